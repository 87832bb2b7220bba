"""Runs Triton's kernels as the PTX that Triton compiles for sm_80, ahead of time, on CPU tensors.

`simulated()` replaces Triton's launch: the kernel is compiled as a launch with these arguments
would compile it, its PTX is translated, and the translation runs.
"""

import contextlib
import ctypes
import functools
import os
from pathlib import Path

from tests.ptx import build
from tests.triton import triton_table

TYPES = {"i1": ctypes.c_bool, "i32": ctypes.c_int32, "u32": ctypes.c_uint32}
TYPES |= {"i64": ctypes.c_int64, "u64": ctypes.c_uint64, "fp32": ctypes.c_float}


@functools.cache
def library(name, ptx):
    return ctypes.CDLL(str(build.module_library("plain", {f"{name}.ptx": ptx})))


def values(kinds, given):
    """The arguments of the compiled kernel: those that are not constants, and tuples' elements."""
    for kind, value in zip(kinds, given, strict=True):
        if isinstance(kind, tuple):
            yield from values(kind, value)
        elif kind != "constexpr":
            yield value if kind.startswith("*") else TYPES[kind](value)


@contextlib.contextmanager
def simulated(capability=80, seed=1):
    """Within it, a launch of a Triton kernel runs its PTX. Yields the names of kernels that ran."""
    from triton.runtime import JITFunction, driver

    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(build.ROOT) / ".cache/triton"))
    ran, run = [], JITFunction.run

    def launch(function, *args, grid, warmup, **kwargs):
        kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
        bound = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
        name, signature = kernel.metadata.name, kernel.src.signature
        blocks = (*grid, 1, 1)[:3]
        threads = 32 * kernel.metadata.num_warps
        build.launch(
            library(name, kernel.asm["ptx"]),
            name,
            blocks,
            threads,
            kernel.metadata.shared,
            [*values(signature.values(), [bound[name] for name in signature])],
            seed=seed,
        )
        ran.append(name)

    before = driver._active  # the property `active` needs a GPU
    driver.set_active(triton_table.Driver(capability))
    JITFunction.run = launch
    try:
        yield ran
    finally:
        JITFunction.run = run
        driver._active = before
