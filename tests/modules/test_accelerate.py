"""fusedseq.accelerate: the same object, parameters and results, with fused operators."""

import copy

import fusedseq
import pytest
import torch
from fusedseq.acceleration import torch_modules
from torch import nn

pytestmark = pytest.mark.usefixtures("in_exact_dtype")
E, N, B, L = 12, 3, 4, 5


def sequence():
    return torch.randn(L, B, E)


def ids():
    return (torch.randint(9, (L, B)),)


class Attention(nn.Module):
    """Self-attention without probabilities, which is what the operator computes."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, N, 0.3)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


MODELS = {
    "lstm": (lambda: nn.LSTM(E, 7, 2, dropout=0.3), lambda: (sequence(),)),
    "bidirectional lstm": (
        lambda: nn.LSTM(E, 7, 2, dropout=0.3, bidirectional=True),
        lambda: (sequence(),),
    ),
    "projected lstm": (
        lambda: nn.LSTM(E, 7, 2, dropout=0.3, bidirectional=True, proj_size=3),
        lambda: (sequence(),),
    ),
    "gru": (lambda: nn.GRU(E, 7, 2, dropout=0.3, bidirectional=True), lambda: (sequence(),)),
    "rnn": (lambda: nn.RNN(E, 7, 2, dropout=0.3, nonlinearity="relu"), lambda: (sequence(),)),
    "attention": (Attention, lambda: (sequence(),)),
    "probabilities": (lambda: nn.MultiheadAttention(E, N, 0.3), lambda: (sequence(),) * 3),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(E, N, 20, 0.3), 2, enable_nested_tensor=False
        ),
        lambda: (sequence(),),
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(E, N, 20, 0.3, "gelu", norm_first=True),
        lambda: (sequence(), sequence()),
    ),
    "transformer": (
        lambda: nn.Transformer(E, N, 1, 2, 20, 0.3, norm_first=True),
        lambda: (sequence(), sequence()),
    ),
    "embedding": (lambda: nn.Embedding(9, E, padding_idx=2), ids),
    "linear": (lambda: nn.Sequential(nn.Linear(E, 7), nn.Dropout(0.3)), lambda: (sequence(),)),
}
models = pytest.mark.parametrize(("build", "inputs"), MODELS.values(), ids=MODELS)


def first(result):
    return result[0] if isinstance(result, tuple) else result


def run(model, inputs):
    y = first(model(*inputs))
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    return y, torch.autograd.grad((y * weight).sum(), [*model.parameters()], allow_unused=True)


@models
def test_results_and_gradients_are_the_same_and_undo_restores_every_bit(build, inputs):
    model, given = build().eval(), inputs()
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    expected = run(model, given)
    report = fusedseq.accelerate(model)
    assert report.replaced
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert [*model.state_dict()] == [*state]
    torch.testing.assert_close(run(model, given), expected)
    torch.testing.assert_close(run(copy.deepcopy(model), given), expected)
    assert model.load_state_dict(state)
    report.undo()
    undone, plain = run(model, given), build().eval()
    plain.load_state_dict(state)
    torch.testing.assert_close(undone, run(plain, given), rtol=0, atol=0)


@models
def test_a_dry_run_changes_nothing(build, inputs):
    model = build()
    classes = [type(module) for module in model.modules()]
    planned = fusedseq.accelerate(model, dry_run=True)
    assert [type(module) for module in model.modules()] == classes
    assert fusedseq.accelerate(model).entries == planned.entries
    assert fusedseq.accelerate(model).replaced == []


@models
def test_hooks_run_and_frozen_parameters_get_no_gradient(build, inputs):
    model, called = build(), []
    model.register_forward_hook(lambda *_: called.append("after"))
    model.register_forward_pre_hook(lambda *_: called.append("before"))
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    fusedseq.accelerate(model)
    y = first(model(*inputs()))
    assert called == ["before", "after"]
    if y.requires_grad:
        y.sum().backward()
    assert frozen.grad is None


@models
def test_a_model_moves_to_another_dtype(build, inputs):
    model, given = build().eval(), inputs()
    expected = first(model(*given))
    moved = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in given]
    plain = first(copy.deepcopy(model).to(torch.bfloat16)(*moved))
    fusedseq.accelerate(model)
    found = first(model.to(torch.bfloat16)(*moved))
    assert found.dtype == torch.bfloat16
    # Twice the error of torch's own modules in bfloat16, plus two roundings of the result.
    budget = 2 * (plain - expected).norm() + 2 * 2**-8 * expected.norm()
    assert (found - expected).norm() <= budget


@pytest.mark.parametrize("name", ["attention", "encoder", "decoder", "transformer"])
def test_inputs_without_a_batch_dimension_are_computed(name):
    build, inputs = MODELS[name]
    model, given = build().eval(), tuple(x[:, 0] for x in inputs())
    expected = run(model, given)
    fusedseq.accelerate(model)
    torch.testing.assert_close(run(model, given), expected)


def padded(length):
    return torch.arange(length) >= torch.tensor([[length], [2], [length - 1], [3]])


MASKS = {
    "src_mask": lambda: torch.randn(L, L),
    "src_key_padding_mask": lambda: padded(L),
    "tgt_mask": lambda: torch.randn(L, L),
    "memory_mask": lambda: torch.randn(L, 7),
    "tgt_key_padding_mask": lambda: padded(L),
    "memory_key_padding_mask": lambda: padded(7),
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_layer_takes_each_mask_of_torchs_and_its_eps(name, norm_first):
    is_encoder = name.startswith("src")
    kind = nn.TransformerEncoderLayer if is_encoder else nn.TransformerDecoderLayer
    layer = kind(E, N, 20, 0.0, norm_first=norm_first, layer_norm_eps=0.1)
    given = [sequence()] if is_encoder else [sequence(), torch.randn(7, B, E)]
    mask = {name: MASKS[name]()}
    expected = layer(*given, **mask)
    assert not torch.allclose(layer(*given), expected)
    fusedseq.accelerate(layer)
    torch.testing.assert_close(layer(*given, **mask), expected)


def test_dropout_has_torchs_strength_and_stops_in_eval_mode():
    model = nn.Sequential(nn.Dropout(0.25))
    fusedseq.accelerate(model)
    x = torch.ones(100_000)
    y = model(x)
    # The standard deviation of the fraction that is dropped is 0.0014.
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.007)
    torch.testing.assert_close(y.max(), torch.tensor(4 / 3))
    assert model.eval()(x) is x


def test_a_hook_on_a_sublayer_that_is_added_later_runs():
    layer = nn.TransformerEncoderLayer(E, N, 20, 0.0)
    fusedseq.accelerate(layer)
    called, x = [], sequence()
    expected = layer(x)
    layer.linear1.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(layer(x), expected)
    assert called


@pytest.mark.parametrize("proj_size", [0, 3])
def test_a_packed_sequence_and_a_state_are_taken_as_by_torch(proj_size):
    model, x = nn.LSTM(E, 7, 2, proj_size=proj_size), sequence()
    packed = nn.utils.rnn.pack_padded_sequence(x, [2, 5, 1, 3], enforce_sorted=False)
    state = torch.randn(2, B, proj_size or 7), torch.randn(2, B, 7)
    y, final = model(packed, state)
    fusedseq.accelerate(model)
    found, found_final = model(packed, state)
    torch.testing.assert_close(found.data, y.data)
    torch.testing.assert_close(found_final, final)


def test_a_projection_is_torchs_on_a_device_without_kernels_for_it(monkeypatch):
    model, x = nn.LSTM(E, 7, proj_size=3), sequence()
    expected = model(x)
    fusedseq.accelerate(model)
    monkeypatch.setattr(torch_modules, "PROJECTING", set())
    monkeypatch.setattr(nn.LSTM, "forward", lambda self, *_: "torch's")
    assert model(x) == "torch's"
    monkeypatch.undo()
    torch.testing.assert_close(model(x), expected)


def test_attention_that_returns_probabilities_is_torchs():
    """The operator stores no probabilities, and torch computes them at once with the result."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(E, N, 0.3), sequence()
    expected = {}
    for options in ({}, {"average_attn_weights": False}, {"attn_mask": torch.eye(L).bool()}):
        torch.manual_seed(1)
        expected[str(options)] = model(x, x, x, **options)
    fusedseq.accelerate(model)
    for options in ({}, {"average_attn_weights": False}, {"attn_mask": torch.eye(L).bool()}):
        torch.manual_seed(1)
        found = model(x, x, x, **options)
        torch.testing.assert_close(found, expected[str(options)], rtol=0, atol=0)
    positional = model(x, x, x, None, False)
    assert positional[1] is None


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("name", "own"),
    [
        *((name, torch.float32) for name in ("gru", "encoder", "attention", "linear", "embedding")),
        *((name, torch.bfloat16) for name in ("gru", "attention", "linear")),
    ],
    ids=str,
)
def test_autocast_to_a_dtype_without_kernels_is_torchs(name, own):
    """fp16 on the CPU: the recurrences and the sublayers' operators have no kernels for it."""
    build, inputs = MODELS[name]
    model = build().eval().to(own)
    given = [t.to(own) if t.is_floating_point() else t for t in inputs()]
    with torch.autocast("cpu", torch.float16):
        expected = first(model(*given))
        fusedseq.accelerate(model)
        found = first(model(*given))
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["lstm", "projected lstm", "gru", "rnn"])
@pytest.mark.parametrize("before", [False, True], ids=["compiled later", "compiled before"])
def test_a_compiled_recurrence_is_computed_by_the_operator(name, before):
    build, inputs = MODELS[name]
    model, given = build().eval(), inputs()
    expected = model(*given)[0]
    compiled = torch.compile(model, backend="aot_eager") if before else None
    fusedseq.accelerate(model)
    if compiled is None:
        compiled = torch.compile(model, backend="aot_eager")
    try:
        torch.testing.assert_close(compiled(*given)[0], expected)
    finally:
        torch._dynamo.reset()  # which would skip more functions of torch from here on


@pytest.mark.parametrize("name", ["attention", "encoder", "decoder", "embedding", "linear"])
def test_compiles_without_a_graph_break_as_torchs_module_does(name):
    """Dynamo refuses torch.nn.LSTM and its subclasses."""
    build, inputs = MODELS[name]
    model, given = build().eval(), inputs()
    expected = first(model(*given))
    fusedseq.accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(first(compiled(*given)), expected)


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def layer_with_a_norm_of_two_dimensions():
    layer = nn.TransformerEncoderLayer(E, N)
    layer.norm2 = nn.LayerNorm([3, E])
    return layer


LEFT = {
    "norm of two dimensions": (layer_with_a_norm_of_two_dimensions, "a norm of several dimensions"),
    "bias_kv": (lambda: nn.MultiheadAttention(E, N, add_bias_kv=True), "add_bias_kv"),
    "silu": (lambda: nn.TransformerEncoderLayer(E, N, activation=nn.SiLU()), "activation"),
    "subclass": (lambda: Scaled(E, E), "subclass"),
    "inplace": (lambda: nn.Dropout(inplace=True), "inplace"),
    "max_norm": (lambda: nn.Embedding(9, E, max_norm=1.0), "max_norm"),
    "frequency": (lambda: nn.Embedding(9, E, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "parametrised": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(E, E)), "subclass"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_supported_is_left_with_a_reason(name):
    build, reason = LEFT[name]
    model = build()
    before = type(model)
    report = fusedseq.accelerate(model)
    assert type(model) is before
    assert reason in report.left[0].reason
    assert reason in str(report)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_norms_of_another_dtype_than_the_layer_are_torchs(kind):
    """Some models in bf16 have their norms in fp32, which torch's norm takes."""
    layer = kind(E, N, 20, 0.0).bfloat16()
    xs = [torch.randn(3, 2, E).bfloat16() for _ in range(1 + ("Decoder" in kind.__name__))]
    for norm in (layer.norm1, layer.norm2):
        norm.float()
    expected = layer(*xs)
    fusedseq.accelerate(layer)
    found = layer(*xs)
    assert found.dtype == expected.dtype
    # The attention is computed by the operator, whose bf16 result may be rounded in another way.
    atol = 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_the_report_has_a_lone_layer_norm_but_no_sublayer_that_a_fused_layer_computes():
    model = nn.Sequential(nn.TransformerEncoderLayer(E, N, 20), nn.LayerNorm(E))
    for _ in range(2):  # also of a model that is accelerated already
        (left,) = fusedseq.accelerate(model).left
        assert (left.name, left.kind) == ("1", "LayerNorm")
        assert "residual" in left.reason


def test_tied_weights_and_an_optimizer_go_on_working():
    model = nn.Sequential(nn.Embedding(9, E), nn.Linear(E, 9, bias=False))
    model[1].weight = model[0].weight
    other = copy.deepcopy(model)
    fusedseq.accelerate(model)
    tokens = torch.randint(9, (20,))
    for m in (model, other):
        optimizer = torch.optim.SGD(m.parameters(), 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(m(tokens), tokens).backward()
            optimizer.step()
    assert model[1].weight is model[0].weight
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_only_a_module_can_be_accelerated():
    with pytest.raises(TypeError, match=r"accelerate: model must be a torch.nn.Module, got int"):
        fusedseq.accelerate(3)


def test_an_embedding_keeps_the_name_of_its_argument_and_takes_what_torchs_takes():
    embedding = nn.Embedding(5, 3)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    expected = embedding(ids).values()
    fusedseq.accelerate(embedding)
    assert torch.equal(embedding(input=torch.tensor([1])), embedding.weight[1:2])
    assert torch.equal(embedding(ids).values(), expected)


@pytest.mark.parametrize(
    ("sparse", "layout"),  # torch's linear layer takes no weight in COO
    [("input", torch.sparse_coo), ("input", torch.sparse_csr), ("weight", torch.sparse_csr)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta state")
def test_a_linear_layer_takes_sparse_tensors(sparse, layout):
    layer, x = nn.Linear(8, 3), torch.randn(4, 8)
    expected = layer(x)
    fusedseq.accelerate(layer)
    if sparse == "input":
        x = x.to_sparse(layout=layout)
    else:
        weight = layer.weight.detach().to_sparse(layout=layout)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    torch.testing.assert_close(layer(x), expected)
