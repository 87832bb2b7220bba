"""The argument checks of `attention`."""

from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import check
from fusedseq.fused.schema import Named

OP = "attention"
NO_WINDOW = -1, -1
MAX_HEAD_DIM = 2048
INFINITY = float("inf")
MAX_OFFSET = 2**62  # as in csrc/ops/attention_call.h: positions are 64-bit integers


def terms(q: Tensor, sizes: tuple[int, int, int, int], offset: int, given: Named) -> Named:
    """Checks the tensors of a call beside q, k and v: alibi, sinks, relative_keys, mask, bias and
    rope. Returns those that the registered operator takes in another form.

    sizes: (B, N, L, S)    offset: the position of the first query    given: the arguments by name
    """
    alibi, sinks = constant("alibi", given["alibi"], q), given["sinks"]
    if alibi is not None:
        check.shape(OP, "alibi", alibi, "(N,)", (sizes[1],))
    if sinks is not None:
        check.shape(OP, "sinks", sinks, "(N,)", (sizes[1],))
    relative_keys(given["relative_keys"], q)
    check.flag(OP, "rope_interleaved", given["rope_interleaved"])
    return {
        "mask": mask(given["mask"], q, sizes),
        "bias": broadcast("bias", given["bias"], sizes),
        "alibi": alibi,
        "rope": rope(given["rope"], q, sizes, offset),
    }


def settings(q: Tensor, given: Named) -> Named:
    """Checks the numbers of a call. Returns those that the registered operator takes: scale,
    dropout, softcap, window_left and window_right.
    """
    scale, softcap = given["scale"], given["softcap"]
    check.probability(OP, "dropout", given["dropout"])
    if scale is None:
        scale = q.size(-1) ** -0.5 if q.size(-1) else 1.0
    check.number(OP, "scale", scale)
    check.flag(OP, "causal", given["causal"])
    if softcap != 0:
        check.number(OP, "softcap", softcap)
        if not 0 <= softcap < INFINITY:
            raise ValueError(f"{OP}: softcap must be at least 0 and finite, got {softcap}")
    left, right = NO_WINDOW if given["window"] is None else window(given["window"])
    return {
        "scale": float(scale),
        "dropout": float(given["dropout"]),
        "softcap": float(softcap),
        "window_left": left,
        "window_right": right,
    }


def window(window: Any) -> tuple[int, int]:
    """Returns the two sides of a window, -1 for unlimited."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{OP}: window must be (left, right) or None, got {window!r}")
    for n in window:
        if n is not None:
            if isinstance(n, bool) or not isinstance(n, int):
                raise TypeError(
                    f"{OP}: window must be two whole numbers or None, got {type(n).__name__}"
                )
            if n < -1:
                raise ValueError(f"{OP}: window must be two numbers of at least -1, got {window}")
    left, right = (-1 if n is None or n > MAX_OFFSET else n for n in window)
    return left, right


def shapes(q: Tensor, k: Tensor, v: Tensor, key_rows: Tensor | None) -> int:
    """Checks the shapes of q, k and v; returns the number of keys of a query."""
    for name, t, symbols in (("q", q, "(B, N, L, D)"), ("k", k, "(B, N_kv, S, D)")):
        check.dimensions(OP, name, t, symbols)
    (B, N, _, D), (_, N_kv, S, _) = q.shape, k.shape
    if D > MAX_HEAD_DIM:
        raise ValueError(
            f"{OP}: q must be (B, N, L, D) with D at most {MAX_HEAD_DIM}, got {tuple(q.shape)}"
        )
    if k.size(3) != D or (N % N_kv if N_kv else N):
        raise ValueError(
            f"{OP}: k must be (B, N_kv, S, D) with D = {D} and an N_kv that divides N = {N}, got "
            f"{tuple(k.shape)}"
        )
    check.shape(OP, "v", v, "(B, N_kv, S, D)", k.shape)
    if key_rows is not None:
        device("key_rows", key_rows, q)
        check.dimensions(OP, "key_rows", key_rows, "(B, S)")
        return key_rows.size(1)
    check.shape(OP, "k", k, "(B, N_kv, S, D)", (B, N_kv, S, D))
    return S


def key_rows(key_rows: Tensor, q: Tensor, k: Tensor, S: int) -> None:
    rows, _, most, _ = k.shape
    if key_rows.size(0) != q.size(0) or not 1 <= S <= most:
        raise ValueError(
            f"{OP}: key_rows must be (B, S) with B = {q.size(0)} and S in [1, {most}], got "
            f"{tuple(key_rows.shape)}"
        )
    check.whole_numbers(
        OP, "key_rows", key_rows, 0, rows - 1, lambda: f"[0, {rows}), the rows of k"
    )


def no_gradients(*tensors: Any) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{OP}: key_rows is for inference and must come without gradients, got q, k, v, bias, "
            "relative_keys or sinks that requires one"
        )


def offset(offset: Any) -> None:
    if isinstance(offset, int) and not -MAX_OFFSET <= offset <= MAX_OFFSET:
        raise ValueError(f"{OP}: offset must be in [-2**62, 2**62], got {offset}")
    check.whole_number(OP, "offset", offset)


def device(name: str, value: Any, q: Tensor) -> None:
    check.tensor(OP, name, value)
    if value.device != q.device:
        raise ValueError(f"{OP}: {name} must be on the device of q, {q.device}, got {value.device}")


def broadcast(name: str, value: Tensor | None, whole: tuple[int, int, int, int]) -> Tensor | None:
    """Returns `value` with four dimensions, each 1 or that of `whole`, (B, N, L, S)."""
    if value is None:
        return None
    sizes = (1,) * (4 - value.dim()) + tuple(value.shape)
    if len(sizes) != 4 or any(n not in (1, most) for n, most in zip(sizes, whole, strict=True)):
        raise ValueError(
            f"{OP}: {name} must be broadcastable to (B, N, L, S) = {whole}, got "
            f"{tuple(value.shape)}"
        )
    return value.reshape(sizes)


def mask(mask: Tensor | None, q: Tensor, sizes: tuple[int, int, int, int]) -> Tensor | None:
    if mask is None:
        return None
    device("mask", mask, q)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{OP}: mask must be bool, True where a key is visible, got {mask.dtype}; a float "
            "mask is a bias"
        )
    return broadcast("mask", mask, sizes)


def constant(name: str, value: Tensor | None, q: Tensor) -> Tensor | None:
    if value is None:
        return None
    device(name, value, q)
    if value.dtype not in (torch.float32, q.dtype):
        raise TypeError(
            f"{OP}: {name} must be float32 or of the dtype of q, {q.dtype}, got {value.dtype}"
        )
    return value.detach()


def rope(
    rope: Tensor | None, q: Tensor, sizes: tuple[int, int, int, int], offset: int
) -> Tensor | None:
    rope = constant("rope", rope, q)
    if rope is None:
        return None
    (_, _, L, S), D = sizes, q.size(-1)
    check.dimensions(OP, "rope", rope, "(P, R)")
    least, R = max(S, L + offset), rope.size(1)
    if R % 2 or not 2 <= R <= D or rope.size(0) < least or offset < 0:
        raise ValueError(
            f"{OP}: rope must be (P, R) with an even R from 2 to D = {D} and P at least {least}, "
            f"the number of positions, and offset at least 0, got {tuple(rope.shape)} and offset "
            f"{offset}"
        )
    return rope


def relative_keys(relative_keys: Tensor | None, q: Tensor) -> None:
    if relative_keys is None:
        return
    check.dimensions(OP, "relative_keys", relative_keys, "(2K + 1, D)")
    D = q.size(-1)
    if relative_keys.size(1) != D or relative_keys.size(0) % 2 == 0:
        raise ValueError(
            f"{OP}: relative_keys must be (2K + 1, D) with D = {D} and an odd number of rows, got "
            f"{tuple(relative_keys.shape)}"
        )
