"""Generates text from a `models.language_model.LanguageModel`, word by word with carried state."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedseq.fused import check
from fusedseq.models.language_model import LanguageModel


@dataclass(frozen=True)
class SamplingSettings:
    """How a word is chosen; see `sample`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    never: Collection[int]


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt: Tensor,
    words: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    never: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns continuations of prompts: (words, B) int64, a column for each column of the prompt.

    model: a LanguageModel in eval mode, with or without splits
    prompt: (T, B) int64, T at least 1    words: the number of words to generate
    temperature: divides the log-probabilities before they are normalized again; 0 chooses the most
        probable word
    top_k: chooses among the k most probable words only (Fan et al., 2018)
    top_p: chooses among the fewest words whose total probability is at least top_p, after
        temperature and top_k (Holtzman et al., 2020)
    never: ids that are never generated
    generator: a torch.Generator on the model's device; the same seed and batch give the same result
    Errors: ValueError for a model in training mode and for arguments out of range; TypeError for
    arguments of other types.
    """
    settings = SamplingSettings(temperature, top_k, top_p, never)
    _check(model, prompt, words, settings)
    generated: list[Tensor] = []
    state, ids = None, prompt
    for _ in range(words):
        y, _, state = model(ids, state)
        log_probs = _log_probs(model, y[-1])
        if never:
            log_probs[:, list(never)] = -math.inf
        ids = _choose(log_probs, settings, generator)[None]
        generated.append(ids)
    return torch.cat(generated) if generated else prompt[:0].long()


def _check(model: LanguageModel, prompt: Tensor, words: int, s: SamplingSettings) -> None:
    V = len(model.output_weight)
    check.tensor("sample", "prompt", prompt)
    check.whole_number("sample", "words", words)
    check.number("sample", "temperature", s.temperature)
    if s.top_k is not None:
        check.whole_number("sample", "top_k", s.top_k)
    if s.top_p is not None:
        check.number("sample", "top_p", s.top_p)
    if not isinstance(s.never, Collection) or isinstance(s.never, Tensor):
        raise TypeError(f"sample: never must be a collection of ids, got {type(s.never).__name__}")
    for word in s.never:
        check.whole_number("sample", "never", word)
    if model.training:
        raise ValueError("sample: model must be in eval mode, got one in training mode")
    if prompt.dim() != 2 or not len(prompt):
        raise ValueError(
            f"sample: prompt must be (T, B) with T at least 1, got {tuple(prompt.shape)}"
        )
    if words < 0:
        raise ValueError(f"sample: words must be at least 0, got {words}")
    if not 0 <= s.temperature < math.inf:
        raise ValueError(f"sample: temperature must be at least 0, got {s.temperature}")
    if s.top_k is not None and s.top_k < 1:
        raise ValueError(f"sample: top_k must be at least 1, got {s.top_k}")
    if s.top_p is not None and not 0 < s.top_p <= 1:
        raise ValueError(f"sample: top_p must be in (0, 1], got {s.top_p}")
    if any(not 0 <= word < V for word in s.never) or len({*s.never}) == V:
        raise ValueError(
            f"sample: never must be ids in [0, {V}), not all of them, got {sorted(s.never)}"
        )


def _log_probs(model: LanguageModel, y: Tensor) -> Tensor:
    """Returns log-probabilities (B, V) of outputs y (B, D), in fp32 if y is narrower."""
    if model.settings.splits:
        return model.loss.log_prob(y, model.output_weight, model.decoder_bias)
    logits = model.logits(y)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _choose(log_probs: Tensor, s: SamplingSettings, generator: torch.Generator | None) -> Tensor:
    """Returns a word, (B,), for each row of log-probabilities (B, V)."""
    if s.temperature == 0:
        return log_probs.argmax(-1)
    ids = None
    if s.top_k is not None and s.top_k < log_probs.size(-1):
        log_probs, ids = log_probs.topk(s.top_k)
    # The maximum is subtracted first, so that the quotient is 0 or less: it cannot overflow to inf.
    limits = torch.finfo(log_probs.dtype)
    temperature = min(max(s.temperature, limits.tiny), limits.max)
    p = ((log_probs - log_probs.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if s.top_p is not None and s.top_p < 1:
        p, order = p.sort(-1, descending=True)
        ids = order if ids is None else ids.gather(-1, order)
        # The words before a word decide, so the most probable word always stays.
        p = torch.where(p.cumsum(-1) - p < s.top_p, p, 0)
    # multinomial normalizes its weights
    choice = torch.multinomial(p, 1, generator=generator)
    return (choice if ids is None else ids.gather(-1, choice))[:, 0]
