"""Recurrences that fusedseq._autograd records: which calls skip the checks in Python, and the
gradients of losses that read only some of the results.
"""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.fused import autograd, check
from fusedseq.fused.schema import Schema

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        autograd.recorder is None, reason="fusedseq._autograd is for another torch or Python"
    ),
]
T, B, X, H = 3, 2, 4, 5
SHAPES = {
    "lstm": {"W_ih": (4 * H, X), "W_hh": (4 * H, H), "b": (4 * H,), "h0": (B, H), "c0": (B, H)},
    "gru": {"W_ih": (3 * H, X), "W_hh": (3 * H, H), "b": (4 * H,), "h0": (B, H)},
    "rnn": {"W_ih": (H, X), "W_hh": (H, H), "b": (H,), "h0": (B, H)},
}
SHAPES["peephole_lstm"] = SHAPES["lstm"] | {"peephole": (3 * H,)}
SHAPES["mogrifier_lstm"] = SHAPES["lstm"] | {
    "Q": (2, X, H),
    "R": (1, H, X),
    "Q_bias": (2, X),
    "R_bias": (1, H),
}
# The vectors that make up the registered operators' input `norm`.
VECTORS = {
    "layer_norm_lstm": {"gamma_ih": 4 * H, "gamma_hh": 4 * H, "gamma_c": H, "beta_c": H},
    "layer_norm_gru": {"gamma_ih": 3 * H, "gamma_hh": 3 * H},
}
for name, sizes in VECTORS.items():
    SHAPES[name] = SHAPES[name.removeprefix("layer_norm_")] | {n: (v,) for n, v in sizes.items()}
OPS = pytest.mark.parametrize("op", SHAPES)
OPTIONS = {"rnn": {"relu": True}, "mogrifier_lstm": {"rounds": 3, "cap_input_gate": True}}
OPTIONS |= {op: {"eps": 1e-3} for op in VECTORS}
# The registered operators' inputs beside tensors of numbers, without masks.
DEFAULTS = {
    "lengths": None,
    "starts": None,
    "reverse": False,
    "variational": False,
    "training": True,
    "weight_drop": 0.0,
    "zoneout_h": 0.0,
    "zoneout_c": 0.0,
    "state_dropout": 0.0,
    "seed": None,
    "Q_factor": None,
    "R_factor": None,
}
OPTIONAL = ("b", "Q_bias", "R_bias")


def call_of(op, dtype=torch.float32):
    """The arguments of a call of the public function, by name."""
    torch.manual_seed(0)
    tensors = {"x": torch.randn(T, B, X)}
    tensors |= {name: torch.randn(shape) for name, shape in SHAPES[op].items()}
    return {name: t.to(dtype) for name, t in tensors.items()} | OPTIONS.get(op, {})


def call_if_valid(op, **changes):
    """autograd.call_if_valid of the registered operator with some inputs changed."""
    named = DEFAULTS | call_of(op)
    if op in VECTORS:
        named["norm"] = torch.cat([named[name] for name in VECTORS[op]])
    named |= changes
    return autograd.call_if_valid(op, *[named[name] for name in Schema(op).inputs])


def states_of(found):
    y, state = found
    return [y, *(state if isinstance(state, tuple) else [state])]


@OPS
def test_a_call_without_masks_is_not_checked_in_python(op, monkeypatch):
    wanted = states_of(getattr(reference, op)(**call_of(op)))
    for name in ("like", "tensor", "shape", "dimensions", "probability", "starts"):
        monkeypatch.setattr(check, name, lambda *_, **__: pytest.fail("checked in Python"))
    for grad in (False, True):
        call = call_of(op)
        call["x"].requires_grad_(grad)
        # A probability without effect, too.
        found = states_of(getattr(fused, op)(**call, weight_drop=0.5, training=False))
        for y, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(y, expected)
            assert y.requires_grad == grad


@OPS
def test_outputs_that_only_a_backward_reads_are_not_returned(op):
    for x in (torch.randn(T, B, X), torch.randn(T, B, X, requires_grad=True)):
        found = call_if_valid(op, x=x)
        returned = [y is not None for y in found]
        assert returned == [name in ("y", "h", "c") for name in Schema(op).outputs]


@OPS
def test_orders_that_need_no_check_in_python(op):
    starts = torch.tensor([[True, False], [False, True], [False, False]])
    for order in (
        {"lengths": torch.tensor([3, 0])},
        {"lengths": torch.tensor([3, 9, 1, 9])[::2]},
        {"starts": starts},
        {"starts": starts, "reverse": True, "lengths": torch.tensor([1, 2])},
        {"b": None},
    ):
        found = [y for y in call_if_valid(op, **order) if y is not None]
        call = {name: order.get(name, value) for name, value in call_of(op).items()}
        wanted = getattr(reference, op)(**(call | order))
        for y, expected in zip(found, states_of(wanted), strict=True):
            torch.testing.assert_close(y, expected)


@OPS
def test_a_batch_of_no_rows(op):
    empty = {name: torch.zeros(0, H) for name in ("h0", "c0")}
    y, h, *_ = call_if_valid(op, x=torch.zeros(T, 0, X), **empty)
    assert y.shape == (T, 0, H)
    assert h.shape == (0, H)


@OPS
def test_wrong_tensors_are_left_to_python(op):
    tensors = {name: t for name, t in call_of(op).items() if name in Schema(op).inputs}
    if op in VECTORS:
        tensors["norm"] = torch.zeros(sum(VECTORS[op].values()))
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            continue
        wrong = [t.double(), t.half(), t.long(), t[None], t.new_zeros(0), t.to("meta")]
        wrong += [t.numpy(), *([] if name == "x" else [torch.cat([t, t])])]
        wrong += [] if name in OPTIONAL else [None]
        wrong += [t[..., :-1]] if t.dim() > 1 else []
        for value in wrong:
            assert call_if_valid(op, **{name: value}) is NotImplemented, (name, value)
    for size in ((0, B, X), (T, B, 0), (T, B + 1, X)):
        assert call_if_valid(op, x=torch.zeros(size)) is NotImplemented


@pytest.mark.parametrize("op", VECTORS)
def test_wrong_vectors_of_a_layer_normalization(op):
    """Of the right total size, or of a dtype to which torch.cat would promote."""
    call = call_of(op)
    first, second = (call[name] for name in ("gamma_ih", "gamma_hh"))
    for fault in (
        {"gamma_ih": first[1:], "gamma_hh": torch.cat([first[:1], second])},
        {"gamma_ih": first.half()},
        {"gamma_hh": second[None]},
        {"gamma_hh": None},
        {"gamma_hh": second.to("meta")},
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{op}: gamma_[ih]h must be"):
            getattr(fused, op)(**(call | fault))


@OPS
def test_wrong_options_are_left_to_python(op):
    faults = {
        "lengths": [
            torch.tensor([4, 1]),
            torch.tensor([-1, 1]),
            torch.tensor([1, 1, 1]),
            torch.tensor([1, 1], dtype=torch.int32),
            [1, 2],
        ],
        "starts": [torch.zeros(T, B), torch.zeros(T, B + 1, dtype=torch.bool), True],
        "reverse": [None, 1],
        "variational": [None],
        "training": [None],
        "relu": [None, 1],
        "rounds": [None, -1, 64, 2**70, True, 5, 1],  # 5 and 1 have other weights
        "cap_input_gate": [None],
    }
    masks = ("weight_drop", "zoneout_h", "zoneout_c", "state_dropout")
    faults |= {name: [0.5, -1.0, float("nan"), None] for name in masks}
    faults |= {name: [torch.zeros(2, 2, 2)] for name in ("Q_factor", "R_factor")}
    for name, values in faults.items():
        for value in values if name in Schema(op).inputs else []:
            assert call_if_valid(op, **{name: value}) is NotImplemented, (name, value)


@pytest.mark.parametrize("name", ["zoneout_h", "zoneout_c"])
@pytest.mark.parametrize("value", [None, "", []], ids=repr)
def test_a_zoneout_that_is_not_a_number(name, value):
    with pytest.raises(TypeError):
        fused.lstm(**call_of("lstm"), **{name: value})


@OPS
def test_calls_that_python_has_to_see(op):
    assert call_if_valid(op) is not NotImplemented
    with torch.autocast("cpu"):
        assert call_if_valid(op) is NotImplemented
    with torch.device("cpu"):  # a TorchFunctionMode
        assert call_if_valid(op) is NotImplemented
    with torch.autograd.forward_ad.dual_level():
        assert call_if_valid(op) is NotImplemented


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("op", ["lstm", "bidirectional_lstm"])
def test_gradients_of_some_results(op, used):
    """A loss that reads y alone has no gradient of the last state, and the reverse."""
    call = call_of("lstm", torch.float64)
    if op == "bidirectional_lstm":
        call |= {f"{name}_reverse": torch.randn_like(call[name]) for name in SHAPES["lstm"]}
    count = 3 if op == "lstm" else 4

    def derivatives(operators):
        given = {name: t.clone().requires_grad_() for name, t in call.items()}
        y, state = getattr(operators, op)(**given)
        results = [y, *(state if op == "lstm" else (*state[0], *state[1]))][:count]
        loss = sum(results[i].sin().sum() for i in used)
        inputs = [*given.values()]
        first = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        total = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True)
        return [*torch.autograd.grad(loss, inputs, materialize_grads=True), *first, *second]

    for found, wanted in zip(derivatives(fused), derivatives(reference), strict=True):
        torch.testing.assert_close(found, wanted)
