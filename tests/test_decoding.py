"""Beam search and sampling: exact where exhaustive search can say so, and the same whatever is beside a sentence."""

import itertools
import math

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.decoding import beam as beams
from fusedseq.decoding.beam import beam_search, largest, penalty
from fusedseq.decoding.sample import sample
from fusedseq.models import torch_mha
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.models.translator import POSITIONS, Translator, TranslatorSettings
from placement import exact

pytestmark = pytest.mark.usefixtures("on_device")
PAD, UNKNOWN, START, END = range(4)
SETTINGS = {"embedding": 12, "heads": 2, "layers": 2, "feedforward": 20, "max_length": 12, "max_distance": 2}
ENDS = {"start": START, "end": END}


def translator(vocabulary=14, ops=fused, sharpness=3.0, **settings):
    """A model whose words are likely or not: of random weights alone they are about equally so."""
    torch.manual_seed(1)
    model = Translator(14, vocabulary, TranslatorSettings(**{**SETTINGS, **settings}), ops=ops).to(exact()).eval()
    with torch.no_grad():
        model.output_weight.mul_(sharpness)
        model.output_bias.normal_()
    return model


def sources(lengths=(5, 2, 7, 1, 4), seed=2):
    ids = torch.randint(
        4, 14, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    lengths = torch.tensor(lengths)
    ids = ids.to(lengths.device)
    return torch.where(torch.arange(ids.size(1)) < lengths[:, None], ids, PAD), lengths


@torch.no_grad()
def log_probs(model, source, prefixes):
    """Of the next word after each of `prefixes`, lists of one length, of one source (1, S): (n, V)."""
    n, lengths = len(prefixes), torch.tensor([source.size(1)])
    y = model.decode(torch.tensor(prefixes), model.encode(source, lengths).expand(n, -1, -1), lengths.expand(n))
    return model.logits(y[:, -1]).log_softmax(-1)


def words_of(vocabulary):
    return [i for i in range(vocabulary) if i not in (PAD, START)]


def by_hand(model, source, beam, max_length, alpha=0.6, n_best=1):
    """A sentence at a time, the whole prefix at each step, lists of Python; nothing stops early."""
    live, ended = [(0.0, [START])], []
    for length in range(1, max_length + 1):
        if not live:
            break
        found = log_probs(model, source, [ids for _, ids in live]).tolist()
        words = [END] if length == max_length else words_of(len(found[0]))
        offers = [(s + row[w], [*ids, w]) for (s, ids), row in zip(live, found, strict=True) for w in words]
        best = sorted(offers, key=lambda offer: -offer[0])[: beam - len(ended)]
        ended += [offer for offer in best if offer[1][-1] == END]
        live = [offer for offer in best if offer[1][-1] != END]
    scored = [(s / penalty(len(ids) - 1, alpha), s, ids[1:-1]) for s, ids in ended]
    return sorted(scored, key=lambda found: -found[0])[:n_best]


def same(found, wanted):
    assert [h.ids for h in found] == [ids for _, _, ids in wanted]
    torch.testing.assert_close(torch.tensor([h.score for h in found]), torch.tensor([s for s, _, _ in wanted]))
    torch.testing.assert_close(torch.tensor([h.log_prob for h in found]), torch.tensor([p for _, p, _ in wanted]))


def search(model, source, lengths, max_length=9, **options):
    return beam_search(model, source, lengths, **ENDS, max_length=max_length, **options)


def counted(model):
    """The rows of each call of the model's decoder, in a list that grows."""
    rows, decode = [], model.decode
    model.decode = lambda prefix, *args, **options: (rows.append(len(prefix)), decode(prefix, *args, **options))[1]
    return rows


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("beam", [1, 2, 5])
def test_is_the_search_by_hand(beam, alpha, ops):
    model, (source, lengths) = translator(ops=ops), sources()
    found = search(model, source, lengths, beam=beam, n_best=beam, length_penalty=alpha)
    for i, n in enumerate(lengths.tolist()):
        same(found[i], by_hand(model, source[i : i + 1, :n], beam, 9, alpha, beam))


@pytest.mark.cpu
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_stopping_early_loses_nothing(alpha):
    """Against the search by hand, which does not; the fewer hypotheses are asked for, the fewer rows are decoded."""
    model, (source, lengths) = translator(sharpness=2.0), sources()
    model.output_bias.data[END] += 3
    rows, decoded = counted(model), []
    for n_best in (1, 2, 5):
        rows.clear()
        found = search(model, source, lengths, beam=5, n_best=n_best, length_penalty=alpha)
        decoded.append(sum(rows))
        for i, n in enumerate(lengths.tolist()):
            same(found[i], by_hand(model, source[i : i + 1, :n], 5, 9, alpha, n_best))
    assert decoded[0] < decoded[1] <= decoded[2]


class Table:
    """A model whose next word depends on its position alone; probabilities: (T, V), of the words in each place."""

    training = has_cache = False

    def __init__(self, probabilities):
        self.rows = torch.tensor(probabilities, dtype=exact()).log()

    def encode(self, source, lengths):
        return torch.zeros(len(source), 1, 1)

    def decode(self, prefix, memory, lengths):
        return self.rows[: prefix.size(1)].expand(len(prefix), -1, -1)

    def logits(self, y):
        return y


def test_a_long_hypothesis_that_begins_badly_is_waited_for():
    """Ending at once is likelier than going on, which in the end has the better score by its length."""
    first, later, last = ([0, 0, 0, end, 1 - end] for end in (0.7, 0.01, 0.99))
    model, source = Table([first, *[later] * 6, last]), torch.zeros(1, 1, dtype=torch.int64)
    for alpha, wanted in ((0.0, 0), (2.0, 7)):
        found = search(model, source, None, 8, beam=2, length_penalty=alpha)[0][0]
        assert len(found.ids) == wanted
    p = math.log(0.3) + 7 * math.log(0.99)
    assert found.score == pytest.approx(p / penalty(8, 2.0))
    assert found.score > math.log(0.7)


@pytest.mark.parametrize("empty", range(5))
def test_a_hypothesis_that_has_ended_keeps_one_place_and_no_more(empty):
    """Also where nothing else is there to fill the beam, while other sentences go on."""
    state = beams._Beams(torch.tensor([9]), 5, START, END, 0.6, 2)
    state.ended[:] = True
    state.log_prob[:] = -torch.arange(1.0, 6.0)
    state.ended[0, empty], state.log_prob[0, empty] = False, -math.inf
    wanted = sorted(state.log_prob[0].tolist())
    for _ in range(3):
        rows = state.rows()
        state.extend(rows, torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.int64))
        assert sorted(state.log_prob[0].tolist()) == wanted
        assert state.ended.sum() == 4


@pytest.mark.cpu
@pytest.mark.parametrize("vocabulary", [5, 6])
def test_a_beam_as_wide_as_all_prefixes_is_exhaustive(vocabulary, ops):
    model, (source, lengths), longest = translator(vocabulary, ops, 1.0), sources((3, 2)), 4
    found = search(model, source, lengths, longest, beam=vocabulary**longest, n_best=6)
    for i, n in enumerate(lengths.tolist()):
        everything = []
        for length in range(longest):
            for ids in itertools.product([w for w in words_of(vocabulary) if w != END], repeat=length):
                whole = [START, *ids, END]
                p = sum(log_probs(model, source[i : i + 1, :n], [whole[:t]])[0, whole[t]].item()
                        for t in range(1, len(whole)))  # fmt: skip
                everything.append((p / penalty(length + 1, 0.6), p, [*ids]))
        same(found[i], sorted(everything, key=lambda h: -h[0])[:6])


@torch.no_grad()
def test_a_beam_of_one_is_greedy(ops):
    model, (source, lengths) = translator(ops=ops), sources()
    found = search(model, source, lengths)
    for i, n in enumerate(lengths.tolist()):
        ids = [START]
        while ids[-1] != END and len(ids) <= 8:
            row = log_probs(model, source[i : i + 1, :n], [ids])[0]
            row[[PAD, START]] = -math.inf
            ids.append(int(row.argmax()))
        assert found[i][0].ids == [w for w in ids[1:] if w != END]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("beam", [1, 3])
def test_cached_equals_recomputed(positions, beam, ops):
    model, (source, lengths) = translator(ops=ops, positions=positions), sources()
    options = {"beam": beam, "n_best": beam}
    found = search(model, source, lengths, **options)
    for ours, theirs in zip(found, search(model, source, lengths, cached=False, **options), strict=True):
        same(ours, [(h.score, h.log_prob, h.ids) for h in theirs])


def test_torchs_attention_decodes_without_a_cache():
    plain = translator(ops=torch_mha).float()
    model = translator().float()
    model.load_state_dict(plain.state_dict())
    found = [search(m, *sources(), beam=2) for m in (model, plain)]
    for ours, theirs in zip(*found, strict=True):
        assert ours[0].ids == theirs[0].ids
        assert ours[0].log_prob == pytest.approx(theirs[0].log_prob, rel=1e-4)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_alone_is_as_in_its_batch(beam):
    model, (source, lengths) = translator(), sources()
    limits = torch.tensor([9, 4, 6, 2, 9])
    found = search(model, source, lengths, limits, beam=beam, n_best=beam)
    for i, n in enumerate(lengths.tolist()):
        alone = search(model, source[i : i + 1, :n], lengths[i : i + 1], int(limits[i]), beam=beam, n_best=beam)
        same(found[i], [(h.score, h.log_prob, h.ids) for h in alone[0]])


def test_log_probabilities_are_the_models(ops):
    """Of each hypothesis, END included, as the loss has them; and hypotheses are sorted, and different."""
    model, (source, lengths) = translator(ops=ops), sources()
    for i, found in enumerate(search(model, source, lengths, beam=6, n_best=6)):
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        assert len({tuple(h.ids) for h in found}) == len(found) > 1
        for h in found:
            target = torch.tensor([[START, *h.ids, END]])
            y = model(source[i : i + 1], lengths[i : i + 1], target[:, :-1])
            loss = model.cross_entropy(y, target[:, 1:], reduction="none").sum().item()
            assert h.log_prob == pytest.approx(-loss)
            assert h.score == pytest.approx(-loss / penalty(len(h.ids) + 1, 0.6))
            assert not {PAD, START, END} & {*h.ids}


def test_a_higher_length_penalty_prefers_longer_sentences():
    model, (source, lengths) = translator(sharpness=1.5), sources()
    means = []
    for alpha in (0.0, 1.0, 3.0):
        found = search(model, source, lengths, beam=8, length_penalty=alpha)
        means.append(sum(len(h[0].ids) for h in found))
    assert means == sorted(means)
    assert means[0] < means[-1]


def test_all_end_at_the_most_words():
    model, (source, lengths) = translator(), sources()
    model.output_bias.data[END] -= 50
    for most in (1, 2, 7):
        for beam in (1, 3):
            found = search(model, source, lengths, most, beam=beam)
            assert all(len(h[0].ids) == most - 1 for h in found)


def test_padding_and_start_are_never_written_however_likely():
    model, (source, lengths) = translator(), sources()
    wanted = search(model, source, lengths, beam=3)
    model.output_bias.data[[PAD, START]] += 30
    found = search(model, source, lengths, beam=3)
    assert not any({PAD, START} & {*h[0].ids} for h in found)
    assert all(
        h[0].log_prob < w[0].log_prob - 20 for h, w in zip(found, wanted, strict=True)
    )  # theirs is not given away


def test_only_those_that_go_on_are_decoded():
    """Of a batch whose sentences end at different words, the decoder sees fewer and fewer."""
    model, (source, lengths) = translator(), sources()
    rows = counted(model)
    search(model, source, lengths, torch.tensor([1, 3, 5, 7, 9]), beam=3)
    assert rows[0] == 5
    assert max(rows) <= 12
    assert rows[-1] <= 3


def test_the_largest_are_those_of_topk():
    for V in (5, 128, 20 * beams.BLOCK, 20 * beams.BLOCK + 7):
        x = torch.randn(3, V)
        for k in (1, 3):
            values, places = largest(x, k)
            wanted = x.topk(k)
            assert torch.equal(values, wanted.values)
            assert torch.equal(places, wanted.indices)
    x = torch.full((1, 20 * beams.BLOCK + 7), -math.inf)
    x[0, -1] = 1
    assert largest(x, 1)[1].item() == 20 * beams.BLOCK + 6


def test_no_sentences_no_results():
    assert search(translator(), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam must be at least 1, got 0"),
        ({"beam": 2, "n_best": 3}, "n_best must be from 1 to beam = 2, got 3"),
        ({"length_penalty": -1.0}, r"length_penalty must be at least 0, got -1\.0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
    ],
)
def test_mistakes_of_a_search_are_named(options, message):
    with pytest.raises(ValueError, match=f"^beam_search: {message}"):
        search(translator(), *sources(), **options)


def test_a_model_that_cannot_be_searched_is_named():
    model = translator()
    with pytest.raises(ValueError, match=r"^beam_search: model must be in eval mode"):
        search(model.train(), *sources())
    model.output_bias.data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"^beam_search: model must give finite log-probabilities"):
        search(model.eval(), *sources())


# ---------------------------------------------------------------------------------------------------------- sampling

V = 11


def language_model(ops=reference, **settings):
    torch.manual_seed(3)
    sizes = {"embedding": 6, "hidden": 6, "layers": 2, "init_range": 1.0}
    return LanguageModel(V, LanguageModelSettings(**sizes, **settings), ops=ops).to(exact()).eval()


KINDS = {
    "lstm": {}, "rnn": {"cell": "rnn"}, "mogrifier-tied": {"rounds": 3, "tied": True}, "splits": {"splits": (4, 7)}
}  # fmt: skip
kinds = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


def prompt(columns=3, length=4):
    return torch.randint(V, (length, columns))


def generator(seed=0):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@torch.no_grad()
@kinds
def test_the_likeliest_words_with_the_state_carried_are_those_of_the_whole(settings, ops):
    """Temperature 0 against argmax after the whole text so far; the likelihood of a word is the loss's."""
    model, text = language_model(ops, **settings), prompt()
    written = sample(model, text, 6, temperature=0)
    for word in written:
        y = model(text)[0][-1]
        losses = torch.stack([model.cross_entropy(y, torch.full_like(word, w), reduction="none") for w in range(V)])
        assert torch.equal(losses.argmin(0), word)
        text = torch.cat([text, word[None]])


@torch.no_grad()
@kinds
def test_words_are_drawn_as_often_as_they_are_likely(settings):
    """Chi squared of 4,000 draws of one word, at a temperature that is not 1."""
    model, text = language_model(**settings), prompt(1)
    drawn = sample(model, text.expand(-1, 4000), 1, temperature=0.4, generator=generator())
    log_prob = model.loss.log_prob(model(text)[0][-1], model.output_weight, model.decoder_bias)[0]
    off = [distance(drawn[0], (log_prob / temperature).softmax(-1)) for temperature in (0.4, 1.0)]
    assert off[0] < 35 < off[1]  # of 10 freedoms: once in 10,000


def distance(drawn, p):
    expected = len(drawn) * p
    return ((torch.bincount(drawn, minlength=V) - expected).square() / expected).sum().item()


def test_one_seed_one_result():
    model, text = language_model(), prompt()
    first, again, other = (sample(model, text, 8, generator=generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (8, 3)


@torch.no_grad()
def test_only_the_allowed_words_are_drawn():
    model, text = language_model(), prompt(1)
    p = model.logits(model(text)[0][-1]).softmax(-1)[0]
    order = p.argsort(descending=True).tolist()

    def drawn(**options):
        return {*sample(model, text.expand(-1, 2000), 1, generator=generator(), **options)[0].tolist()}

    assert drawn(top_k=3) == {*order[:3]}
    together = (p[order[0]] + p[order[1]] / 2).item()  # reached by the second word
    assert drawn(top_p=together) == {*order[:2]}
    assert drawn(top_p=1e-9) == {order[0]} == drawn(top_k=1)
    assert drawn(top_k=4, top_p=1.0) == {*order[:4]}
    assert not drawn(never=[order[0]]) & {order[0]}
    assert drawn(top_k=2, never=[order[0]]) == {*order[1:3]}
    half = p[order[:3]] / p[order[:3]].sum()  # top_p is of what top_k has left
    assert drawn(top_k=3, top_p=(half[0] + half[1] / 2).item()) == {*order[:2]}


def test_no_words_are_none():
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
        ({"prompt": torch.zeros(0, 2, dtype=torch.int64)}, r"prompt must be \(T, B\) with T at least 1, got \(0, 2\)"),
    ],
)
def test_mistakes_of_sampling_are_named(options, message):
    with pytest.raises(ValueError, match=f"^sample: {message}"):
        sample(language_model(), **{"prompt": prompt(), "words": 2, **options})


def test_a_model_in_training_mode_is_named():
    with pytest.raises(ValueError, match=r"^sample: model must be in eval mode"):
        sample(language_model().train(), prompt(), 2)
