"""One judge of two modules of the same parameters, for the tests of modules and of models."""

import torch
from fusedseq.testing import assert_within_budget, cotangents, longest_sum
from torch.utils._pytree import tree_leaves


def equal_modules(got, plain, exact, inputs, *, seed=3, steps=5, call=lambda module, *a: module(*a)):
    """The modules' results, and the gradients of their inputs and parameters, agree within the error budget.

    The three share parameters' names; each runs after the same torch.manual_seed, `exact` in fp64.

    steps: that one rounding may be added up in, of a recurrence or of layers in a row
    """
    exact = exact.double()
    found, upstream = [], None
    for module in (got, plain, exact):
        torch.manual_seed(seed)
        wide = torch.float64 if module is exact else torch.float32
        given = [t.to(wide).requires_grad_() if t.is_floating_point() else t for t in inputs]
        results = [y for y in tree_leaves(call(module, *given)) if isinstance(y, torch.Tensor)]
        used = [y for y in results if y.requires_grad]
        upstream = upstream or cotangents(used)
        wrt = {f"input {i}": t for i, t in enumerate(given) if t.requires_grad} | dict(module.named_parameters())
        grads = torch.autograd.grad(used, list(wrt.values()), [g.to(wide) for g in upstream], materialize_grads=True)
        found.append({**{f"result {i}": y for i, y in enumerate(results)}, **dict(zip(wrt, grads, strict=True))})
    terms = longest_sum([*inputs, *got.parameters()]) * steps
    for name in found[0]:
        assert_within_budget(name, *(f[name] for f in found), torch.float32, terms)
