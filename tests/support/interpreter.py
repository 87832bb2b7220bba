"""Runs Triton's interpreter on a CPU, with its bfloat16 arithmetic and its fma corrected.

Triton 3.6 to 3.9 multiply the bit patterns of bfloat16 operands in tl.dot, round fp32 to bfloat16
towards zero, and round the product of a fused multiply-add.

The interpreter does not model the following, which only the compiler or a GPU can show: the minimum
sizes of tl.dot (K >= 16), TF32, arithmetic on bfloat16 (numpy sees the bits: the kernels convert
first), alignment and the wide loads that it permits, num_warps and num_stages, races, reads out of
bounds that no mask prevents, and device assertions. With Triton 3.6 and numpy >= 2.4 a loop to a
bound known only at run time fails.
"""

import os
import sys


def enable():
    """Enables the interpreter. Must run before triton is imported, whose decorators read the
    environment variable."""
    assert "triton" not in sys.modules, "triton is imported already, compiling"
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(handle):
        """Converts a bfloat16 operand, which numpy holds as uint16, to fp32."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(data):
        """Converts fp32 to the bits of bfloat16, rounded to nearest as on a GPU."""
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1))
        return flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    def create_fma(self, x, y, z):
        """A product and a sum with one rounding, as on a GPU; for fp32."""
        result = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(result.astype(np.float32), z.dtype.scalar)

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, a, b, d, *options):
        return dot(self, widened(a), widened(b), d, *options)

    def cast_impl(self, source, target):
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(rounded(source.data), tl.bfloat16)
        return cast(self, source, target)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.create_fma = create_fma
