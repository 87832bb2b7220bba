"""torch.compile(fullgraph=True) of operators and modules gives the bits of eager mode.

Most tests compile with the backend aot_eager, forward and backward; the slow ones with inductor.
Further: one graph for sequences of any length, wrong values in compiled code, and make_fx.
"""

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.testing import CASES, lstm_case, mogrifier_lstm_case, run
from fusedseq.testing.check import is_by_cudnn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.placement import tolerances

# At least one case of every operator, and most options. The graph does not depend on the sizes.
COMPILED = [
    case
    for case in CASES
    if str(case)
    in (
        "lstm-T4-B3-X5-H7-nobias",
        "lstm-T5-B4-X6-H5-lengths",
        "lstm-T3-B2-X5-H7-weight_drop0.5-variational1",
        "lstm-T5-B4-X6-H5-lengths-starts-reverse1",
        "gru-T5-B4-X6-H5-lengths-starts-reverse1",
        "gru-T3-B2-X5-H7-weight_drop0.5-variational0",
        "lstm-T5-B4-X6-H5-lengths-reverse1-zoneout_h0.25-zoneout_c0.75",
        "gru-T5-B4-X6-H5-nobias-zoneout_h0.25-weight_drop0.3",
        "rnn-T5-B4-X6-H5-lengths",
        "rnn-T5-B4-X6-H5-lengths-starts-reverse1-zoneout_h0.25-training0",
        "peephole_lstm-T3-B2-X5-H7-zoneout_h0.25-zoneout_c0.75-weight_drop0.5-training0",
        "layer_norm_lstm-T5-B4-X6-H5-starts-zoneout_h0.25-zoneout_c0.75",
        "peephole_lstm-T5-B4-X6-H5-lengths-starts",
        "layer_norm_lstm-T5-B4-X6-H5-lengths-starts",
        "layer_norm_gru-T5-B4-X6-H5-lengths-starts-reverse1",
        "layer_norm_gru-T3-B2-X5-H7-zoneout_h0.25-weight_drop0.5-training0",
        "bidirectional_lstm-T5-B4-X6-H5-lengths-starts",
        "bidirectional_lstm-T3-B2-X5-H7-weight_drop0.5",
        "projected_lstm-T5-B4-X6-H5-P3-lengths-starts-reverse1",
        "projected_lstm-T3-B2-X5-H7-P3-weight_drop0.5-variational0",
        "mogrifier_lstm-T3-B2-X5-H4-r5-rank3-shared",
        "mogrifier_lstm-T4-B3-X7-H5-r5-lengths-state_dropout0.3-zoneout_h0.2-zoneout_c0.1",
        "mogrifier_lstm-T3-B2-X5-H4-r5-input_dropout0.5-locked_input1",
        "mogrifier_lstm-T3-B2-X5-H4-r5-weight_drop0.5-variational0",
        "mogrifier_lstm_pair-T3-B2-X5-H4-r3-then-T3-B2-X4-H7-r2-input_dropout0.5",
        "dropout-7x17-p0.3-tensor-seed-9",
        "dropout-2x3x5-p0.5",
        "locked_dropout-3x5x7-p0.4-tensor-seed1099511627776",
        "weight_drop-5x3-p0.5",
        "weight_drop-12x3-p0.5-variational-tensor-seed-5",
        "embedding-4x3-V7-E5-p0.5",
        "activation_regularization-T5-B3-H17-alpha2-beta1",
        "dropout_mask-7-p0.5-seed-9223372036854775808",
        "linear-T2-B3-K5-N4",
        "attention-B2-N3-L6-S6-D4-projected",
        "attention-B2-N4-L34-S50-D8-sinks-lengths-Nkv2-dropout0.3",
        "attention_varlen-N2-D6-L5_0_33_1_60-S5_0_33_1_60-alibi-sinks-spare3-dropout0.3",
        "attention-B2-N2-L18-S18-D10-rope-relative2-alibi-biasNLS-mask-lengths-causal1-dropout0.3",
        "residual_layer_norm-37x4x30-p0.1",
        "residual_layer_norm-5x3x6-p0.5-prenorm1",
        "bias_activation_dropout-2x3x5-gelu-p0.4",
        "bias_activation_dropout-3x7-relu-p0.3-nobias",
        "linear_cross_entropy-9-E5-V33-ignored4-weighted-ignore_index3-label_smoothing0.25"
        "-z_loss0.1-temperature0.75-mean-return_details1",
        "linear_cross_entropy-7-E5-V33",
        "split_cross_entropy-9-E5-V33-splits4x5x20-mean",
    )
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def assert_same(op, args, kwargs, actual, expected):
    """Asserts that compiled code returned the bits of the call in `expected`."""
    if is_by_cudnn(op, args, kwargs):
        # Compiled code does not call cuDNN, whose activations in fp32 have fewer bits.
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
        return
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_every_operator_is_compiled():
    assert {case.op for case in COMPILED} == {case.op for case in CASES}
    assert len(COMPILED) == 45


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_equals_eager(case, device):
    function = getattr(fused, case.op)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (y, g), (wanted, wanted_grads) = (run(f, *case.inputs(device)) for f in (compiled, function))
    assert_same(case.op, *case.inputs(device), y + g, wanted + wanted_grads)


@pytest.mark.parametrize(
    "case", [lstm_case(3, 2, 5, 4), mogrifier_lstm_case(3, 2, 5, 4, rank=2)], ids=str
)
@pytest.mark.slow  # inductor compiles C++
def test_inductor(case, device):
    """With pointwise operations around the operator, which inductor fuses.

    Fusion rounds differently, hence torch's default tolerances.
    """

    def model(*args, **kwargs):
        y, (h, c) = getattr(fused, case.op)(*args, **kwargs)
        return (y.tanh() * 2 + 1, h - c)

    compiled = torch.compile(model, fullgraph=True)
    (y, g), (wanted, wanted_grads) = (run(f, *case.inputs(device)) for f in (compiled, model))
    torch.testing.assert_close(y + g, wanted + wanted_grads, **tolerances(device))


@pytest.mark.parametrize("make", [lstm_case, mogrifier_lstm_case])
def test_one_graph_for_every_length(make, device):
    """With dynamic shapes, another T needs no compilation; AWD-LSTM draws T for each batch."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    op = make(1, 1, 1, 1).op
    compiled = torch.compile(getattr(fused, op), fullgraph=True, backend=backend, dynamic=True)
    args, kwargs = make(9, 4, 5, 6).inputs(device)
    for T in (9, 3, 7, 2):
        inputs = (args[0][:T].clone(), *args[1:])
        (y, *_), (wanted, *_) = compiled(*inputs, **kwargs), getattr(fused, op)(*inputs, **kwargs)
        assert_same(op, inputs, kwargs, [y], [wanted])
    assert len(graphs) == 1


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, is_causal=True)[0]


MODULES = {
    "lstm": lambda: nn.LSTM(6, 5, 2, dropout=0.3, weight_drop=0.4),
    "mogrifier": lambda: nn.MogrifierLSTM(
        6,
        5,
        2,
        rounds=3,
        input_dropout=0.2,
        dropout=0.3,
        state_dropout=0.2,
        zoneout_h=0.1,
        weight_drop=0.4,
    ),
    "mogrifier of three layers": lambda: nn.MogrifierLSTM(
        6, 5, 3, rounds=2, dropout=0.3, locked_input=False
    ),
    "gru": lambda: nn.GRU(6, 5, 2, dropout=0.3, weight_drop=0.4),
    "rnn": lambda: nn.RNN(6, 5, weight_drop=0.4, nonlinearity="relu"),
    "bidirectional lstm": lambda: nn.LSTM(6, 5, 2, dropout=0.3, bidirectional=True),
    "projected lstm": lambda: nn.LSTM(6, 5, weight_drop=0.4, proj_size=3),
    "dropout": lambda: nn.Dropout(0.5),
    "locked_dropout": lambda: nn.LockedDropout(0.5),
    "residual_layer_norm": lambda: nn.ResidualLayerNorm(6, 0.3),
    "feed_forward": lambda: nn.FeedForward(6, 9, 0.3, "gelu"),
    "transformer layer": lambda: nn.TransformerEncoderLayer(6, 2, 9, 0.3, norm_first=True),
    "attention": lambda: SelfAttention(6, 2, 0.3),
    "attention with alibi": lambda: SelfAttention(6, 2, 0.3, positions=nn.ALiBi(2)),
    "attention with relative bias": lambda: SelfAttention(6, 2, 0.3, positions=nn.RelativeBias(2)),
    "attention with relative keys": lambda: SelfAttention(
        6, 2, 0.3, positions=nn.RelativeKeys(2, 3)
    ),
    "attention with rotary": lambda: SelfAttention(
        6, 3, 0.3, positions=nn.Rotary(2, max_positions=3)
    ),
    "sinusoidal": lambda: nn.SinusoidalPositions(6, 0.3, max_positions=3),
    "learned": lambda: nn.LearnedPositions(5, 6, 0.3),
}


@pytest.mark.parametrize("name", MODULES)
def test_module_in_training(name, device):
    """The graph draws the seed: each call has a new mask, eager's after the same manual_seed."""
    module = MODULES[name]().to(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 4, 6, device=device)

    def call(module, seed):
        torch.manual_seed(seed)
        given = x.clone().requires_grad_()
        y = module(given)
        y = y[0] if isinstance(y, tuple) else y
        grads = torch.autograd.grad(y.square().sum(), [given, *module.parameters()])
        return [y, *grads]

    for seed in (1, 2):
        assert all(
            torch.equal(a, b) for a, b in zip(call(compiled, seed), call(module, seed), strict=True)
        )
    assert not torch.equal(compiled_output(compiled, x), compiled_output(compiled, x))


def compiled_output(compiled, x):
    y = compiled(x)
    return y[0] if isinstance(y, tuple) else y


POSITIONS = {
    "none": lambda: None,
    "ALiBi": lambda: nn.ALiBi(3),
    "RelativeBias": lambda: nn.RelativeBias(3),
    "RelativeKeys": lambda: nn.RelativeKeys(2, 2),
    "Rotary": lambda: nn.Rotary(2),
}


@pytest.mark.parametrize("positions", POSITIONS)
def test_the_lengths_of_attention_are_dynamic(positions, device):
    """The first length is compiled for, the second for all others."""
    module = SelfAttention(6, 3, 0.3, positions=POSITIONS[positions]()).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for length in (5, 7, 2, 11, 40):
        x = torch.randn(length, 4, 6, device=device)
        torch.manual_seed(1)
        found = compiled(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, module(x))
    assert counter.frame_count <= 2


def test_the_key_lengths_of_attention_are_compiled_for_once(device):
    module = nn.MultiheadAttention(6, 3).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for L, B in ((5, 4), (7, 2), (3, 6), (11, 5)):
        x, lengths = torch.randn(L, B, 6, device=device), torch.arange(1, B + 1).clamp(max=L)
        found, _ = compiled(x, x, x, key_lengths=lengths)
        torch.testing.assert_close(found, module(x, x, x, key_lengths=lengths)[0])
    assert counter.frame_count <= 2


RECURRENT = (
    *(nn.LSTM, nn.GRU, nn.RNN, nn.PeepholeLSTM),
    *(nn.LayerNormLSTM, nn.LayerNormGRU, nn.MogrifierLSTM),
)


@pytest.mark.parametrize(
    ("make", "directions"), [*((make, 1) for make in RECURRENT), (nn.LSTM, 2), (nn.GRU, 2)]
)
def test_sequences_of_any_lengths_are_one_graph(make, directions, device):
    """The first sizes are compiled for, the second for all others."""
    module = make(6, 5, bidirectional=directions == 2).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for T, B in ((7, 3), (9, 2), (5, 4), (12, 6)):
        x = torch.randn(T, B, 6, device=device)
        order = {
            "lengths": torch.arange(1, B + 1, device=device).clamp(max=T),
            "starts": torch.rand(T, B, device=device) < 0.3,
        }
        torch.testing.assert_close(compiled(x, **order)[0], module(x, **order)[0])
    assert counter.frame_count <= 2


def test_nested_sequences_whose_longest_is_known_are_compiled(device):
    module = nn.LSTM(6, 5).to(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for lengths in ((3, 1), (4, 2, 2), (1, 6)):
        ends = torch.tensor([0, *lengths], device=device).cumsum(0)
        x = torch.nested.nested_tensor_from_jagged(
            torch.randn(sum(lengths), 6, device=device), ends, max_seqlen=max(lengths)
        )
        torch.testing.assert_close(compiled(x)[0].values(), module(x)[0].values())


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_lengths_of_cross_attention_are_dynamic(is_causal, device):
    """Their difference is none that is compiled for."""
    module = nn.MultiheadAttention(6, 3).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for L, S in ((5, 7), (4, 9), (3, 6), (8, 8), (2, 20)):
        q, k = torch.randn(L, 4, 6, device=device), torch.randn(S, 4, 6, device=device)
        found = compiled(q, k, k, is_causal=is_causal)[0]
        torch.testing.assert_close(found, module(q, k, k, is_causal=is_causal)[0])
    assert counter.frame_count <= 2


def test_the_gradient_of_attention_whose_lengths_differ(device):
    module = nn.MultiheadAttention(6, 3).to(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    gradients = []
    q, k = torch.randn(3, 4, 6, device=device), torch.randn(7, 4, 6, device=device)
    for function in (compiled, module):
        y = function(q, k, k, is_causal=True)[0]
        gradients.append(torch.autograd.grad(y.square().sum(), module.in_proj_weight)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_module(padding_idx, device):
    module = nn.Embedding(11, 4, padding_idx, dropout=0.5).to(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ids = torch.arange(12, device=device).reshape(4, 3) % 11
    outputs = []
    for function in (compiled, module):
        torch.manual_seed(1)
        y = function(ids)
        # The gradient of a sum of squares would be 0 at the vector of padding, which is 0.
        outputs.append((y, *torch.autograd.grad((y + 1).square().sum(), module.weight)))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.cpu  # a GPU's assertion is raised later, and no CUDA call works after it
def test_a_wrong_token_in_compiled_code_raises(device):
    """The public function cannot check values while it is traced, so the kernel raises.

    It reads nothing outside the table.
    """
    compiled = torch.compile(fused.embedding, fullgraph=True, backend="aot_eager")
    W = torch.zeros(7, 4, device=device)
    compiled(torch.tensor([0, 6], device=device), W)
    for bad in (-1, 7, 2**40):
        with pytest.raises(RuntimeError, match=r"embedding: .*"):
            compiled(torch.tensor([0, bad], device=device), W)


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_a_wrong_length_in_compiled_code(bad, device):
    """The public function cannot check values while it is traced. The CPU kernel refuses a length
    outside [0, T], and other kernels clamp it.
    """
    compiled = torch.compile(fused.lstm, fullgraph=True, backend="aot_eager")
    args, _ = lstm_case(3, 2, 5, 4).inputs(device)
    lengths = torch.tensor([2, bad], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=rf"lstm: lengths must be in \[0, 3\], got {bad}"):
            compiled(*args, lengths)
        return
    clamped = lengths.clamp(0, 3)
    results = [run(compiled, args, {"lengths": given}) for given in (lengths, clamped)]
    assert all(torch.equal(a, b) for a, b in zip(*(y + g for y, g in results), strict=True))


def test_make_fx_traces_a_recurrence_as_one_operator(device):
    """There is no Python code for each step."""
    from torch.fx.experimental.proxy_tensor import make_fx

    for case in (lstm_case(9, 2, 5, 4), mogrifier_lstm_case(9, 2, 5, 4)):
        args, kwargs = case.inputs(device)
        graph = make_fx(
            lambda *a, case=case, kwargs=kwargs: getattr(fused, case.op)(*a, **kwargs)[0]
        )(*args)
        calls = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        # aten.full makes the tensor of the seed.
        calls = [c for c in calls if "getitem" not in c and c != "aten.full.default"]
        suffix = "_inference" if device == "cpu" else ""
        assert calls == [f"fusedseq.{case.op}{suffix}.default"]
