"""The keys and values of one attention layer during incremental decoding."""

import torch
from torch import Tensor

from fusedseq.fused import autocast, check

OP = "KeyValueCache"  # the name in messages


class KeyValueCache:
    """Keys and values of one layer, in memory reserved for all positions; for inference only.

    rows: B, the rows of the batch, counting every hypothesis of a beam    num_heads: N
    max_length: the largest number of positions    head_dim: D    device, dtype: of the keys
    Errors: TypeError or ValueError for sizes that are not whole numbers of at least 0

    length: the number of positions written so far
    k, v: (B, N, max_length, D)
    key_rows: (rows, max_length) int64, the row of k and v that stores each key of a hypothesis;
        None before the first `reorder`, when hypothesis b reads row b
    """

    def __init__(
        self,
        rows: int,
        num_heads: int,
        max_length: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {
            "rows": rows,
            "num_heads": num_heads,
            "max_length": max_length,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if check.whole_number(OP, name, size) < 0:
                raise ValueError(f"{OP}: {name} must be at least 0, got {size}")
        with torch.inference_mode(False):  # so that any later call can write to it
            self.k, self.v = torch.empty(2, *sizes.values(), device=device, dtype=dtype).unbind()
        self.length = 0
        self.key_rows: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values, (B, N, S, D) each, of the next S positions.

        Errors: TypeError for another dtype than that of the cache, without autocast; ValueError for
        another shape, or for more positions than are reserved; RuntimeError for tensors that
        require a gradient.
        """
        rows, num_heads, max_length, head_dim = self.k.shape
        for name, t in (("keys", k), ("values", v)):
            check.dimensions(OP, name, t, "(B, N, S, D)")
            check.shape(OP, name, t, "(B, N, S, D)", (k.size(0), num_heads, k.size(2), head_dim))
            if t.dtype != self.k.dtype and not autocast.is_on(t.device.type):
                raise TypeError(
                    f"{OP}: {name} must be of the dtype of the cache, {self.k.dtype}, got {t.dtype}"
                )
        end = self.length + k.size(2)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError(
                f"{OP}: keys and values must not require a gradient, because the cache is "
                "for inference (torch.no_grad()), got some that do"
            )
        if k.size(0) != len(self.table()) or k.size(0) > rows:
            raise ValueError(
                f"{OP}: keys must be for {rows} rows, as many as reserved, got "
                f"{k.size(0)} for {len(self.table())} hypotheses"
            )
        if end > max_length:
            raise ValueError(
                f"{OP}: positions must be at most max_length = {max_length}, got {end}"
            )
        self.k[: len(k), :, self.length : end] = k
        self.v[: len(v), :, self.length : end] = v
        self.length = end

    def reorder(self, parents: Tensor) -> None:
        """Makes hypothesis b continue what hypothesis parents[b] was.

        Only the table `key_rows` changes; no key is copied.
        parents: (rows,) int64. There may be fewer hypotheses than before, and again more, up to the
            reserved rows; any number if nothing is appended afterwards, which is how the hypotheses
            of a beam share the keys of their source sentence.
        Errors: TypeError or ValueError for parents of another dtype or shape.
        """
        check.tensor(OP, "parents", parents)
        check.dimensions(OP, "parents", parents, "(rows,)")
        if parents.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{OP}: parents must be int64, got {parents.dtype}")
        table = self.table()[parents]
        # Later positions are written into each hypothesis's own row.
        table[:, self.length :] = torch.arange(len(table), device=table.device)[:, None]
        self.key_rows = table

    def table(self) -> Tensor:
        """Returns key_rows, or the identity table (rows, max_length) before the first `reorder`."""
        if self.key_rows is not None:
            return self.key_rows
        rows, _, max_length, _ = self.k.shape
        return torch.arange(rows, device=self.k.device)[:, None].expand(rows, max_length)

    def held(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns k, v and key_rows as the operator `attention` takes them.

        They are views of the positions written so far: (B, N, length, D) twice, and (rows, length)
        or None.
        """
        k, v = self.k[:, :, : self.length], self.v[:, :, : self.length]
        return k, v, None if self.key_rows is None else self.key_rows[:, : self.length]
