"""Calls of the registered CUDA operators torch.ops.fusedseq.*, without the checks of `fused.<op>`,
with one tensor on the CPU and all others on a GPU: the message names that tensor."""

import re

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.support import direct_calls

RECURRENCES = [
    "lstm",
    "mogrifier_lstm",
    "gru",
    "rnn",
    "peephole_lstm",
    "layer_norm_lstm",
    "layer_norm_gru",
]
WITH_BACKWARD = [*RECURRENCES, "embedding", "activation_regularization"]
OTHERS = ["dropout", "locked_dropout", "weight_drop", "nt_asgd_norm", "nt_asgd_step_"]
UNUSED = {"factors"}  # arguments that the CPU kernels alone read


@pytest.mark.parametrize(
    "op", [*WITH_BACKWARD, *(f"{op}_backward" for op in WITH_BACKWARD), *OTHERS]
)
def test_the_tensor_on_another_device_is_named(op, device):
    if device != "cuda":
        pytest.skip("two devices need --device cuda")
    call = next(arguments for name, arguments in direct_calls.calls() if name == op)
    for name, changed in with_one_on_the_cpu(call, device):
        message = rf"^{op}: {re.escape(name)} must be on (a CUDA device|cuda:0)"
        with pytest.raises(RuntimeError, match=message):
            getattr(torch.ops.fusedseq, op)(**changed)


def with_one_on_the_cpu(call, device):
    """For each tensor of a call: its name, and the call with this tensor alone on the CPU."""
    on_gpu = tree_map_only(torch.Tensor, lambda t: t.to(device), call)
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and name not in UNUSED:
            yield name, on_gpu | {name: value}
        elif isinstance(value, list):
            for i, t in enumerate(value):
                moved = [*on_gpu[name][:i], t, *on_gpu[name][i + 1 :]]
                yield f"{name}[{i}]", on_gpu | {name: moved}
