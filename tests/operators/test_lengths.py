"""The lengths of the recurrences: what lies past a length never matters, the forms in which
lengths are given, also to attention, and empty batches.
"""

import pytest
import torch
from fusedseq import fused, nn, reference
from fusedseq.testing import (
    differentiable,
    lstm_case,
    mogrifier_lstm_case,
    mogrifier_lstm_pair_case,
)
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.past_lengths import assert_does_not_matter, filled, steps_past

T, B, X, H = 5, 4, 6, 7
MASKS = {"state_dropout": 0.3, "zoneout_h": 0.2, "zoneout_c": 0.4, "weight_drop": 0.3, "seed": 11}
LOCKED = {"input_dropout": 0.4, "locked_input": True}
CASES = [
    lstm_case(T, B, X, H),
    lstm_case(T, B, 33, 40, bias=False, weight_drop=0.3, seed=5),
    mogrifier_lstm_case(T, B, X, H, 0, **MASKS),
    mogrifier_lstm_case(T, B, X, H, 1),
    mogrifier_lstm_case(T, B, 20, 33, 5, **MASKS, **LOCKED),
    mogrifier_lstm_case(T, B, X, H, 4, rank=3, shared=True, cap_input_gate=True),
    mogrifier_lstm_case(T, B, X, H, 5, input_dropout=1.0, training=True, seed=3),
    mogrifier_lstm_case(T, B, X, H, 3, zoneout_h=0.3, zoneout_c=0.6, training=False),
]
PAIR = mogrifier_lstm_pair_case(T, B, X, H, 5, 3, 2, first=MASKS, **LOCKED)
VARIED, EMPTY, FULL = [3, 0, 5, 1], [0] * B, [T] * B
OPS = pytest.mark.parametrize("ops", [fused, reference], ids=["fused", "reference"])


def call(ops, case, device, dtype, lengths):
    """The operator of a case, and its arguments with lengths."""
    args, kwargs = case.inputs(device, dtype)
    lengths = torch.tensor(lengths, device=device)
    if case.op == "mogrifier_lstm_pair":
        args = args[0], args[1] | {"lengths": lengths}, args[2] | {"lengths": lengths}
    else:
        kwargs = kwargs | {"lengths": lengths}
    return getattr(ops, case.op), args, kwargs


@OPS
@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        *((case, VARIED) for case in [*CASES, PAIR]),
        *((case, lengths) for case in (CASES[0], CASES[4], PAIR) for lengths in (EMPTY, FULL)),
    ],
    ids=str,
)
def test_what_is_behind_a_length_does_not_matter(ops, case, lengths, device, dtype):
    assert_does_not_matter(*call(ops, case, device, dtype, lengths), lengths)


@OPS
@pytest.mark.parametrize("case", [CASES[0], CASES[5], PAIR], ids=str)
def test_what_is_behind_a_length_does_not_matter_to_second_derivatives(ops, case, device):
    lengths = VARIED
    function, args, kwargs = call(ops, case, device, torch.float64, lengths)
    assert_does_not_matter(function, args, kwargs, lengths, higher=True)


def test_some_needed_gradients(device):
    """Without a gradient of W_ih no copy of x is made; each subset gives the bits of all."""
    function, args, kwargs = call(fused, CASES[0], device, torch.float32, VARIED)
    past = steps_past(VARIED, T)
    args = (filled(args[0], past, None), *args[1:])
    found = []
    for needs in (range(6), (0,), (1,), (2, 3), (4, 5)):
        leaves = [t.detach().clone().requires_grad_(i in needs) for i, t in enumerate(args)]
        y, (h, c) = function(*leaves, **kwargs)
        (y.square().sum() + h.sum() + c.sum()).backward()
        found.append({i: leaves[i].grad for i in needs})
    for grads in found[1:]:
        for i, grad in grads.items():
            assert torch.equal(grad, found[0][i])


def modules(device):
    options = {"residual": True, "output": "sum", "dropout": 0.3, "batch_first": True}
    yield nn.LSTM(H, H, 3, **options, weight_drop=0.2).to(device)
    yield nn.MogrifierLSTM(H, H, 3, **options, rounds=5, rank=3, input_dropout=0.4).to(device)
    # No residual layers: two layers are one call of mogrifier_lstm_pair.
    yield nn.MogrifierLSTM(H, H, 3, rounds=2, dropout=0.3, batch_first=True).to(device)


@pytest.mark.parametrize("which", range(3), ids=["lstm", "residual", "pair"])
def test_what_is_behind_a_length_does_not_matter_to_a_module(which, device):
    torch.manual_seed(0)
    module = list(modules(device))[which]
    x, lengths = torch.randn(B, T, H, device=device), torch.tensor(VARIED)
    past = steps_past(lengths, T).transpose(0, 1)
    found = []
    for value in (0.0, None):
        torch.manual_seed(1)
        leaf = filled(x, past, value).requires_grad_()
        y, states = module(leaf, lengths=lengths)
        dy = filled(torch.ones_like(y), past, value)
        results = [y, *tree_leaves(states)]
        leaves = [leaf, *module.parameters()]
        grads = torch.autograd.grad(results, leaves, [dy, *map(torch.ones_like, results[1:])])
        found.append([*results, *grads])
        assert not torch.where(past.to(device), y, 0.0).count_nonzero()
        assert not torch.where(past.to(device), grads[0], 0.0).count_nonzero()
    for zeros, forbidden in zip(*found, strict=True):
        assert forbidden.isfinite().all()
        assert torch.equal(zeros, forbidden)


@pytest.mark.cpu  # cuDNN rounds factors to TF32
def test_gradients_are_those_of_torch_s_packed_lstm(device):
    torch.manual_seed(0)
    ours = nn.LSTM(X, H, 2, dropout=0.0).to(device)
    theirs = torch.nn.LSTM(X, H, 2).to(device)
    theirs.load_state_dict(ours.state_dict())
    lengths = torch.tensor([3, 2, 5, 1])
    x = filled(torch.randn(T, B, X, device=device), steps_past(lengths, T), None)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    torch.nn.utils.rnn.pad_packed_sequence(theirs(packed)[0])[0].square().sum().backward()
    ours(x, lengths=lengths)[0].square().sum().backward()
    for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


# ---- the forms of lengths

FORMS = {
    "int32": lambda lengths, device: torch.tensor(lengths, dtype=torch.int32, device=device),
    "on the CPU": lambda lengths, device: torch.tensor(lengths),
    "int32 on the CPU": lambda lengths, device: torch.tensor(lengths, dtype=torch.int32),
    "list": lambda lengths, device: lengths,
    "tuple": lambda lengths, device: tuple(lengths),
}


@OPS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], PAIR], ids=str)
def test_forms_of_lengths(ops, form, case, device):
    lengths = VARIED
    function, args, kwargs = call(ops, case, device, torch.float32, lengths)
    given = tree_map(
        lambda t: FORMS[form](lengths, device) if t is kwargs.get("lengths") else t, (args, kwargs)
    )
    if case is PAIR:
        x, *layers = args
        of_form = {"lengths": FORMS[form](lengths, device)}
        given = ((x, *(layer | of_form for layer in layers)), {})
    a, k = given
    expected, got = tree_leaves(function(*args, **kwargs)), tree_leaves(function(*a, **k))
    for this, other in zip(got, expected, strict=True):
        assert torch.equal(this, other)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_module_s_lengths(form, device):
    x, lengths = torch.randn(T, B, X, device=device), VARIED
    for module in (nn.LSTM(X, H, 2), nn.MogrifierLSTM(X, H, 3, rounds=2)):
        module.to(device)
        expected = module(x, lengths=torch.tensor(lengths, device=device))
        got = module(x, lengths=FORMS[form](lengths, device))
        for this, other in zip(*map(tree_leaves, (got, expected)), strict=True):
            assert torch.equal(this, other)


@pytest.mark.parametrize("form", ["on the CPU", "int32 on the CPU", "list"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_lengths_on_the_cpu_with_x_on_another_device(form, case):
    """Their values are checked before they are copied. Meta tensors stand in for a GPU's."""
    function, args, kwargs = call(fused, case, "cpu", torch.float32, VARIED)
    args, kwargs = tree_map(
        lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, (args, kwargs)
    )
    y, _ = function(*args, **kwargs | {"lengths": FORMS[form](VARIED, "meta")})
    assert y.is_meta
    with pytest.raises(ValueError, match=rf"^{case.op}: lengths must be in \[0, T\] = \[0, 5\]"):
        function(*args, **kwargs | {"lengths": FORMS[form]([3, 0, 6, 1], "meta")})


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_key_lengths(form, device):
    q, k, v = torch.randn(3, B, 2, T, H, device=device)
    expected = fused.attention(q, k, v, key_lengths=torch.tensor(VARIED, device=device))
    got = fused.attention(q, k, v, key_lengths=FORMS[form](VARIED, device))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("form", ["on the CPU", "int32 on the CPU", "list"])
def test_key_lengths_on_the_cpu_with_q_on_another_device(form):
    q = torch.randn(B, 2, T, H, device="meta")
    assert fused.attention(q, q, q, key_lengths=FORMS[form](VARIED, "meta")).is_meta
    with pytest.raises(ValueError, match=r"^attention: key_lengths must be in \[0, S\] = \[0, 5\]"):
        fused.attention(q, q, q, key_lengths=FORMS[form]([3, 0, 6, 1], "meta"))


# ---- empty batches


def poisoned(*sizes):
    """Leaves NaN in the memory that the next results of these sizes get."""
    for _ in range(3):
        tensors = [torch.full((n,), float("nan")) for n in sizes]
        del tensors


@OPS
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("size", [(X, H), (33, 160)], ids=str)
@pytest.mark.parametrize("rounds", [None, 0, 5])
def test_no_sequences(ops, rounds, size, with_lengths, device, dtype):
    """B = 0: no results, and each gradient of a weight is a sum over nothing."""
    options = {"lengths": []} if with_lengths else {}
    case = lstm_case(3, 0, *size) if rounds is None else mogrifier_lstm_case(3, 0, *size, rounds)
    args, kwargs = case.inputs(device, dtype)
    leaves = differentiable(args, kwargs)
    for leaf in leaves:
        leaf.requires_grad_()
    y, (h, c) = getattr(ops, case.op)(*args, **kwargs, **options)
    assert (y.shape, h.shape, c.shape) == ((3, 0, size[1]), (0, size[1]), (0, size[1]))
    poisoned(*(leaf.numel() for leaf in leaves))
    for leaf, grad in zip(leaves, torch.autograd.grad([y, h, c], leaves, [y, h, c]), strict=True):
        assert grad.shape == leaf.shape
        assert not grad.count_nonzero()


@pytest.mark.parametrize("module", [nn.LSTM, nn.MogrifierLSTM, torch.nn.LSTM])
def test_a_module_takes_the_zero_sizes_of_torch_s(module, device):
    """No sequences are taken; no steps, inputs or hidden units are refused."""
    options = {"dropout": 0.5} if module is torch.nn.LSTM else {"dropout": 0.5, "weight_drop": 0.5}
    made = module(X, H, 2, **options).to(device)
    x = torch.randn(3, 0, X, device=device, requires_grad=True)
    y, (h, c) = made(x)
    assert (y.shape, h.shape, c.shape) == ((3, 0, H), (2, 0, H), (2, 0, H))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not any(p.grad.count_nonzero() for p in made.parameters())
    with pytest.raises((ValueError, RuntimeError), match=r"T, X and H at least 1|larger than 0"):
        made(torch.randn(0, 2, X, device=device))
    for sizes in ((0, H), (X, 0)):
        with pytest.raises(ValueError, match=r"at least 1|greater than zero"):
            module(*sizes)
