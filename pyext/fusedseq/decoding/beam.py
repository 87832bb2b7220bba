"""Beam search over a `models.translator.Translator`, whole batches at a time; greedy decoding is a beam of 1.

A step's cost is the decoder's and the output layer's for the hypotheses that are still being written, wherever in the
batch they stand: rows of the cache are let go as hypotheses end.
"""

import math
from typing import NamedTuple

import torch

from fusedseq.models.translator import PADDING

GONE = -math.inf  # the log-probability of a place in the beam that no hypothesis has
BLOCK = 32  # words


class Hypothesis(NamedTuple):
    ids: list  # the words, without START and END
    log_prob: float  # of the words and of END after them, in nats
    score: float  # log_prob / penalty


def penalty(length, alpha):
    """((5 + length) / 6)^alpha (Wu et al., 2016, equation 14); of length 1 it is 1. END counts as a word."""
    return ((5 + length) / 6) ** alpha


@torch.no_grad()
def beam_search(
    model, source, source_lengths, *, start, end, max_length, beam=1, length_penalty=0.6, n_best=1, cached=None
):  # fmt: skip
    """The best translations found: for each sentence a list of at most `n_best` different Hypothesis, the best first.

    model: a Translator in eval mode    source: (B, S) int64    source_lengths: (B,) int64
    start, end: the ids that a target begins and ends with    beam: K, hypotheses of each sentence
    max_length: the most words of a translation, END counted: an int, or (B,) int64
    length_penalty: alpha of `penalty`, at least 0; 0 ranks by log-probability    cached: False decodes the whole prefix
        again at each step; None does so with operators that have no cache (`models.torch_mha`)

    A step keeps the K best of all continuations. One that ends keeps its place, so the beam of those that go on shrinks:
    a beam of 1 is greedy decoding, and at most K are found. At `max_length` all end, with END's own log-probability, so that
    every result is a sentence of the model. The search of a sentence stops early where none that goes on can still come among
    the n_best (log-probabilities only fall, and the penalty is at most that of `max_length`): that loses nothing.
    PAD and START are never written; their probability is not given to the others. A sentence's result does not depend on
    those beside it, but where rounding decides between two.
    Errors: ValueError for a model in training mode, or whose probabilities are not finite, and for numbers out of range.
    """
    _check(model, beam, length_penalty, n_best)
    limits = torch.as_tensor(max_length, device=source.device).expand(len(source))
    ends = set(limits.tolist())
    if not ends:
        return []
    if min(ends) < 1:
        raise ValueError(f"beam_search: max_length must be at least 1, got {min(ends)}")
    memory = model.encode(source, source_lengths)
    cached = model.has_cache if cached is None else cached
    decode = (_Cached if cached else _Recomputing)(model, memory, source_lengths, max(ends), beam)
    never = torch.tensor([PADDING, start], device=source.device)
    beams = _Beams(limits, beam, start, end, length_penalty, n_best)
    for length in range(1, max(ends) + 1):
        rows = beams.rows()
        if not len(rows):
            break
        logits = model.logits(decode(beams, rows))  # (R, V)
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        log_probs.index_fill_(1, never, GONE)
        if length in ends:
            last = (limits == length)[rows // beam, None]
            log_probs.masked_fill_(last & (torch.arange(log_probs.size(1), device=rows.device) != end), GONE)
        beams.extend(rows, *largest(log_probs, beam))
    return beams.results()


def _check(model, beam, alpha, n_best):
    if model.training:
        raise ValueError("beam_search: model must be in eval mode, got one in training mode")
    if beam < 1:
        raise ValueError(f"beam_search: beam must be at least 1, got {beam}")
    if not 1 <= n_best <= beam:
        raise ValueError(f"beam_search: n_best must be from 1 to beam = {beam}, got {n_best}")
    if not 0 <= alpha < math.inf:
        raise ValueError(f"beam_search: length_penalty must be at least 0, got {alpha}")


def largest(x, k):
    """The k largest of each row and their places, (R, k) each; fewer where a row has fewer. x: (R, V)

    They stand in the k blocks with the largest maxima: a pass for those, and a sort of k blocks, is a third of the time
    of `topk` on a CPU for V = 20,000 and k = 4.
    """
    rows, V = x.shape
    blocks = V // BLOCK
    if k * 4 > blocks:
        return x.topk(min(k, V), -1)
    cut = blocks * BLOCK
    best = x[:, :cut].view(rows, blocks, BLOCK).amax(-1).topk(k, -1).indices
    places = (best[..., None] * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
    rest = torch.arange(cut, V, device=x.device).expand(rows, -1)
    places = torch.cat([places, rest], -1)
    values, chosen = x.gather(1, places).topk(k, -1)
    return values, places.gather(1, chosen)


class _Beams:
    """K places for each of B sentences, each with a hypothesis that goes on, one that has ended, or none.

    words: (B, K, 1 + steps), START first    log_prob: (B, K)    ended: (B, K)    lengths: (B, K), of those that ended
    origin: (B, K), the row of the decoder that a hypothesis goes on from
    """

    def __init__(self, limits, beam, start, end, alpha, n_best):
        self.limits, self.end, self.alpha, self.n_best = limits, end, alpha, n_best
        shape, device = (len(limits), beam), limits.device
        self.words = torch.full((*shape, 1), start, device=device)
        self.log_prob = torch.full(shape, GONE, dtype=torch.float64, device=device)
        self.log_prob[:, 0] = 0
        self.ended = torch.zeros(shape, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(shape, dtype=torch.int64, device=device)
        self.origin = torch.arange(self.ended.numel(), device=device).view(shape)

    def rows(self):
        """The places of the hypotheses that go on, (R,), in order. The only wait for the device in a step."""
        return (~self.ended & (self.log_prob > GONE)).flatten().nonzero()[:, 0]

    def extend(self, rows, log_probs, words):
        """Each of `rows` offers its best words, each place that has ended itself; the best K of a sentence stay.

        log_probs, words: (R, C)
        """
        B, K = self.ended.shape
        C = words.size(1)
        offers, offered = self.log_prob.new_full((B * K, C), GONE), words.new_full((B * K, C), PADDING)
        offers[rows] = self.log_prob.flatten()[rows, None] + log_probs
        offered[rows] = words
        offers[:, 0].masked_fill_(self.ended.flatten(), math.inf)
        found, place = offers.view(B, K * C).topk(K)
        parent, word = place // C, offered.view(B, K * C).gather(1, place)
        row = torch.empty_like(offered[:, 0])
        row[rows] = torch.arange(len(rows), device=rows.device)

        kept = found == math.inf
        self.words = torch.cat([self.words.gather(1, parent[..., None].expand_as(self.words)), word[..., None]], -1)
        self.log_prob = torch.where(kept, self.log_prob.gather(1, parent), found)
        self.ended = kept | ((word == self.end) & (found > GONE))
        self.lengths = torch.where(kept, self.lengths.gather(1, parent), self.words.size(2) - 1)
        self.origin = row.view(B, K).gather(1, parent)
        self._give_up()

    def scores(self):
        """Of the hypotheses that have ended, (B, K)."""
        return torch.where(self.ended, self.log_prob / penalty(self.lengths.double(), self.alpha), GONE)

    def _give_up(self):
        """Drops those that go on where n_best have ended that none of them can surpass."""
        hope = torch.where(self.ended, GONE, self.log_prob) / penalty(self.limits.double(), self.alpha)[:, None]
        bar = self.scores().topk(self.n_best).values[:, -1:]
        self.log_prob = torch.where(~self.ended & (hope <= bar), GONE, self.log_prob)

    def results(self):
        scores, places = self.scores().topk(self.n_best)
        words = self.words.gather(1, places[..., None].expand(-1, -1, self.words.size(2)))
        found = (t.tolist() for t in (scores, self.log_prob.gather(1, places), self.lengths.gather(1, places), words))
        results = [[Hypothesis(ids[1:length], log_prob, score) for score, log_prob, length, ids in zip(*of, strict=True)
                    if score > GONE] for of in zip(*found, strict=True)]  # fmt: skip
        if not all(results):
            raise ValueError("beam_search: model must give finite log-probabilities, got none for a sentence")
        return results


class _Cached:
    """The decoder's output for the last word of each hypothesis, (R, E), its past kept in a DecoderCache."""

    def __init__(self, model, memory, lengths, longest, beam):
        self.model, self.beam, self.rows = model, beam, len(memory) * beam
        self.cache = model.cache(memory, lengths, max_length=longest, beam=beam)

    def __call__(self, beams, rows):
        if self.beam > 1 or len(rows) != self.rows:  # in a beam of 1 nothing moves until a sentence ends
            self.cache.reorder(beams.origin.flatten()[rows])
        self.rows = len(rows)
        return self.model.decode(beams.words.flatten(0, 1)[rows, -1:], cache=self.cache)[:, 0]


class _Recomputing:
    """The same from the whole prefix at each step."""

    def __init__(self, model, memory, lengths, longest, beam):
        self.model, self.memory, self.lengths = model, memory, lengths

    def __call__(self, beams, rows):
        sentence = rows // beams.ended.size(1)
        memory, lengths = self.memory[sentence], None if self.lengths is None else self.lengths[sentence]
        return self.model.decode(beams.words.flatten(0, 1)[rows], memory, lengths)[:, -1]
