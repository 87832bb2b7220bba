"""The module over the operator `embedding`."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused.transforms import is_transformed
from fusedseq.nn.dropout import check_probability, draw_seed
from fusedseq.nn.operators import Operators, shown_options


class Embedding(nn.Module):
    """A table of word vectors with embedding dropout (Merity et al., 2018).

    In training mode each word type is dropped with probability `dropout` at all its positions, and
    the vectors of the others are scaled by 1/(1-dropout).

    num_embeddings: V    embedding_dim: E
    padding_idx: an id in [-V, V) whose vector is initialized with zeros and receives no gradient
        from this module, as in torch.nn.Embedding. A tied decoder still gives it one
    dropout: probability of dropping a word type, in [0, 1]
    sparse: whether the weight's gradient is a sparse tensor of the rows used
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    The parameter `weight` is (V, E), as in torch.nn.Embedding, and initialized from N(0, 1). A tied
    decoder uses it without dropout.
    forward: int64 or int32 ids of any shape, in [0, V) -> (*shape, E)
    Errors: ValueError for a padding_idx outside [-V, V) and a dropout outside [0, 1]; TypeError for
    a padding_idx that is not an int. torch's max_norm, norm_type and scale_grad_by_freq do not
    exist here.
    """

    padding_idx: int | None = None  # of modules that were pickled before this option existed

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dropout: float = 0.0,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.sparse = num_embeddings, embedding_dim, sparse
        self.padding_idx = _padding_row(padding_idx, num_embeddings)
        self.dropout = check_probability(dropout, "Embedding", "dropout")
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self._embedding = ops.embedding
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        *,
        dropout: float = 0.0,
        sparse: bool = False,
        ops: Operators = fused,
    ) -> Self:
        """Returns an Embedding whose weight is the given tensor, which is not copied.

        embeddings: (V, E)    freeze: the weight does not require a gradient
        padding_idx, dropout, sparse, ops: as of the class; the row padding_idx keeps its values
        Errors: ValueError for embeddings that are not two-dimensional.
        """
        if embeddings.dim() != 2:
            raise ValueError(f"Embedding: embeddings must be (V, E), got {tuple(embeddings.shape)}")
        V, E = embeddings.shape
        module = cls(V, E, padding_idx, dropout=dropout, sparse=sparse, device="meta", ops=ops)
        module.weight = nn.Parameter(embeddings, requires_grad=not freeze)
        return module

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, 1), and sets the row padding_idx to zeros."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the word vectors of int64 or int32 ids of any shape: (*shape, E)."""
        weight: Tensor = self.weight
        padding = self.padding_idx if weight.requires_grad else None
        is_compiling = torch.compiler.is_compiling()
        if padding is not None and not is_compiling:
            # torch has no annotation of Function.apply
            weight = _WithoutGradientOfRow.apply(weight, padding)  # type: ignore[no-untyped-call]
        drop = (self.dropout, draw_seed(ids.device)) if self.training and self.dropout else ()
        y: Tensor = self._embedding(ids, weight, *drop, sparse=self.sparse)
        if padding is not None and is_compiling:
            # Dynamo does not trace the function above; a compiler fuses this with what follows.
            y = torch.where((ids == padding)[..., None], y.detach(), y)
        return y

    def extra_repr(self) -> str:
        return shown_options(self)


def _padding_row(padding_idx: Any, V: int) -> int | None:
    """Returns padding_idx in [0, V), or None for None."""
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(
            "Embedding: padding_idx must be an int or None (dropout is given by keyword), got "
            f"{padding_idx!r}"
        )
    if not -V <= padding_idx < V:
        raise ValueError(
            f"Embedding: padding_idx must be in [-V, V) = [{-V}, {V}), got {padding_idx}"
        )
    return padding_idx % V


class _WithoutGradientOfRow(torch.autograd.Function):
    """The identity on a matrix W; in backward, one row of the gradient becomes zeros.

    Zeroing one row of the gradient is cheaper than masking the gradients at all positions that hold
    this row.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, row: int) -> Tensor:
        return W.view_as(W)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.row = inputs[1]

    @staticmethod
    def backward(ctx: Any, dW: Tensor) -> tuple[Tensor, None]:
        if dW.is_sparse:
            dW = dW.coalesce()
            used = dW.indices()
            rows = dW.values() * (used[0] != ctx.row)[:, None]
            dW = torch.sparse_coo_tensor(
                used, rows, dW.shape, is_coalesced=True, check_invariants=False
            )
            return dW, None
        if torch.is_grad_enabled() or is_transformed():
            return dW.index_fill(0, torch.tensor([ctx.row], device=dW.device), 0.0), None
        # Nothing else reads this gradient: W's view is an input of one operator only.
        dW[ctx.row] = 0
        return dW, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)
