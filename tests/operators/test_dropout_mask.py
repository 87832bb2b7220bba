"""Random masks: which bits `dropout_mask` and all operators with a seed draw.

Tested are the published answers of Philox4x32-10, the layout of a mask against a Philox in Python
integers, equality with the oracle bit for bit, and that every form of a seed, every dtype and every
operator gives the documented mask.
"""

import math

import pytest
import torch
from fusedseq import _C, fused, reference
from fusedseq.reference.dropout_mask import (
    INPUT,
    SINGLE,
    STATE,
    WEIGHT,
    ZONEOUT_C,
    ZONEOUT_H,
    stream_mask,
)
from fusedseq.reference.dropout_mask import philox as oracle_philox
from fusedseq.testing import cotangents

# Known-answer vectors of Random123 (kat_vectors) for philox4x32-10: key, counter, words
KNOWN_ANSWERS = [
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, -1, 2**32, 2**40 + 17, 2**63 - 1, -(2**63), 0x299F31D0A4093822]


def philox(key, counter):
    """Philox4x32-10 in Python integers, from its paper (Salmon et al., 2011)."""
    c, k = list(counter), [key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def words(seed, shape, stream=SINGLE):
    """The random word of each element of a mask of this shape.

    Each row of the last dimension begins at a new block of four words; the number of a block is the
    low half of the counter, the stream is in the high half.
    """
    *leading, S = shape
    blocks = -(-S // 4)
    rows = range(math.prod(leading))
    offsets = ((row * blocks + j // 4, j % 4) for row in rows for j in range(S))
    return [philox(seed, (n & 0xFFFFFFFF, n >> 32, stream, 0))[i] for n, i in offsets]


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN_ANSWERS, ids=["zero", "ones", "pi"])
def test_known_answers(key, counter, expected):
    assert philox(key, counter) == expected
    assert _C.philox(key, counter[0] | counter[1] << 32, counter[2] | counter[3] << 32) == expected


@pytest.mark.parametrize("counter", [0, 1, 2**32 - 1, 2**32, 2**33 + 5, 2**62 + 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_large_counters(seed, counter):
    """No mask in these tests is large enough for such counters."""
    expected = philox(seed, (counter & 0xFFFFFFFF, counter >> 32, 0, 0))
    assert tuple(int(w) for w in oracle_philox(seed, torch.tensor(counter))) == expected
    assert _C.philox(seed & (2**64 - 1), counter) == expected


def test_words_are_compared_as_integers(ops, device):
    """An element is kept at p = word / 2**32 and dropped at the next larger p.

    So the mask of seed 0 reveals the published words.
    """
    for j, word in enumerate(KNOWN_ANSWERS[0][2]):
        keep = [
            ops.dropout_mask(torch.tensor(0, device=device), w / 2**32, (4,))[j].item()
            for w in (word, word + 1)
        ]
        assert keep == [True, False], f"word {j}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "shape", [(1,), (9,), (3, 1), (3, 2), (3, 3), (2, 3, 5), (5, 8), (4, 13)], ids=str
)
def test_mask_is_the_documented_one(ops, seed, shape, device):
    for p in (0.25, 0.5, 0.9):
        expected = torch.tensor([w >= round(p * 2**32) for w in words(seed, shape)]).reshape(shape)
        assert torch.equal(ops.dropout_mask(seed, p, shape, device).cpu(), expected)


@pytest.mark.parametrize("stream", [SINGLE, STATE, ZONEOUT_H, ZONEOUT_C, WEIGHT])
def test_a_stream_is_a_word_of_the_counter(stream, device):
    for seed in SEEDS:
        for shape in ((9,), (3, 5), (2, 3, 8)):
            expected = torch.tensor([w >= 2**31 for w in words(seed, shape, stream)]).reshape(shape)
            assert torch.equal(stream_mask(stream, seed, 0.5, shape, device).cpu(), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_may_be_a_number_or_a_tensor(ops, seed, device):
    expected = ops.dropout_mask(seed, 0.5, (11, 7), device)
    for tensor in (torch.tensor(seed), torch.tensor([seed]), torch.tensor([[seed]])):
        assert torch.equal(ops.dropout_mask(tensor.to(device), 0.5, (11, 7)), expected)
        assert torch.equal(ops.dropout_mask(tensor, 0.5, (11, 7), device), expected)


@pytest.mark.parametrize("last", [*range(1, 10), 650])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 0.5, 1 - 2**-32, 1.0])
def test_fused_mask_equals_the_oracles(last, p, device):
    for seed in SEEDS:
        assert torch.equal(
            fused.dropout_mask(seed, p, (5, last), device),
            reference.dropout_mask(seed, p, (5, last), device),
        )


def test_p_0_keeps_all_and_p_1_keeps_none(ops, device):
    assert ops.dropout_mask(3, 0.0, (1000,), device).all()
    assert not ops.dropout_mask(3, 1.0, (1000,), device).any()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_frequency_of_kept_elements(ops, p, device):
    """Within 5 standard deviations of a binomial, overall and at each position of a row."""
    keep = ops.dropout_mask(12, p, (1000, 10), device).double()
    for mean, n in ((keep.mean(), 10000), *((column, 1000) for column in keep.mean(0))):
        assert abs(mean - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)


def test_different_seeds_give_different_masks(ops, device):
    masks = [ops.dropout_mask(seed, 0.5, (64,), device) for seed in SEEDS]
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


# {name: (the operator applied to a tensor of ones, its shape, the elements of the result that have
# independent random words)}
MASKED_OPERATORS = {
    "dropout": (lambda ops, x, p, seed: ops.dropout(x, p, seed), (6, 3, 5), lambda m: m),
    "locked_dropout": (
        lambda ops, x, p, seed: ops.locked_dropout(x, p, seed),
        (6, 3, 5),
        lambda m: m[0],
    ),
    "weight_drop": (lambda ops, x, p, seed: ops.weight_drop(x, p, seed), (7, 5), lambda m: m),
    "weight_drop_variational": (
        lambda ops, x, p, seed: ops.weight_drop(x, p, seed, True),
        (7, 5),
        lambda m: m[:, 0],
    ),
    "embedding": (
        lambda ops, W, p, seed: ops.embedding(torch.arange(len(W), device=W.device), W, p, seed),
        (17, 5),
        lambda m: m[:, 0],
    ),
}


@pytest.mark.parametrize("name", MASKED_OPERATORS)
@pytest.mark.parametrize("seed", [*SEEDS, torch.tensor(77), torch.tensor([-77])], ids=str)
def test_masks_of_the_operators(ops, name, seed, device, dtype):
    """A tensor of ones shows the mask; the gradient is masked by the same one."""
    apply, shape, independent = MASKED_OPERATORS[name]
    p = 0.5  # a kept 1 becomes exactly 2
    ones = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
    y = apply(ops, ones, p, seed)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    mask = independent(y) != 0
    assert torch.equal(mask, reference.dropout_mask(seed, p, mask.shape, device))
    assert torch.equal(
        y != 0, mask.expand(shape) if mask.dim() > 1 else mask[:, None].expand(shape)
    )
    (grad_output,) = cotangents([y])
    (grad,) = torch.autograd.grad(y, ones, grad_output)
    assert torch.equal(grad, torch.where(y != 0, 2 * grad_output, 0))


@pytest.mark.parametrize("last", [*range(1, 10), 650])
def test_masks_of_any_width(ops, last, device):
    """Each row begins at a new block of four words, also if the width is no multiple of four."""
    ones = torch.ones(3, 4, last, device=device)
    assert torch.equal(
        ops.dropout(ones, 0.5, 9) != 0, reference.dropout_mask(9, 0.5, (3, 4, last), device)
    )
    assert torch.equal(
        ops.locked_dropout(ones, 0.5, 9)[1] != 0, reference.dropout_mask(9, 0.5, (4, last), device)
    )
    assert torch.equal(
        ops.weight_drop(ones[0], 0.5, 9) != 0, reference.dropout_mask(9, 0.5, (4, last), device)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_of_the_mogrifier_lstm(ops, seed, device):
    """Constant weights make the four masks visible in the results.

    With zero weights, c' = f c + i g has f = i = 1/2 and g = 0, so the elements of h and c that
    change show the masks of zoneout. With the identity in the rows of g, g = tanh of the masked
    input or state shows their masks.
    """
    T, B, H = 5, 3, 6
    zeros, h0 = torch.zeros(4 * H, H, device=device), torch.zeros(B, H, device=device)
    ones = torch.ones(B, H, device=device)
    identity_of_g = torch.zeros(4 * H, H, device=device)
    identity_of_g[2 * H : 3 * H] = torch.eye(H, device=device)

    def mask(stream, shape):
        return stream_mask(stream, seed, 0.5, shape, device)

    def run(W_ih, W_hh, h0, c0, T=T, **options):
        x, factors = torch.ones(T, B, H, device=device), (None, None)
        inputs = x, W_ih, W_hh, None, h0, c0, *factors
        return ops.mogrifier_lstm(*inputs, rounds=0, seed=seed, **options)

    # h is 1 until it is first updated to o tanh(c) = 0.
    y, _ = run(zeros, zeros, ones, h0, zoneout_h=0.5)
    assert torch.equal(y == 0, mask(ZONEOUT_H, (T, B, H)).cumsum(0) > 0)

    # c halves at each update.
    _, (_, c) = run(zeros, zeros, h0, ones, zoneout_c=0.5)
    assert torch.equal(c, 0.5 ** mask(ZONEOUT_C, (T, B, H)).sum(0))

    for locked in (False, True):
        y, _ = run(identity_of_g, zeros, h0, h0, input_dropout=0.5, locked_input=locked)
        keep = mask(INPUT, (B, H) if locked else (T, B, H)).expand(T, B, H)
        assert torch.equal(y != 0, keep.cumsum(0) > 0)
    y, _ = run(zeros, identity_of_g, ones, h0, T=1, state_dropout=0.5)
    assert torch.equal(y[0] != 0, mask(STATE, (B, H)))


@pytest.mark.parametrize("seed", [0, -4, 2**40 + 17])
def test_masks_of_neighbouring_seeds_have_nothing_in_common(ops, seed, device):
    """No two masks of mogrifier_lstm and lstm, for seeds from s to s + 8, are equal, opposite or
    shifted copies: for every shift, the correlation of two masks is that of independent ones."""
    masks = [mask for k in range(9) for mask in visible_masks(ops, seed + k, device)]
    signs = 2 * torch.stack(masks).double() - 1  # (masks, n)
    count, n = signs.shape
    for shift in range(n // 2):
        common = n - shift  # elements that are compared
        correlation = signs[:, shift:] @ signs[:, :common].T / common
        if shift == 0:
            correlation -= torch.eye(count, device=device)
        # The standard deviation of a correlation is at most 2 ** -3.5.
        assert correlation.abs().max() < 7 * common**-0.5, f"shift {shift}"


def visible_masks(ops, seed, device):
    """The masks of a step of mogrifier_lstm, as far as its results show them: (B H,) bool each.

    The weight drop is the same as that of `lstm`.
    """
    B, H, p = 4, 64, 0.5
    zeros, h0 = torch.zeros(4 * H, H, device=device), torch.zeros(B, H, device=device)
    ones = torch.ones(B, H, device=device)
    identity_of_g = torch.zeros(4 * H, H, device=device)
    identity_of_g[2 * H : 3 * H] = torch.eye(H, device=device)

    def run(W_ih, W_hh, h0, c0, **options):
        inputs = ones[None], W_ih, W_hh, None, h0, c0, None, None
        y, (_, c) = ops.mogrifier_lstm(*inputs, rounds=0, seed=seed, **options)
        return y[0], c

    W_hh = torch.full((4 * H, H), 0.01, device=device, requires_grad=True)
    dropped, _ = run(zeros, W_hh, ones, ones, weight_drop=p)
    (dW_hh,) = torch.autograd.grad(dropped.sum(), W_hh)
    masks = [
        run(identity_of_g, zeros, h0, h0, input_dropout=p)[0] != 0,
        run(zeros, identity_of_g, ones, h0, state_dropout=p)[0] != 0,
        run(zeros, zeros, ones, h0, zoneout_h=p)[0] == 0,
        run(zeros, zeros, h0, ones, zoneout_c=p)[1] == 0.5,
        dW_hh[:B] != 0,
    ]
    return [mask.flatten() for mask in masks]


def test_masks_do_not_depend_on_the_dtype(ops, device):
    x = torch.ones(7, 33, device=device)
    masks = [
        ops.dropout(x.to(d), 0.37, 4) != 0 for d in (torch.float32, torch.float64, torch.bfloat16)
    ]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
