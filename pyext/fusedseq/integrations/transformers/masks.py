"""The mask function of `attn_implementation="fusedseq"`."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

from fusedseq.integrations.transformers.bloom import MODELING as BLOOM
from fusedseq.integrations.transformers.visible_keys import VisibleKeys


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Returns the mask of a forward pass, once for all layers of a kind, as `VisibleKeys`.

    Causal masks, sliding windows and padding become the arguments `causal`, `offset`, `window`,
    `key_lengths` and a mask of shape (B, 1, 1, S). Everything else (chunks, packed
    sequences, prefixes) is made dense by transformers' own `sdpa_mask`, without the batch
    dimension if it does not depend on it. Values on an accelerator are never read. It never
    returns None, which would leave it to each layer to guess whether it is causal.

    The arguments are those of transformers' mask functions.
    local_size: the size of a window or chunk
    allow_is_causal_skip, allow_is_bidirectional_skip: False where `mask_function` may have more
        than the causal or bidirectional pattern, and window or chunk, in it
    """
    require_attention_interface(type(config).__module__)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            'attn_implementation="fusedseq": attention_mask must be (B, S), or (B, 1 or N, L, S), '
            f"got {tuple(attention_mask.shape)}"
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    make_dense = functools.partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
        **kwargs,
    )
    if is_tracing(padding):
        dense: Tensor = make_dense(attention_mask=attention_mask)
        return dense
    window_is_wide = local_size is not None and kv_length < local_size and kv_offset == 0
    window = sliding_window(mask_function)
    causal = mask_function is causal_mask_function or (window_is_wide and allow_is_causal_skip)
    bidirectional = mask_function is bidirectional_mask_function or (
        window_is_wide and allow_is_bidirectional_skip
    )
    position = known(q_offset)
    options: dict[str, Any] = {}
    if bidirectional or ((causal or window) and position is not None):
        if window and not window_is_wide and position is not None:
            offset = position - kv_offset
            options |= {"causal": True, "offset": offset, "window": (window - 1, 0)}
        elif causal and position is not None:
            options |= causal_options(position - kv_offset, kv_length)
        if padding is not None:
            options |= key_options(padding[:, kv_offset : kv_offset + kv_length])
    else:
        visible = make_dense(attention_mask=attention_mask)
        options["mask"] = visible if visible.stride(0) else visible[:1]
    return VisibleKeys((batch_size, 1, q_length, kv_length), device, options)


def sliding_window(mask_function: Callable[..., Tensor]) -> int | None:
    """Returns w if a mask function is transformers' own causal window, in which query i sees keys
    i - w + 1 to i, and nothing else; else None.

    A mask function that a model or a user has combined with another one is not, and neither is one
    of chunks: only the two functions that `sliding_window_causal_mask_function` combines are.
    """
    wanted = sliding_window_causal_mask_function(1)
    functions = closure(mask_function, wanted)
    if functions is None or len(functions) != 2:
        return None
    overlay, rest = functions
    size = closure(overlay, closure(wanted, wanted)[0])
    return size if rest is causal_mask_function and type(size) is int else None


def closure(function: Any, like: Any) -> Any:
    """Returns the one value that `function` encloses if its code is that of `like`, else None."""
    cells = getattr(function, "__closure__", None)
    if getattr(function, "__code__", None) is not like.__code__ or not cells or len(cells) != 1:
        return None
    return cells[0].cell_contents


def known(position: int | Tensor) -> int | None:
    """Returns the position of the first query, or None if reading it would wait for a device.

    A static cache counts its tokens in a tensor.
    """
    if isinstance(position, Tensor):
        return int(position) if position.device.type == "cpu" and not is_tracing(position) else None
    return position


def causal_options(offset: int, S: int) -> dict[str, Any]:
    """Returns the arguments of a causal mask, none if the first query already sees all S keys."""
    return {"causal": True, "offset": offset} if offset < S - 1 else {}


def key_options(keys: Tensor) -> dict[str, Any]:
    """Returns the arguments that mask padding.

    keys: (B, S) bool, true where a key is not padding
    """
    if keys.device.type != "cpu":
        return {"mask": keys[:, None, None]}
    if keys.all():
        return {}
    lengths = keys.sum(1)
    if (keys == (torch.arange(keys.size(1), device=keys.device) < lengths[:, None])).all():
        return {"key_lengths": lengths}
    return {"mask": keys[:, None, None]}


_accepted: set[str] = set()


def require_attention_interface(configuration: str) -> None:
    """Raises ValueError if the model of a configuration computes attention by code of its own,
    which would take the mask for one that can be added.

    configuration: the Python module of the configuration class
    """
    if configuration in _accepted:
        return
    name = configuration.replace(".configuration_", ".modeling_")
    modeling = sys.modules.get(name)
    if modeling is None or name == BLOOM:
        return
    for model in vars(modeling).values():
        is_here = isinstance(model, type) and model.__module__ == name
        if is_here and issubclass(model, PreTrainedModel):
            if not model._can_set_attn_implementation():
                raise ValueError(
                    f'attn_implementation="fusedseq": the attention of {name} is code of its own, '
                    "which does not go through transformers' AttentionInterface; load the model "
                    'with attn_implementation="eager"'
                )
            _accepted.add(configuration)
            return
