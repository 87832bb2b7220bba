"""Cases of `attention`."""

import torch

from fusedseq.testing.cases.case import Case, join, option_words


def rotations(positions, D):
    """The table of rotary positions, (positions, D): cos and sin of each angle, interleaved."""
    angles = torch.outer(torch.arange(float(positions)), 10000.0 ** (-2 * torch.arange(D // 2) / D))
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1)


def setting_words(settings):
    """Settings as words of an id, a window as in window2to1."""
    window = settings.get("window")
    words = option_words({name: value for name, value in settings.items() if name != "window"})
    return words if window is None else [f"window{window[0]}to{window[1]}", *words]


def option_tensor(randn, option, B, N, L, S, D):
    """(the argument's name, its tensor) of a word of `attention_case`'s options."""
    if option.startswith("bias"):
        sizes = {"B": B, "N": N, "L": L, "S": S}
        return "bias", randn(*(n if name in option[4:] else 1 for name, n in sizes.items()))
    if option.startswith("relative"):
        return "relative_keys", randn(2 * int(option[8:]) + 1, D)
    if option == "mask":
        return "mask", randn(B, 1, L, S) < 0.5
    if option == "blind":
        return "mask", (torch.arange(L) % 3 != 1)[:, None].expand(L, S)
    if option == "lengths":
        return "key_lengths", (torch.arange(B) * 3 + S - 2) % (S + 1)
    if option == "sinks":
        return "sinks", randn(N)
    if option == "alibi":
        return "alibi", 2.0 ** -torch.arange(1.0, N + 1)
    if option.startswith("rope"):
        return "rope", rotations(64 + S + L, int(option[4:] or D))
    raise ValueError(option)


def attention_case(
    B, N, L, S, D, *options, N_kv=None, projected=False, saturated=False, **settings
):
    """A case with batch size B, N heads, L queries, S keys and head width D.

    options: which tensors the operator gets. "bias" is followed by the letters of the dimensions
        that are not broadcast, e.g. "biasNLS"; "relative2" is relative keys with K = 2; "rope4" is
        a rotary embedding of the first 4 elements of a head, "rope" of all; "blind" is a mask under
        which some queries see no key; also "mask", "lengths" and "alibi"
    N_kv: the heads of k and v; default N
    projected: q, k and v are views of one (B, L, 3, N, D), as a model's projection returns them
    saturated: logits of up to some hundreds with `scale=1.0`, of which a row's largest has nearly
        all the probability
    settings: the operator's other options
    """

    def make(randn):
        q, k, v = randn(B, N, L, D), randn(B, N_kv or N, S, D), randn(B, N_kv or N, S, D)
        if projected:
            q, k, v = randn(B, L, 3, N, D).permute(2, 0, 3, 1, 4)
        if saturated:
            # Multiples of 1/4: the logits are exact in any order of summation.
            q, k = 16 * (4 * q).round() / 4, (4 * k).round() / 4
        tensors = dict(option_tensor(randn, option, B, N, L, S, D) for option in options)
        return (q, k, v), settings | tensors

    name = join(
        f"B{B}-N{N}-L{L}-S{S}-D{D}",
        *options,
        f"Nkv{N_kv}" * (N_kv is not None),
        "projected" * projected,
        "saturated" * saturated,
        *setting_words(settings),
    )
    return Case("attention", name, make)


SIZES = [  # B, N, L, S, D
    (1, 1, 1, 1, 1),
    (2, 3, 6, 6, 4),
    (2, 2, 5, 7, 10),
    (1, 2, 1, 9, 6),
    (2, 1, 3, 1, 3),
    (0, 2, 3, 4, 5),
    (2, 0, 3, 4, 5),
    (2, 2, 0, 4, 5),
    (2, 2, 3, 0, 5),
    (2, 2, 3, 4, 0),
    (1, 2, 17, 33, 20),
    (2, 1, 49, 130, 30),
    (1, 1, 5, 6, 300),
]


def mask_cases():
    yield attention_case(2, 2, 6, 6, 5, causal=True)
    yield attention_case(2, 2, 3, 7, 5, causal=True)
    yield attention_case(2, 2, 7, 3, 5, causal=True)  # the first queries see no key
    yield attention_case(1, 2, 4, 6, 5, causal=True, offset=1)
    yield attention_case(1, 1, 4, 6, 5, causal=True, offset=-2)
    yield attention_case(2, 2, 100, 100, 10, causal=True)
    yield attention_case(4, 2, 4, 5, 8, "lengths")
    yield attention_case(4, 2, 5, 5, 8, "lengths", causal=True, dropout=0.4, seed=7)
    yield attention_case(2, 2, 4, 5, 3, "mask")
    yield attention_case(2, 2, 7, 5, 3, "blind")
    yield attention_case(2, 2, 5, 6, 10, "mask", dropout=0.3, seed=3)
    yield attention_case(1, 2, 20, 33, 20, "mask", dropout=0.3, seed=3)
    yield attention_case(2, 2, 4, 5, 3, "mask", "lengths", "biasNLS", causal=True, scale=0.7)


def position_cases():
    for letters in ("S", "NS", "NLS", "BLS", "BNLS"):
        yield attention_case(2, 3, 4, 5, 3, f"bias{letters}")
    yield attention_case(3, 2, 34, 35, 6, "biasNLS", "lengths", dropout=0.2, seed=3)
    yield attention_case(2, 3, 5, 6, 4, "alibi")
    yield attention_case(2, 3, 6, 6, 4, "alibi", causal=True)
    for K in (0, 2, 9):
        yield attention_case(2, 2, 5, 6, 4, f"relative{K}")
    yield attention_case(0, 2, 3, 4, 5, "relative2", "biasNLS")
    masks = {"causal": True, "dropout": 0.2, "seed": 4}
    yield attention_case(2, 2, 35, 34, 6, "relative3", "lengths", **masks)
    yield attention_case(2, 2, 5, 6, 4, "rope")
    yield attention_case(2, 2, 6, 6, 20, "rope", causal=True, offset=3)
    yield attention_case(2, 2, 5, 6, 20, "rope", rope_interleaved=False)
    yield attention_case(2, 2, 6, 7, 13, "rope10", "lengths", causal=True)
    yield attention_case(1, 2, 20, 34, 21, "rope6", "relative2", rope_interleaved=False)
    everything = "rope", "relative2", "alibi", "biasNLS", "mask", "lengths"
    yield attention_case(2, 2, 18, 18, 10, *everything, causal=True, dropout=0.3, seed=-9)


def dropout_cases():
    for p in (0.5, 1.0):
        yield attention_case(2, 2, 4, 6, 5, dropout=p, seed=11)
    yield attention_case(3, 2, 33, 70, 8, dropout=0.1, seed=2**40 + 3)


def head_cases():
    """Grouped queries, and heads that are views of one projection."""
    yield attention_case(2, 4, 5, 6, 3, N_kv=2)
    masks = {"causal": True, "dropout": 0.2, "seed": 1}
    yield attention_case(2, 6, 33, 35, 10, "lengths", "rope", N_kv=2, **masks)
    yield attention_case(2, 4, 5, 6, 3, "biasNLS", N_kv=1)
    yield attention_case(2, 3, 6, 6, 4, projected=True)


def decoding_cases():
    """Few queries and many keys."""
    # The Triton kernels process so many keys in parts.
    everything = "rope", "alibi", "biasNLS", "mask", "lengths"
    yield attention_case(2, 2, 1, 520, 6, *everything, N_kv=1, causal=True, dropout=0.2, seed=3)
    yield attention_case(1, 2, 1, 40, 64, offset=20, causal=True)
    yield attention_case(2, 2, 2, 37, 70, "mask")
    options = "lengths", "rope", "relative3", "alibi", "biasNLS"
    yield attention_case(3, 4, 1, 40, 20, *options, N_kv=2, dropout=0.2, seed=6)


def saturated_cases():
    for L, S in ((6, 7), (20, 40)):
        yield attention_case(2, 3, L, S, 8, saturated=True, scale=1.0)
    masks = {"causal": True, "dropout": 0.3, "seed": 2}
    yield attention_case(2, 3, 34, 35, 8, "lengths", saturated=True, scale=1.0, **masks)


def window_cases():
    yield attention_case(2, 2, 6, 7, 5, window=(2, 1))
    yield attention_case(1, 2, 100, 100, 8, window=(9, None), causal=True)
    yield attention_case(2, 2, 60, 90, 6, "lengths", window=(-1, 3), dropout=0.3, seed=8)
    yield attention_case(1, 1, 30, 20, 4, window=(2, 3), offset=12)  # the last see no key
    yield attention_case(2, 4, 1, 70, 8, N_kv=2, window=(20, 0))
    everything = "rope", "relative2", "alibi", "biasNLS", "mask", "lengths", "sinks"
    options = {"window": (17, 4), "softcap": 2.0, "dropout": 0.3, "seed": 4}
    yield attention_case(2, 2, 70, 75, 10, *everything, **options)


def logit_cases():
    """softcap and sinks."""
    for L, S, D in ((5, 7, 4), (1, 40, 6), (34, 50, 8)):
        yield attention_case(2, 2, L, S, D, softcap=0.8)
        yield attention_case(2, 4, L, S, D, "sinks", "lengths", N_kv=2, dropout=0.3, seed=1)
    yield attention_case(2, 2, 35, 35, 8, "sinks", "biasNLS", causal=True, softcap=1.5)
    yield attention_case(2, 2, 7, 5, 3, "blind", "sinks")
    yield attention_case(0, 2, 3, 4, 5, "sinks")
    yield attention_case(2, 3, 20, 40, 8, "sinks", saturated=True, scale=1.0, softcap=30.0)


CASES = [
    *window_cases(),
    *logit_cases(),
    *(attention_case(*size) for size in SIZES),
    *mask_cases(),
    *position_cases(),
    *dropout_cases(),
    *head_cases(),
    *decoding_cases(),
    *saturated_cases(),
    attention_case(2, 5, 90, 90, 20, "lengths", projected=True, dropout=0.3, seed=5),
]
