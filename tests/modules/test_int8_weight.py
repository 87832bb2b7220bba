"""The class Int8Weight as a tensor and a parameter of torch: functions of torch, state dicts,
copies, changes in place, other processes.
"""

import copy
import io

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.quantization import Int8Weight, quantize_

from tests.support.rounded_weights import weight

pytestmark = pytest.mark.cpu


def test_functions_of_torch_take_the_weight():
    x, W = torch.randn(3, 20), Int8Weight.from_float(weight(6, 20))
    plain = W.dequantize()
    torch.testing.assert_close(torch.nn.functional.linear(x, W), x @ plain.T)
    torch.testing.assert_close(x @ W.T, x @ plain.T)
    assert type(W + 1) is torch.Tensor
    assert torch.equal(W + 1, plain + 1)
    assert isinstance(W[2:4], Int8Weight)
    assert torch.equal(W[2:4].dequantize(), plain[2:4])
    assert type(W[:, 2:4]) is torch.Tensor
    assert torch.equal(W[:, 2:4], plain[:, 2:4])


@pytest.fixture
def pair():
    """A small model, and its copy with rounded weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    quantized = copy.deepcopy(model.eval())
    quantize_(quantized)
    return model, quantized


def test_a_state_dict_returns_from_a_file(pair):
    model, quantized = pair
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert isinstance(state["0.weight"], Int8Weight)
    other = copy.deepcopy(model)
    torch.nn.init.normal_(other[0].weight)
    quantize_(other)
    other.load_state_dict(state)
    in_float = copy.deepcopy(model)
    in_float.load_state_dict(state)
    assigned = copy.deepcopy(model)
    assigned.load_state_dict(state, assign=True)
    x = torch.randn(3, 6)
    with torch.no_grad():
        wanted = quantized(x)
        assert torch.equal(other(x), wanted)
        assert torch.equal(assigned(x), wanted)
        torch.testing.assert_close(in_float(x), wanted)
    assert type(in_float[0].weight) is torch.nn.Parameter


def test_a_state_dict_in_fp32_is_rounded_where_it_is_loaded(pair):
    model, quantized = pair
    other = copy.deepcopy(quantized)
    other[0].weight.scale.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].weight.int8, quantized[0].weight.int8)
    assert torch.equal(other[0].weight.scale, quantized[0].weight.scale)


def set_items(W):
    W[0] = 0


def set_data(W):
    W.data = torch.zeros(5, 6)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (Int8Weight.zero_, "zero_"),
        (lambda W: W.mul_(3), "mul_"),
        (torch.nn.init.ones_, "fill_"),
        (lambda W: W[1:3].zero_(), "zero_"),
        (lambda W: torch.add(torch.ones(5, 6), 1, out=W), "add"),
        (lambda W: torch._foreach_mul_([W], 2), "_foreach_mul_"),
        (set_items, "an assignment to elements"),
        (set_data, "an assignment to data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_in_place_other_than_copy_is_refused(change, name):
    W = Int8Weight.from_float(weight(5, 6))
    before = W.dequantize()
    with pytest.raises(NotImplementedError, match=rf"Int8Weight: .* by copy_.* got {name}$"):
        change(W)
    assert torch.equal(W.dequantize(), before)


def test_rows_are_assigned_by_a_slice():
    W, rows = Int8Weight.from_float(weight(5, 6)), weight(2, 6)
    W[1:3] = rows
    assert torch.equal(W[1:3].dequantize(), Int8Weight.from_float(rows).dequantize())


def answer(queue, model, x):
    with torch.no_grad():
        W = model[0].weight
        queue.put((model(x).tolist(), W.is_shared()))


def test_another_process_gets_the_weights_in_shared_memory(pair):
    _, quantized = pair
    assert not quantized[0].weight.is_shared()
    x = torch.randn(2, 6)
    with torch.no_grad():
        expected = quantized(x)
        quantized.share_memory()
        assert torch.equal(quantized(x), expected)
    W = quantized[0].weight
    assert W.is_shared()
    assert W.share_memory_() is W
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=answer, args=(queue, quantized, x))
    process.start()
    y, is_shared = queue.get(timeout=60)
    process.join()
    torch.testing.assert_close(torch.tensor(y), expected)
    assert is_shared


def test_copies_and_dtypes(pair):
    _, quantized = pair
    W = quantized[0].weight
    assert isinstance(W, torch.nn.Parameter)
    copied = copy.deepcopy(quantized)
    copied[0].weight.int8.zero_()
    assert W.int8.any()
    quantized.to(torch.bfloat16)
    W = quantized[0].weight
    assert (type(W), W.dtype, W.scale.dtype) == (Int8Weight, torch.bfloat16, torch.float32)
    assert not W.requires_grad
    with torch.no_grad():
        assert quantized(torch.randn(2, 6).bfloat16()).dtype == torch.bfloat16


def test_autocast_casts_the_operands(pair):
    _, quantized = pair
    with torch.no_grad(), torch.autocast("cpu"):
        assert fused.linear(torch.randn(2, 6), quantized[0].weight).dtype == torch.bfloat16


@pytest.mark.slow  # inductor compiles C++
def test_compiled_code_calls_the_kernel(pair):
    _, quantized = pair
    x = torch.randn(3, 6)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(quantized)(x), quantized(x))


def test_a_weight_never_requires_a_gradient(pair):
    model, quantized = pair
    assigned = copy.deepcopy(model)
    assigned.load_state_dict(quantized.state_dict(), assign=True)
    W = assigned[0].weight
    W.copy_(torch.randn(5, 6, requires_grad=True))
    W.requires_grad = True
    assert isinstance(W, Int8Weight)
    assert not W.requires_grad_().requires_grad
    assert not torch.nn.Parameter(W).requires_grad
    y = assigned(torch.randn(3, 6))
    y.sum().backward()
    assert W.grad is None
    assert assigned[0].bias.grad is not None


VIEWS = {
    "rows": lambda W: W[1:4],
    "columns": lambda W: W[:, 2:4],
    "row": lambda W: W[0],
    "transpose": lambda W: W.T,
    "chunk": lambda W: W.chunk(2)[1],
    "view": lambda W: W.view(-1),
    "double": lambda W: W.double(),
    "clone": lambda W: W.clone(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_inference_mode_gives_the_same_parts(name):
    W = Int8Weight.from_float(weight(6, 20))
    expected = VIEWS[name](W)
    with torch.inference_mode():
        found = VIEWS[name](W)
        assert type(found) is type(expected)
        assert torch.equal(found + 0, expected + 0)


def test_a_model_is_used_copied_and_converted_in_inference_mode():
    attention = nn.MultiheadAttention(8, 2).eval()
    quantize_(attention)
    x = torch.randn(3, 2, 8)
    wide_inputs = [t.double() for t in (x, x, x + 1)]
    with torch.no_grad():
        expected = attention(x, x, x + 1)[0]  # separate projections take rows of the weight
        expected_wide = copy.deepcopy(attention).double()(*wide_inputs)[0]
    with torch.inference_mode():
        torch.testing.assert_close(attention(x, x, x + 1)[0], expected)
        attention.load_state_dict(attention.state_dict())
        wide = copy.deepcopy(attention).double()
        torch.testing.assert_close(wide(*wide_inputs)[0], expected_wide)
