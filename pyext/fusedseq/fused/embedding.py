from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Gradients, Named
from fusedseq.fused.through_oracle import call_reference
from fusedseq.fused.transforms import is_transformed
from fusedseq.reference.dropout_mask import drop

OP = "embedding"


def embedding(
    ids: Tensor, W: Tensor, p: float = 0.0, seed: int | Tensor = 0, sparse: bool = False
) -> Tensor:
    """Computes `fusedseq.reference.embedding` with the dropout inside the gather: the time does not
    depend on V, and W is never copied.

    With `sparse` the gradient is a sparse tensor of the rows of W that were used. Otherwise it is
    dense: on the CPU each of its rows is written once; above 64 MiB where few rows are used, and
    above 512 MiB always, the other rows are pages that the operating system zeroes when they are
    first read. On CUDA the gradient's sums follow the order of the ids, without atomics, so that
    every run gives the same bits.

    Errors: IndexError for an id outside [0, V) (RuntimeError in compiled code, a device-side
    assertion on CUDA, as in torch); ValueError for p outside [0, 1]; TypeError for ids other than
    int64 and int32, or for a W of a dtype other than fp32, fp64, bf16, and fp16 on CUDA.
    """
    if sparse is False and isinstance(ids, Tensor):
        found: Tensor = autograd.call_if_valid(OP, ids, W, p, seed)
        if found is not NotImplemented:
            return found
    check.like(OP, W, "W")
    check.dimensions(OP, "W", W, "(V, E)")
    check.probability(OP, "p", p)
    check.flag(OP, "sparse", sparse)
    if isinstance(ids, Tensor) and ids.is_nested:
        raise TypeError(f"{OP}: ids must be a dense tensor, got a nested tensor")
    V = W.size(0)
    ids = check.int64(ids)
    check.whole_numbers(OP, "ids", ids, 0, V - 1, lambda: f"[0, V) = [0, {V})", IndexError)
    if ids.device != W.device:
        raise ValueError(f"{OP}: ids must be on the device of W, {W.device}, got {ids.device}")
    seed = check.seed(OP, seed, W.device)
    if sparse and (torch.compiler.is_compiling() or not is_transformed()):
        y: Tensor = SparseGradient.apply(ids, W, p, seed)  # type: ignore[no-untyped-call]
    else:
        y = autograd.call(OP, ids, W, p, seed)
    return y


def gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    dy, ids, V, p, seed = grads["y"], *(named[name] for name in ("ids", "V", "p", "seed"))
    return {"W": autograd.call("embedding_backward", dy, ids, V, p, seed, None)}


def second_gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    """The gradient is linear in dy, and its transpose is the gather."""
    if named["keys"] is not None:
        raise NotImplementedError(
            "embedding: a gradient made with sparse=True has no second derivative; use sparse=False"
        )
    ids, p, seed = (named[name] for name in ("ids", "p", "seed"))
    return {"dy": autograd.call(OP, ids, grads["dW"], p, seed)}


def gradient_oracle(named: Named) -> Tensor:
    """The gradient in plain PyTorch: the sum of the rows of dy with the same id, times the mask."""
    if named["keys"] is not None:
        raise NotImplementedError(
            "embedding: sparse=True supports neither forward-mode AD nor transforms of torch.func"
        )
    return rows_by_oracle(named)


def rows_by_oracle(named: Named) -> Tensor:
    """`gradient_oracle` also where row i is the gradient of word keys[i] (sparse=True)."""
    dy, ids, V, p, seed = (named[name] for name in ("dy", "ids", "V", "p", "seed"))
    keys = named["keys"]
    rows: Tensor = dy.reshape(ids.numel(), dy.size(-1))
    dW = rows.new_zeros(V, rows.size(1)).index_add(0, ids.reshape(-1), rows)
    words = V if keys is None else int(keys.max()) + 1 if len(keys) else 0
    keep = reference.dropout_mask(seed, p, (words,), dW.device)
    keep = keep if keys is None else keep[keys]
    return drop(dW, keep[:, None], p) if p else dW


class SparseGradient(torch.autograd.Function):
    """(ids, W, p, seed) -> y. The formula of a registered operator must return a dense gradient;
    this returns a sparse one.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, W: Tensor, p: float, seed: Tensor) -> Any:
        ctx.save_for_backward(ids, seed)
        ctx.p, ctx.V = p, W.size(0)
        return torch.ops.fusedseq.embedding(ids, W, p, seed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ids, seed = ctx.saved_tensors
        used, place = ids.unique(return_inverse=True)
        rows = torch.ops.fusedseq.embedding_backward(dy, place, len(used), ctx.p, seed, used)
        shape = (ctx.V, dy.size(-1))
        dW = torch.sparse_coo_tensor(
            used[None], rows, shape, is_coalesced=True, check_invariants=False
        )
        return None, dW, None, None


def fake(named: Named) -> Tensor:
    W: Tensor = named["W"]
    return W.new_empty((*named["ids"].shape, W.size(1)))


autograd.register(
    OP,
    fake,
    Gradient(
        results=("y",),
        oracle=lambda named: call_reference(reference.embedding, named),
        saves=("ids", "seed"),
        # C++ saves V in place of W: csrc/python/mask_and_embedding_formulas.h.
        derived=lambda named: {"V": W if isinstance(W := named["W"], int) else W.size(0)},
        compute=gradient,
        is_linear=True,
    ),
)
autograd.register(
    "embedding_backward",
    lambda named: named["dy"].new_empty((named["V"], named["dy"].size(-1))),
    Gradient(
        results=("dW",),
        oracle=gradient_oracle,
        saves=("ids", "seed", "keys"),
        compute=second_gradient,
        is_linear=True,
    ),
)
