"""LSTM, Mogrifier LSTM and attention in JAX, as an experienced user of JAX writes them.

A recurrence is a `lax.scan` with the product of all inputs before it, attention is
`jax.nn.dot_product_attention`. Everything that is timed is one function under `jax.jit`, compiled
before.
"""

import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax

# The size of XLA's pool of threads, which XLA reads when it creates its client, after this import.
os.environ["NPROC"] = str(torch.get_num_threads())


def settings():
    """Returns how JAX is run, for the result file.

    Vectors of 512 bits in place of 256 (--xla_cpu_prefer_vector_width=512) made the recurrences
    slower as often as faster, so XLA's flags are those of the user, by default none.
    """
    return {"XLA_FLAGS": os.environ.get("XLA_FLAGS") or "none", "threads": int(os.environ["NPROC"])}


def cell(gates, c):
    """The LSTM's cell: pre-activations (B, 4H) in torch's order i, f, g, o -> h and c."""
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def lstm(x, W_ih, W_hh, b, h0, c0):
    """`reference.lstm`."""
    W_hh_t = W_hh.T

    def step(state, z):
        h, c = cell(z + state[0] @ W_hh_t, state[1])
        return (h, c), h

    state, y = lax.scan(step, (h0, c0), x @ W_ih.T + b)
    return y, state


def mogrifier_lstm(x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias, *, rounds):
    """`reference.mogrifier_lstm` with full-rank weights for each round.

    The rounds' weights are taken from their stacks before the loop: inside it, XLA copies them in
    every step. One product of [x, h] for the gates is not faster than two.
    """
    W_ih_t, W_hh_t = W_ih.T, W_hh.T
    Q_t, R_t = ([weight.T for weight in weights] for weights in (Q, R))

    def step(state, x):
        h, c = state
        for k in range(rounds):
            if k % 2 == 0:
                x = 2 * jax.nn.sigmoid(h @ Q_t[k // 2] + Q_bias[k // 2]) * x
            else:
                h = 2 * jax.nn.sigmoid(x @ R_t[k // 2] + R_bias[k // 2]) * h
        h, c = cell(x @ W_ih_t + h @ W_hh_t + b, c)
        return (h, c), h

    state, y = lax.scan(step, (h0, c0), x)
    return y, state


def attention(q, k, v, *, causal=False, key_lengths=None):
    """`reference.attention` on tensors in JAX's layout, (B, L, N, D)."""
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, key_value_seq_lengths=key_lengths, implementation="xla"
    )


OPERATORS = {"lstm": lstm, "mogrifier_lstm": mogrifier_lstm, "attention": attention}


def supports(case):
    return case.op in OPERATORS


def to_jax(tensor, op):
    """Returns a tensor as JAX's array, that of attention in JAX's layout."""
    tensor = tensor.detach()
    return jnp.array((tensor.transpose(1, 2) if op == "attention" else tensor).numpy())


class Call:
    """A case compiled by XLA; calling it waits for its results.

    cotangents: the gradients of the results that a case with a backward is given
    compile_seconds: how long tracing and compilation took
    """

    def __init__(self, case, args, kwargs, cotangents):
        self.op, self.backward = case.op, case.backward
        options = dict(kwargs)
        if options.get("key_lengths") is not None:
            options["key_lengths"] = jnp.array(options["key_lengths"].numpy(), jnp.int32)
        function = partial(OPERATORS[case.op], **options)

        def forward_backward(inputs, cotangents):
            outputs, pullback = jax.vjp(function, *inputs)
            flat, structure = jax.tree.flatten(outputs)
            return flat, pullback(jax.tree.unflatten(structure, cotangents))

        inputs = tuple(to_jax(t, case.op) for t in args)
        if case.backward:
            self.inputs = inputs, [to_jax(t, case.op) for t in cotangents]
            timed = forward_backward
        else:
            self.inputs = inputs
            timed = function
        start = time.perf_counter()
        self.compiled = jax.jit(timed).lower(*self.inputs).compile()
        self.compile_seconds = time.perf_counter() - start

    def __call__(self):
        return jax.block_until_ready(self.compiled(*self.inputs))

    def results(self):
        """Returns results and gradients as tensors in the layout of the fused operator."""
        arrays = [torch.tensor(jax.device_get(a)) for a in jax.tree.leaves(self())]
        return [t.transpose(1, 2) for t in arrays] if self.op == "attention" else arrays
