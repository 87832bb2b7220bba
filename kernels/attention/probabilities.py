"""Computes the probabilities of a tile from its logits: exponentials, softmax and dropout.

The exponential of a logit is exp2, which is one instruction, of a fused multiply-add: see
`exp_of_difference`.
"""

import triton
import triton.language as tl
from fusedseq.kernels import philox
from fusedseq.kernels.attention.tile import add_last_dimension

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp_of_difference(s, shift):
    """Returns exp(s - shift log 2) of logits s; shift is in units of log 2.

    In one fused multiply-add s log2(e) is not rounded. That rounding alone would change the
    exponential of a logit of 400 by up to 2e-5. The rounding of shift is a factor of all
    exponentials of a query, and cancels where they are divided by their sum.
    """
    return tl.math.exp2(tl.math.fma(s, LOG2E, -shift))


@triton.jit
def softmax(s):
    """Softmax of logits s over the last dimension.

    Returns the probabilities, and the log-sum-exp in natural units. A row that sees no key has
    probabilities 0 and a log-sum-exp of +inf, with which backward recomputes probabilities of 0.
    The probability of a key that is seen alone is exactly 1, whatever its exponential is, so that
    the gradient of its logit is exactly 0.
    """
    axis: tl.constexpr = len(s.shape) - 1
    top = tl.max(s, axis) * LOG2E
    top = tl.where(top == float("-inf"), 0.0, top)
    e = exp_of_difference(s, add_last_dimension(top))
    total = tl.sum(e, axis)
    sees_nothing = total == 0
    total = tl.where(sees_nothing, 1.0, total)
    inverse = add_last_dimension(1.0 / total)
    p = tl.where(e == add_last_dimension(total), 1.0, e * inverse)
    return p, tl.where(sees_nothing, float("inf"), (top + tl.math.log2(total)) * LN2)


@triton.jit
def dropout(x, optional, row, j0, BS: tl.constexpr, sizes, TRANSPOSED: tl.constexpr):
    """Applies the dropout mask, if there is one, to a tile x for keys j0 : j0 + BS.

    j0: a multiple of 4    row: of `query_row`, in the shape of x without its keys
    TRANSPOSED: x is (keys, queries)
    """
    if optional.seed is None:
        return x
    else:
        # One Philox block has the words of four neighbouring keys.
        block = j0 // 4 + tl.arange(0, BS // 4)
        seed = tl.load(optional.seed)
        if optional.cu_seqlens_k is None:
            first_block = row * tl.cdiv(sizes.S, 4)
        else:
            first_block = row * tl.cdiv(optional.longest_k, 4)
        if TRANSPOSED:
            counter = first_block[None, :] + add_last_dimension(block)
            keep = philox.keep_transposed(seed, counter, sizes.threshold)
        else:
            counter = add_last_dimension(first_block) + block
            keep = philox.keep(seed, counter, sizes.threshold)
        return tl.where(keep, x * sizes.keep_scale, 0.0)
