"""The random masks of csrc/philox.h in Triton, bit for bit: word j % 4 of the Philox4x32-10 block with key `seed` and
counter row * ceil(S / 4) + j // 4, kept where word >= round(p * 2**32).
"""

import triton
import triton.language as tl


def threshold(p):
    """round(p * 2**32) as the int32 of the same bits, so that its type never depends on p.

    2**32 itself does not fit: where nothing is kept `scale` is 0.
    """
    bits = min(round(p * 2**32), 2**32 - 1)
    return bits - 2**32 if bits >= 2**31 else bits


def scale(p):
    """What kept values are multiplied by."""
    return 1 / (1 - p) if round(p * 2**32) < 2**32 else 0.0


@triton.jit
def keep(seed, counter, threshold):
    """Which elements are kept, (..., 4 C) bool.

    seed: int64, loaded from memory: a captured graph or a compiled kernel then takes any
    counter: (..., C) int64, of one to three dimensions: the block of each four neighbours
    threshold: int32, see above; an argument in the kernel's do_not_specialize
    """
    kept = _kept_words(seed, counter, threshold)
    shape: tl.constexpr = counter.shape
    if len(shape) == 1:
        return tl.reshape(kept, (shape[0] * 4,))
    elif len(shape) == 2:
        return tl.reshape(kept, (shape[0], shape[1] * 4))
    else:
        return tl.reshape(kept, (shape[0], shape[1], shape[2] * 4))


@triton.jit
def keep_down(seed, counter, threshold):
    """As `keep`, for a matrix whose columns are the rows of the mask: counter is (C, M), the result (4 C, M)."""
    kept = tl.permute(_kept_words(seed, counter, threshold), (0, 2, 3, 1))
    shape: tl.constexpr = counter.shape
    return tl.reshape(kept, (shape[0] * 4, shape[1]))


@triton.jit
def _kept_words(seed, counter, threshold):
    """(..., 2, 2), in the order of the words."""
    tl.static_assert(counter.dtype == tl.int64)  # of a 32-bit counter randint4x takes no high word
    r0, r1, r2, r3 = tl.randint4x(seed, counter)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3)).to(tl.uint32, bitcast=True)
    return words >= threshold.to(tl.uint32, bitcast=True)
