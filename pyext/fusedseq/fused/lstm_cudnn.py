"""Which calls of `lstm` cuDNN computes: those that its persistent kernel supports, and those that
would otherwise run the loop of csrc/cuda/recurrence/loop.cu.
"""

from typing import Any

import torch
from torch import Tensor

from fusedseq import kernel_table
from fusedseq._load import variable
from fusedseq.fused import recurrence_plan
from fusedseq.fused.cudnn_recurrence import accepts, may_replace_loop
from fusedseq.fused.transforms import is_transformed


def has_persistent_kernel(
    dtype: torch.dtype, capability: tuple[int, int], B: int, X: int, H: int
) -> bool:
    """Whether torch chooses cuDNN's persistent kernel for one layer in one direction: these
    conditions are those of torch's ATen/native/cudnn/RNN.cpp.

    capability: the device's compute capability, such as (9, 0); below 8.0 this returns False
    """
    major, minor = capability
    return (
        dtype == torch.float16
        and major >= 8
        and minor != 6
        and 0 < H <= 1024
        and H % 128 == 0
        and X % 128 == 0
        and 0 < B <= 128
        and B % 8 == 0
    )


def replaces_loop(x: Tensor, h0: Tensor) -> bool:
    """Whether cuDNN computes a call in place of the loop: where csrc/cuda/recurrence/plan.h finds a
    persistent kernel for neither direction, if `may_replace_loop`.
    """
    return may_replace_loop() and recurrence_plan.runs_loop(x, h0)


def is_flipped(x: Tensor, starts: Tensor | None, reverse: bool) -> bool:
    """Whether a call computes a reversed copy of x: on CUDA, so that cuDNN and the kernels with
    words can run it, which have no `reverse`. The copies of x and y take the time of a few steps.
    """
    return reverse and starts is None and x.is_cuda and not variable("FUSEDSEQ_RECURRENCE", "loop")


def supports(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | None,
    weight_drop: float,
    starts: Tensor | None = None,
    reverse: bool = False,
) -> bool:
    """Whether cuDNN computes this call of `lstm`: not with lengths, a weight drop, `starts` or
    `reverse`, which it has no arguments for, and not while torch.compile or torch.func traces the
    call.
    """
    if not x.is_cuda or lengths is not None or weight_drop or x.size(1) == 0:
        return False
    if starts is not None or reverse:
        return False
    if is_transformed() or not accepts(x):
        return False
    if not all(t is None or t.is_contiguous() for t in (x, W_ih, W_hh, b, h0, c0)):
        return False
    capability = torch.cuda.get_device_capability(x.device)
    sizes = x.size(1), x.size(2), h0.size(1)
    if kernel_table.cudnn:
        facts: Any = torch.cuda.get_device_properties(x.device)
        gpu = ".".join(map(str, capability)), facts.multi_processor_count
        dtype = str(x.dtype).removeprefix("torch.")
        measured = kernel_table.cudnn.get((*gpu, dtype, *sizes))
        if measured is not None:
            return measured
    return has_persistent_kernel(x.dtype, capability, *sizes) or replaces_loop(x, h0)
