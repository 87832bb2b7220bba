"""The kernel turns a block of logits into the rows' statistics, into its own gradient, or both."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "first", "V", "ignore_index"])
def cross_entropy_rows(
    z,  # (rows, ld) logits of a block before bias and temperature; overwritten by their gradient
    bias,  # (V,) and zeros to a multiple of 16, or None
    target,  # (rows,) int64
    class_weights,  # (V,) or None
    weights_sum,  # (1,) fp32, the sum of class_weights, or None
    dloss,  # (rows,), or (1,) if COMMON
    dlog_prob,  # (rows,) or None
    dlse,  # (rows,) or None
    loss,  # (rows,) fp32
    log_prob,  # (rows,) fp32, of the target
    lse,  # (rows,) fp32, log-sum-exp; read unless STATISTICS
    argmax,  # (rows,) int64; -1 in rows without a target
    state,  # (rows, 4) fp32, running statistics of the blocks before this one
    ld,  # elements from a row of z to the next
    padded,  # columns of the block with its padding of -inf, a multiple of 16
    n,  # columns of the block: first : first + n of V
    first,  # a multiple of 128
    V,  # classes
    ignore_index,  # rows with this target have no loss and no gradient
    label_smoothing,
    z_loss,
    scale,  # 1 / temperature
    COMMON: tl.constexpr,
    STATISTICS: tl.constexpr,  # whether to compute loss, log_prob, lse and argmax
    GRADIENT: tl.constexpr,  # whether to replace z by its gradient
    BLOCK: tl.constexpr,  # columns of a step
):
    """Computes statistics and gradient of a block of logits. A program owns a row of the block.

    With STATISTICS the row's maximum, sums and argmax are updated by those of this block; the
    results are final at the last block. GRADIENT needs the final log-sum-exp: that of this pass if
    the block has all columns, else that of an earlier one.
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    counts = y != ignore_index
    w = counts.to(tl.float32)
    if class_weights is not None:
        w = tl.load(class_weights + y, mask=counts & (y >= 0) & (y < V), other=0.0).to(tl.float32)
    total_weight = V.to(tl.float32) if weights_sum is None else tl.load(weights_sum).to(tl.float32)
    z += row * ld
    target_column = y - first

    if STATISTICS:
        # What the blocks before this one left behind. The maximum starts at the lowest finite
        # number, since differences of infinities would be NaN.
        state += row * 4
        later = first > 0
        top = tl.load(state, mask=later, other=-3.4028234663852886e38)
        total = tl.load(state + 1, mask=later, other=0.0)
        weighted = tl.load(state + 2, mask=later, other=0.0)
        x_y = tl.load(state + 3, mask=later, other=0.0)
        best = tl.load(argmax + row, mask=later, other=0)

        # The target's logit, unless it is a column of another block. The reductions below are
        # barriers, so that all threads have it before one overwrites it by its gradient.
        in_block = (target_column >= 0) & (target_column < n)
        logit = tl.load(z + target_column, mask=in_block, other=0.0).to(tl.float32)
        if bias is not None:
            logit += tl.load(bias + y, mask=in_block, other=0.0).to(tl.float32)
        x_y += logit * scale

        # A running log-sum-exp, the argmax, and the weighted sum of all logits for label smoothing.
        for c in range(0, padded, BLOCK):
            j = c + tl.arange(0, BLOCK)
            x = load_logits(z, bias, j, padded, first) * scale
            high, place = tl.max(x, 0, return_indices=True)
            best = tl.where(high > top, first + c + place, best)
            higher = tl.maximum(top, high)
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
            if label_smoothing != 0:
                each = tl.where(j < n, x, 0.0)
                if class_weights is not None:
                    each *= tl.load(class_weights + first + j, mask=j < n, other=0.0).to(tl.float32)
                weighted += tl.sum(each, 0)
        tl.store(state, top)
        tl.store(state + 1, total)
        tl.store(state + 2, weighted)
        tl.store(state + 3, x_y)

        # The results, as they would be if this were the last block.
        sum_exp = top + tl.log(total)
        # Not x_y - sum_exp, whose rounding exceeds small losses where the logits are large.
        row_log_prob = (x_y - top) - tl.log(total)
        row_loss = (label_smoothing - 1) * w * row_log_prob + z_loss * w * sum_exp * sum_exp
        if label_smoothing != 0:
            row_loss += label_smoothing / V * (total_weight * sum_exp - weighted)
        tl.store(loss + row, tl.where(counts, row_loss, 0.0))
        tl.store(log_prob + row, tl.where(counts, row_log_prob, 0.0))
        tl.store(lse + row, tl.where(counts, sum_exp, 0.0))
        # Before the last block argmax holds the best column so far, also in rows without a target.
        tl.store(argmax + row, tl.where(counts | (first + n < V), best, -1))
    else:
        sum_exp = tl.load(lse + row)

    if GRADIENT:
        # With P = softmax(x): dz = factor_target (P - [j is the target]) + factor_classes
        # (total_weight P - class_weights) + factor_rest P, times scale. The differences are formed
        # before they are added, so that they are exact where P is 1.
        d = tl.load(dloss + (0 if COMMON else row)).to(tl.float32)
        factor_target = (1 - label_smoothing) * w * d
        if dlog_prob is not None:
            factor_target -= tl.load(dlog_prob + row).to(tl.float32)
        factor_classes = label_smoothing / V * d
        factor_rest = 2 * z_loss * w * sum_exp * d
        if dlse is not None:
            factor_rest += tl.load(dlse + row).to(tl.float32)
        for c in range(0, padded, BLOCK):
            j = c + tl.arange(0, BLOCK)
            x = load_logits(z, bias, j, padded, first) * scale
            P = tl.exp(x - sum_exp)
            g = factor_target * (P - tl.where(j == target_column, 1.0, 0.0)) + factor_rest * P
            if label_smoothing != 0:
                each = 1.0
                if class_weights is not None:
                    each = tl.load(class_weights + first + j, mask=j < n, other=0.0).to(tl.float32)
                g += factor_classes * (total_weight * P - each)
            g = tl.where(counts, g * scale, 0.0)
            tl.store(z + j, g.to(z.dtype.element_ty), mask=j < padded)


@triton.jit
def load_logits(z, bias, j, padded, first):
    """Loads the logits j of a row of a block, with the bias. Those of the padding are -inf."""
    x = tl.load(z + j, mask=j < padded, other=float("-inf")).to(tl.float32)
    if bias is not None:
        aligned = first // 16 * 16  # which is first; the compiler infers wide loads from it
        x += tl.load(bias + aligned + j, mask=j < padded, other=0.0).to(tl.float32)
    return x
