"""Calls of the registered operators torch.ops.fusedseq.*, without the checks of `fused.<op>`.

A wrong call raises an error, whose message names the operator, the argument, what it must be and
what was given. tests/packaging/test_address_sanitizer.py makes the same calls with instrumented
kernels.
"""

import functools
import subprocess
import sys

import pytest
import torch
from fusedseq import _load

from tests.support import direct_calls

pytestmark = pytest.mark.cpu
OPS = torch.ops.fusedseq


@functools.cache
def calls():
    return list(direct_calls.calls())


def good(op, number=0):
    """The arguments of a right call by name; `number` counts the calls of one operator."""
    return [call for name, call in calls() if name == op][number]


def test_no_wrong_call_ends_the_process():
    process = subprocess.run(
        [sys.executable, direct_calls.__file__, _load.LIBRARY], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert int(process.stdout.split()[0]) > 5000


ones = torch.ones(3, 2, 4)
whole = torch.ones(2, dtype=torch.int8)
WRONG = [
    # operator, changed arguments, the message
    ("linear_cross_entropy_scale", {"dx": whole}, "dx must be float32, got int8"),
    ("linear_cross_entropy_scale", {"dloss": ones}, r"dloss must be one number, got \(3, 2, 4\)"),
    ("lstm_backward", {"cells": ones}, r"cells must be \(3, 2, 16\), got \(3, 2, 4\)"),
    ("lstm_backward", {"gates": ones}, r"gates must be \(3, 2, 4, 16\), got \(3, 2, 4\)"),
    ("lstm_backward", {"y": ones[:2]}, r"y must be \(3, 2, 4\), got \(2, 2, 4\)"),
    ("mogrifier_lstm_backward", {"cells": ones}, r"cells must be \(3, 2, 16\), got"),
    ("mogrifier_lstm_backward", {"round_gates": ones}, r"round_gates must be \(3, 2, 48\), got"),
    ("lstm", {"weight_drop": float("nan")}, r"weight_drop must be in \[0, 1\], got nan"),
    ("lstm", {"lengths": torch.tensor([1, 4])}, r"lengths must be in \[0, 3\], got 4"),
    ("lstm", {"W_hh": torch.ones(16, 4).double()}, "W_hh must be float32, got float64"),
    ("lstm", {"seed": None}, "seed must be one int64 where a mask is drawn, got None"),
    ("lstm", {"starts": torch.ones(2, 2) > 0}, r"starts must be \(3, 2\), got \(2, 2\)"),
    ("lstm", {"starts": torch.ones(3, 2)}, "starts must be bool, got float32"),
    ("bidirectional_lstm", {"x_reverse": ones}, r"x_reverse must be \(3, 2, 5\), got \(3, 2, 4\)"),
    ("bidirectional_lstm", {"h0_reverse": ones}, r"h0_reverse must be \(2, 4\), got"),
    ("gru", {"b": torch.ones(12)}, r"b must be \(16,\), got \(12,\)"),
    ("gru", {"W_hh": torch.ones(16, 4)}, r"W_hh must be \(12, 4\), got \(16, 4\)"),
    ("gru_backward", {"gates": ones}, r"gates must be \(3, 2, 4, 16\), got \(3, 2, 4\)"),
    ("gru", {"zoneout_h": 2.0}, r"zoneout_h must be in \[0, 1\], got 2"),
    ("rnn", {"seed": None}, "seed must be one int64 where a mask is drawn, got None"),
    ("layer_norm_gru", {"norm": torch.ones(23)}, r"norm must be \(24,\), got \(23,\)"),
    ("layer_norm_gru_backward", {"statistics": ones}, r"statistics must be \(3, 2, 2\), got"),
    ("layer_norm_lstm", {"zoneout_c": 2.0}, r"zoneout_c must be in \[0, 1\], got 2"),
    ("rnn", {"h0": torch.ones(2, 4).double()}, "h0 must be float32, got float64"),
    ("rnn_backward", {"dh": ones}, r"dh must be \(2, 4\), got \(3, 2, 4\)"),
    ("mogrifier_lstm", {"seed": torch.tensor(1.0)}, r"seed must be one int64, got float32 \(\)"),
    ("mogrifier_lstm", {"zoneout_c": -0.1}, r"zoneout_c must be in \[0, 1\], got -0.1"),
    ("mogrifier_lstm", {"rounds": 2**62}, r"rounds must be in \[0, 63\], got 4611686018427387904"),
    ("attention", {"k": torch.ones(2, 2, 40, 6).half()}, "k must be float32, got float16"),
    ("attention", {"v": torch.ones(2, 2, 40, 6).double()}, "v must be float32, got float64"),
    ("attention", {"dropout": float("nan")}, r"dropout must be in \[0, 1\], got nan"),
    ("attention", {"rope": torch.ones(50, 6), "offset": 2**63 - 1}, r"offset must be in .*, got 9"),
    ("attention", {"rope": torch.ones(50, 6), "offset": 2**62}, r"rope must be .*, got \(50, 6\)"),
    ("embedding", {"ids": torch.tensor([7])}, r"ids must be in \[0, V\) = \[0, 7\), got 7"),
    ("embedding_backward", {"V": 2**62 + 2**16}, r"V must be in \[0, .*\], got 46116860184274534"),
    ("embedding_backward", {"V": -1}, r"V must be in \[0, .*\], got -1"),
    ("embedding_backward", {"keys": torch.full((7,), -1)}, r"keys must be in \[0, .*\], got -1"),
    ("dropout", {"p": float("nan")}, r"p must be in \[0, 1\], got nan"),
    ("dropout", {"x": whole}, "x must be float32, float64 or bfloat16, got int8"),
    ("dropout_mask", {"shape": [-1, 3]}, r"shape must be sizes of at least 0, got \(-1, 3\)"),
    ("dropout_mask", {"shape": [2**62, 2**62]}, "shape would be too large"),
    ("linear", {"W": torch.ones(4, 5).double()}, "W must be float32, got float64"),
    ("linear_backward", {"dy": torch.ones(3, 5)}, r"dy must be \(3, 4\), got \(3, 5\)"),
    ("gemm_rate", {"repeats": -1}, r"repeats must be in \[1, 1000000\], got -1"),
    ("linear_cross_entropy", {"z_loss": float("nan")}, "z_loss must be at least 0, got nan"),
    ("linear_cross_entropy", {"reduction": 3}, r"reduction must be in \[0, 2\], got 3"),
    ("residual_layer_norm", {"eps": float("nan")}, "eps must be at least 0, got nan"),
    ("bias_activation_dropout", {"activation": "swish"}, "activation must be relu.*, got swish"),
    ("activation_regularization", {"raw": ones}, r"raw must be \(4, 2, 5\), got \(3, 2, 4\)"),
    ("nt_asgd_step_", {"grads": [ones]}, "grads must have one tensor for each of 2 params, got 1"),
    ("mogrifier_lstm", {"Q": None}, "Q must be a weight for each of its rounds, or one, got None"),
    (
        "mogrifier_lstm_backward",
        {"rounds": 1, "Q": torch.ones(1, 5, 4), "Q_bias": None},
        r"R must be None, as no round uses it, got \(1, 4, 5\)",
    ),
]


@pytest.mark.parametrize(
    ("op", "changed", "message"), WRONG, ids=[f"{op}-{'-'.join(c)}" for op, c, _ in WRONG]
)
def test_message(op, changed, message):
    with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
        getattr(OPS, op)(**good(op) | changed)


@pytest.mark.parametrize("changed", ["grads", "averages"])
def test_nt_asgd_takes_elements_in_one_order(changed):
    parameter = torch.arange(6.0).reshape(2, 3).t()
    call = {"params": [parameter], "grads": [parameter.clone()], "averages": [parameter.clone()]}
    call[changed] = [parameter.contiguous()]
    settings = {"norm": None, "max_norm": 0.0, "lr": 0.1, "weight_decay": 0.0, "mu": 1.0}
    message = rf"^nt_asgd_step_: {changed} must have the strides of their parameters, \(1, 3\), got"
    with pytest.raises(RuntimeError, match=message):
        OPS.nt_asgd_step_(**call, **settings)
    assert torch.equal(parameter, torch.arange(6.0).reshape(2, 3).t())


def test_nt_asgd_refuses_elements_that_share_memory():
    shared = torch.zeros(9).as_strided((2, 2, 2), (1, 1, 5))
    with pytest.raises(RuntimeError, match="grads must be tensors without gaps or shared elements"):
        OPS.nt_asgd_norm([shared])


def test_rounds_of_rank_0():
    factors = {"Q": torch.ones(2, 5, 0), "Q_factor": torch.ones(2, 0, 4)}
    factors |= {"R": torch.ones(1, 4, 0), "R_factor": torch.ones(1, 0, 5)}
    with pytest.raises(RuntimeError, match=r"^mogrifier_lstm: Q_factor must be of rank 1 at least"):
        OPS.mogrifier_lstm(**good("mogrifier_lstm", 1) | factors)


def test_gradients_of_one_projection_need_k_in_the_shape_of_q():
    call = good("attention_backward", -1)
    k = call["k"][:, :, :2]
    with pytest.raises(RuntimeError, match=r"^attention_backward: k must be \(2, 2, 4, 6\), got"):
        OPS.attention_backward(**call | {"k": k, "v": k})


def test_gradients_of_one_projection_are_computed_together():
    """The bit that asks for one layout asks for the gradients, too."""
    call = good("attention_backward", -1)
    assert call["needs"] == 1 << 6
    torch.testing.assert_close(
        OPS.attention_backward(**call)[:3], OPS.attention_backward(**call | {"needs": 7})[:3]
    )
