"""Weights in 8 bits: `fusedseq.quantize_`, the class Int8Weight, and `linear`.

test_int8_weight.py has what functions of torch do with the class, and
test_quantized_recurrences.py the recurrences.
"""

import copy

import fusedseq
import pytest
import torch
from fusedseq import _load, fused, nn, reference
from fusedseq.fused import check, explain, int8_weight
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.quantization import Int8Weight, quantize_
from fusedseq.testing.budget import assert_within_budget

from tests.support.rounded_weights import weight, with_rounded_weights

pytestmark = pytest.mark.cpu
ROWS = (1, 2, 3, 8, 9, 48, 150)  # of both kernels: dot products up to 8 or 48, panels above
DEPTHS = (1, 15, 16, 64, 65, 650)
WIDTHS = (1, 7, 8, 9, 65)


@pytest.mark.parametrize("shape", [(4, 9), (3, 5, 7), (6, 1), (2, 0), (0, 3)], ids=str)
def test_rounding_changes_an_element_by_half_a_scale_at_most(shape):
    W = torch.randn(shape)
    q = Int8Weight.from_float(W)
    assert (q.shape, q.dtype, q.int8.dtype) == (W.shape, W.dtype, torch.int8)
    assert q.scale.shape == W.shape[:-1]
    assert ((q.dequantize() - W).abs() <= 0.5001 * q.scale[..., None]).all()
    assert torch.equal(q.dequantize(), -Int8Weight.from_float(-W).dequantize())


def test_the_largest_number_of_a_row_is_exact_and_a_row_of_zeros_stays_zero():
    W = torch.tensor([[1.0, -4.0, 2.0], [0.0, 0.0, 0.0], [1e-45, 0.0, 0.0]])
    found = Int8Weight.from_float(W).dequantize()
    assert found[0, 1] == -4
    assert (found[1] == 0).all()
    assert found.isfinite().all()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.tensor([[1.0, float("nan")]])])
def test_a_vector_and_numbers_that_are_not_finite_are_refused(wrong):
    with pytest.raises(ValueError, match="Int8Weight: weight must be"):
        Int8Weight.from_float(wrong)


def test_numbers_beyond_those_of_fp32_are_refused():
    message = "weight must be at most 3.4e[+]38, the largest number of fp32, got 2e[+]299"
    with pytest.raises(ValueError, match=message):
        Int8Weight.from_float(torch.tensor([[1.0, -2e299]], dtype=torch.float64))


def test_whole_numbers_are_refused():
    with pytest.raises(TypeError, match=r"must be floating-point, got torch\.int64"):
        Int8Weight.from_float(torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M", ROWS)
def test_linear_is_the_product_with_the_dequantized_weight(M, element):
    """The results of all widths are compared together: a single one may be a sum that cancels, of
    which no rounding error is a small part."""
    torch.manual_seed(M)
    for K in DEPTHS:
        triples = []  # found, the oracle's, exact
        for N in WIDTHS:
            x, b = torch.randn(M, K).to(element), torch.randn(N).to(element)
            W = Int8Weight.from_float(weight(N, K).to(element))
            exact = W.int8.double() * W.scale.double()[:, None]
            for bias in (b, None):
                wanted = reference.linear(
                    x.double(), exact, None if bias is None else bias.double()
                )
                plain = reference.linear(x, exact.to(element), bias)
                triples.append((fused.linear(x, W, bias), plain, wanted))
        together = (torch.cat(tensors, dim=1) for tensors in zip(*triples, strict=True))
        assert_within_budget(f"{M} {K}", *together, element, K)


def test_linear_in_fp64_is_the_product_with_the_dequantized_weight():
    x, W = torch.randn(3, 65).double(), Int8Weight.from_float(weight(9, 65).double())
    exact = W.int8.double() * W.scale.double()[:, None]
    assert torch.equal(fused.linear(x, W), fused.linear(x, exact))


def test_the_value_of_a_row_does_not_depend_on_the_threads():
    x, W = torch.randn(3, 650), Int8Weight.from_float(weight(700, 650))
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(fused.linear(x, W))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_operator_alone_checks_a_valid_product(monkeypatch):
    """The checks in Python take longer than a small product."""
    x, W = torch.randn(2, 5), Int8Weight.from_float(weight(3, 5))
    monkeypatch.setattr(check, "tensor", lambda *_: pytest.fail("checked in Python"))
    with torch.inference_mode():
        fused.linear(x, W, torch.randn(3))
    monkeypatch.undo()
    for wrong, error in (
        ((x[:, :4], W), "x must be .* with W's K = 5"),
        ((x.double(), W), "W must be of the dtype of x"),
        ((x, W, torch.randn(4)), r"b must be \(N,\) = \(3,\)"),
    ):
        with torch.inference_mode(), pytest.raises((ValueError, TypeError), match=error):
            fused.linear(*wrong)


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-100, 1.0, 2.0**100], ids=str)
def test_rows_of_every_magnitude_are_as_exact_as_in_fp32(scale):
    """Rows whose largest numbers differ by many powers of two, each with numbers up to 2^22 times
    as small as its largest. Two errors are allowed: that of rounding each number of x to 2^-23 of
    the largest one of its row, whose signs are random, and that of 8 roundings of the whole sum."""
    rows, K = 7, 650
    x = torch.randn(rows, K) * torch.exp2(torch.randint(-22, 1, (rows, K)).float())
    x *= torch.exp2(torch.arange(rows) * 4.0 - 12)[:, None] * scale
    x[1] = 0
    W = Int8Weight.from_float(weight(33, K))
    assert_as_exact_as_fp32(x, W, subnormal=2.0**-126 * (1 + W.dequantize().double().abs().sum(1)))


def assert_as_exact_as_fp32(x, W, subnormal=0.0):
    """Allows the two errors of test_rows_of_every_magnitude_are_as_exact_as_in_fp32, and that of
    subnormal numbers."""
    exact = x.double() @ (W.int8.double() * W.scale.double()[:, None]).T
    with torch.no_grad():
        error = (fused.linear(x, W).double() - exact).abs()
    magnitude = x.double().abs() @ (W.int8.double().abs() * W.scale.double()[:, None]).T
    largest = x.double().abs().amax(1, keepdim=True) * W.dequantize().double().abs().sum(1)
    allowed = 2**-23 * (largest / x.size(1) ** 0.5 + 8 * magnitude)
    assert (error <= allowed + subnormal).all()


def test_a_product_of_whole_numbers_is_exact():
    x = torch.randint(-2000, 2001, (5, 129)).float()
    x[:, :3] = torch.tensor([-(2.0**13), 2.0**13 - 1, 0.0])
    W = Int8Weight(torch.randint(-127, 128, (19, 129), dtype=torch.int8), torch.ones(19), x.dtype)
    assert torch.equal(fused.linear(x, W), (x.long() @ W.int8.long().T).float())


def test_a_product_in_fp64_is_one_of_fp64_without_gradients():
    x = torch.randn(4, 65, dtype=torch.float64) * 1e40
    W = Int8Weight.from_float(torch.randn(7, 65, dtype=torch.float64))
    with torch.no_grad():
        torch.testing.assert_close(fused.linear(x, W), x @ W.dequantize().T)


@pytest.mark.parametrize("rows", [1, 2, 60])
@pytest.mark.parametrize("scale", [1e-30, 1e-33, 1e-36])
def test_rows_of_tiny_numbers_are_as_exact_as_others(rows, scale):
    assert_as_exact_as_fp32(
        torch.randn(rows, 65) * scale, Int8Weight.from_float(torch.randn(9, 65))
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_a_product_of_large_numbers_and_a_small_weight_is_finite(rows):
    assert_as_exact_as_fp32(
        torch.randn(rows, 65) * 1e34, Int8Weight.from_float(torch.randn(9, 65) * 1e-6)
    )


@pytest.mark.parametrize("K", [1, 64, 650])
def test_infinite_numbers_and_nan_stay_in_their_rows(K):
    x = torch.randn(6, K)
    x[1, K // 2], x[2, 0], x[4, K - 1] = float("nan"), float("inf"), -3e38
    W = Int8Weight(torch.randint(1, 128, (19, K), dtype=torch.int8), torch.ones(19), x.dtype)
    found, wanted = fused.linear(x, W), torch.nn.functional.linear(x, W.dequantize())
    assert found[1].isnan().all()
    assert torch.equal(found[2], wanted[2])
    assert torch.equal(found[4].isinf(), wanted[4].isinf())
    for i in (0, 3, 5):
        assert torch.equal(found[i : i + 1], fused.linear(x[i : i + 1], W))


def test_an_element_does_not_depend_on_the_other_rows_and_columns():
    x, W = torch.randn(8, 200), Int8Weight.from_float(weight(40, 200))
    found = fused.linear(x, W)
    for rows, columns in ((slice(3, 4), slice(5, 6)), (slice(1, 3), slice(0, 17))):
        part = Int8Weight(W.int8[columns], W.scale[columns], W.dtype)
        assert torch.equal(fused.linear(x[rows], part), found[rows, columns])


@pytest.mark.parametrize(
    ("x", "W", "scale", "b", "message"),
    [
        ((2, 3), (4, 5), (4,), None, "W must be"),
        ((2, 3), (4, 3), (3,), None, r"scale must be \(4,\), got \(3,\)"),
        ((2, 3), (4, 3), (4,), (3,), r"b must be \(4,\)"),
        ((2, 0), (4, 0), (4,), None, "K, at least 1"),
        ((), (4, 3), (4,), None, "x must be"),
    ],
)
def test_the_registered_operator_guards_its_memory(x, W, scale, b, message):
    bias = None if b is None else torch.zeros(b)
    arguments = torch.zeros(x), torch.zeros(W, dtype=torch.int8), torch.zeros(scale), bias
    with pytest.raises(RuntimeError, match=f"linear_int8: {message}|linear_int8: .*{message}"):
        torch.ops.fusedseq.linear_int8(*arguments)
    with pytest.raises(RuntimeError, match="W must be int8, got float32"):
        torch.ops.fusedseq.linear_int8(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4), None)


def test_opcheck():
    W = Int8Weight.from_float(weight(9, 20))
    torch.library.opcheck(
        torch.ops.fusedseq.linear_int8,
        (torch.randn(2, 3, 20), W.int8, W.scale, torch.randn(9)),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_x_has_a_gradient_and_the_weight_has_none():
    x, b = torch.randn(3, 20, requires_grad=True), torch.randn(6, requires_grad=True)
    W = Int8Weight.from_float(weight(6, 20))
    fused.linear(x, W, b).sum().backward()
    torch.testing.assert_close(x.grad, W.dequantize().sum(0).expand(3, 20))
    torch.testing.assert_close(b.grad, torch.full((6,), 3.0))
    assert not W.requires_grad


def models():
    settings = LanguageModelSettings(embedding=8, hidden=12, layers=2)
    return {
        "language model": (LanguageModel(20, settings), (torch.randint(20, (3, 2)),)),
        "encoder layer": (nn.TransformerEncoderLayer(16, 2, 32), (torch.randn(5, 2, 16),)),
        "attention": (nn.MultiheadAttention(16, 2), (torch.randn(5, 2, 16),) * 3),
        "GRU": (nn.GRU(8, 6, bidirectional=True), (torch.randn(5, 2, 8),)),
        "RNN": (nn.RNN(8, 6), (torch.randn(1, 2, 8),)),
        "peephole LSTM": (nn.PeepholeLSTM(8, 6), (torch.randn(5, 2, 8),)),
        "layer-normalized LSTM": (nn.LayerNormLSTM(8, 6), (torch.randn(5, 2, 8),)),
        "layer-normalized GRU": (nn.LayerNormGRU(8, 6), (torch.randn(5, 2, 8),)),
        "bidirectional LSTM": (nn.LSTM(8, 6, bidirectional=True), (torch.randn(1, 2, 8),)),
        "torch's layer": (torch.nn.TransformerEncoderLayer(16, 2, 32), (torch.randn(5, 2, 16),)),
    }


@pytest.mark.parametrize("name", models())
def test_a_model_computes_with_the_rounded_weights(name):
    torch.manual_seed(0)
    model, inputs = models()[name]
    model.eval()
    quantized = copy.deepcopy(model)
    assert quantize_(quantized)
    exact = with_rounded_weights(model, quantized)
    with torch.no_grad():
        found, wanted = (m(*inputs)[0] for m in (quantized, exact))
    torch.testing.assert_close(found, wanted)


def test_what_a_model_rounds_and_what_not():
    untied = LanguageModelSettings(embedding=8, hidden=8, layers=1)
    tied = LanguageModelSettings(embedding=8, hidden=8, layers=1, tied=True)
    names = quantize_(LanguageModel(20, untied).eval())
    assert "decoder_weight" in names
    assert not any("embedding" in name or "bias" in name for name in names)
    tied_names = quantize_(LanguageModel(20, tied).eval())
    assert {*names} - {*tied_names} == {"decoder_weight"}


def test_a_weight_that_an_embedding_shares_stays_as_it_is():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.output = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
            self.output.weight = self.words.weight

    assert quantize_(Tied().eval()) == []


def test_a_filter_chooses_modules():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).eval()
    assert quantize_(model, lambda module, name: name == "1") == ["1.weight"]
    assert quantize_(model) == ["0.weight"]  # a weight in 8 bits stays as it is


def test_only_a_module_is_quantized():
    with pytest.raises(TypeError, match=r"quantize_: model must be a torch.nn.Module, got int"):
        fusedseq.quantize_(3)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"quantize_: model must be in inference mode, got"):
        fusedseq.quantize_(torch.nn.Linear(2, 3))


def test_an_exported_program_keeps_the_product():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5)).eval()
    fusedseq.accelerate(model)
    quantize_(model)
    x = torch.randn(3, 6)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), model(x))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "fusedseq.linear_int8.default" in targets


def test_explain_says_what_multiplies():
    x, W = torch.randn(1, 6), Int8Weight.from_float(weight(5, 6))
    found = explain(fused.linear, x, W)
    assert "csrc/cpu/gemm/linear_int8.h" in found
    assert ("three digits" in found) == _load.multiplies_bytes()
    assert "csrc/cpu/gemm/linear.h" in explain(fused.linear, x.double(), W)
    assert "csrc/cpu/gemm/linear.h" in explain(fused.linear, x, W.dequantize())
    W_ih, W_hh = (Int8Weight.from_float(weight(16, n)) for n in (3, 4))
    state = torch.zeros(2, 4), torch.zeros(2, 4)
    for weight_hh, options, in_8_bits in (
        (W_hh, {}, True),
        (W_hh, {"weight_drop": 0.5}, False),
        (W_hh.dequantize(), {}, False),
    ):
        found = explain(fused.lstm, torch.zeros(2, 2, 3), W_ih, weight_hh, None, *state, **options)
        assert "csrc/cpu/recurrence/forward.h" in found
        assert ("the weights read as numbers of 8 bits" in found) == in_8_bits
    mogrifier = (torch.zeros(2, 2, 3), W_ih, W_hh, None, *state, None, None)
    assert "numbers of 8 bits" in explain(fused.mogrifier_lstm, *mogrifier, rounds=0)
    dropped = explain(fused.mogrifier_lstm, *mogrifier, rounds=0, state_dropout=0.5)
    assert "numbers of 8 bits" not in dropped
    targets = torch.zeros(1, dtype=torch.int64)
    assert "numbers of 8 bits" not in explain(fused.linear_cross_entropy, x, W, targets)


def test_a_weight_of_torchao_is_multiplied_as_it_is():
    torchao = pytest.importorskip("torchao.quantization")
    layer = nn.FeedForward(16, 32).eval()
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    exact, W = nn.FeedForward(16, 32).eval(), layer.linear1.weight
    assert int8_weight.parts(W) is not None
    for mine, theirs in ((exact.linear1, layer.linear1), (exact.linear2, layer.linear2)):
        mine.weight.data, mine.bias.data = theirs.weight.dequantize(), theirs.bias.data
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused.linear(x, W), x @ W.dequantize().T)
        torch.testing.assert_close(layer(x), exact(x))
    x.requires_grad_()
    fused.linear(x, W).sum().backward()
    torch.testing.assert_close(x.grad, W.dequantize().sum(0).expand(3, 16))


def test_accelerated_modules_of_torch_are_rounded():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(8, 6)
            self.attention = torch.nn.MultiheadAttention(6, 2)

        def forward(self, x):
            y, _ = self.lstm(x)
            return self.attention(y, y, y, need_weights=False)[0]

    model, x = Model().eval(), torch.randn(1, 3, 8)
    assert fusedseq.quantize_(model) == ["attention.out_proj.weight"]
    model = Model().eval()
    expected = model(x)
    fusedseq.accelerate(model)
    rounded = fusedseq.quantize_(model)
    assert {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "attention.in_proj_weight"} <= {*rounded}
    with torch.inference_mode():
        found = model(x)
    assert not torch.equal(found, expected)
    # Weights of at most 8^-0.5 are rounded by at most 2^-8 of that; each output is a sum of 8
    # products of such a weight and an x of at most 3, then of 6 below 1.
    torch.testing.assert_close(found, expected, rtol=0, atol=(8 * 3 + 6) * 8**-0.5 * 2**-8)
