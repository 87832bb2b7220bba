"""Baselines of the output layer with its loss."""

import itertools
import time

import torch
from torch.nn import functional as F


def linear_cross_entropy(
    x,
    W,
    target,
    b=None,
    *,
    class_weights=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    temperature=1.0,
    reduction="mean",
    return_details=False,
):
    """F.linear, then F.cross_entropy, with all logits in memory."""
    if z_loss or return_details:
        raise NotImplementedError("the baseline implements neither z_loss nor return_details")
    logits = F.linear(x, W, b).flatten(0, -2)
    logits = logits / temperature if temperature != 1 else logits
    loss = F.cross_entropy(
        logits,
        target.flatten(),
        class_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


def linear_cross_entropy_chunked(x, W, target, b=None, chunk=None, **more):
    """torch's F.linear_cross_entropy (since 2.13); chunk: rows at once, None: its default."""
    options = torch.nn.LinearCrossEntropyOptions(
        **{} if chunk is None else {"batch_chunk_size": chunk, "chunking_method": None}
    )
    return F.linear_cross_entropy(x, W, target, linear_bias=b, options=options, **more)


class FastestChunk:
    """F.linear_cross_entropy with the fastest of some chunk sizes, found in its first call."""

    CHUNKS = (256, 512, 1024, 2048)

    def __init__(self):
        self.chunk = None

    def __call__(self, *args, **options):
        if self.chunk is None:
            self.chunk = min(self.CHUNKS, key=lambda chunk: self._seconds(args, options, chunk))
        return linear_cross_entropy_chunked(*args, chunk=self.chunk, **options)

    def _seconds(self, args, options, chunk):
        """The faster of two calls; the operator computes its gradients together with the loss."""
        times = []
        for _ in range(2):
            start = time.perf_counter()
            linear_cross_entropy_chunked(*args, chunk=chunk, **options)
            times.append(time.perf_counter() - start)
        return min(times)


def split_cross_entropy(
    x,
    W,
    target,
    tombstones,
    splits,
    b=None,
    tombstone_bias=None,
    *,
    ignore_index=-100,
    reduction="mean",
):
    """SplitCrossEntropyLoss of the AWD-LSTM code without its bugs, on each tail's own rows."""
    if not splits:
        return linear_cross_entropy(x, W, target, b, ignore_index=ignore_index, reduction=reduction)
    rows, targets = x.flatten(0, -2), target.flatten()
    head_bias = None
    if b is not None or tombstone_bias is not None:
        word_bias = W.new_zeros(splits[0]) if b is None else b[: splits[0]]
        tail_bias = W.new_zeros(len(splits)) if tombstone_bias is None else tombstone_bias
        head_bias = torch.cat([word_bias, tail_bias])
    head = F.log_softmax(F.linear(rows, torch.cat([W[: splits[0]], tombstones]), head_bias), -1)
    counted, loss = targets != ignore_index, rows.new_zeros(len(rows))
    for i, (start, end) in enumerate(itertools.pairwise((0, *splits, len(W)))):
        in_split = (counted & (targets >= start) & (targets < end)).nonzero()[:, 0]
        if i == 0:
            loss = loss.index_put((in_split,), -head[in_split, targets[in_split]])
            continue
        bias = None if b is None else b[start:end]
        tail = F.log_softmax(F.linear(rows[in_split], W[start:end], bias), -1)
        log_p_word = tail.gather(1, targets[in_split, None] - start)[:, 0]
        log_p_tail = head[in_split, splits[0] + i - 1]
        loss = loss.index_put((in_split,), -log_p_tail - log_p_word)
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() / counted.sum().clamp(min=1) if reduction == "mean" else loss.sum()
