"""Beam search against exhaustive search, a plain search, and searches of single sentences."""

import itertools
import math

import pytest
import torch
from fusedseq import fused
from fusedseq.decoding.beam import BLOCK, beam_search, largest, penalty
from fusedseq.decoding.hypotheses import Beams, SearchSettings
from fusedseq.models import torch_mha
from fusedseq.models.translator import POSITIONS, Translator, TranslatorSettings

from tests.support.placement import exact

pytestmark = pytest.mark.usefixtures("on_device")
PAD, UNKNOWN, START, END = range(4)
SETTINGS = {
    "embedding": 12,
    "heads": 2,
    "layers": 2,
    "feedforward": 20,
    "max_length": 12,
    "max_distance": 2,
}
ENDS = {"start": START, "end": END}


def translator(vocabulary=14, ops=fused, sharpness=3.0, **settings):
    """A model with distinct word probabilities; random weights alone make them nearly equal."""
    torch.manual_seed(1)
    model = (
        Translator(14, vocabulary, TranslatorSettings(**{**SETTINGS, **settings}), ops=ops)
        .to(exact())
        .eval()
    )
    with torch.no_grad():
        model.output_weight.mul_(sharpness)
        model.output_bias.normal_()
    return model


def sources(lengths=(5, 2, 7, 1, 4), seed=2):
    ids = torch.randint(
        4,
        14,
        (len(lengths), max(lengths)),
        generator=torch.Generator().manual_seed(seed),
        device="cpu",
    )
    lengths = torch.tensor(lengths)
    ids = ids.to(lengths.device)
    return torch.where(torch.arange(ids.size(1)) < lengths[:, None], ids, PAD), lengths


@torch.no_grad()
def log_probs(model, source, prefixes):
    """Log-probabilities (n, V) of the words after n prefixes of equal length, for one source."""
    n, lengths = len(prefixes), torch.tensor([source.size(1)])
    y = model.decode(
        torch.tensor(prefixes), model.encode(source, lengths).expand(n, -1, -1), lengths.expand(n)
    )
    return model.logits(y[:, -1]).log_softmax(-1)


def words_of(vocabulary):
    return [i for i in range(vocabulary) if i not in (PAD, START)]


def plain_search(model, source, beam, max_length, alpha=0.6, n_best=1):
    """Searches one sentence with Python lists and whole prefixes, without stopping early."""
    live, ended = [(0.0, [START])], []
    for length in range(1, max_length + 1):
        if not live:
            break
        found = log_probs(model, source, [ids for _, ids in live]).tolist()
        words = [END] if length == max_length else words_of(len(found[0]))
        candidates = [
            (s + row[w], [*ids, w])
            for (s, ids), row in zip(live, found, strict=True)
            for w in words
        ]
        best = sorted(candidates, key=lambda candidate: -candidate[0])[: beam - len(ended)]
        ended += [candidate for candidate in best if candidate[1][-1] == END]
        live = [candidate for candidate in best if candidate[1][-1] != END]
    scored = [(s / penalty(len(ids) - 1, alpha), s, ids[1:-1]) for s, ids in ended]
    return sorted(scored, key=lambda found: -found[0])[:n_best]


def assert_equal(found, expected):
    assert [h.ids for h in found] == [ids for _, _, ids in expected]
    torch.testing.assert_close(
        torch.tensor([h.score for h in found]), torch.tensor([s for s, _, _ in expected])
    )
    torch.testing.assert_close(
        torch.tensor([h.log_prob for h in found]), torch.tensor([p for _, p, _ in expected])
    )


def search(model, source, lengths, max_length=9, **options):
    return beam_search(model, source, lengths, **(ENDS | options), max_length=max_length)


def count_rows(model):
    """A list to which every call of the model's decoder appends its number of rows."""
    rows, decode = [], model.decode
    model.decode = lambda prefix, *args, **options: (
        rows.append(len(prefix)),
        decode(prefix, *args, **options),
    )[1]
    return rows


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("beam", [1, 2, 5])
def test_equals_a_plain_search(beam, alpha, ops):
    model, (source, lengths) = translator(ops=ops), sources()
    found = search(model, source, lengths, beam=beam, n_best=beam, length_penalty=alpha)
    for i, n in enumerate(lengths.tolist()):
        assert_equal(found[i], plain_search(model, source[i : i + 1, :n], beam, 9, alpha, beam))


@pytest.mark.cpu
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_stopping_early_loses_nothing(alpha):
    """Equals the search without early stopping, and a smaller n_best decodes fewer rows."""
    model, (source, lengths) = translator(sharpness=2.0), sources()
    model.output_bias.data[END] += 3
    rows, decoded = count_rows(model), []
    for n_best in (1, 2, 5):
        rows.clear()
        found = search(model, source, lengths, beam=5, n_best=n_best, length_penalty=alpha)
        decoded.append(sum(rows))
        for i, n in enumerate(lengths.tolist()):
            assert_equal(found[i], plain_search(model, source[i : i + 1, :n], 5, 9, alpha, n_best))
    assert decoded[0] < decoded[1] <= decoded[2]


class Table:
    """A model whose next word depends on its position alone.

    probabilities: (T, V), of the words at each position
    """

    training = has_cache = False

    def __init__(self, probabilities):
        self.rows = torch.tensor(probabilities, dtype=exact()).log()
        self.output_bias = torch.zeros_like(self.rows[0])

    def encode(self, source, lengths):
        return torch.zeros(len(source), 1, 1)

    def decode(self, prefix, memory, lengths):
        return self.rows[: prefix.size(1)].expand(len(prefix), -1, -1)

    def logits(self, y):
        return y


def test_a_longer_hypothesis_with_a_better_final_score_is_found():
    """Ending at once is more probable, but the longer hypothesis has the better penalized score."""
    first, later, last = ([0, 0, 0, end, 1 - end] for end in (0.7, 0.01, 0.99))
    model, source = Table([first, *[later] * 6, last]), torch.zeros(1, 1, dtype=torch.int64)
    for alpha, expected in ((0.0, 0), (2.0, 7)):
        found = search(model, source, None, 8, beam=2, length_penalty=alpha)[0][0]
        assert len(found.ids) == expected
    p = math.log(0.3) + 7 * math.log(0.99)
    assert found.score == pytest.approx(p / penalty(8, 2.0))
    assert found.score > math.log(0.7)


def test_log_probabilities_of_16_bits_are_computed_in_fp32():
    """As those of the loss are: in bf16 each would have an error of up to one in 256."""
    model, source = Table([[0, 0, 0, 0.1, 0.9]] * 4), torch.zeros(1, 1, dtype=torch.int64)
    model.rows = model.rows.bfloat16()
    ((found,),) = search(model, source, None, 4)
    assert found.ids == [4, 4, 4]
    expected = model.rows.float().log_softmax(-1).double()
    assert found.log_prob == expected[range(4), [4, 4, 4, END]].sum().item()


def test_an_end_without_probability_ends_no_hypothesis():
    """It would take a place in the beam from the words that follow."""
    state = Beams(torch.tensor([9]), SearchSettings(2, START, END, 0.6, 1))
    state.log_prob[:] = torch.tensor([-1.0, -2.0])
    log_probs = torch.tensor([[-1.0, -math.inf], [-math.inf, -math.inf]])
    state.extend(state.active(), log_probs, torch.tensor([[4, END], [END, END]]))
    assert state.log_prob.tolist() == [[-2.0, -math.inf]]
    assert not state.ended.any()


@pytest.mark.parametrize("empty", range(5))
def test_an_ended_hypothesis_occupies_exactly_one_place(empty):
    """Also if nothing else can fill the beam, while other sentences are still searched."""
    state = Beams(torch.tensor([9]), SearchSettings(5, START, END, 0.6, 2))
    state.ended[:] = True
    state.log_prob[:] = -torch.arange(1.0, 6.0)
    state.ended[0, empty], state.log_prob[0, empty] = False, -math.inf
    expected = sorted(state.log_prob[0].tolist())
    for _ in range(3):
        rows = state.active()
        state.extend(rows, torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.int64))
        assert sorted(state.log_prob[0].tolist()) == expected
        assert state.ended.sum() == 4


@pytest.mark.cpu
@pytest.mark.parametrize("vocabulary", [5, 6])
def test_a_beam_as_wide_as_all_prefixes_is_exhaustive(vocabulary, ops):
    model, (source, lengths), longest = translator(vocabulary, ops, 1.0), sources((3, 2)), 4
    found = search(model, source, lengths, longest, beam=vocabulary**longest, n_best=6)
    for i, n in enumerate(lengths.tolist()):
        everything = []
        for length in range(longest):
            for ids in itertools.product(
                [w for w in words_of(vocabulary) if w != END], repeat=length
            ):
                whole = [START, *ids, END]
                p = sum(
                    log_probs(model, source[i : i + 1, :n], [whole[:t]])[0, whole[t]].item()
                    for t in range(1, len(whole))
                )
                everything.append((p / penalty(length + 1, 0.6), p, [*ids]))
        assert_equal(found[i], sorted(everything, key=lambda h: -h[0])[:6])


@torch.no_grad()
def test_a_beam_of_one_is_greedy_decoding(ops):
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
def test_cached_decoding_equals_decoding_whole_prefixes(positions, beam, ops):
    model, (source, lengths) = translator(ops=ops, positions=positions), sources()
    options = {"beam": beam, "n_best": beam}
    found = search(model, source, lengths, **options)
    for ours, theirs in zip(
        found, search(model, source, lengths, cached=False, **options), strict=True
    ):
        assert_equal(ours, [(h.score, h.log_prob, h.ids) for h in theirs])


def test_torch_mha_decodes_without_a_cache():
    plain = translator(ops=torch_mha).float()
    model = translator().float()
    model.load_state_dict(plain.state_dict())
    found = [search(m, *sources(), beam=2) for m in (model, plain)]
    for ours, theirs in zip(*found, strict=True):
        assert ours[0].ids == theirs[0].ids
        assert ours[0].log_prob == pytest.approx(theirs[0].log_prob, rel=1e-4)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_alone_equals_the_sentence_in_its_batch(beam):
    model, (source, lengths) = translator(), sources()
    limits = torch.tensor([9, 4, 6, 2, 9])
    found = search(model, source, lengths, limits, beam=beam, n_best=beam)
    for i, n in enumerate(lengths.tolist()):
        alone = search(
            model, source[i : i + 1, :n], lengths[i : i + 1], int(limits[i]), beam=beam, n_best=beam
        )
        assert_equal(found[i], [(h.score, h.log_prob, h.ids) for h in alone[0]])


def test_log_probabilities_equal_the_loss(ops):
    """Of each hypothesis with END; the hypotheses are sorted and different from each other."""
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
    with torch.device("cpu"):  # whose random weights give sentences of different lengths
        model = translator(sharpness=1.5)
    source, lengths = sources()
    model, means = model.to(source.device, exact()), []
    for alpha in (0.0, 1.0, 3.0):
        found = search(model, source, lengths, beam=8, length_penalty=alpha)
        means.append(sum(len(h[0].ids) for h in found))
    assert means == sorted(means)
    assert means[0] < means[-1]


def test_all_hypotheses_end_at_max_length():
    model, (source, lengths) = translator(), sources()
    model.output_bias.data[END] -= 50
    for max_length in (1, 2, 7):
        for beam in (1, 3):
            found = search(model, source, lengths, max_length, beam=beam)
            assert all(len(h[0].ids) == max_length - 1 for h in found)


def test_padding_and_start_are_never_generated():
    """Even if they are very probable, and their probability is not distributed to other words."""
    model, (source, lengths) = translator(), sources()
    before = search(model, source, lengths, beam=3)
    model.output_bias.data[[PAD, START]] += 30
    found = search(model, source, lengths, beam=3)
    assert not any({PAD, START} & {*h[0].ids} for h in found)
    assert all(h[0].log_prob < w[0].log_prob - 20 for h, w in zip(found, before, strict=True))


def test_only_active_hypotheses_are_decoded():
    """In a batch whose sentences end at different steps, the decoder gets fewer and fewer rows."""
    model, (source, lengths) = translator(), sources()
    rows = count_rows(model)
    search(model, source, lengths, torch.tensor([1, 3, 5, 7, 9]), beam=3)
    assert rows[0] == 5
    assert max(rows) <= 12
    assert rows[-1] <= 3


def test_largest_equals_topk():
    for V in (5, 128, 20 * BLOCK, 20 * BLOCK + 7):
        x = torch.randn(3, V)
        for k in (1, 3):
            values, columns = largest(x, k)
            expected = x.topk(k)
            assert torch.equal(values, expected.values)
            assert torch.equal(columns, expected.indices)
    x = torch.full((1, 20 * BLOCK + 7), -math.inf)
    x[0, -1] = 1
    assert largest(x, 1)[1].item() == 20 * BLOCK + 6


def test_a_batch_without_sentences_has_no_results():
    ids, lengths = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    assert search(translator(), ids, lengths) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam must be at least 1, got 0"),
        ({"beam": 2, "n_best": 3}, "n_best must be from 1 to beam = 2, got 3"),
        ({"length_penalty": -1.0}, r"length_penalty must be at least 0, got -1\.0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        (
            {"max_length": torch.tensor([3, 4])},
            r"max_length must be an int or \(B,\) = \(5,\), got \(2,\)",
        ),
        ({"end": 14}, r"end must be an id in \[0, V\) = \[0, 14\), got 14"),
        ({"start": -1}, r"start must be an id in \[0, V\) = \[0, 14\), got -1"),
        ({"end": PAD}, f"end must be another id than PAD = {PAD} and start = {START}, .* {PAD}$"),
        ({"end": START}, f"end must be another id than PAD = {PAD} and start = .* got {START}$"),
    ],
)
def test_arguments_out_of_range_are_rejected(options, message):
    with pytest.raises(ValueError, match=f"^beam_search: {message}"):
        search(translator(), *sources(), **options)


@pytest.mark.parametrize("name", ["beam", "n_best", "max_length", "start", "end"])
@pytest.mark.parametrize("value", [2.0, True, "2"])
def test_numbers_that_are_not_whole_are_rejected(name, value):
    with pytest.raises(TypeError, match=f"^beam_search: {name} must be a whole number"):
        search(translator(), *sources(), **{name: value})


def test_models_that_cannot_be_searched_are_rejected():
    model = translator()
    with pytest.raises(ValueError, match=r"^beam_search: model must be in eval mode"):
        search(model.train(), *sources())
    model.output_bias.data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"^beam_search: model must give finite log-probabilities"):
        search(model.eval(), *sources())
