"""Cases of `lstm`."""

import torch

from fusedseq.testing.cases.case import Case, join, option_words

# T, B, X, H; used for mogrifier_lstm as well
SIZES = [
    (1, 1, 1, 1),
    (3, 2, 3, 1),
    (1, 3, 17, 3),
    (5, 1, 5, 17),
    (4, 3, 3, 17),
    (3, 0, 5, 4),
    (2, 2, 650, 650),
]


def recurrent_inputs(randn, T, B, X, H, bias, scale):
    """x, W_ih, W_hh, b, h0, c0 with pre-activations of about `scale`.

    With scale 0 the pre-activations of the gates i and f are zero; those of g and o are not.
    """
    W_ih, W_hh = scale * X**-0.5 * randn(4 * H, X), scale * H**-0.5 * randn(4 * H, H)
    b = randn(2, 2 * H) * torch.tensor([[scale], [scale or 1.0]])
    b = b.flatten() if bias else None
    return randn(T, B, X), W_ih, W_hh, b, randn(B, H).tanh(), randn(B, H)


def with_order(options, T, B, lengths, starts):
    """The options of a case with its lengths, and with the starts (t, b), as tensors."""
    options = dict(options)
    if lengths is not None:
        options["lengths"] = torch.tensor(lengths)
    if starts is not None:
        options["starts"] = torch.tensor([[(t, b) in starts for b in range(B)] for t in range(T)])
    return options


# Steps in another order, and resets, of a sequence of 5 steps and 4 rows.
ORDERS = [
    {"reverse": True},
    {"reverse": True, "lengths": [3, 0, 5, 1]},
    {"starts": [(0, 1), (2, 0), (3, 0), (4, 3)]},
    {"starts": [(0, 1), (1, 0), (4, 0), (4, 2)], "lengths": [3, 0, 5, 1]},
    {"starts": [(4, 1), (1, 0), (4, 0), (3, 2)], "lengths": [3, 0, 5, 1], "reverse": True},
]


def zoneout_cases(case, **probabilities):
    """Zoneout in training, alone and with a weight drop, its expectation, and in other orders.

    case: (T, B, X, H, **options) -> Case    probabilities: zoneout_h and zoneout_c
    """
    for name in probabilities:
        for p in (0.5, 1.0):
            yield case(3, 2, 5, 7, **{name: p}, seed=5)
    yield case(3, 2, 5, 7, **probabilities, weight_drop=0.5, training=False)
    yield case(5, 4, 6, 5, **probabilities, weight_drop=0.3, bias=False, seed=2**40 + 7)
    for order in ORDERS:
        yield case(5, 4, 6, 5, **order, **probabilities, seed=9)
    yield case(5, 4, 6, 5, **ORDERS[-1], **probabilities, training=False)
    yield case(2, 17, 9, 100, **probabilities, seed=11)  # several threads share a row of a mask
    yield case(3, 70, 33, 40, **probabilities, seed=-1)  # the threads share the rows


def lstm_case(T, B, X, H, *, bias=True, lengths=None, starts=None, scale=1.0, **options):
    """A case with T steps, batch size B, input width X and hidden width H.

    starts: the (t, b) that are true    scale: of the pre-activations
    options: those of the operator
    """

    def make(randn):
        inputs = recurrent_inputs(randn, T, B, X, H, bias, scale)
        return inputs, with_order(options, T, B, lengths, starts)

    name = join(
        f"T{T}-B{B}-X{X}-H{H}",
        "nobias" * (not bias),
        "lengths" * (lengths is not None),
        "starts" * (starts is not None),
        f"scale{scale:g}" * (scale != 1),
        *option_words(options),
    )
    return Case("lstm", name, make)


def weight_drop_cases():
    for p in (0.5, 1.0):
        for variational in (False, True):
            yield lstm_case(3, 2, 5, 7, weight_drop=p, variational=variational, seed=5)
    yield lstm_case(3, 2, 5, 7, weight_drop=0.5, seed=5, training=False)
    options = {"lengths": [3, 0, 5, 1], "weight_drop": 0.3, "seed": torch.tensor(2**63 - 2)}
    yield lstm_case(5, 4, 6, 5, bias=False, **options)
    yield lstm_case(3, 20, 33, 130, weight_drop=0.4, seed=-1)


CASES = [
    *(lstm_case(*size) for size in SIZES),
    lstm_case(4, 3, 5, 7, bias=False),
    lstm_case(5, 4, 6, 5, lengths=[3, 0, 5, 1]),
    lstm_case(3, 2, 5, 7, scale=30.0),  # saturated gates
    lstm_case(33, 9, 20, 24, lengths=[33, 1, 2, 7, 0, 32, 16, 17, 5]),
    lstm_case(3, 70, 33, 40),
    *weight_drop_cases(),
    *(lstm_case(5, 4, 6, 5, **order) for order in ORDERS),
    lstm_case(9, 70, 33, 40, reverse=True),
    *zoneout_cases(lstm_case, zoneout_h=0.25, zoneout_c=0.75),
]
