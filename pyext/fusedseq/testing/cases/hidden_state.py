"""Cases of `gru`, `rnn` and `layer_norm_gru`."""

import functools

import torch

from fusedseq.testing.cases.case import Case, join, option_words
from fusedseq.testing.cases.lstm import ORDERS, SIZES, with_order, zoneout_cases

GATES = {"gru": 3, "rnn": 1, "layer_norm_gru": 3}
BIASES = {"gru": 4, "rnn": 1, "layer_norm_gru": 4}


def hidden_state_case(
    op, T, B, X, H, *, bias=True, lengths=None, starts=None, scale=1.0, **options
):
    """A case of `gru`, `rnn` or `layer_norm_gru`; its arguments are those of `lstm_case`."""

    def make(randn):
        G = GATES[op] * H
        W_ih, W_hh = scale * X**-0.5 * randn(G, X), scale * H**-0.5 * randn(G, H)
        b = scale * randn(BIASES[op] * H) if bias else None
        count = 2 if op == "layer_norm_gru" else 0
        gammas = [1 + 0.3 * randn(G) for _ in range(count)]
        inputs = randn(T, B, X), W_ih, W_hh, b, *gammas, randn(B, H).tanh()
        return inputs, with_order(options, T, B, lengths, starts)

    name = join(
        f"T{T}-B{B}-X{X}-H{H}",
        "nobias" * (not bias),
        "lengths" * (lengths is not None),
        "starts" * (starts is not None),
        f"scale{scale:g}" * (scale != 1),
        *option_words(options),
    )
    return Case(op, name, make)


def cases(op, sizes=SIZES):
    yield from (hidden_state_case(op, *size) for size in sizes)
    yield hidden_state_case(op, 4, 3, 5, 7, bias=False)
    yield hidden_state_case(op, 5, 4, 6, 5, lengths=[3, 0, 5, 1])
    yield hidden_state_case(op, 33, 9, 20, 24, lengths=[33, 1, 2, 7, 0, 32, 16, 17, 5], scale=0.7)
    yield hidden_state_case(op, 3, 70, 33, 40)
    yield hidden_state_case(op, 9, 70, 33, 40, reverse=True, scale=0.7)
    yield from (hidden_state_case(op, 5, 4, 6, 5, **order) for order in ORDERS)
    for variational in (False, True):
        yield hidden_state_case(op, 3, 2, 5, 7, weight_drop=0.5, variational=variational, seed=5)
    yield hidden_state_case(op, 3, 2, 5, 7, weight_drop=0.5, seed=5, training=False)
    options = {"lengths": [3, 0, 5, 1], "weight_drop": 0.3, "seed": torch.tensor(2**63 - 2)}
    yield hidden_state_case(op, 5, 4, 6, 5, bias=False, **options)
    yield from zoneout_cases(functools.partial(hidden_state_case, op), zoneout_h=0.25)


# With one input or one unit, gradients through a norm are only rounding errors.
WIDE = [(1, 1, 3, 2), *(size for size in SIZES if size[2] > 1 and size[3] > 1)]
CASES = [*cases("gru"), *cases("rnn"), *cases("layer_norm_gru", WIDE)]
CASES += [
    hidden_state_case("layer_norm_gru", 3, 5, 40, 200),  # several tiles of columns
    hidden_state_case("layer_norm_gru", 3, 2, 5, 7, eps=0.5),
]
CASES += [
    hidden_state_case("rnn", *size, relu=True, scale=0.7)
    for size in ((4, 3, 3, 17), (3, 70, 33, 40))
]
CASES += [hidden_state_case("gru", 3, 2, 5, 7, scale=10.0)]  # saturated gates
