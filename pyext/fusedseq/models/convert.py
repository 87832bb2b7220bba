"""Converts weights of torch's modules and of AWD-LSTM's checkpoints to models of this package.

A converted module has copies of the weights, on their device, in their dtype and with their
requires_grad, and computes the same results in eval mode. In training mode it drops with the same
probabilities, but with other random masks. Modules with parametrized weights, or with weights of
several dtypes, are refused.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.models.transformer_layers import Decoder, Encoder
from fusedseq.nn import GRU, LSTM, RNN, MultiheadAttention, Operators
from fusedseq.nn.feed_forward import activation_name

AnyModule = TypeVar("AnyModule", bound=nn.Module)
RecurrentModule = TypeVar("RecurrentModule", GRU, LSTM, RNN)
StackType = TypeVar("StackType", Encoder, Decoder)


def encoder(
    source: nn.TransformerEncoderLayer | nn.TransformerEncoder, *, ops: Operators = fused
) -> Encoder:
    """Returns an Encoder with the weights of a torch.nn.TransformerEncoder or one of its layers.

    source: the module of torch, on any device, whose weights are copied
    ops: `fusedseq.fused` or `fusedseq.reference`
    The Encoder takes (B, L, E), whatever `batch_first` of the source is.
    Errors: ValueError naming the sublayer or option, for an activation other than relu, gelu,
    gelu_tanh and tanh, for layers that differ in more than their weights, for norms, dropouts or
    attentions of one layer that differ from each other, and for sublayers that are not torch's.
    """
    return _stack(source, nn.TransformerEncoderLayer, Encoder, ops)


def decoder(
    source: nn.TransformerDecoderLayer | nn.TransformerDecoder, *, ops: Operators = fused
) -> Decoder:
    """Returns a Decoder with the weights of a torch.nn.TransformerDecoder or one of its layers.

    As `encoder`. Self-attention of the Decoder is always causal, as torch's with tgt_is_causal and
    its mask.
    """
    return _stack(source, nn.TransformerDecoderLayer, Decoder, ops)


def _stack(
    source: Any, torch_layer: type[nn.Module], ours: type[StackType], ops: Operators
) -> StackType:
    layers = [source] if isinstance(source, torch_layer) else list(source.layers)
    norm = getattr(source, "norm", None)
    options = _options(layers[0], "layers[0]")
    for i, layer in enumerate(layers):
        for name, value in _options(layer, f"layers[{i}]").items():
            if value != options[name]:
                raise ValueError(
                    f"convert: layers[{i}]: {name} must be that of layers[0], {options[name]}, got "
                    f"{value}"
                )
    if norm is not None:
        _require_type("norm", norm, nn.LayerNorm)
        _check_parameters("norm", norm, options["bias"])
        _require_equal("norm.eps", norm.eps, "the layers' layer_norm_eps", options["eps"])
    stack = ours(len(layers), **options, final_norm=norm is not None, ops=ops)
    state = {
        f"layers.{i}.{name}": t
        for i, layer in enumerate(layers)
        for name, t in layer.state_dict(keep_vars=True).items()
    }
    state = {
        re.sub(r"\.(linear[12])\.", r".feed_forward.\1.", name): t for name, t in state.items()
    }
    if norm is not None:
        state |= {f"norm.{name}": t for name, t in norm.state_dict(keep_vars=True).items()}
    return _like(source, stack, state)


def _options(layer: Any, where: str) -> dict[str, Any]:
    """Returns the arguments of our layers for a layer of torch.nn.

    where: the name of the layer in error messages
    Errors: ValueError for sublayers that our layers cannot represent.
    """
    _check_sublayers(layer, where)
    return {
        "E": layer.linear1.in_features,
        "num_heads": layer.self_attn.num_heads,
        "dim_feedforward": layer.linear1.out_features,
        "dropout": layer.dropout1.p,
        "attention_dropout": layer.self_attn.dropout,
        "feed_forward_dropout": layer.dropout.p,
        "prenorm": layer.norm_first,
        "activation": activation_name(layer.activation, "convert"),
        "eps": layer.norm1.eps,
        "bias": layer.linear1.bias is not None,
    }


def _check_sublayers(layer: Any, where: str) -> None:
    """Raises ValueError unless the sublayers are torch's and share the options that ours share."""
    attentions = ["self_attn", *(["multihead_attn"] if hasattr(layer, "multihead_attn") else [])]
    for i in range(1, len(attentions) + 2):
        norm, dropout = f"norm{i}", f"dropout{i}"
        _require_type(f"{where}.{norm}", getattr(layer, norm), nn.LayerNorm)
        _check_parameters(f"{where}.{norm}", getattr(layer, norm), layer.linear1.bias is not None)
        _require_type(f"{where}.{dropout}", getattr(layer, dropout), nn.Dropout)
        eps, p = getattr(layer, norm).eps, getattr(layer, dropout).p
        _require_equal(f"{where}.{norm}.eps", eps, "norm1.eps", layer.norm1.eps)
        _require_equal(f"{where}.{dropout}.p", p, "dropout1.p", layer.dropout1.p)
    _require_type(f"{where}.dropout", layer.dropout, nn.Dropout)
    for name in ("linear1", "linear2"):
        _require_type(f"{where}.{name}", getattr(layer, name), nn.Linear)
    for name in attentions:
        source = getattr(layer, name)
        _check_attention(f"{where}.{name}", source)
        for option in ("num_heads", "dropout", "batch_first"):
            expected, got = getattr(layer.self_attn, option), getattr(source, option)
            _require_equal(f"{where}.{name}.{option}", got, f"self_attn.{option}", expected)


def _check_attention(where: str, source: Any) -> None:
    """Raises ValueError for what `MultiheadAttention` cannot represent."""
    _require_type(where, source, nn.MultiheadAttention)
    if source.bias_k is not None:
        raise ValueError(f"convert: {where} must be without add_bias_kv, got add_bias_kv=True")
    if source.add_zero_attn:
        raise ValueError(f"convert: {where} must be without add_zero_attn, got add_zero_attn=True")


def _check_parameters(where: str, norm: nn.LayerNorm, bias: bool) -> None:
    """Raises ValueError unless a norm has a weight, and a bias where the linear layers have one."""
    if norm.weight is None:
        raise ValueError(
            f"convert: {where} must have elementwise_affine=True, got elementwise_affine=False"
        )
    if (norm.bias is not None) != bias:
        raise ValueError(
            f"convert: {where} must have bias={bias}, as the linear layers, got bias={not bias}"
        )


def _require_type(name: str, module: Any, required: type[nn.Module]) -> None:
    if not isinstance(module, required):
        raise ValueError(
            f"convert: {name} must be a torch.nn.{required.__name__}, got {type(module).__name__}"
        )


def _require_equal(name: str, got: Any, like: str, expected: Any) -> None:
    if got != expected:
        raise ValueError(f"convert: {name} must equal {like} = {expected}, got {got}")


def attention(source: nn.MultiheadAttention, *, ops: Operators = fused) -> MultiheadAttention:
    """Returns a MultiheadAttention with the weights of a torch.nn.MultiheadAttention.

    It can take the place of the source in a model: as in torch, its calls return the probabilities
    unless they say need_weights=False. Where the model does not use them, set the attribute
    `need_weights` to False, because they take a second pass, with a (B, N, L, S) tensor in memory.
    source, ops: as of `encoder`
    Errors: ValueError for add_bias_kv, add_zero_attn, and parametrized or pruned weights.
    """
    _check_attention("attention", source)
    ours = MultiheadAttention(
        source.embed_dim,
        source.num_heads,
        source.dropout,
        source.in_proj_bias is not None,
        kdim=source.kdim,
        vdim=source.vdim,
        batch_first=source.batch_first,
        need_weights=True,
        ops=ops,
    )
    return _like(source, ours, source.state_dict(keep_vars=True))


def lstm(source: nn.LSTM, *, ops: Operators = fused) -> LSTM:
    """Returns an LSTM with the weights of a torch.nn.LSTM.

    source, ops: as of `encoder`
    Its dropout between layers is drawn for each step, as torch's.
    Errors: ValueError for parametrized or pruned weights.
    """
    return _recurrent(source, LSTM, ops, proj_size=source.proj_size)


def gru(source: nn.GRU, *, ops: Operators = fused) -> GRU:
    """Returns a GRU with the weights of a torch.nn.GRU; see `lstm`."""
    return _recurrent(source, GRU, ops)


def rnn(source: nn.RNN, *, ops: Operators = fused) -> RNN:
    """Returns an RNN with the weights of a torch.nn.RNN; see `lstm`."""
    return _recurrent(source, RNN, ops, nonlinearity=source.nonlinearity)


def _recurrent(
    source: nn.RNNBase, kind: type[RecurrentModule], ops: Operators, **options: Any
) -> RecurrentModule:
    ours = kind(
        source.input_size,
        source.hidden_size,
        source.num_layers,
        bias=source.bias,
        dropout=source.dropout,
        locked_input=False,
        batch_first=source.batch_first,
        bidirectional=source.bidirectional,
        ops=ops,
        **options,
    )
    return _like(source, ours, source.state_dict(keep_vars=True))


def awd_lstm(
    state: Mapping[str, Tensor], *, ops: Operators = fused, **settings: Any
) -> LanguageModel:
    """Returns a LanguageModel with the weights of AWD-LSTM's RNNModel (Merity et al., 2018).

    state: its `state_dict`, from which sizes and tying are read
    settings: other LanguageModelSettings, such as dropouts, which the state does not contain
    The weight-dropped matrices weight_hh_l0_raw become weight_hh without a mask. The tombstones of
    the split cross-entropy are in another module there; `LanguageModel.loss` loads its state_dict.
    Errors: ValueError for a model without LSTM layers, such as a QRNN.
    """
    layers = 1 + max(
        (int(m[1]) for name in state if (m := re.match(r"rnns\.(\d+)\.", name))), default=-1
    )
    ours = _awd_lstm_layers(state)
    if not layers or len(ours) != 4 * layers:
        raise ValueError(
            "awd_lstm: state must have weight_ih, weight_hh, bias_ih and bias_hh of each of its "
            f"LSTM layers, rnns.0 to rnns.{layers - 1}, got {', '.join(state)}"
        )
    if missing := {"encoder.weight", "decoder.weight", "decoder.bias"} - state.keys():
        raise ValueError(
            f"awd_lstm: state must have {', '.join(sorted(missing))}, got {', '.join(state)}"
        )
    hidden = tuple(ours[f"recurrent.weight_hh_l{l}"].size(1) for l in range(layers))
    V, E = state["encoder.weight"].shape
    tied = state["decoder.weight"].shape == (V, E) and torch.equal(
        state["decoder.weight"], state["encoder.weight"]
    )
    ours |= {"embedding.weight": state["encoder.weight"], "decoder_bias": state["decoder.bias"]}
    if not tied:
        ours["decoder_weight"] = state["decoder.weight"]
    made = LanguageModelSettings(embedding=E, hidden=hidden, layers=layers, tied=tied, **settings)
    model = LanguageModel(V, made, ops=ops)
    return _load(model, ours | {f"loss.{name}": t for name, t in model.loss.state_dict().items()})


def _awd_lstm_layers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters of the recurrent layers under the names that LanguageModel has."""
    found = {}
    for name, t in state.items():
        # Some versions of torch also store the masked copy of a weight-dropped matrix.
        masked_copy = name.replace("_l0", "_l0_raw") in state
        m = re.fullmatch(r"rnns\.(\d+)\.(?:module\.)?((?:weight|bias)_[ih]h)_l0(?:_raw)?", name)
        if m and not masked_copy:
            found[f"recurrent.{m[2]}_l{m[1]}"] = t
    return found


def _like(source: nn.Module, module: AnyModule, state: Mapping[str, Tensor]) -> AnyModule:
    """Returns the module with the weights and the mode of a module of torch, and with gradients for
    those parameters that have one there.

    state: the parameters of `source` under the names that our module has
    """
    if unknown := state.keys() - module.state_dict().keys():
        raise ValueError(
            f"convert: {type(source).__name__} must have the parameters of torch's module and no "
            "others, as of a parametrization (weight_norm) or of pruning, which must be removed "
            f"first, got {', '.join(sorted(unknown))}"
        )
    if len(dtypes := {str(t.dtype) for t in state.values()}) > 1:
        raise ValueError(
            f"convert: the parameters of {type(source).__name__} must have one dtype, got "
            f"{' and '.join(sorted(dtypes))}"
        )
    module = _load(module, state)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(state[name].requires_grad)
    return module.train(source.training)


def _load(module: AnyModule, state: Mapping[str, Tensor]) -> AnyModule:
    """Returns the module with the state loaded, on the state's device and in its dtype."""
    like = next(iter(state.values()))
    module = module.to(like.device, like.dtype)
    module.load_state_dict(state)
    return module
