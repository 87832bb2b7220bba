"""Prepares a call's arguments for the kernel, computes blocks of logits and launches the kernel."""

from typing import NamedTuple

import torch
from fusedseq.kernels import launch, shapes
from fusedseq.kernels.linear_cross_entropy.kernel import cross_entropy_rows
from fusedseq.kernels.linear_cross_entropy.plan import plan

BLOCK = 2048  # logits of a row that are in registers at once
WARPS = 4  # of a row
NONE, MEAN, SUM = range(3)  # reductions, by the numbers of the operator


class Chunk(NamedTuple):
    """Rows of a call whose logits are computed together, and what the kernel reads and writes of
    them. The tensors begin at the chunk's first row."""

    rows: slice
    x: torch.Tensor  # (rows, padded E)
    target: torch.Tensor
    output_grads: tuple  # dloss, dlog_prob, dlse: (rows,), (1,) for all rows, or None
    results: tuple  # loss, log_prob, lse, argmax, state; None where not used


class Block(NamedTuple):
    """Classes of a call whose logits are computed together."""

    columns: slice
    W: torch.Tensor  # (columns, padded E)


class Call:
    """The operator's arguments as the kernel needs them, and the blocks in which the logits are
    computed."""

    def __init__(
        self,
        x,  # (N, E)
        W,  # (V, E)
        target,  # (N,) int64
        b,  # (V,) or None
        class_weights,  # (V,) or None
        ignore_index,
        label_smoothing,
        z_loss,
        temperature,
        reduction,  # NONE, MEAN or SUM
    ):
        (self.N, self.E), self.V = x.shape, len(W)
        classes = {"b": (b, (self.V,)), "class_weights": (class_weights, (self.V,))}
        rows = {"W": (W, (self.V, self.E)), "target": (target, (self.N,))}
        shapes.require("linear_cross_entropy", **rows, **classes)
        counts = target != ignore_index
        is_valid = (target >= 0) & (target < self.V) | ~counts
        message = "linear_cross_entropy: target must be in [0, V) or ignore_index"
        torch._assert_async(is_valid.all(), message)
        # Rows without a target are zeroed: an infinity in them times their zero gradient would be
        # NaN.
        self.x = torch.where(counts[:, None], padded(x), 0)
        self.target = target.contiguous()
        self.options = ignore_index, label_smoothing, z_loss, 1 / temperature
        if class_weights is None:
            self.class_weights = self.weights_sum = None
            row_weights = counts
        else:
            self.class_weights = class_weights.contiguous()
            self.weights_sum = class_weights.sum(dtype=torch.float32)[None]
            row_weights = torch.where(counts, class_weights[target.clamp(0, self.V - 1)], 0)
        norm = row_weights.sum(dtype=torch.float32)
        mean_factor = torch.where(norm == 0, 0, 1 / norm)
        self.factor = mean_factor if reduction == MEAN else torch.ones_like(norm)
        self.rows, self.columns = plan(self.N, self.V, x.element_size())
        self.z = x.new_empty(min(self.rows, self.N), -(-self.columns // 64) * 64)
        # The kernel loads whole vectors.
        self.bias = None if b is None else torch.nn.functional.pad(b, (0, -self.V % 16))
        self.blocks = [
            Block(slice(i * self.columns, i * self.columns + len(W)), W)
            for i, W in enumerate(padded(W).split(self.columns))
        ]

    def chunks(self, output_grads, results):
        """Yields the chunks of rows.

        output_grads: (dloss, dlog_prob, dlse)    results: (loss, log_prob, lse, argmax, state),
        None where not used
        """
        for first in range(0, self.N, self.rows):
            rows = slice(first, min(first + self.rows, self.N))

            def part(t, rows=rows):
                # A slice of all rows would take host time in each of up to a hundred launches.
                return t if t is None or len(t) == rows.stop - rows.start else t[rows]

            grads = tuple(t if t is None or t.numel() == 1 else part(t) for t in output_grads)
            yield Chunk(
                rows, part(self.x), part(self.target), grads, tuple(part(t) for t in results)
            )

    def logits(self, chunk, block):
        """Computes the logits of a block without bias. Returns z (rows, columns), a view of
        self.z."""
        n = len(block.W)
        z = self.z[: len(chunk.x), :n]
        if n % 16:  # the kernel loads whole vectors
            self.z[: len(chunk.x), n : n + -n % 16].fill_(-torch.inf)
        return torch.mm(chunk.x, block.W.T, out=z)

    def run(self, z, chunk, block, statistics, gradient):
        """Launches the kernel on a block."""
        n = len(block.W)
        launch.run(
            cross_entropy_rows,
            len(z),
            *(z, self.bias, chunk.target, self.class_weights, self.weights_sum),
            *chunk.output_grads,
            *chunk.results,
            *(self.z.stride(0), -(-n // 16) * 16, n, block.columns.start, self.V, *self.options),
            warps=WARPS,
            COMMON=chunk.output_grads[0].numel() == 1,
            STATISTICS=statistics,
            GRADIENT=gradient,
            BLOCK=BLOCK,
        )


def padded(t):
    """Returns a matrix with zero columns behind its own, so that its rows begin at multiples of 16
    bytes, as cuBLAS's fast kernels need them."""
    more = -t.size(1) % (16 // t.element_size())
    return torch.nn.functional.pad(t, (0, more)) if more else t
