"""The baselines, with torch's own operator of an output layer and its loss, which keeps no logits.

An operator set of `bench.training`. F.linear_cross_entropy is in torch since 2.13. Calls that it
computes with all logits, or not at all, are those of the other baselines: with a temperature, label
smoothing, weights of classes, or the loss of every row.
"""

from typing import Any

from bench.suite import baselines

# {shape of the logits: the operator with the fastest of its chunk sizes}
_fastest: dict[tuple[int, int], baselines.FastestChunk] = {}


def __getattr__(name: str) -> Any:
    return getattr(baselines, name)


def linear_cross_entropy(
    x, W, target, b=None, *, ignore_index=-100, label_smoothing=0.0, reduction="mean", **options
):
    """F.linear_cross_entropy with the chunk size that was the fastest in its first call."""
    special = options.get("temperature", 1.0) != 1 or options.get("class_weights") is not None
    if special or label_smoothing or reduction == "none":
        options |= {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        return baselines.linear_cross_entropy(x, W, target, b, reduction=reduction, **options)
    x, target = x.flatten(0, -2), target.flatten()
    call = _fastest.setdefault((len(x), len(W)), baselines.FastestChunk())
    return call(*(x, W, target, b), ignore_index=ignore_index, reduction=reduction)
