"""What `split_cross_entropy` and its module compute, beyond agreeing with the oracle: normalized
distributions, the flat softmax, rows without a target, and training.
"""

import itertools
import math

import pytest
import torch
from fusedseq import nn, reference
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from torch.nn import functional as F

from tests.support.losses import inputs
from tests.support.placement import exact

pytestmark = pytest.mark.usefixtures("on_device")

V = 37
SPLITS = pytest.mark.parametrize(
    "splits", [(), (10,), (1,), (36,), (5, 20), (5, 6, 30), (1, 2, 3, 4, 5)], ids=str
)


def split_inputs(splits, N=50, E=7):
    x, W, target, b = inputs(N, E, V)
    K = len(splits)
    tombstones = [
        torch.randn(K, *rest, dtype=exact(), requires_grad=True) if K else None
        for rest in ((E,), ())
    ]
    return x, W, target, tombstones[0], splits, b, tombstones[1]


@SPLITS
def test_probabilities_sum_to_one(ops, splits):
    """So do exp(-loss) over all words as targets, and exp(log_prob), which is the same."""
    x, W, _, tombstones, _, b, tombstone_bias = split_inputs(splits)
    rows = x[:3].repeat_interleave(V, 0)
    losses = ops.split_cross_entropy(
        rows, W, torch.arange(V).repeat(3), tombstones, splits, b, tombstone_bias, reduction="none"
    )
    torch.testing.assert_close((-losses).reshape(3, V).exp().sum(1), torch.ones(3, dtype=exact()))
    log_probs = reference.split_cross_entropy.__globals__["log_prob"](
        x[:3], W, tombstones, splits, b, tombstone_bias
    )
    torch.testing.assert_close(log_probs, -losses.reshape(3, V))


def test_without_splits_it_is_cross_entropy(ops):
    x, W, target, *_, b, _ = split_inputs(())
    torch.testing.assert_close(
        ops.split_cross_entropy(x, W, target, None, (), b),
        F.cross_entropy(F.linear(x, W, b), target),
    )


@SPLITS
def test_tombstones_equal_to_their_tails_give_the_flat_softmax(ops, splits):
    """With the log-sum-exp of a tail as the logit of its tombstone, the loss is cross-entropy.

    The logits of the tombstones are set by their bias, for one row.
    """
    x, W, target, tombstones, _, b, _ = split_inputs(splits, N=1)
    if not splits:
        return
    logits = F.linear(x, W, b)[0]
    edges = itertools.pairwise((*splits, V))
    tails = torch.stack([logits[start:end].logsumexp(0) for start, end in edges])
    loss = ops.split_cross_entropy(x, W, target, torch.zeros_like(tombstones), splits, b, tails)
    torch.testing.assert_close(loss, F.cross_entropy(logits[None], target))


def test_tombstone_of_a_split_belongs_to_its_tail(ops):
    """A likely tombstone makes the words of its own tail likely."""
    splits = (5, 20)
    x, W, _, tombstones, _, b, _ = split_inputs(splits, N=1)
    for i, (start, end) in enumerate(itertools.pairwise((*splits, V))):
        bias = torch.zeros(2, dtype=exact())
        bias[i] = 50.0
        target = torch.arange(V)
        losses = ops.split_cross_entropy(
            x.expand(V, -1), W, target, tombstones, splits, b, bias, reduction="none"
        )
        assert (-losses[start:end]).exp().sum() > 0.999


@SPLITS
def test_a_split_row_without_a_target_does_not_matter(ops, splits):
    x, W, target, *rest = split_inputs(splits)
    changed, target = x.detach().clone(), target.clone()
    changed[::3] = math.inf
    target[::3] = 11  # the ignored index, which other rows may have as well
    changed.requires_grad_()
    has_target = target != 11
    expected = ops.split_cross_entropy(x[has_target], W, target[has_target], *rest)
    loss = ops.split_cross_entropy(changed, W, target, *rest, ignore_index=11)
    torch.testing.assert_close(loss, expected)
    (dx, dW), (expected_dx, expected_dW) = (
        torch.autograd.grad(y, (t, W)) for y, t in ((loss, changed), (expected, x))
    )
    torch.testing.assert_close(dW, expected_dW)
    torch.testing.assert_close(dx[target != 11], expected_dx[target != 11])
    assert (dx[target == 11] == 0).all()
    assert ops.split_cross_entropy(x, W, torch.full_like(target, 11), *rest, ignore_index=11) == 0


@pytest.mark.parametrize("bias", [True, False])
def test_module_equals_its_operator(ops, bias):
    module = nn.SplitCrossEntropy(7, (5, 20), bias, ops=ops).to(exact())
    torch.nn.init.normal_(module.tombstones)
    x, W, target, *_, b, _ = split_inputs((5, 20))
    expected = reference.split_cross_entropy(
        x, W, target, module.tombstones, (5, 20), b, module.tombstone_bias
    )
    torch.testing.assert_close(module(x, target, W, b), expected)
    log_probs = module.log_prob(x, W, b)
    assert log_probs.shape == (50, V)
    torch.testing.assert_close(-log_probs.gather(1, target[:, None]).mean(), expected)


def test_module_without_splits_has_the_whole_log_prob_and_no_parameters():
    module = nn.SplitCrossEntropy(7)
    x, W, *_, b, _ = split_inputs(())
    assert not list(module.parameters())
    assert not module.state_dict()
    torch.testing.assert_close(module.log_prob(x, W, b), F.linear(x, W, b).log_softmax(-1))


def test_tail_vectors_of_the_awd_lstm_code_load_in_reverse():
    """In that code the tombstone of split i is the i-th from the end of the head."""
    state = {"loss.tail_vectors": torch.randn(3, 7), "loss.tail_bias": torch.randn(3)}
    original = {name: value.clone() for name, value in state.items()}
    model = torch.nn.ModuleDict({"loss": nn.SplitCrossEntropy(7, (5, 20, 30))})
    model.load_state_dict(state)
    module = model["loss"]
    for i in range(3):
        assert torch.equal(module.tombstones[i], original["loss.tail_vectors"][-(i + 1)])
        assert module.tombstone_bias[i] == original["loss.tail_bias"][-(i + 1)]
    model.load_state_dict(model.state_dict())
    assert torch.equal(module.tombstones[0], original["loss.tail_vectors"][2])


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_trains_its_tombstones(ops, tied):
    """The tombstones are parameters of the model and get gradients."""
    settings_ = LanguageModelSettings(embedding=6, hidden=6, layers=1, tied=tied, splits=(5, 20))
    model = LanguageModel(V, settings_, ops=ops)
    ids, targets = torch.randint(V, (2, 8, 3))
    model.cross_entropy(model(ids)[0], targets).backward()
    names = {
        name
        for name, p in model.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert {"loss.tombstones", "loss.tombstone_bias"} <= names
    with pytest.raises(ValueError, match=r"splits must be \(\) for logits"):
        model.logits(model(ids)[0])
