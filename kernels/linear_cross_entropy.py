"""The cross-entropy of a linear map's rows by blocks of logits: the products are the vendor's, on a block that stays in the
second cache, and one kernel turns a block into the rows' statistics, or into its own gradient, or both in one.

On an H200 (4.3 TB/s, 788 TFLOP/s in bf16):
- 2,048 x 256 x 100,000: four products, since each block is made twice, 0.42 TFLOP, 0.53 ms; W twice and dW in fp32 once, 205 MB,
  48 us. The block itself, 41 times 10 MB written, read, made again, read and written, is the second cache's.
- 4,900 x 650 x 10,000: three products, 0.19 TFLOP, 0.24 ms; W and dW once a chunk of rows, of which there are three, 195 MB,
  45 us.
The products limit both. In fp32 without TF32 they take 4 to 6 ms. Not timed on a GPU.
"""

import torch
import triton
import triton.language as tl
from fusedseq.kernels import launch

BLOCK = 4096  # logits of a row that are in registers at once
CACHED = 32 << 20  # bytes of a block of logits
FEWEST = 1024  # rows in a chunk: with fewer, adding to dW takes longer than a fourth product


@triton.jit(do_not_specialize=["n", "first", "V", "ignore_index"])
def cross_entropy_rows(
    z, target, class_weights, weights_sum, dloss, dlog_prob, dlse, loss, log_prob, lse, argmax, state, ld, padded, n, first,
    V, ignore_index, label_smoothing, z_loss, scale, COMMON: tl.constexpr, STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes a row of a block: z (rows, ld), logits before the temperature in, their gradient out.

    target, argmax: (rows,)    class_weights: (V,), weights_sum: (1,) or None    dloss: (rows,) or, if COMMON, (1,)
    dlog_prob, dlse: (rows,) or None    loss, log_prob, lse: (rows,)    state: (rows, 4), of the blocks before this one
    the block's columns are [first, first + n) of V, and to `padded`, a multiple of 16, -inf
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    kept = y != ignore_index
    w = kept.to(tl.float32)
    if class_weights is not None:
        w = tl.load(class_weights + y, mask=kept & (y >= 0) & (y < V), other=0.0).to(tl.float32)
    total_weight = V.to(tl.float32) if weights_sum is None else tl.load(weights_sum).to(tl.float32)
    z += row * ld
    here = y - first
    if STATISTICS:
        state += row * 4
        later = first > 0
        top = tl.load(state, mask=later, other=-1e30)  # no infinity, of which differences would be NaN
        total = tl.load(state + 1, mask=later, other=0.0)
        weighted = tl.load(state + 2, mask=later, other=0.0)
        x_y = tl.load(state + 3, mask=later, other=0.0)
        best = tl.load(argmax + row, mask=later, other=0)
        for c in range(0, padded, BLOCK):
            j = c + tl.arange(0, BLOCK)
            x = tl.load(z + j, mask=j < padded, other=float("-inf")).to(tl.float32) * scale
            high, place = tl.max(x, 0, return_indices=True)
            best = tl.where(high > top, first + c + place, best)
            higher = tl.maximum(top, high)
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
            x_y += tl.sum(tl.where(j == here, x, 0.0), 0)
            if label_smoothing != 0:
                each = tl.where(j < n, x, 0.0)
                if class_weights is not None:
                    each *= tl.load(class_weights + first + j, mask=j < n, other=0.0).to(tl.float32)
                weighted += tl.sum(each, 0)
        tl.store(state, top)
        tl.store(state + 1, total)
        tl.store(state + 2, weighted)
        tl.store(state + 3, x_y)
        sum_exp = top + tl.log(total)
        row_loss = (label_smoothing - 1) * w * (x_y - sum_exp) + z_loss * w * sum_exp * sum_exp
        row_loss += label_smoothing / V * (total_weight * sum_exp - weighted)
        tl.store(loss + row, tl.where(kept, row_loss, 0.0))
        tl.store(log_prob + row, tl.where(kept, x_y - sum_exp, 0.0))
        tl.store(lse + row, tl.where(kept, sum_exp, 0.0))
        # Before the last block it is the place of the best so far, also in rows without a target.
        tl.store(argmax + row, tl.where(kept | (first + n < V), best, -1))
    else:
        sum_exp = tl.load(lse + row)
    if GRADIENT:
        d = tl.load(dloss + (0 if COMMON else row)).to(tl.float32)
        of_target = (1 - label_smoothing) * w * d
        if dlog_prob is not None:
            of_target -= tl.load(dlog_prob + row).to(tl.float32)
        of_classes = label_smoothing / V * d
        of_p = of_target + of_classes * total_weight + 2 * z_loss * w * sum_exp * d
        if dlse is not None:
            of_p += tl.load(dlse + row).to(tl.float32)
        for c in range(0, padded, BLOCK):
            j = c + tl.arange(0, BLOCK)
            x = tl.load(z + j, mask=j < padded, other=float("-inf")).to(tl.float32) * scale
            g = of_p * tl.exp(x - sum_exp)
            if label_smoothing != 0:
                each = of_classes
                if class_weights is not None:
                    each *= tl.load(class_weights + first + j, mask=j < n, other=0.0).to(tl.float32)
                g -= each
            g = tl.where(kept, (g - tl.where(j == here, of_target, 0.0)) * scale, 0.0)
            tl.store(z + j, g.to(z.dtype.element_ty), mask=j < padded)


class Call:
    """The operator's arguments as the kernel wants them, and the blocks that it goes by."""

    def __init__(self, x, W, target, b, class_weights, ignore_index, label_smoothing, z_loss, temperature, reduction):
        (self.N, self.E), self.V = x.shape, len(W)
        kept = target != ignore_index
        fits = (target >= 0) & (target < self.V) | ~kept
        torch._assert_async(fits.all(), "linear_cross_entropy: target must be in [0, V) or ignore_index")
        self.x = torch.where(kept[:, None], x, 0)  # an infinity would come out of the product with a zero
        self.W, self.b, self.target = W, b, target.contiguous()
        self.class_weights = class_weights if class_weights is None else class_weights.contiguous()
        self.weights_sum = None if class_weights is None else class_weights.sum(dtype=torch.float32)[None]
        self.options = ignore_index, label_smoothing, z_loss, 1 / temperature
        weights = kept if class_weights is None else torch.where(kept, class_weights[target.clamp(0, self.V - 1)], 0)
        norm = weights.sum(dtype=torch.float32)
        self.factor = torch.where(norm == 0, 0, 1 / norm) if reduction == MEAN else torch.ones_like(norm)
        self.rows, self.columns = plan(self.N, self.V, x.element_size())
        self.z = x.new_empty(min(self.rows, self.N), -(-self.columns // 64) * 64)

    def blocks(self):
        for r in range(0, self.N, self.rows):
            for c in range(0, self.V, self.columns):
                yield slice(r, min(r + self.rows, self.N)), slice(c, min(c + self.columns, self.V))

    def logits(self, rows, columns):
        n, x, W = columns.stop - columns.start, self.x[rows], self.W[columns]
        z, rest = self.z[: len(x)].split([n, self.z.size(1) - n], 1)
        rest[:, : -n % 16].fill_(-torch.inf)  # so that rows are whole vectors
        return torch.mm(x, W.T, out=z) if self.b is None else torch.addmm(self.b[columns], x, W.T, out=z)

    def run(self, z, rows, columns, upstream, results, statistics, gradient):
        """upstream: (dloss, dlog_prob, dlse)    results: (loss, log_prob, lse, argmax, state)"""
        common = upstream[0].numel() == 1
        dloss, *others = (t if t is None or t.numel() == 1 else t[rows] for t in upstream)
        n = columns.stop - columns.start
        launch.run(
            cross_entropy_rows, len(z), z, self.target[rows], self.class_weights, self.weights_sum, dloss, *others,
            *(None if t is None else t[rows] for t in results), self.z.stride(0), -(-n // 16) * 16, n, columns.start,
            self.V, *self.options, warps=8, COMMON=common, STATISTICS=statistics, GRADIENT=gradient, BLOCK=BLOCK,
        )  # fmt: skip

    def gradients(self, needs):
        """Zeros for those of the bits in `needs`: x 1, W 2, b 4, to which `add` adds."""
        shapes = ((self.N, self.E), (self.V, self.E), (self.V,))
        return [
            self.x.new_empty(shape if needs & 1 << i else (0,), dtype=torch.float32) for i, shape in enumerate(shapes)
        ]

    def add(self, z, rows, columns, needs, gradients):
        dx, dW, db = gradients
        if needs & 1:
            add_product(dx[rows], z, self.W[columns], columns.start > 0)
        if needs & 2:
            add_product(dW[columns], z.T, self.x[rows], rows.start > 0)
        if needs & 4:
            total = z.sum(0, dtype=torch.float32)
            db[columns] = db[columns] + total if rows.start > 0 else total


NONE, MEAN, _ = range(3)  # reductions, by the numbers of the operator


def plan(N, V, itemsize):
    """(rows, columns) of a block: all columns of as many rows as fit the cache, or all rows of some columns."""
    rows = CACHED // (V * itemsize)
    if rows >= min(N, FEWEST):
        return rows, V
    return max(N, 1), max(1024, CACHED // (N * itemsize) // 128 * 128)


def add_product(total, A, B, more):
    """total (fp32) = A B, or if there is `more` in it, + A B: narrow operands, wide sums."""
    if A.dtype == total.dtype:
        torch.addmm(total, A, B, out=total) if more else torch.mm(A, B, out=total)
    elif A.device.type == "cuda":
        wide = {"out_dtype": total.dtype, "out": total}
        torch.addmm(total, A, B, **wide) if more else torch.mm(A, B, **wide)
    else:  # Triton's interpreter
        add_product(total, A.float(), B.float(), more)


def linear_cross_entropy(
    x, W, target, b, class_weights, ignore_index, label_smoothing, z_loss, temperature, reduction, needs
):  # fmt: skip
    call = Call(x, W, target, b, class_weights, ignore_index, label_smoothing, z_loss, temperature, reduction)
    loss, log_prob, lse = call.z.new_empty(3, call.N, dtype=torch.float32)
    results = loss, log_prob, lse, torch.empty_like(call.target), loss.new_empty(call.N, 4)
    gradients = call.gradients(needs)
    # In fp16 a gradient divided by the number of rows would vanish: it is divided after the products.
    late = x.dtype == torch.float16
    upstream = torch.ones_like(call.factor) if late else call.factor, None, None
    whole = call.columns >= call.V
    for rows, columns in call.blocks():
        z = call.logits(rows, columns)
        call.run(z, rows, columns, upstream, results, True, bool(needs) and whole)
        if needs and whole:
            call.add(z, rows, columns, needs, gradients)
    for rows, columns in call.blocks() if needs and not whole else ():
        z = call.logits(rows, columns)
        call.run(z, rows, columns, upstream, results, False, True)
        call.add(z, rows, columns, needs, gradients)
    finish(call, gradients, late)
    if reduction != NONE:
        loss = loss.sum() * call.factor
    return (loss, log_prob.clone(), lse.clone(), results[3], *gradients)


def linear_cross_entropy_backward(
    dloss, dlog_prob, dlse, lse, x, W, target, b, class_weights, ignore_index, label_smoothing, z_loss, temperature,
    reduction, needs,
):  # fmt: skip
    call = Call(x, W, target, b, class_weights, ignore_index, label_smoothing, z_loss, temperature, reduction)
    dloss = torch.zeros_like(call.factor) if dloss is None else dloss if reduction == NONE else dloss * call.factor
    upstream = [t if t is None else t.contiguous() for t in (dloss, dlog_prob, dlse)]
    gradients = call.gradients(needs)
    for rows, columns in call.blocks():
        z = call.logits(rows, columns)
        call.run(z, rows, columns, upstream, (None, None, lse.contiguous(), None, None), False, True)
        call.add(z, rows, columns, needs, gradients)
    finish(call, gradients, False)
    return tuple(gradients)


def finish(call, gradients, late):
    for gradient in gradients:
        if call.N == 0:
            gradient.zero_()
        elif late:
            gradient.mul_(call.factor)


def linear_cross_entropy_scale(dx, dW, db, dloss, needs):
    return tuple(g * dloss if needs >> i & 1 else g.new_empty(0) for i, g in enumerate((dx, dW, db)))


def explain(x, W, *args, **kwargs):
    N, V = x.numel() // max(1, x.size(-1)), len(W)
    rows, columns = plan(N, V, x.element_size())
    how = (
        f"{min(rows, N)} rows of all classes at a time"
        if columns >= V
        else f"{columns} classes of all rows at a time, twice"
    )
    return f"kernels/linear_cross_entropy.py; torch's products, {how}"
