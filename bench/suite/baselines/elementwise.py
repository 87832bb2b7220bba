"""Baselines of dropouts, embedding, norm, activation, linear map and activation regularization."""

import torch
from torch.nn import functional as F


def dropout(x, p, seed=None):
    return F.dropout(x, p)


def locked_dropout(x, p, seed=None):
    """LockedDropout of the AWD-LSTM code: one mask is drawn, scaled and used in all steps."""
    if p == 0:
        return x
    mask = torch.empty_like(x[:1]).bernoulli_(1 - p)
    return x * (mask.div_(1 - p) if p < 1 else mask)


def weight_drop(W, p, seed=None, variational=False):
    """WeightDrop of the AWD-LSTM code: F.dropout on the weight, or on a column of ones."""
    if variational:
        return F.dropout(W.new_ones(len(W), 1), p) * W
    return F.dropout(W, p)


def embedding(ids, W, p=0.0, seed=None, sparse=False):
    """embedded_dropout of the AWD-LSTM code: a gather from a masked copy of the whole table."""
    if p:
        mask = torch.empty_like(W[:, :1]).bernoulli_(1 - p).expand_as(W) / (1 - p)
        W = mask * W
    return F.embedding(ids, W, sparse=sparse and not p)


def embedding_rows(ids, W, p=0.0, seed=None, sparse=False):
    """The same distribution without a copy of the table: a gather whose rows are then masked."""
    return F.embedding(ids, W, sparse=sparse) * F.dropout(W.new_ones(len(W)), p)[ids][..., None]


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}


def bias_activation_dropout(x, b=None, activation="relu", p=0.0, seed=0):
    return F.dropout(ACTIVATIONS[activation](x if b is None else x + b), p)


def residual_layer_norm(
    x, residual=None, weight=None, bias=None, *, p=0.0, eps=1e-5, prenorm=False, seed=0
):
    s = F.dropout(x, p)
    if residual is not None:
        s = residual + s
    y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return (y, s) if prenorm else y


def linear(x, W, b=None):
    return F.linear(x, W, b)


def activation_regularization(dropped, raw, alpha, beta):
    """As the AWD-LSTM code's training loop computes it."""
    loss = alpha * dropped.pow(2).mean()
    if len(raw) < 2:  # the mean of an empty tensor would be NaN
        return loss
    return loss + beta * (raw[1:] - raw[:-1]).pow(2).mean()
