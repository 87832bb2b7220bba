"""The Triton kernels as the CPU's kernels of the operators, for tests in Triton's interpreter."""

import torch
from fusedseq import kernels
from torch import Tensor

# The options of a call of attention that has none, as its operators take them: those between v and
# the seed, without key_rows, and those after the scale.
BEFORE_SEED = (None, None, None, None, None, None, True)
BEHIND_SCALE = (False, 0, 0.0, None, 0.0, -1, -1, None, None, 0, 0)

_registered = []  # a Library that is garbage-collected unregisters its kernels


def register() -> None:
    """Replaces the CPU's kernels of all operators that have Triton kernels.

    The CPU has an operator of its own for attention without options; it gets those of attention.
    """
    kernels.register("CPU")
    library = torch.library.Library("fusedseq", "IMPL")
    library.impl("attention_plain", attention_plain, "CPU")
    library.impl("attention_plain_backward", attention_plain_backward, "CPU")
    library.impl("attention_plain_inference", lambda *given: attention_plain(*given)[0], "CPU")
    _registered.append(library)


def attention_plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    key_rows = seed = None
    options = *BEFORE_SEED, key_rows, seed, scale, *BEHIND_SCALE
    out, lse = torch.ops.fusedseq.attention(q, k, v, *options)
    return out, lse


def attention_plain_backward(
    dout: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, needs: int
) -> tuple[Tensor, ...]:
    """Computes the output again: attention_backward reads it, attention_plain_backward does not."""
    out, _ = attention_plain(q, k, v, scale)
    seed = None
    options = *BEFORE_SEED, seed, scale, *BEHIND_SCALE
    dq, dk, dv, *_ = torch.ops.fusedseq.attention_backward(dout, out, lse, q, k, v, *options, needs)
    return dq, dk, dv
