"""Dynamic evaluation of a language model, and its softmax temperature."""

import random

import pytest
import torch
from fusedseq.data.corpus import Corpus
from fusedseq.tasks import ptb
from fusedseq.tasks.evaluation.dynamic_evaluation import DynamicEvaluation, evaluate
from fusedseq.tasks.evaluation.softmax_temperature import best_temperature
from fusedseq.tasks.training import override

TINY = ("embedding=8", "hidden=8", "layers=1", "valid_batch=2", "test_batch=2", "bptt=5")


def task(ops, preset="lstm", *changes, test=None):
    """A task on sentences of random words, whose test split repeats a fixed sentence."""
    rng = random.Random(0)
    lines = [" ".join(rng.choices("abcdefghij", k=8)) for _ in range(40)]
    repeated = ["a f b a f b j c" for _ in range(40)]
    corpus = Corpus.of({"train": lines, "valid": lines[:20], "test": test or repeated})
    torch.manual_seed(0)
    made = ptb.Task(override(ptb.PRESETS[preset], [*TINY, *changes]), corpus, ops=ops, seed=0)
    made.model.eval()
    return made


RULES = pytest.mark.parametrize("rule", [{}, {"rms": True}], ids=["sgd", "rms"])


@RULES
@pytest.mark.parametrize("preset", ["lstm", "mogrifier-awd", "rnn", "awd-merity"])
def test_lr_zero_is_the_static_evaluation(rule, preset, ops):
    hidden = ["hidden=(8, 8)", "layers=2"] if preset == "awd-merity" else []
    t = task(ops, preset, *hidden)
    assert evaluate(
        t, "test", DynamicEvaluation(lr=0.0, decay=0.1, columns=2, **rule)
    ) == t.evaluate("test")


@RULES
def test_repeating_text_is_learnt_and_the_weights_are_restored(rule, ops):
    t = task(ops)
    before = {name: w.clone() for name, w in t.model.state_dict().items()}
    static, found = (
        t.evaluate("test"),
        evaluate(t, "test", DynamicEvaluation(lr=0.5 if not rule else 0.005, **rule)),
    )
    assert found["loss"] < static["loss"] - 0.3
    assert found["tokens"] == static["tokens"]
    assert all(torch.equal(w, before[name]) for name, w in t.model.state_dict().items())


@RULES
def test_a_segment_is_evaluated_before_it_is_trained_on(rule, ops):
    """In a single segment as long as the text no update precedes a prediction."""
    t = task(ops)
    found = evaluate(t, "test", DynamicEvaluation(lr=5.0, segment=10_000, columns=2, **rule))
    assert found["loss"] == pytest.approx(t.evaluate("test")["loss"], rel=1e-6)


def test_full_decay_uses_the_last_segment_alone(ops):
    """With decay 1 every update starts from the trained weights."""
    t = task(ops)
    static = t.evaluate("test")["loss"]
    losses = [
        evaluate(t, "test", DynamicEvaluation(lr=0.5, decay=decay))["loss"]
        for decay in (0.0, 0.1, 1.0)
    ]
    assert losses == sorted(losses)
    assert losses[-1] < static
    assert evaluate(t, "test", DynamicEvaluation(lr=0.0, decay=1.0, columns=2)) == t.evaluate(
        "test"
    )


def test_two_updates_match_the_formula(ops):
    t = task(ops, test=["a b c"])  # 4 words with <eos>; the first is not a target
    t.model.double()
    settings = DynamicEvaluation(lr=0.3, decay=0.25, segment=1)
    found = evaluate(t, "test", settings)
    trained = [w.detach().clone() for w in t.model.parameters()]
    total, state = 0.0, None
    for word, target in zip(*(c.split(1) for c in t._columns("test", 1)), strict=True):
        y, _, state = t.model(word, state)
        state = ptb.detached(state)
        loss = t.model.cross_entropy(y, target)
        total += loss.item()
        t.model.zero_grad()
        loss.backward()
        for w, start in zip(t.model.parameters(), trained, strict=True):
            w.data += -0.3 * w.grad + 0.25 * (start - w.data)
    assert found["loss"] == pytest.approx(total / 3)


def test_two_scaled_updates_match_the_formula(ops):
    """At a temperature, with a decay that reaches its limit for some weights."""
    t = task(ops, test=["a b c"])
    t.model.double()
    settings = DynamicEvaluation(lr=0.02, decay=0.5, segment=1, rms=True, epsilon=0.01)
    found = evaluate(t, "test", settings, temperature=1.5)
    weights, state = [*t.model.parameters()], None
    trained = [w.detach().clone() for w in weights]

    def trained_on(inputs, targets, state):
        y, _, state = t.model(inputs, state)
        loss = t.model.cross_entropy(y, targets, temperature=1.5)
        return loss.item(), torch.autograd.grad(loss, weights), ptb.detached(state)

    squares = []
    for batch in t.batches("train", t.settings.data.batch, 1):
        _, gradients, state = trained_on(batch.inputs, batch.targets, state)
        squares.append([g.square() for g in gradients])
    rms = [torch.stack(parts).mean(0).sqrt() for parts in zip(*squares, strict=True)]
    mean = torch.cat([r.flatten() for r in rms]).mean()
    decays = [(0.5 * r / mean).clamp(max=1) for r in rms]
    assert any((d == 1).any() for d in decays)
    total, state = 0.0, None
    for word, target in zip(*(c.split(1) for c in t._columns("test", 1)), strict=True):
        loss, gradients, state = trained_on(word, target, state)
        total += loss
        for w, start, g, r, d in zip(weights, trained, gradients, rms, decays, strict=True):
            w.data += -0.02 * g / (r + 0.01) + d * (start - w.data)
    assert found["loss"] == pytest.approx(total / 3)


@pytest.mark.parametrize("name", ["lr", "decay", "segment", "columns", "epsilon"])
def test_invalid_settings_are_errors(name):
    with pytest.raises(ValueError, match=f"^dynamic evaluation: {name} must be at least ., got -1"):
        DynamicEvaluation(**{"lr": 0.1, name: -1})


# Temperature.


@torch.no_grad()
def test_temperature_divides_the_logits(ops):
    t = task(ops)
    t.model.double()
    total = 0.0
    state = None
    for batch in t.batches("test"):
        y, _, state = t.model(batch.inputs, state)
        logp = (t.model.logits(y) / 1.7).log_softmax(-1)
        known = batch.targets >= 0
        total -= logp[known].gather(1, batch.targets[known][:, None]).sum().item()
    assert t.evaluate("test", temperature=1.7)["loss"] == pytest.approx(
        total / t.evaluate("test")["tokens"]
    )


def test_the_best_temperature_undoes_a_scale(ops):
    """Logits scaled by 1.25 have their best temperature scaled by 1.25."""
    t = task(ops)
    t.model.double()
    t.model.decoder_bias.data = torch.arange(len(t.model.decoder_bias)).double().mul_(-0.05)

    def search():
        return best_temperature(lambda temperature: t.evaluate("valid", temperature)["loss"])

    first = search()
    t.model.decoder_weight.data *= 1.25
    t.model.decoder_bias.data *= 1.25
    assert search() == pytest.approx(1.25 * first, abs=0.006)


@pytest.mark.parametrize("best", [0.5, 0.83, 1.0, 1.234, 2.0])
def test_the_search_finds_the_minimum(best):
    calls = []
    found = best_temperature(lambda t: (calls.append(t), (1 / t - 1 / best) ** 2)[1])
    assert found == pytest.approx(best, abs=0.003)
    assert len(calls) < 20


def test_temperature_needs_one_softmax(ops):
    t = task(ops, "lstm", "splits=(4,)")
    assert t.evaluate("test", 1.0)["loss"] > 0
    with pytest.raises(
        ValueError, match=r"LanguageModel: temperature must be 1 with splits, got 1\.1"
    ):
        t.evaluate("test", 1.1)
