"""The attention function of `attn_implementation="fusedseq"`."""

from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.integrations.transformers.visible_keys import VisibleKeys
from fusedseq.nn.dropout import draw_seed

# What models pass to some implementations and what the operator cannot compute: {argument: what}.
REFUSED = {
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "a paged cache",
    "output_attentions": "attention probabilities as an output",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of one layer by `fused.attention`; no tensor is copied.

    module: the attention layer, in training mode if probabilities are to be dropped
    query: (B, N, L, D)    key, value: (B, N_kv, S, D), not repeated for grouped queries
    attention_mask: `VisibleKeys`; or (B or 1, N or 1, L or 1, S) bool, true where a key is
        visible, or float, added to the logits; or None, then `is_causal` decides
    scaling: factor of the logits, by default 1 / sqrt(D)
    is_causal: whether a query sees no later key, by default the layer's attribute of this name,
        and True if it has none; ignored beside a mask, as in transformers' own implementations
    position_bias: (1 or B, N, L, S), added to the logits (T5)
    sliding_window: the window of the layer, which the mask already has
    cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,), where packed sequences begin and end; B is 1
    softcap: of the logits (Gemma 2), None for none    s_aux: (N,), the layer's attention sinks
        (GPT-OSS)
    returns (B, L, N, D), contiguous, and None in place of the probabilities

    Errors: ValueError for what the operator cannot compute (`REFUSED`), and for a mask of None
    whose meaning is not certain; TypeError for a mask that is neither bool nor float.
    """
    refuse(module, kwargs, s_aux)
    if value.size(-1) != key.size(-1):
        raise ValueError(
            'attn_implementation="fusedseq" does not compute values of another width than keys: '
            f"{type(module).__name__} passed {value.size(-1)} and {key.size(-1)}; use another "
            'implementation, such as "eager"'
        )
    L, S = query.size(2), key.size(2)
    if attention_mask is None:
        options = options_without_mask(module, L, S, is_causal, sliding_window)
    else:
        options = mask_options(attention_mask, query.dtype)
    ends = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        lengths = kwargs.get("max_length_q"), kwargs.get("max_length_k")
        plain = {*options} <= {"causal", "offset", "window"} and not options.get("offset")
        if position_bias is None and plain:
            ends = common_ends(query, S, cu_seq_lens_q, cu_seq_lens_k, *lengths)
        if ends is None:
            packed = same_sequence(query, S, cu_seq_lens_q, cu_seq_lens_k)
            options["mask"] = options["mask"] & packed if "mask" in options else packed
    if position_bias is not None:
        bias = position_bias.to(query.dtype)
        options["bias"] = bias + options["bias"] if "bias" in options else bias
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux.to(query.dtype)
    if dropout and module.training:
        options |= {"dropout": dropout, "seed": draw_seed(query.device)}
    if ends is not None:
        options.pop("offset", None)  # 0
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = fused.attention_varlen(q, k, v, ends, ends, *lengths, scale=scaling, **options)
        return out[None], None
    out = fused.attention(query, key, value, scale=scaling, **options)
    return out.transpose(1, 2), None


def refuse(module: nn.Module, kwargs: dict[str, Any], sinks: Tensor | None) -> None:
    """Raises ValueError for arguments that would change the result and that the operator lacks, and
    for sinks that the layer has but does not pass."""
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(
                f'attn_implementation="fusedseq" does not compute {what}: '
                f"{type(module).__name__} passed {name}; use another implementation, such as "
                '"eager"'
            )
    if getattr(module, "sinks", None) is not None and sinks is None:
        raise ValueError(
            'attn_implementation="fusedseq" needs attention sinks as the argument s_aux, which '
            f"{type(module).__name__} has and does not pass; use another implementation, such as "
            '"eager"'
        )


def mask_options(mask: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Returns a mask as arguments of the operator.

    dtype: that of the queries, to which a mask that is added is cast
    """
    if isinstance(mask, VisibleKeys):
        return dict(mask.options)
    if mask.dim() != 4:
        raise ValueError(
            'attn_implementation="fusedseq": attention_mask must be (B, 1 or N, L, S) where it '
            f"reaches a layer, got {tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return {"mask": mask}
    if not mask.is_floating_point():
        raise TypeError(
            'attn_implementation="fusedseq": a mask with four dimensions must be bool, true where '
            f"a key is visible, or a float that is added to the logits, got {mask.dtype}"
        )
    return {"bias": mask.to(dtype)}


def options_without_mask(
    module: nn.Module, L: int, S: int, is_causal: bool | None, sliding_window: int | None
) -> dict[str, Any]:
    """Returns the arguments of a call without a mask, which the model has not made by the mask
    function.

    Where L queries and S keys differ, a causal layer may mean that the queries are the last
    positions (a cache) or the first (a static cache that is not full). One of the two would show
    a query what it must not see, so this is an error.
    """
    name = type(module).__name__
    if sliding_window is not None and sliding_window < S:
        raise ValueError(
            f'attn_implementation="fusedseq": {name} has a sliding window of {sliding_window} and '
            f"must pass a mask for {S} keys, got None"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or L == 1:
        return {}
    if L != S:
        raise ValueError(
            f'attn_implementation="fusedseq": {name} is causal and must pass a mask for {L} '
            f"queries and {S} keys, got None, which does not say where the queries are"
        )
    return {"causal": True}


def common_ends(
    query: Tensor,
    S: int,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
) -> Tensor | None:
    """Returns where the packed sequences of queries and keys end, if these are the same rows, or
    None. Values on an accelerator are not read.

    ends_q, ends_k: as of `same_sequence`    longest_q, longest_k: the longest sequences, if known
    """
    ends = ends_k if ends_q is None else ends_q
    if ends is None or query.size(0) != 1 or query.size(2) != S:
        return None
    is_readable = ends.device.type == "cpu" and not torch.compiler.is_compiling()
    same = ends_q is None or ends_k is None or ends_q is ends_k
    if not is_readable:
        return ends if same and longest_q is not None and longest_k is not None else None
    if not same and not torch.equal(ends, ends_k):  # type: ignore[arg-type]
        return None
    covers = ends.dim() == 1 and len(ends) > 1 and int(ends[0]) == 0 and int(ends[-1]) == S
    return ends if covers and query.device.type == "cpu" else None


def same_sequence(query: Tensor, S: int, ends_q: Tensor | None, ends_k: Tensor | None) -> Tensor:
    """Returns the (1, 1, L, S) mask of packed sequences: a query sees the keys of its own.

    ends_q, ends_k: (sequences + 1,), rising from 0; one stands for both if the other is None
    """
    B, _, L, _ = query.shape
    if B != 1:
        raise ValueError(
            'attn_implementation="fusedseq": cu_seq_lens_q and cu_seq_lens_k are for packed '
            f"sequences in a batch of 1, got a batch of {B}"
        )
    ends_q, ends_k = (ends_k if ends_q is None else ends_q), (ends_q if ends_k is None else ends_k)
    assert ends_q is not None
    assert ends_k is not None
    q, k = (
        torch.searchsorted(ends, torch.arange(n, device=ends.device, dtype=ends.dtype), right=True)
        for ends, n in ((ends_q, L), (ends_k, S))
    )
    return (q[:, None] == k).to(query.device)[None, None]
