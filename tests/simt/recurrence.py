"""lstm and mogrifier_lstm by the CUDA kernels of a simulated library: differentiable functions with the arguments of the
operators, so that testing.check takes them for fused.lstm and fused.mogrifier_lstm."""

import torch
from fusedseq.reference.mogrifier_lstm import STATE, WEIGHT, ZONEOUT_C, ZONEOUT_H
from simt.memory import Mask, Recurrence, RecurrenceBackward, RecurrenceGradients

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]  # in the order of csrc/cuda_type.h
ROUND_WEIGHTS = ["Q", "Q_factor", "Q_bias", "R", "R_factor", "R_bias"]


def pad(n):
    return (n + 15) // 16 * 16


def mask(p, stream):
    return Mask(stream, round(p * 2**32), p, 1 / (1 - p) if p < 1 else 0.0)


def each_round(rounds, q, r):
    """The address of each round's part of (n, ...) tensors, 0 where there is none: even rounds of q, odd ones of r."""
    found = []
    for k in range(rounds):
        t = r if k % 2 else q
        found.append(0 if t is None else t[k // 2 % len(t)].data_ptr())
    return found + [0] * (64 - rounds)


class Simulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, engine, seed, lengths, rounds, options, names, *tensors):
        s = dict.fromkeys(["b", *ROUND_WEIGHTS]) | dict(zip(names, map(kernels.copy, tensors), strict=True))
        x, h0 = s["x"], s["h0"]
        (T, B, X), H, own = x.shape, h0.size(1), x.dtype
        computing = own if own == torch.float64 else torch.float32
        factored = s["Q_factor"] is not None
        lengths = None if lengths is None else kernels.copy(lengths)
        key = kernels.copy(torch.tensor([options["seed"]]))
        Xp, Hp = pad(X), pad(H)
        width = (rounds + 1) // 2 * Xp + rounds // 2 * Hp
        y, h, c = kernels.empty((T, B, H), own), kernels.empty((B, H), own), kernels.empty((B, H), own)
        saved = [
            kernels.empty((T, B, 4, Hp), own),
            kernels.empty((T, B, Hp), computing),
            kernels.empty((T, B, width), own),
        ]
        dense, factors = (None, None) if factored else (s["Q"], s["R"]), (s["Q"], s["R"]) if factored else (None, None)
        r = Recurrence(
            type=TYPES.index(own), steps=T, B=B, X=X, H=H, rounds=rounds, Xp=Xp, Hp=Hp, round_width=width,
            cap_input_gate=options["cap_input_gate"], training=options["training"], seed=key.data_ptr(),
            state=mask(options["state_dropout"] if options["training"] else 0.0, STATE),
            zoneout_h=mask(options["zoneout_h"], ZONEOUT_H), zoneout_c=mask(options["zoneout_c"], ZONEOUT_C),
            weight=mask(options["weight_drop"] if options["training"] else 0.0, WEIGHT),
            weight_by_row=options["variational"],
            lengths=None if lengths is None else lengths.data_ptr(), x=x.data_ptr(), W_ih=s["W_ih"].data_ptr(),
            W_hh=s["W_hh"].data_ptr(), b=None if s["b"] is None else s["b"].data_ptr(), h0=h0.data_ptr(),
            c0=s["c0"].data_ptr(), rank=s["Q_factor"].size(1) if factored else 0,
            y=y.data_ptr(), h=h.data_ptr(), c=c.data_ptr(), gates=saved[0].data_ptr(), cells=saved[1].data_ptr(),
            round_gates=saved[2].data_ptr(),
        )  # fmt: skip
        r.Q[:] = each_round(rounds, *dense)
        r.A[:] = each_round(rounds, *factors)
        r.F[:] = each_round(rounds, s["Q_factor"], s["R_factor"])
        r.bias[:] = each_round(rounds, s["Q_bias"], s["R_bias"])
        ctx.keep = [kernels.recur("multiply_out", r, seed)] if factored else []
        kernels.recur(f"{engine}_forward", r, seed)
        ctx.keep += [s, lengths, key, y, saved]
        ctx.kernels, ctx.engine, ctx.seed, ctx.r, ctx.names = kernels, engine, seed, r, names
        return y.clone(), h.clone(), c.clone()

    @staticmethod
    def backward(ctx, dy, dh, dc):
        kernels, r, inputs = ctx.kernels, ctx.r, next(entry for entry in ctx.keep if isinstance(entry, dict))
        own = dy.dtype
        upstream = [kernels.copy(t.contiguous()) for t in (dy, dh, dc)]
        d = {name: None if t is None else kernels.empty(t.shape, own) for name, t in inputs.items()}
        dz = kernels.empty((r.steps, r.B, 4 * r.H), own)
        dround = kernels.empty((r.steps, r.B, r.round_width), own)
        dx = d["x"].data_ptr()
        g = RecurrenceBackward(
            r, *(t.data_ptr() for t in upstream), dz.data_ptr(), dround.data_ptr(), dx if r.rounds else None,
            d["h0"].data_ptr(), d["c0"].data_ptr()
        )  # fmt: skip
        kernels.recur(f"{ctx.engine}_backward", g, ctx.seed)
        db = None if d["b"] is None else d["b"].data_ptr()
        w = RecurrenceGradients(g, None if r.rounds else dx, d["W_ih"].data_ptr(), d["W_hh"].data_ptr(), db)
        w.dQ[:] = each_round(r.rounds, d["Q"], d["R"])
        w.dF[:] = each_round(r.rounds, d["Q_factor"], d["R_factor"])
        w.dbias[:] = each_round(r.rounds, d["Q_bias"], d["R_bias"])
        kernels.recur("gradients", w, ctx.seed)
        return (None,) * 7 + tuple(d[name].clone() for name in ctx.names)


NO_OPTIONS = {
    "cap_input_gate": False, "training": True, "state_dropout": 0.0, "zoneout_h": 0.0, "zoneout_c": 0.0,
    "weight_drop": 0.0, "variational": False, "seed": 0,
}  # fmt: skip


def operators(kernels, order, engine="loop"):
    """{name: function}; order: the seed of the order in which threads run    engine: loop or persistent"""

    def call(tensors, lengths, rounds, options):
        given = {name: t for name, t in tensors.items() if t is not None}
        y, h, c = Simulation.apply(
            kernels, engine, order, lengths, rounds, NO_OPTIONS | options, list(given), *given.values()
        )
        return y, (h, c)

    def lstm(x, W_ih, W_hh, b, h0, c0, lengths=None, **options):
        return call({"x": x, "W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h0, "c0": c0}, lengths, 0, options)

    def mogrifier_lstm(x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias=None, R_bias=None, *, rounds, lengths=None, **options):
        Q, Q_factor = Q if isinstance(Q, tuple) else (Q, None)
        R, R_factor = R if isinstance(R, tuple) else (R, None)
        tensors = {"x": x, "W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h0, "c0": c0, "Q": Q, "Q_factor": Q_factor, "R": R, "R_factor": R_factor,
                       "Q_bias": Q_bias, "R_bias": R_bias}  # fmt: skip
        return call(tensors, lengths, rounds, options)

    return {"lstm": lstm, "mogrifier_lstm": mogrifier_lstm}
