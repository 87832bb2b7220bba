"""Text from a `models.language_model.LanguageModel`, word by word, its state carried."""

import math

import torch


@torch.no_grad()
def sample(model, prompt, words, *, temperature=1.0, top_k=None, top_p=None, never=(), generator=None):
    """Continuations of a prompt: (words, B) int64, a column for each of the prompt's.

    model: a LanguageModel in eval mode, with splits or without    prompt: (T, B) int64, T at least 1    words: how many
    temperature: that the log-probabilities are divided by before they are normalised again; 0 takes the likeliest word
    top_k: only of the k likeliest words (Fan et al., 2018)    top_p: only of the fewest words whose probability is
        together at least top_p, after temperature and top_k (Holtzman et al., 2020)
    never: ids that are not written    generator: a torch.Generator on the model's device; one seed, one batch: one result
    Errors: ValueError for a model in training mode and for numbers out of range.
    """
    _check(model, prompt, words, temperature, top_k, top_p, never)
    written, state, word = [], None, prompt
    for _ in range(words):
        y, _, state = model(word, state)
        log_probs = _log_probs(model, y[-1])
        if never:
            log_probs[:, list(never)] = -math.inf
        word = _draw(log_probs, temperature, top_k, top_p, generator)[None]
        written.append(word)
    return torch.cat(written) if written else prompt[:0]


def _check(model, prompt, words, temperature, top_k, top_p, never):
    V = len(model.output_weight)
    if model.training:
        raise ValueError("sample: model must be in eval mode, got one in training mode")
    if prompt.dim() != 2 or not len(prompt):
        raise ValueError(f"sample: prompt must be (T, B) with T at least 1, got {tuple(prompt.shape)}")
    if words < 0:
        raise ValueError(f"sample: words must be at least 0, got {words}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"sample: temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"sample: top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"sample: top_p must be in (0, 1], got {top_p}")
    if any(not 0 <= word < V for word in never) or len({*never}) == V:
        raise ValueError(f"sample: never must be ids in [0, {V}), not all of them, got {sorted(never)}")


def _log_probs(model, y):
    """(B, D) -> (B, V), in fp32 where y is narrower."""
    if model.settings.splits:
        return model.loss.log_prob(y, model.output_weight, model.decoder_bias)
    logits = model.logits(y)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _draw(log_probs, temperature, top_k, top_p, generator):
    """(B, V) -> (B,)"""
    if temperature == 0:
        return log_probs.argmax(-1)
    ids = None
    if top_k is not None and top_k < log_probs.size(-1):
        log_probs, ids = log_probs.topk(top_k)
    p = (log_probs / temperature).softmax(-1)
    if top_p is not None and top_p < 1:
        p, order = p.sort(-1, descending=True)
        ids = order if ids is None else ids.gather(-1, order)
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0)  # the likeliest word always stays
    drawn = torch.multinomial(p, 1, generator=generator)  # of numbers that need not sum to 1
    return (drawn if ids is None else ids.gather(-1, drawn))[:, 0]
