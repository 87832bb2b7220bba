"""Compares two modules or models with equal parameters, within the error budget of operators."""

import torch
from fusedseq.testing import assert_within_budget, cotangents, longest_sum
from torch.utils._pytree import tree_leaves


def equal_modules(
    got, plain, exact, inputs, *, seed=3, steps=5, call=lambda module, *a: module(*a)
):
    """Asserts that results and gradients of inputs and parameters agree within the error budget.

    got: the module with fused operators    plain, exact: the same module with the oracles; `exact`
        is converted to fp64. The three have parameters of the same names and values
    seed: each module runs after torch.manual_seed(seed), so that all draw the same random masks
    steps: how many roundings may add up one after the other, in a recurrence or in stacked layers
    call: call(module, *inputs) runs the module
    """
    exact = exact.double()
    tensors, grad_outputs = [], None
    for module in (got, plain, exact):
        torch.manual_seed(seed)
        dtype = torch.float64 if module is exact else torch.float32
        leaves = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in inputs]
        results = [y for y in tree_leaves(call(module, *leaves)) if isinstance(y, torch.Tensor)]
        used = [y for y in results if y.requires_grad]
        grad_outputs = grad_outputs or cotangents(used)
        wrt = {f"input {i}": t for i, t in enumerate(leaves) if t.requires_grad}
        wrt |= dict(module.named_parameters())
        grads = torch.autograd.grad(
            used, list(wrt.values()), [dy.to(dtype) for dy in grad_outputs], materialize_grads=True
        )
        named_results = {f"result {i}": y for i, y in enumerate(results)}
        tensors.append(named_results | dict(zip(wrt, grads, strict=True)))
    terms = longest_sum([*inputs, *got.parameters()]) * steps
    for name in tensors[0]:
        assert_within_budget(name, *(t[name] for t in tensors), torch.float32, terms)
