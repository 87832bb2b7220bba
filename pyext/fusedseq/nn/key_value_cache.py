import torch


class KeyValueCache:
    """One layer's keys and values of a decoding, in memory reserved for all its positions: inference only.

    rows: B, of the batch, with every hypothesis of a beam    num_heads: N    max_length: the most positions
    head_dim: D    device, dtype: of the keys
    length: the positions held so far    k, v: (B, N, max_length, D)
    key_rows: (rows, max_length) int64, the row in which each key of a hypothesis stands, after a `reorder`; else None
    """

    def __init__(self, rows, num_heads, max_length, head_dim, *, device=None, dtype=None):
        self.k, self.v = torch.empty(2, rows, num_heads, max_length, head_dim, device=device, dtype=dtype).unbind()
        self.length, self.key_rows = 0, None

    def append(self, k, v):
        """Keys and values (B, N, S, D) of the next S positions.

        Errors: ValueError for other rows, or more positions than there is memory for; RuntimeError for gradients.
        """
        rows, _, most, _ = self.k.shape
        end = self.length + k.size(2)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("KeyValueCache: is for inference and must come without gradients (torch.no_grad()), got keys "
                               "or values that require one")  # fmt: skip
        if k.size(0) != len(self.table()) or k.size(0) > rows:
            raise ValueError(f"KeyValueCache: keys must be for {rows} rows, as many as reserved, got {k.size(0)} for "
                             f"{len(self.table())} hypotheses")  # fmt: skip
        if end > most:
            raise ValueError(f"KeyValueCache: positions must be at most max_length = {most}, got {end}")
        self.k[: len(k), :, self.length : end], self.v[: len(v), :, self.length : end] = k, v
        self.length = end

    def reorder(self, parents):
        """Hypothesis b goes on from what hypothesis parents[b] was: the table changes, no key is copied.

        parents: (rows,) int64. There may be fewer than before, and again more, up to the rows reserved; and any number
        where nothing is appended any more: so the hypotheses of a beam share the keys of their source sentence.
        """
        held = self.table()[parents]  # what comes next is written into each hypothesis's own row
        held[:, self.length :] = torch.arange(len(held), device=held.device)[:, None]
        self.key_rows = held

    def table(self):
        if self.key_rows is not None:
            return self.key_rows
        rows, _, most, _ = self.k.shape
        return torch.arange(rows, device=self.k.device)[:, None].expand(rows, most)

    def held(self):
        """k, v and key_rows, as attention takes them: views of what there is so far."""
        k, v = (t[:, :, : self.length] for t in (self.k, self.v))
        return k, v, None if self.key_rows is None else self.key_rows[:, : self.length]
