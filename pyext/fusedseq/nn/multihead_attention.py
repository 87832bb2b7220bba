import torch
from torch import nn

from fusedseq import fused, reference
from fusedseq.nn.dropout import check_probability, draw_seed
from fusedseq.nn.heads import heads
from fusedseq.nn.key_value_cache import KeyValueCache


class MultiheadAttention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017): a drop-in for torch.nn.MultiheadAttention, whose parameters it has and
    whose state dict it loads. Self-attention is one product for q, k and v, and attention reads them where they lie.

    embed_dim: E    num_heads: N, dividing E    dropout: of the probabilities, in training    bias: of the projections
    kdim, vdim: of key and value, by default E    batch_first: inputs are (B, L, E), not (L, B, E)
    positions: an ALiBi, RelativeBias, RelativeKeys or Rotary    scale: of the logits, by default 1/sqrt(E / N)

    The projections are the operator `linear`: on CPUs where torch's library has no fast path, 2.2 times torch's own
    (as the decoder of LanguageModel). There is no fp16 with it on a CPU.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    # So torch.nn.TransformerEncoderLayer calls `forward`, and not, in eval mode, a kernel of its own with our parameters.
    _qkv_same_embed_dim = False

    def __init__(
        self, embed_dim, num_heads, dropout=0.0, bias=True, *, kdim=None, vdim=None, batch_first=False, positions=None,
        scale=None, device=None, dtype=None, ops=fused,
    ):  # fmt: skip
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"MultiheadAttention: embed_dim must be a multiple of num_heads, got {embed_dim} and "
                             f"{num_heads}")  # fmt: skip
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = (embed_dim if size is None else size for size in (kdim, vdim))
        self.dropout = check_probability(dropout, "MultiheadAttention", "dropout")
        self.batch_first = batch_first
        one = self.kdim == self.vdim == embed_dim
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if one else None,
            "q_proj_weight": None if one else (embed_dim, embed_dim),
            "k_proj_weight": None if one else (embed_dim, self.kdim),
            "v_proj_weight": None if one else (embed_dim, self.vdim),
            "in_proj_bias": (3 * embed_dim,) if bias else None,
        }
        for name, shape in shapes.items():
            parameter = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.positions, self.scale = positions, scale
        self._attention, self._linear = ops.attention, ops.linear
        self.reset_parameters()

    def reset_parameters(self):
        """As torch.nn.MultiheadAttention: Xavier uniform, biases 0; its numbers after the same torch.manual_seed."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def cache(self, rows, max_length):
        """An empty KeyValueCache for `forward`."""
        weight = self.out_proj.weight
        return KeyValueCache(rows, self.num_heads, max_length, self.head_dim, device=weight.device, dtype=weight.dtype)

    def fill(self, cache, key, value):
        """Appends key and value to the KeyValueCache, as `forward` does, without a query: those of a source once, for any
        number of hypotheses (`KeyValueCache.reorder`)."""
        cache.append(*self._keys_and_values(key, value))

    def forward(
        self, query, key=None, value=None, key_padding_mask=None, need_weights=False, attn_mask=None,
        average_attn_weights=True, is_causal=False, *, key_lengths=None, cache=None,
    ):  # fmt: skip
        """Attention of query over key and value, the same tensor thrice for self-attention.

        query: (L, B, E), key: (S, B, kdim), value: (S, B, vdim), or (B, L, E), ... with `batch_first`
        key_padding_mask: (B, S), attn_mask: (L, S), (B N, L, S), or broadcastable to (B, N, L, S); as in torch a bool one
            is True where a key is NOT seen, a float one is added to the logits
        key_lengths: (B,) int64, the keys that there are of each row: cheaper than a key_padding_mask
        is_causal: query i sees no key behind its own position; the last query stands at the last key. An attn_mask is
            not needed for it, and holds as well
        need_weights: also return the probabilities after dropout, (B, L, S) averaged over the heads or (B, N, L, S). The
            operator never has them in memory, and the oracle makes them in a second pass; so, unlike torch's, this
            is False by default
        cache: a KeyValueCache: key and value are appended, and attention is over all it holds; without key and value
            over what it holds. Inference only
        returns y, as query; the weights or None
        """
        self._check(query, key, value, cache)
        q, k, v = self._heads(query, key, value)
        options = {"scale": self.scale, "causal": is_causal, "key_lengths": key_lengths}
        if cache is not None:
            if k is not None:
                cache.append(k, v)
            k, v, options["key_rows"] = cache.held()
        options |= self._terms(q, k.size(2), attn_mask, key_padding_mask)
        if self.training and self.dropout:
            options |= {"dropout": self.dropout, "seed": draw_seed(q.device)}
        y = self._attention(q, k, v, **options).transpose(1, 2).flatten(2)  # (B, L, E), as it lies in memory
        y = self._linear(y, self.out_proj.weight, self.out_proj.bias)
        weights = probabilities(q, k, options, average_attn_weights) if need_weights else None
        return y if self.batch_first else y.transpose(0, 1), weights

    def _check(self, query, key, value, cache):
        dims = "B, L" if self.batch_first else "L, B"
        for name, t, size in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if cache is not None and name != "query" and key is None and value is None:
                continue
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"MultiheadAttention: {name} must be a tensor, got {type(t).__name__}; only with a cache may "
                                "key and value be None")  # fmt: skip
            if t.dim() != 3 or t.size(2) != size:
                raise ValueError(f"MultiheadAttention: {name} must be ({dims}, {size}), got {tuple(t.shape)}")

    def _heads(self, query, key, value):
        """q (B, N, L, D), k and v (B, N, S, D) or None: views of as few products as there are different inputs."""
        together = self.in_proj_weight is not None
        if together and key is query and value is query:
            return self._project(query, 0, 3)
        (q,) = self._project(query, 0, 1)
        return (q, None, None) if key is None else (q, *self._keys_and_values(key, value))

    def _keys_and_values(self, key, value):
        if self.in_proj_weight is not None and key is value:
            return self._project(key, 1, 3)
        return *self._project(key, 1, 2), *self._project(value, 2, 3)

    def _project(self, x, first, last):
        """Of q, k, v those from `first` to before `last`, in one product of x."""
        rows = slice(first * self.embed_dim, last * self.embed_dim)
        if self.in_proj_weight is not None:
            weight = part(self.in_proj_weight, rows)
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[first]
        y = self._linear(x, weight, part(self.in_proj_bias, rows))
        return heads(y, last - first, self.num_heads, self.batch_first)

    def _terms(self, q, S, attn_mask, key_padding_mask):
        """The operator's mask and bias, and the argument that the positions are for."""
        (B, N, L, _), terms = q.shape, {}
        if attn_mask is not None:
            wanted = {2: (L, S), 3: (B * N, L, S)}.get(attn_mask.dim())
            check_mask("attn_mask", attn_mask, "(L, S)" if attn_mask.dim() == 2 else "(B N, L, S)", wanted)
            attn_mask = attn_mask.unflatten(0, (B, N)) if attn_mask.dim() == 3 else attn_mask
        if key_padding_mask is not None:
            check_mask("key_padding_mask", key_padding_mask, "(B, S)", (B, S))
            key_padding_mask = key_padding_mask[:, None, None]
        if self.positions is not None:
            terms[self.positions.argument] = self.positions(L, S, S - L)
        for given in (attn_mask, key_padding_mask):
            if given is None:
                continue
            if given.dtype == torch.bool:
                terms["mask"] = ~given & terms.get("mask", True)
            else:
                terms["bias"] = given.to(q.dtype) + terms.get("bias", 0)
        return terms

    def extra_repr(self):
        return f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"


def part(parameter, rows):
    """Some rows of a parameter, or None of None; all of them as they are, for a slice's gradient is written twice."""
    return parameter if parameter is None or rows == slice(0, len(parameter)) else parameter[rows]


def check_mask(name, mask, symbols, wanted):
    """wanted: a shape, or None for one that the operator judges"""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"MultiheadAttention: {name} must be bool, True where a key is not seen, or a float that is added to "
                        f"the logits, got {mask.dtype}")  # fmt: skip
    if wanted is not None and tuple(mask.shape) != wanted:
        raise ValueError(f"MultiheadAttention: {name} must be {symbols} = {wanted}, got {tuple(mask.shape)}")


def probabilities(q, k, options, average):
    """What attention multiplies the values by, (B, N, L, S), or (B, L, S) averaged over the heads: its result for the
    identity as values."""
    S = k.size(2)
    found = reference.attention(q, k, torch.eye(S, dtype=q.dtype, device=q.device).expand(*k.shape[:3], S), **options)
    return found.mean(1) if average else found
