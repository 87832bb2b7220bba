"""The hypotheses of a beam search and their ranking."""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedseq.models.translator import PADDING

NO_HYPOTHESIS = -math.inf  # the log-probability of an empty place in the beam
Number = TypeVar("Number", float, Tensor)


class Hypothesis(NamedTuple):
    """A translation."""

    ids: list[int]  # the words, without START and END
    log_prob: float  # of the words and of END after them, in nats
    score: float  # log_prob / penalty


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a beam search; see `beam_search`."""

    beam: int  # K
    start: int  # id
    end: int  # id
    length_penalty: float  # alpha
    n_best: int


def penalty(length: Number, alpha: float) -> Number:
    """Returns ((5 + length) / 6)^alpha (Wu et al., 2016, equation 14); 1 for a length of 1.

    length: the number of words, counting END; a number or a tensor
    """
    result: Number = ((5 + length) / 6) ** alpha
    return result


class Beams:
    """K places for each of B sentences, each with an active hypothesis, an ended one, or none.

    words: (B, K, 1 + steps), START first    log_prob: (B, K), -inf for an empty place
    ended: (B, K) bool    lengths: (B, K), of the ended hypotheses, counting END
    origin: (B, K), the decoder's row in the last step that a hypothesis continues
    """

    def __init__(self, limits: Tensor, settings: SearchSettings) -> None:
        """limits: (B,), the max_length of each sentence."""
        self.limits, self.settings = limits, settings
        shape, device = (len(limits), settings.beam), limits.device
        self.words = torch.full((*shape, 1), settings.start, device=device)
        self.log_prob = torch.full(shape, NO_HYPOTHESIS, dtype=torch.float64, device=device)
        self.log_prob[:, 0] = 0
        self.ended = torch.zeros(shape, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(shape, dtype=torch.int64, device=device)
        self.origin = torch.arange(self.ended.numel(), device=device).view(shape)

    def active(self) -> Tensor:
        """Returns the places of the active hypotheses in the flattened (B K), (R,), ascending.

        This is the only synchronization with the device in a step.
        """
        return (~self.ended & (self.log_prob > NO_HYPOTHESIS)).flatten().nonzero()[:, 0]

    def extend(self, rows: Tensor, log_probs: Tensor, words: Tensor) -> None:
        """Replaces the hypotheses of each sentence by the K best candidates.

        The candidates are the given continuations of the active hypotheses, and the ended
        hypotheses themselves, which always stay.
        rows: (R,), the places of the active hypotheses    log_probs, words: (R, C)
        """
        B, K = self.ended.shape
        C = words.size(1)
        candidates = self.log_prob.new_full((B * K, C), NO_HYPOTHESIS)
        next_words = words.new_full((B * K, C), PADDING)
        candidates[rows] = self.log_prob.flatten()[rows, None] + log_probs
        next_words[rows] = words
        # An ended hypothesis is its own only candidate, above all continuations.
        candidates[:, 0].masked_fill_(self.ended.flatten(), math.inf)
        found, place = candidates.view(B, K * C).topk(K)
        parent, word = place // C, next_words.view(B, K * C).gather(1, place)
        decoder_row = torch.empty_like(next_words[:, 0])
        decoder_row[rows] = torch.arange(len(rows), device=rows.device)

        had_ended = found == math.inf
        prefixes = self.words.gather(1, parent[..., None].expand_as(self.words))
        self.words = torch.cat([prefixes, word[..., None]], -1)
        self.log_prob = torch.where(had_ended, self.log_prob.gather(1, parent), found)
        ends_now = (word == self.settings.end) & (found > NO_HYPOTHESIS)
        self.ended = had_ended | ends_now
        self.lengths = torch.where(
            had_ended, self.lengths.gather(1, parent), self.words.size(2) - 1
        )
        self.origin = decoder_row.view(B, K).gather(1, parent)
        self._prune()

    def scores(self) -> Tensor:
        """Returns the scores of the ended hypotheses, (B, K); -inf in other places."""
        penalties = penalty(self.lengths.double(), self.settings.length_penalty)
        return torch.where(self.ended, self.log_prob / penalties, NO_HYPOTHESIS)

    def _prune(self) -> None:
        """Drops the active hypotheses that cannot surpass the n_best ended ones."""
        # The log-probability can only decrease, and the penalty is largest at the limit.
        penalties = penalty(self.limits.double(), self.settings.length_penalty)
        log_prob = torch.where(self.ended, NO_HYPOTHESIS, self.log_prob)
        best_possible = log_prob / penalties[:, None]
        threshold = self.scores().topk(self.settings.n_best).values[:, -1:]
        hopeless = ~self.ended & (best_possible <= threshold)
        self.log_prob = torch.where(hopeless, NO_HYPOTHESIS, self.log_prob)

    def results(self) -> list[list[Hypothesis]]:
        """Returns the n_best ended hypotheses of each sentence, the best first.

        Errors: ValueError if a sentence has none, because the model's probabilities are not finite.
        """
        scores, places = self.scores().topk(self.settings.n_best)
        words = self.words.gather(1, places[..., None].expand(-1, -1, self.words.size(2)))
        log_probs, lengths = self.log_prob.gather(1, places), self.lengths.gather(1, places)
        columns = (t.tolist() for t in (scores, log_probs, lengths, words))
        results = [
            [
                Hypothesis(ids[1:length], log_prob, score)
                for score, log_prob, length, ids in zip(*sentence, strict=True)
                if score > NO_HYPOTHESIS
            ]
            for sentence in zip(*columns, strict=True)
        ]
        if not all(results):
            raise ValueError(
                "beam_search: model must give finite log-probabilities, got none for a sentence"
            )
        return results
