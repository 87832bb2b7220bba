"""Makes the benchmark cases of whole models, before and after `fusedseq.accelerate`."""

from functools import partial

from bench.suite import accelerated_models
from bench.suite.case import Target
from bench.suite.cases.word_ids import words


def accelerated(model, *sizes, **fields):
    """A training step of a model before and after `fusedseq.accelerate`.

    sizes: of bert and gpt2 B, L, E, heads; of transformer L, B, E, heads, layers; of lstm T, B, E,
        V; then the targets
    """
    targets = tuple(size for size in sizes if isinstance(size, Target))
    sizes = [size for size in sizes if not isinstance(size, Target)]
    if model in ("bert", "gpt2"):
        B, L, E, heads = sizes
        kind = {"bert": accelerated_models.BertBlock, "gpt2": accelerated_models.Gpt2Block}[model]
        build, shapes = partial(kind, E, heads, L), [(B, L, E)]
        flops = 2.0 * B * L * (12 * E * E + 2 * L * E)
    elif model == "transformer":
        L, B, E, heads, layers = sizes
        build = partial(accelerated_models.Translator, E, heads, layers)
        shapes = [(L, B, E)] * 2
        # A decoder layer has four more square maps, and a second attention.
        flops = 2.0 * B * L * layers * (28 * E * E + 6 * L * E)
    else:
        T, B, E, V = sizes
        build, shapes = partial(accelerated_models.LanguageModel, V, E), []
        flops = 2.0 * T * B * (2 * 8 * E * E + E * V)

    def make(randn):
        if shapes:
            return tuple(randn(*shape) for shape in shapes)
        return (words(randn, (T + 1) * B, V).view(T + 1, B),)

    return accelerated_models.AcceleratedModelCase(
        "accelerate",
        f"{model}-{'-'.join(map(str, sizes))}",
        partial(accelerated_models.inputs, build, make),
        flops=flops,
        targets=targets,
        build=build,
        **fields,
    )
