"""The random masks of csrc/math/philox.h in Triton, bit for bit.

Element (row, j) of a mask with S columns has word j % 4 of the Philox4x32-10 block with key `seed`
and counter row * ceil(S / 4) + j // 4. It is kept where that word >= round(p * 2**32).

The operators with Triton kernels have one mask each, of the stream 0 (csrc/math/mask_stream.h):
tl.randint4x sets the counter word of the stream to 0.
"""

import triton
import triton.language as tl


def threshold(p):
    """Returns round(p * 2**32) as the int32 of the same bits, so that the argument's type never
    depends on p.

    2**32 itself does not fit into 32 bits: for p = 1 the threshold is 2**32 - 1, and `scale` is 0.
    """
    bits = min(round(p * 2**32), 2**32 - 1)
    return bits - 2**32 if bits >= 2**31 else bits


def scale(p):
    """Returns the factor of the elements that are kept, 1 / (1 - p), or 0 where none is."""
    return 1 / (1 - p) if round(p * 2**32) < 2**32 else 0.0


@triton.jit
def keep(seed, counter, threshold):
    """Returns which elements are kept, (..., 4 C) bool.

    seed: int64, loaded from memory, so that a captured graph or a compiled kernel serves any seed
    counter: (..., C) int64, of one to three dimensions, the Philox block of each four neighbouring
    elements
    threshold: int32, of `threshold` above; the kernel must name its parameter in do_not_specialize
    """
    keep = _keep_words(seed, counter, threshold)
    shape: tl.constexpr = counter.shape
    if len(shape) == 1:
        return tl.reshape(keep, (shape[0] * 4,))
    elif len(shape) == 2:
        return tl.reshape(keep, (shape[0], shape[1] * 4))
    else:
        return tl.reshape(keep, (shape[0], shape[1], shape[2] * 4))


@triton.jit
def keep_transposed(seed, counter, threshold):
    """As `keep`, for a tile whose columns are rows of the mask: counter is (C, M), the result (4 C,
    M)."""
    keep = tl.permute(_keep_words(seed, counter, threshold), (0, 2, 3, 1))
    shape: tl.constexpr = counter.shape
    return tl.reshape(keep, (shape[0] * 4, shape[1]))


@triton.jit
def _keep_words(seed, counter, threshold):
    """Returns which of the four words of each block are kept, (..., 2, 2), in the words' order."""
    tl.static_assert(
        counter.dtype == tl.int64
    )  # randint4x ignores the high word of a 32-bit counter
    r0, r1, r2, r3 = tl.randint4x(seed, counter)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3)).to(tl.uint32, bitcast=True)
    return words >= threshold.to(tl.uint32, bitcast=True)
