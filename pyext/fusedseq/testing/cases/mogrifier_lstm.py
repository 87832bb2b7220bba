"""Cases of `mogrifier_lstm`."""

from fusedseq.testing.cases.case import Case, join, option_words
from fusedseq.testing.cases.lstm import ORDERS, SIZES, recurrent_inputs, with_order


def weights(randn, n, rows, columns, rank):
    """n matrices of (rows, columns), or their factors of `rank`; None for n = 0."""
    if n == 0:
        return None
    if rank is None:
        return columns**-0.5 * randn(n, rows, columns)
    std = (columns * rank) ** -0.25
    return std * randn(n, rows, rank), std * randn(n, rank, columns)


def mogrifier_lstm_case(
    T,
    B,
    X,
    H,
    rounds=5,
    *,
    rank=None,
    bias=True,
    mogrifier_bias=True,
    shared=False,
    lengths=None,
    starts=None,
    scale=1.0,
    **options,
):
    """A case with T steps, batch size B, input width X and hidden width H.

    rank: of the factors of Q and R; None for whole matrices
    shared: all rounds on x share one Q, all rounds on h one R
    starts: the (t, b) that are true
    scale: of the pre-activations of the gates; 0 makes i and 1 - f equal
    options: those of the operator
    """
    uses = (rounds + 1) // 2, rounds // 2  # of Q and of R
    counts = [min(n, 1) if shared else n for n in uses]

    def make(randn):
        inputs = recurrent_inputs(randn, T, B, X, H, bias, scale)
        Q = weights(randn, counts[0], X, H, rank)
        R = weights(randn, counts[1], H, X, rank)
        biases = [
            randn(n, width) if mogrifier_bias and n else None
            for n, width in zip(counts, (X, H), strict=True)
        ]
        kwargs = with_order(options, T, B, lengths, starts)
        return (*inputs, Q, R, *biases), {"rounds": rounds, **kwargs}

    name = join(
        f"T{T}-B{B}-X{X}-H{H}-r{rounds}",
        f"rank{rank}" * (rank is not None),
        "nobias" * (not bias),
        "nomogrifierbias" * (not mogrifier_bias),
        "shared" * shared,
        "lengths" * (lengths is not None),
        "starts" * (starts is not None),
        f"scale{scale:g}" * (scale != 1),
        *option_words(options),
    )
    return Case("mogrifier_lstm", name, make, smooth=scale != 0)


def small(rounds=5, **options):
    return mogrifier_lstm_case(3, 2, 5, 4, rounds, **options)


def random_mask_cases():
    """Each random mask alone, at p = 0.5 and at p = 1, and in evaluation mode."""
    for p in (0.5, 1.0):
        for locked in (False, True):
            yield small(seed=-3, input_dropout=p, locked_input=locked)
    for p in (0.5, 1.0):
        for name in ("state_dropout", "zoneout_h", "zoneout_c"):
            yield small(seed=5, **{name: p})
    for p in (0.5, 1.0):
        for variational in (False, True):
            yield small(weight_drop=p, variational=variational, seed=5)
    yield small(weight_drop=0.5, seed=5, training=False)
    yield small(zoneout_h=0.25, zoneout_c=0.75, training=False)
    yield small(input_dropout=0.5, state_dropout=0.5, zoneout_h=0.5, training=False)
    yield small(0, state_dropout=0.5, input_dropout=0.5)


def order_cases():
    masks = {"state_dropout": 0.3, "zoneout_h": 0.2, "zoneout_c": 0.1, "seed": 9}
    locked = {"input_dropout": 0.3, "locked_input": True}
    for order in ORDERS:
        yield mogrifier_lstm_case(5, 4, 6, 5, 2, **order)
        yield mogrifier_lstm_case(5, 4, 6, 5, 3, **order, **masks, input_dropout=0.3)
    yield mogrifier_lstm_case(5, 4, 6, 5, 1, **ORDERS[-1], **masks, **locked, rank=2)


def many_options_cases():
    masks = {"state_dropout": 0.3, "zoneout_h": 0.2, "zoneout_c": 0.1}
    yield mogrifier_lstm_case(4, 3, 7, 5, lengths=[4, 2, 0], **masks)

    common = {"rank": 2, "lengths": [5, 0, 2], "cap_input_gate": True, "seed": 2**40 + 7}
    masks = {"state_dropout": 0.2, "zoneout_h": 0.1, "zoneout_c": 0.4}
    locked = {"input_dropout": 0.3, "locked_input": True}
    yield mogrifier_lstm_case(5, 3, 17, 3, **common, **locked, **masks)
    yield mogrifier_lstm_case(5, 3, 17, 9, **common, **masks, weight_drop=0.3)

    masks = {"input_dropout": 0.5, "state_dropout": 0.5, "zoneout_c": 0.3, "seed": 11}
    yield mogrifier_lstm_case(11, 33, 20, 24, 4, **masks)
    # Wide enough for several threads to share a row of a mask.
    masks = {"state_dropout": 0.5, "zoneout_h": 0.5, "zoneout_c": 0.3, "seed": 11}
    yield mogrifier_lstm_case(2, 17, 9, 100, 2, **masks)


CASES = [
    *(mogrifier_lstm_case(*size) for size in SIZES),
    *(small(rounds) for rounds in range(5)),
    *(small(rounds, rank=2) for rounds in (1, 2, 5)),
    small(bias=False),
    small(mogrifier_bias=False),
    small(mogrifier_bias=False, bias=False, rank=1),
    small(shared=True),
    small(shared=True, rank=3),
    mogrifier_lstm_case(5, 4, 6, 5, lengths=[3, 0, 5, 1]),
    small(scale=10.0),
    small(cap_input_gate=True),
    # i = 1 - f = 1/2: a tie of the capped input gate, whose gradient is shared.
    small(cap_input_gate=True, scale=0.0),
    *random_mask_cases(),
    *many_options_cases(),
    *order_cases(),
]
