"""The masks: Philox's published answers, the oracle bit for bit, and one mask whatever the form of the seed."""

import math

import pytest
import torch
from fusedseq import _C, fused, reference
from fusedseq.reference.dropout_mask import philox as oracle_philox
from fusedseq.testing import cotangents

# Random123's kat_vectors for philox4x32-10: key, counter, words
KNOWN = [
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
SEEDS = [0, 1, -1, 2**32, 2**40 + 17, 2**63 - 1, -(2**63), 0x299F31D0A4093822]


def philox(key, counter):
    """Philox4x32-10 in Python's integers, from the paper's description."""
    c, k = list(counter), [key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def words(seed, shape):
    """The word of each element of a mask of this shape, as SEMANTICS lays them out."""
    *rows, S = shape
    blocks = -(-S // 4)
    offsets = ((row * blocks + j // 4, j % 4) for row in range(math.prod(rows)) for j in range(S))
    return [philox(seed, (n & 0xFFFFFFFF, n >> 32, 0, 0))[i] for n, i in offsets]


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN, ids=["zero", "ones", "pi"])
def test_known_answers(key, counter, expected):
    assert philox(key, counter) == expected
    assert _C.philox(key, counter[0] | counter[1] << 32, counter[2] | counter[3] << 32) == expected


@pytest.mark.parametrize("counter", [0, 1, 2**32 - 1, 2**32, 2**33 + 5, 2**62 + 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_large_counters(seed, counter):
    """No mask of a test is long enough to reach them."""
    expected = philox(seed, (counter & 0xFFFFFFFF, counter >> 32, 0, 0))
    assert tuple(int(w) for w in oracle_philox(seed, torch.tensor(counter))) == expected
    assert _C.philox(seed & (2**64 - 1), counter) == expected


def test_words_are_compared_as_integers(ops, device):
    """An element is kept at p = word / 2**32 and dropped at the next p: so the mask shows the published words."""
    for j, word in enumerate(KNOWN[0][2]):
        kept = [ops.dropout_mask(torch.tensor(0, device=device), w / 2**32, (4,))[j].item() for w in (word, word + 1)]
        assert kept == [True, False], f"word {j}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 1), (3, 2), (3, 3), (2, 3, 5), (5, 8), (4, 13)], ids=str)
def test_mask_is_the_documented_one(ops, seed, shape, device):
    for p in (0.25, 0.5, 0.9):
        expected = torch.tensor([w >= round(p * 2**32) for w in words(seed, shape)]).reshape(shape)
        assert torch.equal(ops.dropout_mask(seed, p, shape, device).cpu(), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_forms_of_a_seed(ops, seed, device):
    expected = ops.dropout_mask(seed, 0.5, (11, 7), device)
    for tensor in (torch.tensor(seed), torch.tensor([seed]), torch.tensor([[seed]])):
        assert torch.equal(ops.dropout_mask(tensor.to(device), 0.5, (11, 7)), expected)
        assert torch.equal(ops.dropout_mask(tensor, 0.5, (11, 7), device), expected)


@pytest.mark.parametrize("last", [*range(1, 10), 650])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 0.5, 1 - 2**-32, 1.0])
def test_fused_mask_equals_the_oracles(last, p, device):
    for seed in SEEDS:
        assert torch.equal(
            fused.dropout_mask(seed, p, (5, last), device), reference.dropout_mask(seed, p, (5, last), device)
        )


def test_nothing_dropped_at_0_and_nothing_kept_at_1(ops, device):
    assert ops.dropout_mask(3, 0.0, (1000,), device).all()
    assert not ops.dropout_mask(3, 1.0, (1000,), device).any()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_frequency(ops, p, device):
    """Within 5 standard deviations of a binomial, over all elements and over every position of a row."""
    keep = ops.dropout_mask(12, p, (1000, 10), device).double()
    for mean, n in ((keep.mean(), 10000), *((column, 1000) for column in keep.mean(0))):
        assert abs(mean - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)


def test_other_seed_other_mask(ops, device):
    masks = [ops.dropout_mask(seed, 0.5, (64,), device) for seed in SEEDS]
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


# What each masked operator multiplies ones by, and the mask that SEMANTICS says it applies.
MASKED = {
    "dropout": (lambda ops, x, p, seed: ops.dropout(x, p, seed), (6, 3, 5), lambda m: m),
    "locked_dropout": (lambda ops, x, p, seed: ops.locked_dropout(x, p, seed), (6, 3, 5), lambda m: m[0]),
    "weight_drop": (lambda ops, x, p, seed: ops.weight_drop(x, p, seed), (7, 5), lambda m: m),
    "weight_drop_variational": (lambda ops, x, p, seed: ops.weight_drop(x, p, seed, True), (7, 5), lambda m: m[:, 0]),
    "embedding": (
        lambda ops, W, p, seed: ops.embedding(torch.arange(len(W), device=W.device), W, p, seed), (17, 5),
        lambda m: m[:, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("seed", [*SEEDS, torch.tensor(77), torch.tensor([-77])], ids=str)
def test_masks_of_the_operators(ops, name, seed, device, dtype):
    """Recovered by feeding ones; the gradient has passed the same mask."""
    apply, shape, independent = MASKED[name]
    p = 0.5  # kept ones become exactly 2
    ones = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
    y = apply(ops, ones, p, seed)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    mask = independent(y) != 0
    assert torch.equal(mask, reference.dropout_mask(seed, p, mask.shape, device))
    assert torch.equal(y != 0, mask.expand(shape) if mask.dim() > 1 else mask[:, None].expand(shape))
    (upstream,) = cotangents([y])
    (grad,) = torch.autograd.grad(y, ones, upstream)
    assert torch.equal(grad, torch.where(y != 0, 2 * upstream, 0))


@pytest.mark.parametrize("last", [*range(1, 10), 650])
def test_masks_of_any_width(ops, last, device):
    """A row of a width that is no multiple of four begins at a new block."""
    ones = torch.ones(3, 4, last, device=device)
    assert torch.equal(ops.dropout(ones, 0.5, 9) != 0, reference.dropout_mask(9, 0.5, (3, 4, last), device))
    assert torch.equal(ops.locked_dropout(ones, 0.5, 9)[1] != 0, reference.dropout_mask(9, 0.5, (4, last), device))
    assert torch.equal(ops.weight_drop(ones[0], 0.5, 9) != 0, reference.dropout_mask(9, 0.5, (4, last), device))


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_of_the_mogrifier_lstm(ops, seed, device):
    """Zero weights leave c' = f c + i g with f = i = 1/2: what h and c keep shows zoneout's masks, what
    the state and input masks hide shows through an identity in g's weights."""
    T, B, H = 5, 3, 6
    zeros, h0 = torch.zeros(4 * H, H, device=device), torch.zeros(B, H, device=device)
    one = torch.ones(B, H, device=device)
    y = ops.mogrifier_lstm(
        torch.ones(T, B, H, device=device), zeros, zeros, None, one, h0, None, None, rounds=0, zoneout_h=0.5, seed=seed
    )[0]  # h is 1 until it is first updated to o tanh(c) = 0
    update = reference.dropout_mask(as_seed(seed, 2), 0.5, (T, B, H), device)
    assert torch.equal(y == 0, update.cumsum(0) > 0)

    _, (_, c) = ops.mogrifier_lstm(
        torch.ones(T, B, H, device=device), zeros, zeros, None, h0, one, None, None, rounds=0, zoneout_c=0.5, seed=seed
    )  # c halves at each update
    update = reference.dropout_mask(as_seed(seed, 3), 0.5, (T, B, H), device)
    assert torch.equal(c, 0.5 ** update.sum(0))

    pick_g = torch.zeros(4 * H, H, device=device)
    pick_g[2 * H : 3 * H] = torch.eye(H, device=device)  # g = tanh of the masked input (or state), i = f = 1/2
    for locked in (False, True):
        shape = (B, H) if locked else (T, B, H)
        y = ops.mogrifier_lstm(
            torch.ones(T, B, H, device=device), pick_g, zeros, None, h0, h0, None, None, rounds=0, input_dropout=0.5,
            locked_input=locked, seed=seed,
        )[0]  # fmt: skip
        keep = reference.dropout_mask(as_seed(seed, 0), 0.5, shape, device).expand(T, B, H)
        assert torch.equal(y != 0, keep.cumsum(0) > 0)
    y = ops.mogrifier_lstm(
        torch.ones(1, B, H, device=device),
        zeros,
        pick_g,
        None,
        one,
        h0,
        None,
        None,
        rounds=0,
        state_dropout=0.5,
        seed=seed,
    )[0]
    assert torch.equal(y[0] != 0, reference.dropout_mask(as_seed(seed, 1), 0.5, (B, H), device))


def as_seed(seed, n):
    """seed + n in 64 bits."""
    return (seed + n + 2**63) % 2**64 - 2**63


def test_masks_do_not_depend_on_the_dtype(ops, device):
    x = torch.ones(7, 33, device=device)
    masks = [ops.dropout(x.to(d), 0.37, 4) != 0 for d in (torch.float32, torch.float64, torch.bfloat16)]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
