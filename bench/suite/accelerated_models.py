"""A training step of a model before and after `fusedseq.accelerate`: forward and backward.

The weights are arguments of the call, so that its gradients are computed as those of an operator.
The blocks are those of Hugging Face transformers, as models of one layer; a case is skipped where
it is not installed.
"""

from dataclasses import dataclass
from functools import partial

import fusedseq
import pytest
import torch
from fusedseq import testing
from torch import nn
from torch.func import functional_call

from bench.suite.case import BenchmarkCase

DROPOUT = 0.1
UNUSED = ("wte.weight", "word_embeddings.weight")  # the models get embedded inputs


class BertBlock(nn.Module):
    """BERT's embeddings without words, and one layer."""

    def __init__(self, E, heads, L):
        super().__init__()
        hf = pytest.importorskip("transformers", "5.23", reason="needs transformers")
        config = hf.BertConfig(
            vocab_size=1,
            hidden_size=E,
            num_hidden_layers=1,
            num_attention_heads=heads,
            intermediate_size=4 * E,
            max_position_embeddings=L,
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=DROPOUT,
        )
        self.model = hf.BertModel(config, add_pooling_layer=False)

    def forward(self, x):
        return self.model(inputs_embeds=x).last_hidden_state


class Gpt2Block(nn.Module):
    """GPT-2's embedding of positions, one layer, and the last norm."""

    def __init__(self, E, heads, L):
        super().__init__()
        hf = pytest.importorskip("transformers", "5.23", reason="needs transformers")
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROPOUT)
        config = hf.GPT2Config(
            vocab_size=1, n_positions=L, n_embd=E, n_layer=1, n_head=heads, **drops
        )
        self.model = hf.GPT2Model(config)

    def forward(self, x):
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class Translator(nn.Module):
    """torch.nn.Transformer with a causal decoder."""

    def __init__(self, E, heads, layers):
        super().__init__()
        self.model = nn.Transformer(E, heads, layers, layers, 4 * E, DROPOUT)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(len(target), dtype=target.dtype)
        return self.model(source, target, tgt_mask=mask, tgt_is_causal=True)


class LanguageModel(nn.Module):
    """A two-layer torch.nn.LSTM between an embedding and an output layer, with its loss."""

    def __init__(self, V, E):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(V, E), nn.Dropout(0.5)
        self.lstm = nn.LSTM(E, E, 2, dropout=0.5)
        self.decoder = nn.Linear(E, V)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, words):
        y, _ = self.lstm(self.drop(self.embedding(words[:-1])))
        return self.criterion(self.decoder(self.drop(y)).flatten(0, 1), words[1:].flatten())


def used_parameters(model):
    """Returns {name: parameter} of those that get a gradient."""
    return {name: p for name, p in model.named_parameters() if not name.endswith(UNUSED)}


def inputs(build, make, randn):
    """Returns the model's inputs and parameters, as small as those of a new model."""
    shapes = [p.shape for p in used_parameters(build()).values()]
    parameters = (randn(*s) * (s[-1] ** -0.5 if len(s) > 1 else 0.1) for s in shapes)
    return (*make(randn), *parameters), {}


def with_parameters(model, names, args):
    count = len(args) - len(names)
    parameters = dict(zip(names, args[count:], strict=True))
    return functional_call(model, parameters, tuple(args[:count]))


def make_models(build, dtype):
    """Returns {provider: function of inputs and parameters}, and the models."""
    found, models = {}, []
    for name in ("fused", "torch"):
        model = build().to(dtype)
        names = [*used_parameters(model)]
        if name == "fused":
            loss = getattr(model, "criterion", None)
            fusedseq.accelerate(model, loss=loss)
        found[name] = partial(with_parameters, model, names)
        models.append(model)
    return found, models


@dataclass(frozen=True)
class AcceleratedModelCase(BenchmarkCase):
    """build: returns a new model in training mode"""

    build: object = None

    def providers(self, full):
        made = {}

        def call(provider, *args):
            if not made:
                made.update(make_models(self.build, args[-1].dtype)[0])
            return made[provider](args)

        return {name: partial(call, name) for name in ("fused", "torch")}


def without_dropout(model):
    """Sets every probability of dropout to 0, so that a training step can be compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


def step(model, args):
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in args]
    out = model(given)
    wanted = [t for t in given if t.requires_grad]
    gradients = torch.autograd.grad(out, wanted, testing.cotangents([out]))
    return [t.double() for t in (out.detach(), *gradients)]


def check(case, args):
    """Asserts that the accelerated model's result and gradients are as near to those in twice the
    precision as torch's are, in training mode without dropout.

    An error is the norm of a difference. At most twice torch's own is allowed, plus some roundings
    of the tensor, or of the largest one where a gradient is 0 but for rounding.
    Returns the largest error as a fraction of what is allowed.
    """
    dtype = args[-1].dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    found = {}
    for kind, precision in (("fused", dtype), ("torch", dtype), ("exact", wide)):
        made, models = make_models(case.build, precision)
        for model in models:
            without_dropout(model)
        given = [t.to(precision) if t.is_floating_point() else t for t in args]
        found[kind] = step(made["torch" if kind == "exact" else kind], given)
    floor = 1e-3 * max(t.norm() for t in found["exact"])
    roundings = 8 * torch.finfo(dtype).eps
    errors = [
        (ours - exact).norm() / (2 * (theirs - exact).norm() + roundings * max(exact.norm(), floor))
        for ours, theirs, exact in zip(*found.values(), strict=True)
    ]
    worst = torch.stack(errors).max().item()  # which is NaN if one is
    assert worst <= 1, f"{case.name}: the error is {worst:.3g} of what is allowed"
    return worst
