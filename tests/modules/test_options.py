"""The options of modules: those that are refused, how they are printed, and their signatures."""

import copy
import inspect
import pydoc

import pytest
import torch
from fusedseq import fused, nn, reference
from torch import nn as torch_nn

pytestmark = pytest.mark.usefixtures("in_exact_dtype")
E, N, B, L, S = 12, 3, 4, 5, 7

BAD = {
    r"FeedForward: activation must be relu, .* got 'swish'": lambda: nn.FeedForward(
        6, 9, activation="swish"
    ),
    r"FeedForward: d_model must be .* got 0 and 9": lambda: nn.FeedForward(0, 9),
    r"FeedForward: d_model must be .* got 6 and -1": lambda: nn.FeedForward(6, -1),
    r"FeedForward: d_model must be .* got 6.0 and 9": lambda: nn.FeedForward(6.0, 9),
    r"ResidualLayerNorm: eps must be at least 0, got -1": lambda: nn.ResidualLayerNorm(6, eps=-1),
    r"ResidualLayerNorm: eps must be at least 0, got nan": lambda: nn.ResidualLayerNorm(
        6, eps=float("nan")
    ),
    r"ResidualLayerNorm: normalized_shape must be .* got \(3, 6\)": lambda: nn.ResidualLayerNorm(
        (3, 6)
    ),
    r"ResidualLayerNorm: normalized_shape must be .* got -1": lambda: nn.ResidualLayerNorm(-1),
    r"TransformerEncoderLayer: activation must be .* got <function silu": lambda: (
        nn.TransformerEncoderLayer(E, N, activation=torch.nn.functional.silu)
    ),
    r"TransformerDecoderLayer: dropout must be in \[0, 1\], got 2": lambda: (
        nn.TransformerDecoderLayer(E, N, dropout=2)
    ),
}


@pytest.mark.cpu
@pytest.mark.parametrize("sentence", BAD)
def test_bad_options_are_refused_when_the_module_is_made(sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        BAD[sentence]()


@pytest.mark.cpu
def test_residual_layer_norm_takes_a_sequence_of_one_size():
    assert nn.ResidualLayerNorm((6,)).normalized_shape == 6


MODULES = [
    getattr(nn, name)
    for name in nn.__all__
    if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), torch_nn.Module)
]
SIZES = {"input_size": 6, "hidden_size": 6, "d_model": 6, "nhead": 3, "embed_dim": 6}
SIZES |= {"num_heads": 3, "num_embeddings": 9, "embedding_dim": 6, "normalized_shape": 6}
SIZES |= {"in_features": 6, "num_classes": 9, "max_positions": 9, "max_distance": 16, "head_dim": 4}
OTHERS = {"num_layers": 3, "output": "sum", "splits": (2, 4), "activation": "tanh", "rank": 2}
OTHERS |= {"padding_idx": 2, "forget_bias": 1.0, "kdim": 4, "vdim": 5, "ignore_index": 0}
OTHERS |= {"scale": 0.5, "eps": 0.25, "layer_norm_eps": 0.25, "rounds": 3, "max_distance": 99}
OTHERS |= {"proj_size": 1, "nonlinearity": "relu", "reduction": "sum"}
OTHERS |= {"base": 500, "max_positions": 33, "num_buckets": 16, "dim_feedforward": 8}
NOT_OPTIONS = {"ops", "device", "dtype", "positions", "weight", "add_bias_kv", "add_zero_attn"}


# The repr of Rotary leaves out max_positions, which is only the first size of a growing table.
PRINTED = [build for build in MODULES if build is not nn.Rotary]


@pytest.mark.cpu
@pytest.mark.parametrize("build", PRINTED, ids=lambda build: build.__name__)
def test_repr_shows_every_option_that_is_not_the_default(build):
    parameters = dict(inspect.signature(build).parameters)
    required = {n: SIZES[n] for n, p in parameters.items() if p.default is p.empty}
    plain = repr(build(**required))
    assert all(repr(value) in plain for value in required.values())
    assert "ops" not in plain
    if "ops" in parameters:
        assert "ops=reference" in repr(build(**required, ops=reference))
    for name, p in parameters.items():
        if name in NOT_OPTIONS or name in required:
            continue
        value = not p.default if isinstance(p.default, bool) else OTHERS.get(name, 0.125)
        text = repr(build(**{**required, name: value}))
        assert text != plain, name
        # The dropout of added positions is shown by their submodule.
        shown = f"p={value}" if "Positions" in build.__name__ and name == "dropout" else name
        # RelativeBias shows its first arguments without their names.
        assert shown in text or build is nn.RelativeBias, name
        assert str(value) in text, name


@pytest.mark.cpu
def test_a_module_of_operators_is_printed_without_its_path():
    assert repr(fused) == "fusedseq.fused"
    for build in MODULES:
        text = pydoc.plain(pydoc.render_doc(build.__init__))
        assert "/" not in str(inspect.signature(build)), build
        assert ".py" not in text, build


@pytest.mark.cpu
@pytest.mark.parametrize("op", reference.__all__)
def test_help_of_an_operator_has_the_definition_and_what_is_special(op):
    text = pydoc.plain(pydoc.render_doc(getattr(fused, op)))
    assert ".py" not in text
    definition = inspect.getdoc(getattr(reference, op)).split("\n\n")
    for paragraph in definition:
        assert all(line.strip() in text for line in paragraph.splitlines())
    assert inspect.getdoc(getattr(fused, op)).count(definition[0]) == 1
    assert len(getattr(fused, op).__doc__) > len("\n\n".join(definition)) + 20


@pytest.mark.cpu
def test_modules_with_new_options_can_be_copied():
    for build in (lambda: nn.TransformerDecoderLayer(E, N, 20), lambda: nn.Embedding(9, E, 3)):
        module = build()
        assert repr(copy.deepcopy(module)) == repr(module)
