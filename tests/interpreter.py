"""Triton's interpreter on a CPU, with what it gets wrong of bfloat16 put right.

Triton 3.6 to 3.9 multiply the bit patterns of bfloat16 operands in a dot, and round fp32 to bfloat16 towards zero.
What else it does not model, so that only the compiler or a GPU can show it: a dot's least sizes (K >= 16), TF32,
arithmetic on bfloat16 (numpy sees its bits: the kernels convert first), alignment and what it allows, num_warps and
num_stages, races, reads out of bounds that no mask prevents, assertions on the device. Under Triton 3.6 with numpy >= 2.4 a
loop to a bound known at run time fails.
"""

import os
import sys


def turn_on():
    """Before anything imports triton: its decorators look at the variable."""
    assert "triton" not in sys.modules, "triton is imported already, compiling"
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(data):
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1))
        return flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, a, b, d, *options):
        return dot(self, widened(a), widened(b), d, *options)

    def cast_impl(self, source, target):
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(rounded(source.data), tl.bfloat16)
        return cast(self, source, target)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
