"""Launches the Triton kernels, and caches what Triton finds out in each launch.

In each call Triton determines again for which dtypes, numbers and alignments a kernel must be
compiled: 12 us of host time for an attention kernel (Triton 3.7, with a launch that does nothing).
This cache is keyed by what Triton's decision depends on: dtypes, the numbers, and each address
modulo 16. A hit starts the compiled kernel directly.
"""

import functools
import itertools

import torch
import triton.language as tl
from triton.runtime import driver

MAX_CACHED = 4096  # entries of a cache, some hundred bytes each; a full cache is emptied
_cache: dict[tuple, tuple] = {}


def run(kernel, blocks, *args, warps, stages=1, **constants):
    """Launches `blocks` programs of a kernel.

    Returns the compiled kernel with its compile-time arguments, for `relaunch`; None without blocks
    and in Triton's interpreter, which compile nothing.

    Programs are numbered along the grid's first axis, since the others end at 65,535.
    Floating-point contraction is requested explicitly, because its default changes in Triton 3.10.
    """
    if not blocks:
        return None
    key = cache_key(kernel, args, warps, stages, constants)
    if found := _cache.get(key):
        relaunch(found, blocks, *args)
        return found
    compiled = run_uncached(kernel, blocks, *args, warps=warps, stages=stages, **constants)
    if compiled is None:
        return None
    found = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]
    if key is not None:
        insert(_cache, key, found)
    return found


def run_uncached(kernel, blocks, *args, warps, stages=1, **constants):
    """Launches a kernel as Triton does it, which arguments of other kinds need, such as tensor
    descriptors. Returns the compiled kernel, or None in the interpreter."""
    return kernel[(blocks,)](
        *args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True
    )


def cache_key(kernel, args, warps, stages, constants):
    """Returns what determines the compiled kernel of a launch; None off the GPU and in the
    interpreter."""
    if not on_gpu(args[0]) or not hasattr(kernel, "params"):
        return None
    key = [kernel, args[0].get_device(), warps, stages, *constants.values()]
    append_specialization(args, unspecialized(kernel), key)
    return tuple(key)


@functools.cache
def unspecialized(kernel):
    """Returns for each parameter whether one compiled kernel serves all its values
    (do_not_specialize)."""
    return [p.do_not_specialize for p in kernel.params]


SPECIALIZED = itertools.repeat(False)


def append_specialization(args, unspecialized, key):
    """Appends to key what Triton specializes of each argument.    unspecialized: one bool for each
    argument"""
    for x, any_value in zip(args, unspecialized, strict=False):
        if isinstance(x, torch.Tensor):
            key += (x.dtype, x.data_ptr() & 15)
        elif any_value:  # the type alone counts; an int beyond 32 bits has another type
            key.append(-(2**31) <= x < 2**31 if isinstance(x, int) else type(x))
        elif hasattr(x, "_fields"):  # a NamedTuple of options
            append_specialization(x, SPECIALIZED, key)
        else:
            key.append(x.value if isinstance(x, tl.constexpr) else x)


def on_gpu(x):
    return x.is_cuda


def capability(kernel, x):
    """Returns the compute capability (90 for 9.0) that a launch with the tensor x compiles a kernel
    for; 100 in Triton's interpreter, which computes everything."""
    if x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
        return 10 * major + minor
    return driver.active.get_current_target().arch if hasattr(kernel, "params") else 100


def insert(cache, key, found):
    """Adds an entry to a cache, which is emptied first if it is full."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = found


def relaunch(found, blocks, *args):
    """Starts a kernel that `run` returned, with arguments for which Triton would compile the same
    code."""
    compiled, constants = found
    compiled[blocks, 1, 1](*args, *constants)
