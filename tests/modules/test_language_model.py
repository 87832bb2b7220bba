"""Language models: both operator sets, state, evaluation, and the sizes of the published models."""

import dataclasses
import math

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.data import corpus
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.nn import LSTM, Dropout, LockedDropout, MogrifierLSTM
from fusedseq.tasks import ptb
from torch.nn import functional as F

V = 93
PRESET = pytest.mark.parametrize("preset", ptb.PRESETS)


def small(preset):
    """The model settings of a preset, with few units."""
    s = ptb.PRESETS[preset].model
    hidden = 12 if isinstance(s.hidden, int) else (*(20 for _ in s.hidden[1:]), 12)
    return dataclasses.replace(s, embedding=12, hidden=hidden, rank=s.rank and 3)


def model(preset, ops, **changes):
    torch.manual_seed(0)
    return LanguageModel(V, dataclasses.replace(small(preset), **changes), ops=ops)


def run(m, ids, targets, seed=1):
    torch.manual_seed(seed)
    dropped, raw, state = m(ids)
    loss = m.cross_entropy(dropped, targets)
    (loss + m.regularization(dropped, raw)).backward()
    return loss.detach(), {name: p.grad for name, p in m.named_parameters()}, state


def words(T=9, B=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(V, (T, B), generator=generator), torch.randint(
        V, (T, B), generator=generator
    )


@PRESET
def test_both_operator_sets_give_the_same_model(preset):
    """The same parameters, random masks, loss and gradients, in training mode."""
    models = [model(preset, ops).double() for ops in (reference, fused)]
    states = [m.state_dict() for m in models]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    (loss, grads, _), (fused_loss, fused_grads, _) = (run(m, *words()) for m in models)
    torch.testing.assert_close(fused_loss, loss)
    torch.testing.assert_close(fused_grads, grads)


@PRESET
def test_every_parameter_has_a_gradient(preset, ops):
    _, grads, _ = run(model(preset, ops), *words(T=20))
    for name, grad in grads.items():
        assert grad is not None, name
        assert grad.abs().sum() > 0, name


@PRESET
def test_only_training_is_random(preset, ops):
    m, (ids, _) = model(preset, ops), words()
    random = any(
        getattr(m.settings, f) for f in ("input_dropout", "weight_drop", "embedding_dropout")
    )
    assert torch.equal(m(ids)[0], m(ids)[0]) == (not random)
    m.eval()
    assert torch.equal(m(ids)[0], m(ids)[0])
    assert torch.equal(m(ids)[0], m(ids)[1])  # no output dropout


@PRESET
def test_two_segments_equal_one(preset, ops):
    m, (ids, _) = model(preset, ops).eval(), words(T=11)
    y, _, last = m(ids)
    first, _, state = m(ids[:4])
    second, _, last_of_two = m(ids[4:], state)
    torch.testing.assert_close(torch.cat([first, second]), y)
    torch.testing.assert_close(last_of_two, last)


def test_the_future_does_not_matter(ops):
    m, (ids, _) = model("mogrifier-awd", ops).eval(), words(T=8)
    other = ids.clone()
    other[5:] = (other[5:] + 1) % V
    y, y_other = m(ids)[0], m(other)[0]
    torch.testing.assert_close(y_other[:5], y[:5])
    assert not torch.allclose(y_other[5:], y[5:])


def test_a_tied_decoder_is_the_embedding_without_dropout():
    m = model("awd", reference, embedding_dropout=1.0)
    y = torch.randn(3, 2, 12)
    assert torch.equal(m.logits(y), F.linear(y, m.embedding.weight, m.decoder_bias))
    assert "decoder_weight" not in m.state_dict()
    assert "decoder_weight" in model("lstm", reference).state_dict()
    with pytest.raises(
        ValueError, match="tied needs the last hidden size to be embedding = 12, got 20"
    ):
        model("awd", reference, hidden=20)


def test_locked_dropout_has_one_mask_for_all_steps():
    for preset, locked in (("locked", True), ("embdrop", False)):
        m = model(preset, reference, output_dropout=0.5)
        dropped, raw, _ = m(words(T=30)[0])
        keep = (dropped != 0) | (raw == 0)
        assert bool((keep == keep[:1]).all()) == locked


EVERY_SETTING = {
    "embedding": 12,
    "hidden": 12,
    "residual": True,
    "output": "sum",
    "locked": False,
    "input_dropout": 0.1,
    "dropout": 0.2,
    "output_dropout": 0.3,
    "embedding_dropout": 0.4,
    "weight_drop": 0.5,
}
OF_A_MOGRIFIER = {
    "rounds": 2,
    "rank": 3,
    "cap_input_gate": True,
    "forget_bias": 0.7,
    "state_dropout": 0.6,
}


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(
    "more",
    [{"forget_bias": 0.7}, {"cell": "gru"}, {"cell": "rnn"}, OF_A_MOGRIFIER],
    ids=["lstm", "gru", "rnn", "mogrifier"],
)
def test_every_setting_reaches_its_module(more, locked, ops):
    settings = {**EVERY_SETTING, **more, "locked": locked}
    m = LanguageModel(V, LanguageModelSettings(**settings), ops=ops)
    assert m.input_dropout.p == 0.1
    assert m.output_dropout.p == 0.3
    assert m.embedding.dropout == 0.4
    kind = LockedDropout if locked else Dropout
    assert type(m.input_dropout) is type(m.output_dropout) is kind
    names = ("residual", "output", "dropout", "weight_drop", *more)
    found = {name: getattr(m.recurrent, name) for name in names if name != "cell"}
    assert found == {name: settings[name] for name in found}
    assert (not locked) == ("locked_input=False" in repr(m.recurrent))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, LSTM),
        ({"rounds": 1}, MogrifierLSTM),
        ({"state_dropout": 0.1}, MogrifierLSTM),
        ({"cap_input_gate": True}, MogrifierLSTM),
    ],
    ids=str,
)
def test_what_an_lstm_does_not_have_makes_a_mogrifier(changes, kind):
    assert type(model("lstm", reference, **changes).recurrent) is kind


def test_embedding_and_decoder_are_drawn_from_the_range():
    m = model("lstm", reference, init_range=0.03)
    for weight in (m.embedding.weight, m.decoder_weight):
        assert weight.abs().max() <= 0.03
        # Four standard errors of a uniform distribution's standard deviation.
        error = 4 * (0.2 / weight.numel()) ** 0.5
        assert weight.std().item() == pytest.approx(0.03 / 3**0.5, rel=error)


def test_regularization_equals_the_formulas_of_ar_and_tar():
    m = model("awd", reference, alpha=2.0, beta=1.5)
    dropped, raw = torch.randn(5, 3, 12), torch.randn(5, 3, 12)
    expected = 2.0 * dropped.pow(2).mean() + 1.5 * (raw[1:] - raw[:-1]).pow(2).mean()
    torch.testing.assert_close(m.regularization(dropped, raw), expected)
    assert model("locked", reference).regularization(dropped, raw) == 0


def test_cross_entropy_ignores_padding():
    m, (ids, targets) = model("lstm", reference), words()
    y = m(ids)[0]
    filled = targets.clone()
    filled[-2:, -1] = -100
    logp = m.logits(y).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(m.cross_entropy(y, filled), -logp[filled >= 0].mean())


def test_sizes_equal_the_published_ones():
    """24M parameters each. The source report's Mogrifier, reported as 24M, is 23M at 650 units."""
    counts = {}
    for preset in ("awd-merity", "mogrifier-melis", "mogrifier-awd"):
        with torch.device("meta"):
            m = LanguageModel(10_000, ptb.PRESETS[preset].model, ops=reference)
        counts[preset] = sum(p.numel() for p in m.parameters()) / 1e6
    assert counts == pytest.approx(
        {"awd-merity": 24.2, "mogrifier-melis": 24.0, "mogrifier-awd": 23.0}, abs=0.1
    )


@pytest.mark.parametrize("changes", [{}, {"rank": None, "tied": False, "rounds": 3}], ids=str)
def test_mogrifier_melis_is_initialised_as_in_the_paper_s_code(changes):
    """Every weight is truncated at two standard deviations and has the variance 1 / n after it; the
    forget gates' biases have the mean 1; the other biases of the package are 0."""
    settings = dataclasses.replace(
        ptb.PRESETS["mogrifier-melis"].model, embedding=160, hidden=160, **changes
    )
    torch.manual_seed(0)
    m = LanguageModel(1000, settings, ops=reference)
    seen = 0
    for name, p in m.named_parameters():
        name, values = name.removeprefix("recurrent."), p.detach().double()
        if name.startswith("bias_ih"):
            values[160:320] -= 1
        elif "bias" in name:
            assert not values.count_nonzero(), name
            continue
        # The product of two factors of rank 84 has the variance 1 / n before truncation.
        factor = "_A_" in name or "_B_" in name
        std = (160 * 84) ** -0.25 if factor else (1.3 / 160) ** 0.5
        assert std * 1.9 < values.abs().max() < std * 2.01, name
        expected = 0.8796 * std
        assert values.std().item() == pytest.approx(expected, rel=4 / values.numel() ** 0.5), name
        assert values.mean().item() == pytest.approx(0, abs=4 * expected / values.numel() ** 0.5)
        seen += 1
    assert seen == (12 if changes else 15)


def test_an_unknown_init_is_rejected():
    with pytest.raises(ValueError, match="init must be uniform or truncated_normal, got 'zeros'"):
        LanguageModelSettings(init="zeros")


@pytest.fixture(scope="module")
def miniature():
    return corpus.load("synthetic")


def task(miniature, preset="awd", **data):
    s = ptb.PRESETS[preset]
    s = dataclasses.replace(s, model=small(preset), data=dataclasses.replace(s.data, **data))
    torch.manual_seed(0)
    return ptb.Task(s, miniature, ops=reference, seed=0)


def test_evaluation_does_not_depend_on_segments_or_repetition(miniature):
    tasks = [task(miniature, bptt=bptt) for bptt in (70, 7, 1000)]
    losses = []
    for t in tasks:
        t.model.eval()
        losses += [t.evaluate("valid")["loss"], t.evaluate("valid")["loss"]]
    assert losses[0] == losses[1]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-6)


def test_evaluation_is_the_mean_over_every_word_but_the_first(miniature):
    t = task(miniature)
    t.model.eval()
    found = t.evaluate("test")
    with torch.no_grad():
        logp = t.model.logits(t.model(miniature.test[:-1, None])[0])[:, 0].log_softmax(-1)
    loss = F.nll_loss(logp, miniature.test[1:]).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["tokens"] == len(miniature.test) - 1


def test_state_is_carried_detached_and_reset(miniature):
    t = task(miniature, "awd-merity")
    batches = t.start_epoch(0)
    for batch in batches[0], batches[1]:
        t.loss(batch).objective.backward()  # fails if the state has a graph
    assert not any(h.requires_grad for part in t.state for h in part)
    assert t.state[0][0].abs().sum() > 0
    t.start_epoch(1)
    assert t.state is None


@pytest.mark.parametrize("preset", ["mogrifier-melis", "awd-merity"])
def test_a_reset_sequence_starts_from_zeros(miniature, preset):
    t = task(miniature, preset, reset_probability=0.5)
    t.loss(t.start_epoch(0)[0])
    h, c = t._reset(t.state, t.inputs.size(1))
    for new, old in zip([*h, *c], [*t.state[0], *t.state[1]], strict=True):
        reset = (new == 0).all(-1)
        assert 0 < reset.sum() < reset.numel()
        assert torch.equal(reset, (h[0] == 0).all(-1))  # the same sequences in all layers
        assert torch.equal(new[~reset], old[~reset])


def test_sum_over_time_scales_only_the_objective(miniature):
    results = []
    for flag in (False, True):
        t = task(miniature, "lstm", sum_over_time=flag, vary_bptt=False, bptt=20)
        results.append(t.loss(t.start_epoch(0)[0]))
    mean, total = results
    assert total.loss == mean.loss
    torch.testing.assert_close(total.objective, 20 * mean.objective)


@pytest.mark.parametrize("changes", [{"batch": 0}, {"reset_probability": 1.5}, {"bptt": -1}])
def test_bad_stream_settings_are_rejected(changes):
    with pytest.raises(ValueError, match=f"data.{next(iter(changes))} must be"):
        ptb.StreamSettings(**changes)


@pytest.mark.parametrize(("cell", "torch_class"), [("rnn", torch.nn.RNN), ("gru", torch.nn.GRU)])
def test_other_cells_equal_those_of_torch(cell, torch_class, ops):
    m, (ids, _) = model("rnn", ops, cell=cell, layers=2).eval(), words()
    theirs = torch_class(12, 12, 2)
    theirs.load_state_dict(
        {
            name.removeprefix("recurrent."): t
            for name, t in m.state_dict().items()
            if "recurrent" in name
        }
    )
    torch.testing.assert_close(m(ids)[1], theirs(m.embedding(ids))[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "qrnn"}, "cell must be lstm, gru or rnn, got 'qrnn'"),
        ({"cell": "rnn", "rounds": 5}, "rounds must be 0 with cell = rnn, got 5"),
        ({"cell": "gru", "forget_bias": 1.0}, "forget_bias must be None with cell = gru, got 1.0"),
    ],
    ids=str,
)
def test_bad_cells_are_rejected(changes, message):
    with pytest.raises(ValueError, match=f"LanguageModel: .*{message}"):
        LanguageModelSettings(**changes)


def test_the_default_settings_are_the_plain_lstm():
    assert ptb.PRESETS["lstm"].model == LanguageModelSettings()
