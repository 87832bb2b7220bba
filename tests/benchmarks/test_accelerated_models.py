"""The benchmark cases of whole models before and after accelerate: what is timed is right."""

import pytest
import torch
from fusedseq.acceleration.deferred_logits import DeferredLogits

from bench.suite import accelerated_models
from bench.suite.case_list import CASES
from bench.suite.cases.models import accelerated

SIZES = {
    "bert": (2, 5, 16, 2),
    "gpt2": (2, 5, 16, 2),
    "transformer": (5, 2, 16, 2, 1),
    "lstm": (5, 2, 16, 40),
}
precisions = pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])


@precisions
@pytest.mark.parametrize("model", SIZES)
def test_the_accelerated_model_is_as_exact_as_torchs(model, precision):
    case = accelerated(model, *SIZES[model], dtype=precision)
    args, kwargs = case.inputs("cpu")
    assert not kwargs
    assert 0 < accelerated_models.check(case, args) <= 1


@pytest.mark.parametrize("model", SIZES)
def test_both_providers_train_the_same_parameters(model):
    case = accelerated(model, *SIZES[model])
    args, _ = case.inputs("cpu")
    leaves = [t.requires_grad_() for t in args if t.is_floating_point()]
    for call in case.providers(full=True).values():
        y = call(*args)
        assert not isinstance(y, DeferredLogits)
        gradients = torch.autograd.grad(y.square().sum(), leaves)
        assert all(g.isfinite().all() for g in gradients)


def test_a_wrong_model_is_noticed(monkeypatch):
    case = accelerated("transformer", *SIZES["transformer"])
    args, _ = case.inputs("cpu")
    right = accelerated_models.with_parameters
    is_first = iter([True])

    def wrong(model, names, given):
        return right(model, names, given) * (1.01 if next(is_first, False) else 1)

    monkeypatch.setattr(accelerated_models, "with_parameters", wrong)
    with pytest.raises(AssertionError, match="of what is allowed"):
        accelerated_models.check(case, args)


def test_the_cases_belong_to_the_full_set():
    found = [case for case in CASES if case.op == "accelerate"]
    assert len(found) == 8
    assert all(case.full and case.targets for case in found)
