"""What all recurrent modules take beside their cell: directions, resets inside of rows, and ragged
batches. torch's modules and separate calls for each sequence are the oracles.
"""

import copy
from importlib import import_module

import pytest
import torch
from fusedseq import fused, nn, reference, testing
from fusedseq.fused import autograd
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

X, H = 5, 4
LENGTHS = [3, 6, 1, 4]
OPTIONS = {
    "LSTM": (nn.LSTM, {}),
    "projected LSTM": (nn.LSTM, {"proj_size": 2}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "RNN with relu": (nn.RNN, {"nonlinearity": "relu"}),
    "MogrifierLSTM": (nn.MogrifierLSTM, {"rounds": 3}),
    "PeepholeLSTM": (nn.PeepholeLSTM, {}),
    "LayerNormLSTM": (nn.LayerNormLSTM, {}),
    "LayerNormGRU": (nn.LayerNormGRU, {}),
    "LSTM with zoneout": (nn.LSTM, {"zoneout_h": 0.3, "zoneout_c": 0.4}),
    "GRU with zoneout": (nn.GRU, {"zoneout_h": 0.3}),
    "RNN with zoneout": (nn.RNN, {"zoneout_h": 0.3}),
}
OF_TORCH = [name for name, (kind, _) in OPTIONS.items() if hasattr(torch.nn, kind.__name__)]
OF_TORCH = [name for name in OF_TORCH if "zoneout" not in name]
MODULES = pytest.mark.parametrize("name", OPTIONS)
WITH_TORCH = pytest.mark.parametrize("name", OF_TORCH)
DIRECTIONS = pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])


def made(name, bidirectional, ops, layers=2, **more):
    kind, options = OPTIONS[name]
    module = kind(X, H, layers, bidirectional=bidirectional, ops=ops, **options, **more)
    return module.double().train("zoneout" not in name)  # masks depend on the place in a batch


def of_torch(name, module):
    kind, options = OPTIONS[name]
    theirs = getattr(torch.nn, kind.__name__)(
        X, H, module.num_layers, bidirectional=module.bidirectional, **options
    )
    theirs.double().load_state_dict(module.state_dict())
    assert [*theirs.state_dict()] == [*module.state_dict()]
    return theirs


def random_state(module, B):
    count = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(count, B, module._output_size(H), dtype=torch.float64)
    return (h, torch.randn(count, B, H, dtype=torch.float64)) if len(module.STATE) > 1 else h


def rows(B=4, T=6):
    return torch.randn(T, B, X, dtype=torch.float64)


def gradients(module, *results):
    module.zero_grad()
    sum((r.square() * (1 + i)).sum() for i, t in enumerate(results) for r in flat(t)).backward()
    return [p.grad.clone() for p in module.parameters()]


def flat(t):
    return [t] if isinstance(t, torch.Tensor) else [r for part in t for r in flat(part)]


def assert_same(found, wanted):
    for a, b in zip(flat(found), flat(wanted), strict=True):
        torch.testing.assert_close(a, b)


@WITH_TORCH
@DIRECTIONS
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_results_and_gradients_are_those_of_torch(name, bidirectional, packed, ops):
    module = made(name, bidirectional, ops)
    theirs = of_torch(name, module)
    x, state = rows().requires_grad_(), random_state(module, 4)

    def inputs():
        return pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if packed else x

    found, wanted = module(inputs(), state), theirs(inputs(), state)
    if packed:
        found = pad_packed_sequence(found[0])[0], found[1]
        wanted = pad_packed_sequence(wanted[0])[0], wanted[1]
    assert_same(found, wanted)
    assert_same(gradients(module, *found), gradients(theirs, *wanted))


@MODULES
@DIRECTIONS
def test_lengths_end_both_directions_where_the_sequence_ends(name, bidirectional, ops):
    module, x = made(name, bidirectional, ops), rows()
    state = random_state(module, 4)
    y, final = module(x, state, LENGTHS)
    for b, n in enumerate(LENGTHS):
        of_row = (
            tuple(s[:, b : b + 1] for s in state)
            if isinstance(state, tuple)
            else state[:, b : b + 1]
        )
        alone, last = module(x[:n, b : b + 1], of_row)
        torch.testing.assert_close(y[:n, b : b + 1], alone)
        assert not y[n:, b].any()
        assert_same([s[:, b : b + 1] for s in flat(final)], flat(last))


@MODULES
@DIRECTIONS
def test_padding_is_never_read(name, bidirectional, ops):
    module, x = made(name, bidirectional, ops), rows()
    clean = module(x, lengths=LENGTHS)
    for b, n in enumerate(LENGTHS):
        x[n:, b] = torch.nan
    x.requires_grad_()
    found = module(x, lengths=LENGTHS)
    assert_same(found, clean)
    assert all(g.isfinite().all() for g in gradients(module, *found))
    assert x.grad.isfinite().all()


@MODULES
def test_a_sequence_without_steps_retains_its_state(name, ops):
    module, x = made(name, True, ops), rows(B=2)
    state = random_state(module, 2)
    y, final = module(x, state, [0, 6])
    assert not y[:, 0].any()
    assert_same([s[:, 0] for s in flat(final)], [s[:, 0] for s in flat(state)])


@MODULES
@DIRECTIONS
def test_sequences_in_one_row_do_not_see_each_other(name, bidirectional, ops):
    module, x = made(name, bidirectional, ops), rows(B=3)
    lengths = [3, 6, 1]
    row = torch.cat([x[:n, b : b + 1] for b, n in enumerate(lengths)])
    starts = torch.zeros(10, 1, dtype=torch.bool)
    starts[[0, 3, 9]] = True
    y, final = module(row, starts=starts)
    alone = [module(x[:n, b : b + 1]) for b, n in enumerate(lengths)]
    torch.testing.assert_close(y, torch.cat([y for y, _ in alone]))
    # The forward direction ends with the last sequence, the reverse one with the first.
    directions = 2 if bidirectional else 1
    for part, last, first in zip(flat(final), flat(alone[-1][1]), flat(alone[0][1]), strict=True):
        torch.testing.assert_close(part[::directions], last[::directions])
        if bidirectional:
            torch.testing.assert_close(part[1::2], first[1::2])
    together = gradients(module, y)
    assert_same(together, gradients(module, torch.cat([y for y, _ in alone])))


@MODULES
def test_no_gradient_passes_a_start(name, ops):
    module, x = made(name, False, ops), rows(B=2).requires_grad_()
    starts = torch.zeros(6, 2, dtype=torch.bool)
    starts[4, 0] = True
    y, _ = module(x, starts=starts)
    (dx,) = torch.autograd.grad(y[4:].sum(), x)
    assert not dx[:4, 0].any()
    assert dx[4:, 0].all()
    assert dx[:, 1].all()


@MODULES
@DIRECTIONS
def test_ragged_batches_equal_padded_ones(name, bidirectional, ops):
    module, x = made(name, bidirectional, ops), rows()
    state = random_state(module, 4)
    y, final = module(x, state, LENGTHS)
    tokens = torch.cat([x[:n, b] for b, n in enumerate(LENGTHS)]).requires_grad_()
    wanted = torch.cat([y[:n, b] for b, n in enumerate(LENGTHS)])
    expected = gradients(module, wanted, final)
    cu_seqlens = torch.tensor([0, 3, 9, 10, 14], dtype=torch.int32)
    found, last = module(tokens, state, cu_seqlens=cu_seqlens)
    assert_same([found, last], [wanted, final])
    assert_same(gradients(module, found, last), expected)
    dx, tokens.grad = tokens.grad, None
    assert dx.any()
    nested = torch.nested.nested_tensor_from_jagged(tokens, cu_seqlens.long())
    in_nested, last = module(nested, state)
    assert in_nested.is_nested
    assert_same([in_nested.values(), last], [wanted, final])
    assert_same(gradients(module, in_nested.values(), last), expected)
    torch.testing.assert_close(tokens.grad, dx)


@MODULES
@DIRECTIONS
def test_nested_tensors_with_holes_are_read_without_them(name, bidirectional, ops):
    """As torch.nested.narrow makes them: views of a padded batch."""
    module, x = made(name, bidirectional, ops), rows()
    y, final = module(x, lengths=LENGTHS)
    starts, lengths = torch.zeros(4, dtype=torch.int64), torch.tensor(LENGTHS)
    batch_first = x.transpose(0, 1).contiguous()
    nested = torch.nested.narrow(batch_first, 1, starts, lengths, layout=torch.jagged)
    found, last = module(nested)
    wanted = torch.cat([y[:n, b] for b, n in enumerate(LENGTHS)])
    assert_same([found.values(), last], [wanted, final])


@pytest.mark.cpu
def test_nested_results_have_the_lengths_of_x():
    """Which to_padded_tensor reads, and would overestimate otherwise."""
    nested = torch.nested.nested_tensor([torch.ones(3, X), torch.ones(5, X)], layout=torch.jagged)
    y, _ = nn.GRU(X, X)(nested)
    assert y.to_padded_tensor(0.0).shape == (2, 5, X)
    assert (y + nested).shape == y.shape


@pytest.mark.cpu
@pytest.mark.parametrize("lengths", [[3, 3, 3], [4, 2, 2]], ids=str)
def test_packed_results_are_in_the_order_of_x(lengths, ops):
    """Also where that is not the order in which torch.sort puts sequences of the same length."""
    order = torch.tensor([2, 0, 1])
    given = pack_padded_sequence(rows(3), lengths)
    packed = PackedSequence(given.data, given.batch_sizes, order)
    module = made("LSTM", True, ops)
    theirs, state = of_torch("LSTM", module), random_state(module, 3)
    y, final = module(packed, state)
    expected, last = theirs(packed, state)
    assert_same([y.data, final], [expected.data, last])
    for found, wanted in zip(y[1:], packed[1:], strict=True):
        assert torch.equal(found, wanted)


@MODULES
def test_batch_first_transposes_starts(name, ops):
    module = made(name, False, ops)
    other = made(name, False, ops, batch_first=True)
    other.load_state_dict(module.state_dict())
    x, starts = rows(), torch.rand(6, 4) < 0.4
    y, _ = module(x, starts=starts)
    y_other, _ = other(x.transpose(0, 1), starts=starts.t())
    torch.testing.assert_close(y_other.transpose(0, 1), y)


@MODULES
@DIRECTIONS
def test_dropout_draws_the_same_masks_in_both_operator_sets(name, bidirectional):
    kind, options = OPTIONS[name]
    drop = {"dropout": 0.4, "weight_drop": 0.3}
    ours = kind(X, H, 2, bidirectional=bidirectional, ops=fused, **drop, **options).double()
    oracle = kind(X, H, 2, bidirectional=bidirectional, ops=reference, **drop, **options).double()
    oracle.load_state_dict(ours.state_dict())
    x, found = rows(), []
    for module in (ours, oracle):
        torch.manual_seed(3)
        found.append(module(x, lengths=LENGTHS))
    assert_same(*found)
    assert not torch.equal(found[0][0], copy.deepcopy(ours).eval()(x, lengths=LENGTHS)[0])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"starts": torch.zeros(6, 4)}, "starts must be bool, got torch.float32"),
        ({"starts": torch.zeros(4, 6) > 0}, r"starts must be \(T, B\) = \(6, 4\), got \(4, 6\)"),
        ({"cu_seqlens": torch.tensor([0, 6])}, r"x must be \(tokens, 5\) with cu_seqlens"),
        (
            {"lengths": [1, 2, 3, 4], "cu_seqlens": torch.tensor([0, 6])},
            "lengths must be None with cu_seqlens, which has its own sequences",
        ),
        ({"max_seqlen": 6}, "max_seqlen must be None without cu_seqlens, got 6"),
    ],
    ids=["dtype", "shape", "x", "twice", "max_seqlen"],
)
def test_wrong_orders_are_rejected(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nn.GRU(X, H)(rows().float(), **arguments)


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["LSTM", "GRU", "MogrifierLSTM"])
def test_ragged_batches_are_compiled_with_max_seqlen(name):
    """Without it, the longest length would be read back, which a whole graph cannot hold."""
    torch.compiler.reset()  # all modules share one forward, and torch compiles it 8 times at most
    module, tokens = getattr(nn, name)(X, H), torch.randn(14, X, requires_grad=True)
    cu_seqlens = torch.tensor([0, 3, 9, 10, 14])
    y, final = module(tokens, cu_seqlens=cu_seqlens)
    expected = gradients(module, y, final)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for longest in (6, 8):  # more than the longest is allowed
        found, last = compiled(tokens, cu_seqlens=cu_seqlens, max_seqlen=longest)
        assert_same([found, last], [y, final])
        assert_same(gradients(module, found, last), expected)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("max_seqlen", "message"),
    [
        (2, "be at least the length of the longest sequence, 3, got 2"),
        (-1, "be at least 0, got -1"),
        (3.0, "be a whole number, got float"),
        (True, "be a whole number, got bool"),
    ],
)
def test_wrong_longest_lengths_are_rejected(max_seqlen, message):
    module, cu_seqlens = nn.LSTM(X, H), torch.tensor([0, 3, 4])
    with pytest.raises((TypeError, ValueError), match=f"LSTM: max_seqlen must {message}"):
        module(torch.ones(4, X), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["GRU", "RNN", "LayerNormGRU"])
def test_cells_without_a_forget_gate_refuse_its_bias(name):
    module = getattr(nn, name)(X, H)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    message = f"{name}: forget_bias must be None, since the cell has no forget gate, got 1"
    with pytest.raises(ValueError, match=message):
        module.reset_parameters(forget_bias=1)
    assert_same(list(module.state_dict().values()), list(before.values()))


@pytest.mark.cpu
@pytest.mark.parametrize("values", [[1, 4], [0, 3, 2, 4], [0, 3], []], ids=str)
def test_cumulative_lengths_rise_from_0_to_the_number_of_tokens(values):
    cu_seqlens = torch.tensor(values, dtype=torch.int64)
    rule = "rise from 0 to the number of rows of x, 4, got" if values else r"be \(B \+ 1,\)"
    with pytest.raises(ValueError, match=f"LSTM: cu_seqlens must {rule}"):
        nn.LSTM(X, H)(torch.ones(4, X), cu_seqlens=cu_seqlens)


@pytest.mark.cpu
@pytest.mark.parametrize("proj_size", [-1, H, H + 1])
def test_a_projection_is_narrower_than_the_state(proj_size):
    with pytest.raises(ValueError, match=f"LSTM: proj_size must be 0.*got {proj_size} and {H}"):
        nn.LSTM(X, H, proj_size=proj_size)


@pytest.mark.cpu
def test_an_unknown_nonlinearity_is_rejected():
    with pytest.raises(ValueError, match="RNN: nonlinearity must be 'tanh' or 'relu', got 'gelu'"):
        nn.RNN(X, H, nonlinearity="gelu")


@pytest.mark.parametrize("ops", [fused, reference], ids=["fused", "reference"])
@pytest.mark.parametrize("layers", [1, 2])
@MODULES
def test_a_final_state_may_be_changed_in_place(name, layers, ops):
    """It is detached between segments, and set where a new sequence starts."""
    module = made(name, False, ops, layers)
    x = torch.randn(6, 4, X, dtype=torch.float64, requires_grad=True)

    def states_of(state):
        return state if isinstance(state, tuple) else (state,)

    y, state = module(x)
    for s in states_of(state):
        s[:, 0] = 0.0
    sum(s.sum() for s in (y, *states_of(state))).backward()
    _, state = module(x)
    for s in states_of(state):
        assert s.detach_().grad_fn is None
    with torch.no_grad():
        _, state = module(x)
    learned = torch.zeros(H, dtype=torch.float64, requires_grad=True)
    for s in states_of(state):
        s[:, 0] = learned[: s.size(-1)]
        assert s.requires_grad


@pytest.mark.parametrize("lengths", [None, [4, 0, 6]])
@pytest.mark.parametrize("weight_drop", [0.0, 0.5])
def test_a_reversed_copy_gives_the_results_of_reverse(monkeypatch, lengths, weight_drop):
    """On CUDA the kernels for whole sequences compute `reverse` so."""
    module = import_module("fusedseq.fused.lstm_cudnn")
    case = testing.lstm_case(
        6, 3, 5, 7, lengths=lengths, weight_drop=weight_drop, seed=3, reverse=True
    )
    args, kwargs = case.inputs()
    copies = []

    def is_flipped(x, starts, reverse):
        copies.append(reverse)
        return reverse and starts is None

    monkeypatch.setattr(module, "is_flipped", is_flipped)
    # On the CPU a call without masks would be made in C++, and never reach is_flipped.
    monkeypatch.setattr(autograd, "call_if_valid", lambda *_: NotImplemented)
    testing.check("lstm", args, kwargs)
    assert copies[:2] == [True, False]
