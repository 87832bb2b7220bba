"""Weights of torch's modules and of AWD-LSTM's checkpoints, in models and modules of this package.

A converted module has copies of the weights, on their device and in their dtype, and gives the same results in eval mode.
Dropout in training is as strong, by other random numbers.
"""

import re

import torch
from torch import nn
from torch.nn import functional as F

from fusedseq import fused
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.models.transformer_layers import Decoder, Encoder
from fusedseq.nn import LSTM

ACTIVATIONS = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu"}


def encoder(theirs, *, ops=fused):
    """An Encoder from a torch.nn.TransformerEncoderLayer or a TransformerEncoder: batch first, whatever theirs is.

    Errors: ValueError for an activation other than relu and gelu, and for layers that differ in more than weights.
    """
    return _stack(theirs, nn.TransformerEncoderLayer, Encoder, ops)


def decoder(theirs, *, ops=fused):
    """A Decoder from a torch.nn.TransformerDecoderLayer or a TransformerDecoder; as `encoder`. Ours sees no later position,
    as theirs with tgt_is_causal and its mask."""
    return _stack(theirs, nn.TransformerDecoderLayer, Decoder, ops)


def _stack(theirs, of_torch, ours, ops):
    layers = [theirs] if isinstance(theirs, of_torch) else list(theirs.layers)
    norm = getattr(theirs, "norm", None)
    options = _options(layers[0])
    if any(_options(layer) != options for layer in layers) or (norm is not None and norm.eps != options["eps"]):
        raise ValueError(f"{ours.__name__}: the layers and the norm must be alike but for their weights, got {theirs}")
    stack = ours(len(layers), **options, final_norm=norm is not None, ops=ops)
    state = {f"layers.{i}.{name}": t for i, layer in enumerate(layers) for name, t in layer.state_dict().items()}
    state = {re.sub(r"\.(linear[12])\.", r".feed_forward.\1.", name): t for name, t in state.items()}
    if norm is not None:
        state |= {f"norm.{name}": t for name, t in norm.state_dict().items()}
    return _load(stack, state).train(theirs.training)


def _options(layer):
    if layer.activation not in ACTIVATIONS and not isinstance(layer.activation, (nn.ReLU, nn.GELU)):
        raise ValueError(f"convert: activation must be relu or gelu, got {layer.activation}")
    activation = ACTIVATIONS.get(layer.activation) or type(layer.activation).__name__.lower()
    if getattr(layer.activation, "approximate", "none") == "tanh":
        activation = "gelu_tanh"
    return {
        "E": layer.linear1.in_features, "num_heads": layer.self_attn.num_heads,
        "dim_feedforward": layer.linear1.out_features, "dropout": layer.dropout1.p,
        "attention_dropout": layer.self_attn.dropout, "feed_forward_dropout": layer.dropout.p,
        "prenorm": layer.norm_first, "activation": activation, "eps": layer.norm1.eps,
        "bias": layer.linear1.bias is not None,
    }  # fmt: skip


def lstm(theirs, *, ops=fused):
    """An LSTM from a torch.nn.LSTM, whose dropout between layers is drawn for each step.

    Errors: ValueError for one that is bidirectional or has projections.
    """
    if theirs.bidirectional or theirs.proj_size:
        raise ValueError(f"LSTM: must be of one direction and without projections, got {theirs}")
    ours = LSTM(
        theirs.input_size, theirs.hidden_size, theirs.num_layers, theirs.bias, dropout=theirs.dropout, locked=False,
        batch_first=theirs.batch_first, ops=ops,
    )  # fmt: skip
    return _load(ours, theirs.state_dict()).train(theirs.training)


def awd_lstm(state, *, ops=fused, **settings):
    """A LanguageModel from the `state_dict` of AWD-LSTM's RNNModel (Merity et al., 2018): sizes and tying are read from it.

    settings: the rest of LanguageModelSettings, such as dropouts, which the state does not have
    Its weight-dropped matrices, weight_hh_l0_raw, are ours without the mask. The split cross-entropy's tombstones are in another
    module there: `LanguageModel.loss` loads its state_dict.
    Errors: ValueError for a model without LSTM layers, such as a QRNN.
    """
    layers = 1 + max((int(m[1]) for name in state if (m := re.match(r"rnns\.(\d+)\.", name))), default=-1)
    found = {}
    for name, t in state.items():
        masked_copy = name.replace("_l0", "_l0_raw") in state  # which some versions of torch keep
        m = re.fullmatch(r"rnns\.(\d+)\.(?:module\.)?((?:weight|bias)_[ih]h)_l0(?:_raw)?", name)
        if m and not masked_copy:
            found[f"recurrent.{m[2]}_l{m[1]}"] = t
    if not layers or len(found) != 4 * layers:
        raise ValueError("awd_lstm: state must have weight_ih, weight_hh, bias_ih and bias_hh of each of its LSTM layers, "
                         f"rnns.0 to rnns.{layers - 1}, got {', '.join(state)}")  # fmt: skip
    hidden = tuple(found[f"recurrent.weight_hh_l{l}"].size(1) for l in range(layers))
    V, E = state["encoder.weight"].shape
    tied = state["decoder.weight"].shape == (V, E) and torch.equal(state["decoder.weight"], state["encoder.weight"])
    found |= {"embedding.weight": state["encoder.weight"], "decoder_bias": state["decoder.bias"]}
    if not tied:
        found["decoder_weight"] = state["decoder.weight"]
    made = LanguageModelSettings(embedding=E, hidden=hidden, layers=layers, tied=tied, **settings)
    model = LanguageModel(V, made, ops=ops)
    return _load(model, found | {f"loss.{name}": t for name, t in model.loss.state_dict().items()})


def _load(module, state):
    like = next(iter(state.values()))
    module = module.to(like.device, like.dtype)
    module.load_state_dict(state)
    return module
