"""The recurrences by the CUDA kernels on the simulated GPU.

Differentiable functions with the operators' arguments, so that testing.check tests them like
fused.lstm.
"""

import ctypes

import torch
from fusedseq.reference.dropout_mask import INPUT, STATE, WEIGHT, ZONEOUT_C, ZONEOUT_H

from tests.simt.memory import (
    LayerInterface,
    Layers,
    LayersBackward,
    Mask,
    Recurrence,
    RecurrenceBackward,
    RecurrenceGradients,
)

TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
]  # in the order of csrc/cuda/type.h
# {operator: (CellKind of csrc/math/cell_kind.h, gates, slots, terms, statistics)}
CELLS = {
    "lstm": (0, 4, 4, 0, 0),
    "gru": (1, 3, 4, 0, 0),
    "rnn": (2, 1, 1, 0, 0),
    "rnn of relu": (3, 1, 1, 0, 0),
    "peephole_lstm": (4, 4, 4, 3, 0),
    "layer_norm_lstm": (5, 4, 8, 6, 4),
    "layer_norm_gru": (6, 3, 6, 4, 2),
}
ROUND_WEIGHTS = ["Q", "Q_factor", "Q_bias", "R", "R_factor", "R_bias"]


def pad(n):
    return (n + 15) // 16 * 16


def address(t):
    return None if t is None else t.data_ptr()


def mask(p, stream):
    return Mask(stream, round(p * 2**32), p, 1 / (1 - p) if p < 1 else 0.0)


def each_round(rounds, q, r):
    """Returns each round's address in (n, ...) tensors: even rounds in q, odd ones in r; 0 if
    absent.
    """
    found = []
    for k in range(rounds):
        t = r if k % 2 else q
        found.append(0 if t is None else t[k // 2 % len(t)].data_ptr())
    return found + [0] * (64 - rounds)


class Layer:
    """A layer's tensors in guarded memory, and the structures of csrc/cuda/recurrence/arguments.h
    that point to them.
    """

    def __init__(self, kernels, order, lengths, rounds, options, given):
        self.kernels, self.order, self.names = kernels, order, list(given)
        cell, _, slots, self.terms_of_cell, statistics = CELLS[options["cell"]]
        self.slots = slots
        s = dict.fromkeys(["b", "c0", "vectors", *ROUND_WEIGHTS]) | {
            name: kernels.copy(t) for name, t in given.items()
        }
        x, h0 = s["x"], s["h0"]
        (T, B, X), H, own = x.shape, h0.size(1), x.dtype
        computing = own if own == torch.float64 else torch.float32
        factored = s["Q_factor"] is not None
        lengths = None if lengths is None else kernels.copy(lengths)
        starts = options["starts"]
        starts = None if starts is None else kernels.copy(starts)
        key = kernels.copy(torch.tensor([options["seed"]]))
        Xp, Hp = pad(X), pad(H)
        width = (rounds + 1) // 2 * Xp + rounds // 2 * Hp
        y, h, c = (
            kernels.empty((T, B, H), own),
            kernels.empty((B, H), own),
            None if s["c0"] is None else kernels.empty((B, H), own),
        )
        saved = [
            kernels.empty((T, B, slots, Hp), own),
            None if c is None else kernels.empty((T, B, Hp), computing),
            kernels.empty((T, B, width), own),
            kernels.empty((T, B, statistics), computing),
        ]
        dense, factors = (
            (None, None) if factored else (s["Q"], s["R"]),
            (s["Q"], s["R"]) if factored else (None, None),
        )
        self.r = r = Recurrence(
            type=TYPES.index(own),
            cell=cell,
            steps=T,
            B=B,
            X=X,
            H=H,
            rounds=rounds,
            Xp=Xp,
            Hp=Hp,
            round_width=width,
            cap_input_gate=options["cap_input_gate"],
            training=options["training"],
            reverse=options["reverse"],
            seed=key.data_ptr(),
            state=mask(options["state_dropout"] if options["training"] else 0.0, STATE),
            zoneout_h=mask(options["zoneout_h"], ZONEOUT_H),
            zoneout_c=mask(options["zoneout_c"], ZONEOUT_C),
            weight=mask(options["weight_drop"] if options["training"] else 0.0, WEIGHT),
            variational=options["variational"],
            lengths=address(lengths),
            starts=address(starts),
            x=x.data_ptr(),
            W_ih=s["W_ih"].data_ptr(),
            W_hh=s["W_hh"].data_ptr(),
            b=address(s["b"]),
            vectors=address(s["vectors"]),
            eps=options["eps"],
            h0=h0.data_ptr(),
            c0=address(s["c0"]),
            rank=s["Q_factor"].size(1) if factored else 0,
            y=y.data_ptr(),
            h=h.data_ptr(),
            c=address(c),
            gates=saved[0].data_ptr(),
            cells=address(saved[1]),
            round_gates=saved[2].data_ptr(),
            statistics=saved[3].data_ptr(),
        )
        r.Q[:] = each_round(rounds, *dense)
        r.A[:] = each_round(rounds, *factors)
        r.F[:] = each_round(rounds, s["Q_factor"], s["R_factor"])
        r.bias[:] = each_round(rounds, s["Q_bias"], s["R_bias"])
        self.multiplied_out = kernels.recur("multiply_out", r, order) if factored else None
        self.inputs, self.results, self.saved = s, (y, h, c), saved
        self.lengths, self.starts, self.key = lengths, starts, key

    def outputs(self):
        return tuple(None if t is None else t.clone() for t in self.results)

    def backward(self, dy, dh, dc):
        """Returns the argument of a backward loop, with memory for its results; dy may be None."""
        kernels, r = self.kernels, self.r
        own, (_, h, c) = self.inputs["x"].dtype, self.results
        dh = torch.zeros_like(h) if dh is None else dh
        dc = torch.zeros_like(c) if dc is None and c is not None else dc
        self.output_gradients = [
            None if t is None else kernels.copy(t.contiguous()) for t in (dy, dh, dc)
        ]
        self.d = {
            name: None if t is None else kernels.empty(t.shape, own)
            for name, t in self.inputs.items()
        }
        self.dz = kernels.empty((r.steps, r.B, self.slots * r.H), own)
        self.terms = kernels.empty((r.steps, r.B, self.terms_of_cell * r.H), own)
        self.dround = kernels.empty((r.steps, r.B, r.round_width), own)
        self.g = RecurrenceBackward(
            r,
            *(None if t is None else t.data_ptr() for t in self.output_gradients),
            self.dz.data_ptr(),
            self.terms.data_ptr(),
            self.dround.data_ptr(),
            self.d["x"].data_ptr() if r.rounds else None,
            self.d["h0"].data_ptr(),
            address(self.d["c0"]),
        )
        return self.g

    def gradients(self):
        """Returns the gradients of the tensors, after the backward loop."""
        r, d = self.r, self.d
        dx = None if r.rounds else d["x"].data_ptr()
        shared = (d[name] for name in ("W_ih", "W_hh", "b", "vectors"))
        w = RecurrenceGradients(self.g, dx, *(address(t) for t in shared))
        w.dQ[:] = each_round(r.rounds, d["Q"], d["R"])
        w.dF[:] = each_round(r.rounds, d["Q_factor"], d["R_factor"])
        w.dbias[:] = each_round(r.rounds, d["Q_bias"], d["R_bias"])
        self.kernels.recur("gradients", w, self.order)
        return [d[name].clone() for name in self.names]


class Simulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, engine, order, lengths, rounds, options, names, *tensors):
        forward, _, backward = engine.partition(", ")
        ctx.engine, ctx.layer = (
            backward or forward,
            Layer(kernels, order, lengths, rounds, options, dict(zip(names, tensors, strict=True))),
        )
        kernels.recur(f"{forward}_forward", ctx.layer.r, order)
        return ctx.layer.outputs()

    @staticmethod
    def backward(ctx, dy, dh, dc):
        layer = ctx.layer
        layer.kernels.recur(f"{ctx.engine}_backward", layer.backward(dy, dh, dc), layer.order)
        return (None,) * 7 + tuple(layer.gradients())


class Wavefront(torch.autograd.Function):
    """Two layers in one launch. settings: (lengths, rounds, options, names of its tensors) of each
    layer
    """

    @staticmethod
    def forward(ctx, kernels, order, p, locked, settings, *tensors):
        ctx.set_materialize_grads(False)
        x, *tensors = tensors
        layers = []
        for lengths, rounds, options, names in settings:
            given = dict(zip(names, tensors, strict=False))
            layers.append(Layer(kernels, order, lengths, rounds, options, {"x": x, **given}))
            tensors = tensors[len(names) :]
            x = layers[0].results[0]
        first, second = layers
        second.inputs["x"] = kernels.empty(x.shape, x.dtype) if p else x
        second.r.x = second.inputs["x"].data_ptr()
        between = LayerInterface(
            mask(p, INPUT), locked, second.key.data_ptr(), second.r.x if p else None
        )
        kernels.recur(
            "wavefront_forward",
            Layers(ctypes.pointer(first.r), ctypes.pointer(second.r), between),
            order,
        )
        ctx.kernels, ctx.order, ctx.layers, ctx.between = kernels, order, layers, between
        return *first.outputs(), *second.outputs()

    @staticmethod
    def backward(ctx, *output_gradients):
        first, second = ctx.layers
        dy, dh, dc = output_gradients[3:]
        b = (
            first.backward(*output_gradients[:3]),
            second.backward(torch.zeros_like(second.results[0]) if dy is None else dy, dh, dc),
        )
        ctx.between.tensor = second.d["x"].data_ptr()
        both = LayersBackward(ctypes.pointer(b[0]), ctypes.pointer(b[1]), ctx.between)
        ctx.kernels.recur("wavefront_backward", both, ctx.order)
        return (None,) * 5 + (*first.gradients(), *second.gradients()[1:])


NO_OPTIONS = {
    "cell": "lstm",
    "starts": None,
    "reverse": False,
    "eps": 0.0,
    "cap_input_gate": False,
    "training": True,
    "state_dropout": 0.0,
    "zoneout_h": 0.0,
    "zoneout_c": 0.0,
    "weight_drop": 0.0,
    "variational": False,
    "seed": 0,
}


def operators(kernels, order, engine="loop"):
    """Returns {operator: function}. order: seed of the threads' order    engine: "loop",
    "persistent", "words" (the persistent kernels with words in place of flags), or one for forward
    and one for backward, as in "loop, persistent"
    """

    def call(tensors, lengths, rounds, options):
        given = {name: t for name, t in tensors.items() if t is not None}
        y, h, c = Simulation.apply(
            kernels,
            engine,
            order,
            lengths,
            rounds,
            NO_OPTIONS | options,
            list(given),
            *given.values(),
        )
        return y, (h, c)

    def lstm(x, W_ih, W_hh, b, h0, c0, lengths=None, **options):
        return call(
            {"x": x, "W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h0, "c0": c0}, lengths, 0, options
        )

    def mogrifier_lstm(
        x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias=None, R_bias=None, *, rounds, lengths=None, **options
    ):
        return call(
            {"x": x, **named(W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias)}, lengths, rounds, options
        )

    def mogrifier_lstm_pair(x, first, second):
        (a, *of_first), (b, *of_second) = settings(**first), settings(**second)
        p = b[2].get("input_dropout", 0.0) if b[2].get("training", True) else 0.0
        y, h, c, *others = Wavefront.apply(
            kernels,
            order,
            p,
            b[2].get("locked_input", False),
            [
                (lengths, rounds, NO_OPTIONS | options, names)
                for lengths, rounds, options, names in (a, b)
            ],
            x,
            *of_first,
            *of_second,
        )
        return (y, (h, c)), (others[0], tuple(others[1:]))

    def hidden_state(cell):
        def run(x, W_ih, W_hh, b, h0, lengths=None, relu=False, **options):
            options["cell"] = "rnn of relu" if relu else cell
            tensors = {"x": x, "W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h0}
            y, (h, _) = call(tensors, lengths, 0, options)
            return y, h

        return run

    def peephole_lstm(x, W_ih, W_hh, b, peephole, h0, c0, lengths=None, **options):
        tensors = {"x": x, "W_ih": W_ih, "W_hh": W_hh, "b": b, "vectors": peephole}
        return call(tensors | {"h0": h0, "c0": c0}, lengths, 0, options | {"cell": "peephole_lstm"})

    def layer_norm_gru(x, W_ih, W_hh, b, gamma_ih, gamma_hh, h0, lengths=None, **options):
        vectors = torch.cat([gamma_ih, gamma_hh])
        tensors = {"x": x, "W_ih": W_ih, "W_hh": W_hh, "b": b, "vectors": vectors, "h0": h0}
        options = {"eps": 1e-5, **options, "cell": "layer_norm_gru"}
        y, (h, _) = call(tensors, lengths, 0, options)
        return y, h

    def layer_norm_lstm(
        x, W_ih, W_hh, b, gamma_ih, gamma_hh, gamma_c, beta_c, h0, c0, lengths=None, **options
    ):
        vectors = torch.cat([gamma_ih, gamma_hh, gamma_c, beta_c])
        tensors = {"x": x, "W_ih": W_ih, "W_hh": W_hh, "b": b, "vectors": vectors}
        options = {"eps": 1e-5, **options, "cell": "layer_norm_lstm"}
        return call(tensors | {"h0": h0, "c0": c0}, lengths, 0, options)

    return {
        "lstm": lstm,
        "mogrifier_lstm": mogrifier_lstm,
        "mogrifier_lstm_pair": mogrifier_lstm_pair,
        "gru": hidden_state("gru"),
        "rnn": hidden_state("rnn"),
        "peephole_lstm": peephole_lstm,
        "layer_norm_gru": layer_norm_gru,
        "layer_norm_lstm": layer_norm_lstm,
    }


def named(W_ih, W_hh, b, h0, c0, Q, R, Q_bias=None, R_bias=None):
    """Returns the tensors of a layer without x and without those that are None."""
    Q, Q_factor = Q if isinstance(Q, tuple) else (Q, None)
    R, R_factor = R if isinstance(R, tuple) else (R, None)
    found = {
        "W_ih": W_ih,
        "W_hh": W_hh,
        "b": b,
        "h0": h0,
        "c0": c0,
        "Q": Q,
        "Q_factor": Q_factor,
        "R": R,
        "R_factor": R_factor,
        "Q_bias": Q_bias,
        "R_bias": R_bias,
    }
    return {name: t for name, t in found.items() if t is not None}


def settings(
    rounds,
    lengths=None,
    W_ih=None,
    W_hh=None,
    b=None,
    h0=None,
    c0=None,
    Q=None,
    R=None,
    Q_bias=None,
    R_bias=None,
    **options,
):
    """Returns the arguments of `Wavefront` for one layer: its settings, then its tensors."""
    tensors = named(W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias)
    return (lengths, rounds, options, list(tensors)), *tensors.values()
