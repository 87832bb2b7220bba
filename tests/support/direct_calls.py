"""Calls the registered operators torch.ops.fusedseq.* with wrong arguments: a fuzz of the guards in
csrc/ops.

    python tests/support/direct_calls.py LIBRARY [PAIRS]

LIBRARY is a _ops.so, which may be instrumented by AddressSanitizer; the package fusedseq is not
imported, so that nothing stands between a call and the C++ code. Every operator is called with each
argument replaced by each wrong value in turn, and then PAIRS times with two arguments replaced. A
call must return or raise an exception of Python; it must not end the process. The last line names
the number of calls.

Sizes that are meant to be huge exceed the address space, so that no system grants the memory.
"""

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

OPS = torch.ops.fusedseq
HUGE = (2**48, 2**62, 2**62 + 2**16)
INTEGERS = (-(2**63), -(2**62) - 1, -1, 0, 1, 2, 3, 7, 63, 64, 96, *HUGE, 2**63 - 1, 2**64)
NUMBERS = (float("nan"), float("inf"), -float("inf"), -0.1, 0.0, 0.5, 1.0, 1.5, 1e308)
NAMES = ("", "swish", "relu\0", "tanh")
SHAPES = ([], [0], [-1], [3, -1, 5], [2**62, 2**62], [2**62 + 2**16, 4], [2**48], [0, 2**62, 8])
DTYPES = (
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
EXCEPTIONS = (RuntimeError, ValueError, TypeError, IndexError, MemoryError, NotImplementedError)

Call = dict[str, Any]


WEIGHTS = ("W_ih", "W_hh", "Q", "Q_factor", "R", "R_factor")
OF_A_DIRECTION = ("x", "W_ih", "W_hh", "b", "h0", "c0", "starts", "seed")


def seed() -> Tensor:
    return torch.tensor(7)


def calls() -> Iterator[tuple[str, Call]]:
    """Right calls: (operator, arguments by name)."""
    for op, call in recurrences():
        yield op, call
        if hasattr(OPS, f"{op}_inference"):
            yield f"{op}_inference", call
    yield from recurrences_in_8_bits()
    yield from attentions()
    yield from losses()
    yield from pointwise()
    yield from products()


def recurrences_in_8_bits() -> Iterator[tuple[str, Call]]:
    for op, call in recurrences():
        if hasattr(OPS, f"{op}_int8"):
            yield f"{op}_int8", in_8_bits(call)


def in_8_bits(call: Call) -> Call:
    """The call of `<op>_int8` that corresponds to one of `<op>`."""
    weights = {name: call[name] for name in WEIGHTS if name in call}
    numbers: Call = dict.fromkeys(weights)
    scales: Call = {f"{name}_scale": None for name in weights}
    for name, W in weights.items():
        if W is not None:
            numbers[name] = torch.randint(-127, 128, W.shape).to(torch.int8)
            scales[f"{name}_scale"] = torch.rand(W.shape[:-1])
    return {**call, **numbers, **scales}


def recurrences() -> Iterator[tuple[str, Call]]:
    T, B, X, H = 3, 2, 5, 4
    x = torch.randn(T, B, X)
    layer = {
        "W_ih": torch.randn(4 * H, X),
        "W_hh": torch.randn(4 * H, H),
        "b": torch.randn(4 * H),
        "h0": torch.randn(B, H),
        "c0": torch.randn(B, H),
        "lengths": torch.tensor([3, 1]),
    }
    drop = {"seed": seed(), "weight_drop": 0.5, "variational": False}
    gradients = {"dy": torch.randn(T, B, H), "dh": torch.randn(B, H), "dc": torch.randn(B, H)}

    order = {"starts": torch.rand(T, B) < 0.5, "reverse": True}
    lstm = {"x": x, **order, **layer, **drop}
    yield "lstm", lstm
    y, _, _, gates, cells = OPS.lstm(**lstm)
    saved = {"y": y, "gates": gates, "cells": cells, "needs": 63}
    yield "lstm_backward", {**gradients, **lstm, **saved}

    reverse = {f"{name}_reverse": value for name, value in lstm.items() if name in OF_A_DIRECTION}
    both = {name: value for name, value in lstm.items() if name != "reverse"} | reverse
    yield "bidirectional_lstm", both
    y_reverse, _, _, gates_reverse, cells_reverse = OPS.bidirectional_lstm(**both)[5:]
    saved = saved | {"y_reverse": y_reverse, "gates_reverse": gates_reverse}
    saved |= {"cells_reverse": cells_reverse, "needs": 4095}
    given = gradients | {f"{name}_reverse": value for name, value in gradients.items()}
    yield "bidirectional_lstm_backward", {**both, **given, **saved}

    vectors = {
        "peephole_lstm": {"peephole": torch.randn(3 * H)},
        "layer_norm_lstm": {"norm": torch.randn(10 * H), "eps": 1e-5},
    }
    zoneout = {"training": True, "zoneout_h": 0.1}
    for op, own in vectors.items():
        own = {**zoneout, "zoneout_c": 0.1, **own}
        yield op, {**lstm, **own}
        y, _, _, *tensors = getattr(OPS, op)(**lstm, **own)
        names = ("gates", "cells", "statistics")
        saved = {"y": y, **dict(zip(names, tensors, strict=False)), "needs": 127}
        yield f"{op}_backward", {**gradients, **lstm, **own, **saved}

    P = 3
    of_projection = {
        "W_hh": torch.randn(4 * H, P),
        "W_hr": torch.randn(P, H),
        "h0": torch.randn(B, P),
        "training": True,
        "zoneout_c": 0.1,
    }
    projected = {**lstm, **of_projection}
    yield "projected_lstm", projected
    y, _, _, gates, cells = OPS.projected_lstm(**projected)
    saved = {"y": y, "gates": gates, "cells": cells, "needs": 127}
    narrow = {"dy": torch.randn(T, B, P), "dh": torch.randn(B, P)}
    yield "projected_lstm_backward", {**gradients, **narrow, **projected, **saved}

    for op, gates, slots, settings in (
        ("gru", 3, 4, {}),
        ("rnn", 1, 1, {"relu": False}),
        ("layer_norm_gru", 3, 4, {"norm": torch.randn(6 * H), "eps": 1e-5}),
    ):
        hidden_state = {
            "x": x,
            **order,
            "W_ih": torch.randn(gates * H, X),
            "W_hh": torch.randn(gates * H, H),
            "b": torch.randn(slots * H),
            "h0": layer["h0"],
            "lengths": layer["lengths"],
            **drop,
            **zoneout,
            **settings,
        }
        yield op, hidden_state
        y, _, *tensors = getattr(OPS, op)(**hidden_state)
        of_outputs = {name: gradients[name] for name in ("dy", "dh")}
        saved = {"y": y, **dict(zip(("gates", "statistics"), tensors, strict=False))}
        saved["needs"] = 63 if "norm" in settings else 31
        yield f"{op}_backward", {**of_outputs, **hidden_state, **saved}

    settings = {
        **drop,
        "rounds": 3,
        "cap_input_gate": True,
        "training": True,
        "state_dropout": 0.2,
        "zoneout_h": 0.1,
        "zoneout_c": 0.1,
    }
    full = {"Q": torch.randn(2, X, H), "R": torch.randn(1, H, X), "Q_factor": None}
    rank = {
        "Q": torch.randn(2, X, 2),
        "Q_factor": torch.randn(2, 2, H),
        "R": torch.randn(1, H, 2),
        "R_factor": torch.randn(1, 2, X),
    }
    biases = {"Q_bias": torch.randn(2, X), "R_bias": torch.randn(1, H)}
    for rounds in ({**full, "R_factor": None}, rank):
        mogrifier = {"x": x, **order, **layer, **rounds, **biases, **settings}
        yield "mogrifier_lstm", mogrifier
        y, _, _, gates, cells, round_gates, factors = OPS.mogrifier_lstm(**mogrifier)
        saved = {"y": y, "gates": gates, "cells": cells, "round_gates": round_gates}
        yield (
            "mogrifier_lstm_backward",
            {**gradients, **mogrifier, **saved, "factors": factors, "needs": 4095},
        )


def attentions() -> Iterator[tuple[str, Call]]:
    none = dict.fromkeys(
        ("bias", "mask", "key_lengths", "alibi", "relative_keys", "rope", "key_rows", "seed")
    )
    none |= dict.fromkeys(("sinks", "cu_seqlens_q", "cu_seqlens_k"))
    settings = {
        "rope_interleaved": True,
        "scale": 0.5,
        "causal": False,
        "offset": 0,
        "dropout": 0.0,
        "softcap": 0.0,
        "window_left": -1,
        "window_right": -1,
        "max_seqlen_q": 0,
        "max_seqlen_k": 0,
    }
    B, N, S, D = 2, 2, 5, 6
    # The kernels `few_queries`, `packed` and `blocks`, one after the other.
    for L, keys in ((1, 40), (4, S), (20, 20)):
        q = torch.randn(B, N, L, D)
        k, v = torch.randn(2, B, N, keys, D)
        terms = {
            "bias": torch.randn(1, N, L, keys),
            "mask": torch.rand(B, 1, L, keys) < 0.7,
            "key_lengths": torch.tensor([keys, 1]),
            "alibi": torch.rand(N),
            "relative_keys": torch.randn(5, D) if L != 4 else None,
            "rope": torch.randn(L + keys + 3, D),
            "key_rows": torch.zeros(B, keys, dtype=torch.int64),
            "seed": seed(),
            "sinks": torch.randn(N),
            "cu_seqlens_q": None,
            "cu_seqlens_k": None,
        }
        masks = {"rope_interleaved": L != 4, "causal": True, "offset": 1, "dropout": 0.3}
        masks |= {"softcap": 3.0, "window_left": 7, "window_right": 0}
        for options in (none | settings, terms | settings | masks):
            call = {"q": q, "k": k, "v": v, **options}
            yield "attention", call
            names = [a.name for a in OPS.attention_plan.default._schema.arguments]
            yield "attention_plan", {name: call[name] for name in names}
            plain = {"q": q, "k": k, "v": v, "scale": 0.5}
            yield "attention_plain", plain
            yield "attention_plain_inference", plain
            out, lse = OPS.attention_plain(**plain)
            upstream = {"dout": torch.randn(out.shape), "lse": lse}
            for needs in (7, 5, 2):
                yield "attention_plain_backward", {**upstream, **plain, "needs": needs}
            seen = {name: value for name, value in call.items() if name != "key_rows"}
            yield "attention_backward", with_output(seen, 63)
    # Sequences of 3, 0 and 4 queries, and of 5, 2 and 4 keys.
    ends = {"cu_seqlens_q": torch.tensor([0, 3, 3, 7]), "cu_seqlens_k": torch.tensor([0, 5, 7, 11])}
    sizes = {"max_seqlen_q": 4, "max_seqlen_k": 5}
    rows = {
        "q": torch.randn(1, N, 7, D),
        "k": torch.randn(1, N, 11, D),
        "v": torch.randn(1, N, 11, D),
    }
    ragged = rows | none | settings | ends | sizes
    yield "attention", ragged
    without = {name: value for name, value in ragged.items() if name != "key_rows"}
    yield "attention_backward", with_output(without, 63)
    # Views of one projection, whose gradients are laid out as that of the projection.
    options = {name: value for name, value in none.items() if name != "key_rows"} | settings
    q, k, v = torch.randn(B, 4, 3, N, D).permute(2, 0, 3, 1, 4)
    keys, values = torch.randn(B, 4, 2, N, D).permute(2, 0, 3, 1, 4)
    yield "attention_backward", with_output({"q": q, "k": keys, "v": values, **options}, 1 << 7)
    yield "attention_backward", with_output({"q": q, "k": k, "v": v, **options}, 1 << 6)


def with_output(call: Call, needs: int) -> Call:
    out, lse = OPS.attention(**call, key_rows=None)
    return {"dout": torch.randn(out.shape), "out": out, "lse": lse, **call, "needs": needs}


def losses() -> Iterator[tuple[str, Call]]:
    N, E, V = 6, 5, 9
    tensors = {
        "x": torch.randn(N, E),
        "W": torch.randn(V, E),
        "target": torch.tensor([0, 8, -100, 3, 3, 2]),
        "b": torch.randn(V),
        "class_weights": torch.rand(V),
    }
    options = {
        "ignore_index": -100,
        "label_smoothing": 0.1,
        "z_loss": 0.1,
        "temperature": 2.0,
        "reduction": 1,
    }
    loss = {**tensors, **options, "needs": 7}
    yield "linear_cross_entropy", loss
    _, log_prob, lse, _, dx, dW, db = OPS.linear_cross_entropy(**loss)
    gradients = {"dlog_prob": torch.randn(N), "dlse": torch.randn(N), "lse": lse}
    yield "linear_cross_entropy_backward", {**gradients, "dloss": torch.ones(()), **loss}
    each = {**loss, "reduction": 0}
    yield "linear_cross_entropy_backward", {**gradients, "dloss": torch.randn(N), **each}
    scale = {"dx": dx, "dW": dW, "db": db, "dloss": torch.ones(()), "needs": 7}
    scale["x"] = loss["x"]
    yield "linear_cross_entropy_scale", scale

    activations = {"dropped": torch.randn(4, 2, 5), "raw": torch.randn(4, 2, 5)}
    activations |= {"alpha": 2.0, "beta": 1.0}
    yield "activation_regularization", activations
    yield "activation_regularization_backward", {"dloss": torch.ones(()), **activations}

    params, grads = [torch.randn(3, 5), torch.randn(7)], [torch.randn(3, 5), torch.randn(7)]
    yield "nt_asgd_norm", {"grads": grads}
    step = {"params": params, "grads": grads, "norm": torch.ones(())}
    step |= {"max_norm": 0.25, "lr": 1.0, "weight_decay": 0.1, "mu": 0.5}
    yield "nt_asgd_step_", {**step, "averages": []}
    yield "nt_asgd_step_", {**step, "averages": [p.clone() for p in params]}


def pointwise() -> Iterator[tuple[str, Call]]:
    masked = {"p": 0.5, "seed": seed()}
    yield "dropout", {"x": torch.randn(3, 5), **masked}
    yield "locked_dropout", {"x": torch.randn(3, 2, 5), **masked}
    for variational in (False, True):
        yield "weight_drop", {"W": torch.randn(6, 5), **masked, "variational": variational}
    yield "dropout_mask", {**masked, "shape": [3, 5]}

    ids, words = torch.tensor([[0, 6], [3, 3]]), {"p": 0.5, "seed": seed()}
    yield "embedding", {"ids": ids, "W": torch.randn(7, 4), **words}
    rows = {"dy": torch.randn(2, 2, 4), "ids": ids, "V": 7, **words}
    yield "embedding_backward", {**rows, "keys": None}
    yield "embedding_backward", {**rows, "keys": torch.arange(7)}

    x, weight, bias = torch.randn(4, 5), torch.randn(5), torch.randn(5)
    for activation in ("relu", "gelu"):
        layer = {"x": x, "b": bias, "activation": activation, **masked}
        yield "bias_activation_dropout", layer
        backward = {"dy": torch.randn(4, 5), **layer, "needs": 3}
        yield "bias_activation_dropout_backward", backward
    for prenorm in (False, True):
        inputs = {"x": x, "residual": torch.randn(4, 5), "weight": weight}
        norm = {**inputs, "bias": bias, "eps": 1e-5, "prenorm": prenorm, **masked}
        yield "residual_layer_norm", norm
        _, s, mean, rstd = OPS.residual_layer_norm(**norm)
        saved = {"s": s if prenorm else None, "mean": mean, "rstd": rstd}
        gradients = {"dy": torch.randn(4, 5), "ds": torch.randn(4, 5) if prenorm else None}
        yield (
            "residual_layer_norm_backward",
            {**gradients, **inputs, **saved, **masked, "needs": 15},
        )


def products() -> Iterator[tuple[str, Call]]:
    x, W, b = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    yield "linear", {"x": x, "W": W, "b": b}
    yield "linear_backward", {"dy": torch.randn(3, 4), "x": x, "W": W, "needs": 7}
    numbers = torch.ones(4, 5, dtype=torch.int8)
    yield "linear_int8", {"x": x, "W": numbers, "scale": torch.ones(4), "b": b}
    yield "gemm_rate", {"x": x, "W": W, "repeats": 1}


def wrong_tensors(t: Tensor) -> Iterator[Any]:
    """Tensors that differ from t in shape, dtype, layout, device or values."""
    yield from (None, 3, t.new_zeros(0), t.new_zeros(()), t.new_zeros(0, 0, 0, 0), t[None])
    yield from (t.flatten(), t.flatten()[:1], t.to("meta"), t.reshape(*t.shape, 1))
    yield from (t.to(dtype) for dtype in DTYPES)
    for d in range(t.dim()):
        n = t.size(d)
        yield from (t.narrow(d, 0, 0), t.narrow(d, 0, n - 1) if n else t, torch.cat([t, t], d))
        yield t.select(d, 0) if n else t
        yield t.repeat_interleave(2, d).narrow(d, 0, 2 * n)[
            (slice(None),) * d + (slice(None, None, 2),)
        ]
        yield t.transpose(d, -1).contiguous().transpose(d, -1)
        for huge in HUGE:
            one = t.narrow(d, 0, 1) if n else t
            shape = [huge if e == d else m for e, m in enumerate(t.shape)]
            yield lambda one=one, shape=shape: one.expand(shape)
            ones = t[(slice(0, 1),) * t.dim()]
            shape = [huge if e == d else 1 for e in range(t.dim())]
            yield lambda ones=ones, shape=shape: ones.expand(shape)
            yield lambda d=d, huge=huge: t.new_zeros(0).expand(
                [0, *(huge if e == d else 1 for e in range(1, t.dim()))]
            )
    yield t[(slice(0, 1),) * t.dim()].expand(t.shape) if t.numel() else t
    yield lambda: t.to_sparse()
    if t.dtype == torch.int64:
        yield from (torch.full_like(t, n) for n in (-(2**63), -1, 10, 2**62, 2**63 - 1))
    elif t.is_floating_point():
        yield from (torch.full_like(t, n) for n in NUMBERS if abs(n) != 1e308)


def wrong_values(value: Any, kind: str) -> Iterator[Any]:
    """kind: the argument's type in the schema"""
    if kind.startswith("List[Tensor"):
        yield from ([], value[:-1], [*value, *value], None, [None], [v.flatten() for v in value])
        for i, t in enumerate(value):
            for wrong in wrong_tensors(t):
                yield lambda wrong=wrong, i=i: [*value[:i], made(wrong), *value[i + 1 :]]
    elif "Tensor" in kind:
        example = value if value is not None else torch.randn(2, 3)
        yield from wrong_tensors(example)
        yield from (torch.arange(5), torch.randn(2, 2, 3, 4), torch.randn(5), torch.tensor(3))
    elif kind.startswith("List"):
        yield from (*SHAPES, None, 3)
    elif kind == "int":
        yield from (*INTEGERS, None, 1.5)
    elif kind == "float":
        yield from (*NUMBERS, None, "half")
    elif kind == "bool":
        yield from (not value, None, 2)
    elif kind == "str":
        yield from (*NAMES, None, 3)
    else:
        raise AssertionError(f"no wrong values are known for an argument of the type {kind}")


def made(value: Any) -> Any:
    """The wrong value; some can only be made by a call that torch may refuse."""
    return value() if callable(value) else value


def attempt(op: str, call: Call, changed: dict[str, Any]) -> bool:
    """Makes a wrong call; returns whether it was made."""
    try:
        changed = {name: made(value) for name, value in changed.items()}
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return False  # torch makes no such tensor
    # An operator that writes to its arguments gets copies.
    own = {
        n: [t.clone() for t in v] if isinstance(v, list) and v and isinstance(v[0], Tensor) else v
        for n, v in call.items()
    }
    with contextlib.suppress(*EXCEPTIONS):
        getattr(OPS, op)(**{**own, **changed})
    return True


def kinds(op: str) -> dict[str, str]:
    """The types of an operator's arguments by name."""
    return {a.name: str(a.type) for a in getattr(OPS, op).default._schema.arguments}


def registered() -> set[str]:
    names = (s.name for s in torch._C._jit_get_all_schemas())
    return {name.removeprefix("fusedseq::") for name in names if name.startswith("fusedseq::")}


ON_CUDA_ALONE = {"mogrifier_lstm_pair", "mogrifier_lstm_pair_backward"}


def main(library: str, pairs: int = 2000) -> None:
    torch.ops.load_library(library)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    every = list(calls())
    assert {op for op, _ in every} == registered() - ON_CUDA_ALONE, "an operator is not called"
    made_calls = 0
    choices: list[tuple[str, Call, dict[str, list[Any]]]] = []
    for op, call in every:
        getattr(OPS, op)(**call)  # the call is right
        wrong = {name: list(wrong_values(call[name], kind)) for name, kind in kinds(op).items()}
        choices.append((op, call, wrong))
        for name, values in wrong.items():
            for i, value in enumerate(values):
                print(f"{op}: {name} is wrong value {i}", file=sys.stderr, flush=True)
                made_calls += attempt(op, call, {name: value})
    draw = random.Random(0)
    for op, call, wrong in itertools.islice(itertools.cycle(choices), pairs):
        names = draw.sample(list(wrong), 2) if len(wrong) > 1 else list(wrong)
        picks = {name: draw.randrange(len(wrong[name])) for name in names}
        print(f"{op}: wrong values {picks}", file=sys.stderr, flush=True)
        made_calls += attempt(op, call, {name: wrong[name][i] for name, i in picks.items()})
    print(f"{made_calls} wrong calls")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
