"""An accelerated model is moved to the meta device and back, and to other dtypes, as torch's is."""

import copy

import fusedseq
import pytest
import torch

from tests.modules.test_accelerate import first, models, run

pytestmark = [pytest.mark.usefixtures("in_exact_dtype"), pytest.mark.cpu]


@models
def test_a_model_on_the_meta_device_has_the_shapes_and_dtypes_of_torchs(build, inputs):
    model, given = build(), inputs()
    other = copy.deepcopy(model)
    assert fusedseq.accelerate(other).replaced
    moved = tuple(x.to("meta") for x in given)
    expected, found = (m.to("meta")(*moved) for m in (model, other))
    expected, found = (y if isinstance(y, tuple) else (y,) for y in (expected, found))
    for y, wanted in zip(found, expected, strict=True):
        for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (y, wanted)), strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


@models
def test_a_model_that_comes_back_from_the_meta_device_computes_the_same(build, inputs):
    model, given = build().eval(), inputs()
    expected, state = run(model, given), copy.deepcopy(model.state_dict())
    report = fusedseq.accelerate(model)
    classes = [type(module) for module in model.modules()]
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    assert [type(module) for module in model.modules()] == classes
    torch.testing.assert_close(run(model, given), expected)
    report.undo()
    torch.testing.assert_close(run(model, given), expected)


@models
def test_a_model_that_comes_back_from_another_dtype_computes_the_same(build, inputs):
    """The parameters stay the same objects, whose values are those that bf16 has."""
    model, given = build().eval().bfloat16(), inputs()
    dtype = torch.get_default_dtype()
    parameters = [*model.parameters()]
    expected = run(copy.deepcopy(model).to(dtype), given)
    fusedseq.accelerate(model)
    model.to(dtype)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert first(model(*given)).dtype == dtype
    torch.testing.assert_close(run(model, given), expected)
    model.bfloat16().float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
