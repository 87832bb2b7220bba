"""The one place that starts a kernel.

Triton works out anew in each call what a kernel has to be compiled for, 12 us of the host's time for one of attention's (3.7,
with a launch that does nothing). What it found is kept here, under what it looks at: dtypes, numbers, and whether an address is a
multiple of 16; and the kernel is started again at once.
"""

import functools
import itertools

import torch
import triton.language as tl

MOST = 4096  # kept of a kind, each of some hundred bytes: then they are forgotten, and found anew
_kept: dict[tuple, tuple] = {}


def run(kernel, blocks, *args, warps, stages=1, **constants):
    """Starts `blocks` programs of a kernel, on the grid's first axis: the others end at 65,535. Returns what was compiled, with the
    compile-time arguments in order, for `again`; None where nothing was, with no blocks or under Triton's interpreter.

    Floating-point contraction is asked for by name, because its default is to change in Triton 3.10.
    """
    if not blocks:
        return None
    key = key_of(kernel, args, warps, stages, constants)
    if found := _kept.get(key):
        again(found, blocks, *args)
        return found
    compiled = kernel[(blocks,)](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True)
    if compiled is None:
        return None
    found = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]
    if key is not None:
        keep(_kept, key, found)
    return found


def key_of(kernel, args, warps, stages, constants):
    """What decides what is compiled; None off the GPU, and under the interpreter."""
    if not on_gpu(args[0]) or not hasattr(kernel, "params"):
        return None
    key = [kernel, args[0].get_device(), warps, stages, *constants.values()]
    look_at(args, any_number(kernel), key)
    return tuple(key)


@functools.cache
def any_number(kernel):
    """Of each argument, whether the kernel is compiled for any number there."""
    return [p.do_not_specialize for p in kernel.params]


NEVER = itertools.repeat(False)


def look_at(args, any_number, key):
    for x, of_any in zip(args, any_number, strict=False):
        if isinstance(x, torch.Tensor):
            key += (x.dtype, x.data_ptr() & 15)
        elif of_any:  # of a type: a large int has 64 bits
            key.append(-(2**31) <= x < 2**31 if isinstance(x, int) else type(x))
        elif hasattr(x, "_fields"):  # a tuple of options
            look_at(x, NEVER, key)
        else:
            key.append(x.value if isinstance(x, tl.constexpr) else x)


def on_gpu(x):
    return x.is_cuda


def keep(kept, key, found):
    if len(kept) >= MOST:
        kept.clear()
    kept[key] = found


def again(found, blocks, *args):
    """The same with what `run` returned, for arguments that Triton would compile nothing else for."""
    compiled, constants = found
    compiled[blocks, 1, 1](*args, *constants)
