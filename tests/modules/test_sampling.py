"""Sampling from a language model: the distribution of the words, and its restrictions."""

import pytest
import torch
from fusedseq import reference
from fusedseq.decoding.sample import sample
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings

from tests.support.placement import exact

pytestmark = pytest.mark.usefixtures("on_device")
V = 11


def language_model(ops=reference, **settings):
    torch.manual_seed(3)
    sizes = {"embedding": 6, "hidden": 6, "layers": 2, "init_range": 1.0}
    return LanguageModel(V, LanguageModelSettings(**sizes, **settings), ops=ops).to(exact()).eval()


KINDS = {
    "lstm": {},
    "rnn": {"cell": "rnn"},
    "mogrifier-tied": {"rounds": 3, "tied": True},
    "splits": {"splits": (4, 7)},
}
kinds = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


def prompt(columns=3, length=4):
    return torch.randint(V, (length, columns))


def generator(seed=0):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@torch.no_grad()
@kinds
def test_temperature_0_chooses_the_most_probable_word(settings, ops):
    """The word with the least loss after the whole text so far, without carried state."""
    model, text = language_model(ops, **settings), prompt()
    generated = sample(model, text, 6, temperature=0)
    for word in generated:
        y = model(text)[0][-1]
        losses = torch.stack(
            [model.cross_entropy(y, torch.full_like(word, w), reduction="none") for w in range(V)]
        )
        assert torch.equal(losses.argmin(0), word)
        text = torch.cat([text, word[None]])


@torch.no_grad()
@kinds
def test_words_are_drawn_with_their_probabilities(settings):
    """Chi-squared test of 4,000 draws of one word, at a temperature other than 1."""
    model, text = language_model(**settings), prompt(1)
    drawn = sample(model, text.expand(-1, 4000), 1, temperature=0.4, generator=generator())
    log_prob = model.loss.log_prob(model(text)[0][-1], model.output_weight, model.decoder_bias)[0]
    statistics = [
        chi_squared(drawn[0], (log_prob / temperature).softmax(-1)) for temperature in (0.4, 1.0)
    ]
    # With 10 degrees of freedom a value above 35 has probability 1e-4.
    assert statistics[0] < 35 < statistics[1]


def chi_squared(drawn, p):
    expected = len(drawn) * p
    return ((torch.bincount(drawn, minlength=V) - expected).square() / expected).sum().item()


def test_the_same_seed_gives_the_same_words():
    model, text = language_model(), prompt()
    first, again, other = (sample(model, text, 8, generator=generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (8, 3)


@torch.no_grad()
def test_top_k_top_p_and_never_restrict_the_words():
    model, text = language_model(), prompt(1)
    p = model.logits(model(text)[0][-1]).softmax(-1)[0]
    order = p.argsort(descending=True).tolist()

    def drawn(**options):
        return {
            *sample(model, text.expand(-1, 2000), 1, generator=generator(), **options)[0].tolist()
        }

    assert drawn(top_k=3) == {*order[:3]}
    threshold = (p[order[0]] + p[order[1]] / 2).item()  # the second word reaches it
    assert drawn(top_p=threshold) == {*order[:2]}
    assert drawn(top_p=1e-9) == {order[0]} == drawn(top_k=1)
    assert drawn(top_k=4, top_p=1.0) == {*order[:4]}
    assert not drawn(never=[order[0]]) & {order[0]}
    assert drawn(top_k=2, never=[order[0]]) == {*order[1:3]}
    remaining = p[order[:3]] / p[order[:3]].sum()  # top_p is applied after top_k
    assert drawn(top_k=3, top_p=(remaining[0] + remaining[1] / 2).item()) == {*order[:2]}


@torch.no_grad()
def test_logits_of_16_bits_are_normalized_in_fp32(ops):
    """In bf16 a log-probability of -2.4 is a multiple of 1/64, which would hide the difference."""
    model = language_model(ops).bfloat16()
    model.output_weight.zero_()
    model.decoder_bias.fill_(0.25)[5] += torch.finfo(torch.bfloat16).eps / 4
    assert (sample(model, prompt(), 2, temperature=0) == 5).all()


def test_zero_words_give_an_empty_result():
    assert sample(language_model(), prompt(), 0).shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": -1}, "words must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"never": [V]}, rf"never must be ids in \[0, {V}\), not all of them, got \[{V}\]"),
        ({"never": range(V)}, "never must be ids in"),
        (
            {"prompt": torch.zeros(0, 2, dtype=torch.int64)},
            r"prompt must be \(T, B\) with T at least 1, got \(0, 2\)",
        ),
    ],
)
def test_arguments_out_of_range_are_rejected(options, message):
    with pytest.raises(ValueError, match=f"^sample: {message}"):
        sample(language_model(), **{"prompt": prompt(), "words": 2, **options})


def test_a_model_in_training_mode_is_rejected():
    with pytest.raises(ValueError, match=r"^sample: model must be in eval mode"):
        sample(language_model().train(), prompt(), 2)


@torch.no_grad()
@kinds
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_a_temperature_near_0_chooses_as_0(settings, more):
    model, text = language_model(**settings), prompt()
    coldest = sample(model, text, 6, temperature=0, never=[1])
    for temperature in (1e-40, 1e-46, 5e-324):
        found = sample(model, text, 6, temperature=temperature, never=[1], **more)
        assert torch.equal(found, coldest)


@torch.no_grad()
def test_a_very_high_temperature_draws_every_word_but_those_excluded():
    drawn = sample(language_model(), prompt(1000), 1, temperature=1e300, never=[1])
    assert set(drawn.flatten().tolist()) == {*range(V)} - {1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("words", 2.5),
        ("words", True),
        ("temperature", "x"),
        ("top_k", 2.5),
        ("top_p", "x"),
        ("never", [1.5]),
        ("never", 3),
        ("never", torch.tensor([1])),
        ("prompt", [[1]]),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_rejected(name, value):
    given = {"prompt": prompt(2), "words": 2} | {name: value}
    with pytest.raises(TypeError, match=f"^sample: {name} must be "):
        sample(language_model(), **given)
