"""The baselines: every operator as a good user of plain PyTorch writes it, with the oracle's names and signatures.

They say what is fast, not what is right: masks come from torch's own generator (F.dropout, bernoulli_), the `seed` is
ignored, and torch's own operator serves where there is one. `bench.baselines` can stand for `ops` in `fusedseq.nn`.
"""

import itertools
import time

import torch
from torch.nn import functional as F


def attention(
    q, k, v, *, scale=None, causal=False, key_lengths=None, mask=None, bias=None, alibi=None, relative_keys=None,
    rope=None, offset=None, key_rows=None, dropout=0.0, seed=None,
):  # fmt: skip
    """torch's own operator, with what it has no argument for in its mask."""
    without(key_rows=key_rows)
    (L, S), D = (q.size(2), k.size(2)), q.size(3)
    q, k = turn(q, k, rope, offset)
    plain = causal and L == S and offset is None and key_lengths is mask is bias is alibi is relative_keys is None
    terms = None if plain else attention_mask(
        q, S, causal, key_lengths, mask, bias, alibi, relative_keys, D**-0.5 if scale is None else scale, offset
    )  # fmt: skip
    return F.scaled_dot_product_attention(
        q, k, v, terms, dropout, plain, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )


def attention_eager(
    q, k, v, *, scale=None, causal=False, key_lengths=None, mask=None, bias=None, alibi=None, relative_keys=None,
    rope=None, offset=None, key_rows=None, dropout=0.0, seed=None,
):  # fmt: skip
    """The formula, as it stands in many a model."""
    without(key_rows=key_rows)
    scale = q.size(3) ** -0.5 if scale is None else scale
    q, k = turn(q, k, rope, offset)
    terms = attention_mask(q, k.size(2), causal, key_lengths, mask, bias, alibi, relative_keys, scale, offset)
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) if q.size(1) != t.size(1) else t for t in (k, v))
    logits = q @ k.mT * scale
    if terms is not None:
        logits = logits.masked_fill(~terms, -torch.inf) if terms.dtype == torch.bool else logits + terms
    return F.dropout(logits.softmax(-1), dropout) @ v


def attention_mask(q, S, causal, key_lengths, mask, bias, alibi, relative_keys, scale, offset):
    """A bool mask, or the sum of what is added to the logits, or None."""
    L = q.size(2)
    i = torch.arange(L, device=q.device)[:, None] + (S - L if offset is None else offset)
    j = torch.arange(S, device=q.device)
    seen = None
    for each in (
        j <= i if causal else None,
        None if key_lengths is None else j < key_lengths[:, None, None, None],
        mask,
    ):
        seen = each if seen is None else seen if each is None else seen & each
    terms = bias
    if alibi is not None:
        slopes = -alibi[:, None, None] * (i - j).abs()
        terms = slopes if terms is None else terms + slopes
    if relative_keys is not None:
        K = len(relative_keys) // 2
        at = K + (j - i).clamp(-K, K)
        shaw = scale * (q @ relative_keys.T).gather(-1, at.expand(*q.shape[:3], S))
        terms = shaw if terms is None else terms + shaw
    if terms is None:
        return seen
    return terms if seen is None else terms.masked_fill(~seen, -torch.inf)


def turn(q, k, rope, offset):
    if rope is None:
        return q, k
    L, S = q.size(2), k.size(2)
    start = S - L if offset is None else offset
    return rotate(q, rope[start : start + L]), rotate(k, rope[:S])


def rotate(x, table):
    return torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(table.unflatten(-1, (-1, 2)))
    ).flatten(-2)


def dropout(x, p, seed=None):
    return F.dropout(x, p)


def locked_dropout(x, p, seed=None):
    """LockedDropout of the AWD-LSTM code: a mask drawn for one step, scaled and broadcast over the steps."""
    if p == 0:
        return x
    mask = torch.empty_like(x[:1]).bernoulli_(1 - p)
    return x * (mask.div_(1 - p) if p < 1 else mask)


def weight_drop(W, p, seed=None, variational=False):
    """WeightDrop of the AWD-LSTM code: F.dropout on the weight, or on a column of ones."""
    if variational:
        return F.dropout(W.new_ones(len(W), 1), p) * W
    return F.dropout(W, p)


def drop_weight(W_hh, p, variational, training):
    """The W_hh that a recurrence uses."""
    return weight_drop(W_hh, p, variational=variational) if training and p else W_hh


def embedding(ids, W, p=0.0, seed=None, sparse=False):
    """embedded_dropout of the AWD-LSTM code: gather from a masked copy of the whole table."""
    if p:
        mask = torch.empty_like(W[:, :1]).bernoulli_(1 - p).expand_as(W) / (1 - p)
        W = mask * W
    return F.embedding(ids, W, sparse=sparse and not p)


def embedding_rows(ids, W, p=0.0, seed=None, sparse=False):
    """The same distribution without a copy of the table: gather, then mask the rows."""
    return F.embedding(ids, W, sparse=sparse) * F.dropout(W.new_ones(len(W)), p)[ids][..., None]


ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "tanh": torch.tanh
}  # fmt: skip


def bias_activation_dropout(x, b=None, activation="relu", p=0.0, seed=0):
    return F.dropout(ACTIVATIONS[activation](x if b is None else x + b), p)


def residual_layer_norm(x, residual=None, weight=None, bias=None, *, p=0.0, eps=1e-5, prenorm=False, seed=0):
    s = F.dropout(x, p)
    if residual is not None:
        s = residual + s
    y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return (y, s) if prenorm else y


def linear(x, W, b=None):
    return F.linear(x, W, b)


def linear_cross_entropy(
    x, W, target, b=None, *, class_weights=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
    reduction="mean", return_details=False,
):  # fmt: skip
    logits = F.linear(x, W, b).flatten(0, -2)
    logits = logits / temperature if temperature != 1 else logits
    loss = F.cross_entropy(
        logits, target.flatten(), class_weights, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )  # fmt: skip
    if not z_loss and not return_details:
        return loss.reshape(target.shape) if reduction == "none" else loss
    raise NotImplementedError("the baseline takes no z_loss and returns no details")


def linear_cross_entropy_chunked(x, W, target, b=None, chunk=None):
    """torch's own (2.13 on), by chunks of so many rows, or of its default."""
    options = torch.nn.LinearCrossEntropyOptions(
        **{} if chunk is None else {"batch_chunk_size": chunk, "chunking_method": None}
    )
    return F.linear_cross_entropy(x, W, target, linear_bias=b, options=options)


def split_cross_entropy(
    x, W, target, tombstones, splits, b=None, tombstone_bias=None, *, ignore_index=-100, reduction="mean"
):  # fmt: skip
    """SplitCrossEntropyLoss of the AWD-LSTM code with its faults mended: the rows of each tail are gathered."""
    if not splits:
        return linear_cross_entropy(x, W, target, b, ignore_index=ignore_index, reduction=reduction)
    rows, targets = x.flatten(0, -2), target.flatten()
    biases = None if b is None and tombstone_bias is None else torch.cat(
        [W.new_zeros(splits[0]) if b is None else b[: splits[0]],
         W.new_zeros(len(splits)) if tombstone_bias is None else tombstone_bias])  # fmt: skip
    head = F.log_softmax(F.linear(rows, torch.cat([W[: splits[0]], tombstones]), biases), -1)
    kept, loss = targets != ignore_index, rows.new_zeros(len(rows))
    for i, (start, end) in enumerate(itertools.pairwise((0, *splits, len(W)))):
        mine = (kept & (targets >= start) & (targets < end)).nonzero()[:, 0]
        if i == 0:
            loss = loss.index_put((mine,), -head[mine, targets[mine]])
            continue
        tail = F.log_softmax(F.linear(rows[mine], W[start:end], None if b is None else b[start:end]), -1)
        in_tail = tail.gather(1, targets[mine, None] - start)[:, 0]
        loss = loss.index_put((mine,), -head[mine, splits[0] + i - 1] - in_tail)
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() / kept.sum().clamp(min=1) if reduction == "mean" else loss.sum()


class BestChunk:
    """torch's own with the fastest of these chunks, found at the first call."""

    CHUNKS = (256, 512, 1024, 2048)

    def __init__(self):
        self.best = None

    def __call__(self, *args):
        if self.best is None:
            self.best = min(self.CHUNKS, key=lambda chunk: self.seconds(args, chunk))
        return linear_cross_entropy_chunked(*args, chunk=self.best)

    def seconds(self, args, chunk):
        times = []
        for _ in range(2):
            start = time.perf_counter()
            linear_cross_entropy_chunked(*args, chunk=chunk)  # its gradients too, formed with the loss
            times.append(time.perf_counter() - start)
        return min(times)


def activation_regularization(dropped, raw, alpha, beta):
    """As the AWD-LSTM code's training loop has it."""
    loss = alpha * dropped.pow(2).mean()
    if len(raw) < 2:  # there the mean of nothing is NaN
        return loss
    return loss + beta * (raw[1:] - raw[:-1]).pow(2).mean()


def lstm(x, W_ih, W_hh, b, h0, c0, lengths=None, *, weight_drop=0.0, variational=False, training=True, seed=None):
    """torch.nn.LSTM's own operator: oneDNN's on a CPU, cuDNN's on a GPU."""
    without(lengths=lengths)
    W_hh = drop_weight(W_hh, weight_drop, variational, training)
    weights = [W_ih, W_hh] if b is None else [W_ih, W_hh, b, torch.zeros_like(b)]
    y, h, c = torch._VF.lstm(x, (h0[None], c0[None]), weights, b is not None, 1, 0.0, True, False, False)
    return y, (h[0], c[0])


def lstm_loop(x, W_ih, W_hh, b, h0, c0, lengths=None, *, weight_drop=0.0, variational=False, training=True, seed=None):
    """The LSTM as a loop in Python: the input's product for all steps at once, one GEMM a step."""
    return run_lstm_loop(lstm_step, x, W_ih, W_hh, b, h0, c0, lengths, weight_drop, variational, training)


def run_lstm_loop(step, x, W_ih, W_hh, b, h0, c0, lengths, weight_drop, variational, training):
    without(lengths=lengths)
    W_hh = drop_weight(W_hh, weight_drop, variational, training)
    h, c, y, W_hh_t = h0, c0, [], W_hh.t()
    for z_t in F.linear(x, W_ih, b).unbind():
        h, c = step(z_t, h, c, W_hh_t)
        y.append(h)
    return torch.stack(y), (h, c)


def lstm_step(z, h, c, W_hh_t):
    i, f, g, o = torch.addmm(z, h, W_hh_t).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def mogrifier_lstm(
    x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias=None, R_bias=None, *, rounds, lengths=None, cap_input_gate=False,
    input_dropout=0.0, locked_input=False, state_dropout=0.0, zoneout_h=0.0, zoneout_c=0.0, weight_drop=0.0,
    variational=False, training=True, seed=None,
):  # fmt: skip
    """A loop over the steps; weights and masks are unpacked and drawn once, before it.

    Timed against each other on a CPU, the variants (two F.linear and a sum, one GEMM over [x, h], nn.LSTMCell's
    operator, this addmm) are equal within 5 %.
    """
    return run_mogrifier_loop(
        mogrifier_step, x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias, rounds, lengths, cap_input_gate,
        input_dropout, locked_input, state_dropout, zoneout_h, zoneout_c, weight_drop, variational, training,
    )  # fmt: skip


def mogrifier_lstm_pair(x, first, second):
    y, state = mogrifier_lstm(x, **first)
    return (y, state), mogrifier_lstm(y, **second)


def run_mogrifier_loop(
    step, x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias, rounds, lengths, cap_input_gate,
    input_dropout, locked_input, state_dropout, zoneout_h, zoneout_c, weight_drop, variational, training,
):  # fmt: skip
    without(lengths=lengths)
    T, W_hh = len(x), drop_weight(W_hh, weight_drop, variational, training)
    if training and input_dropout:
        x = (locked_dropout if locked_input else dropout)(x, input_dropout)
    state_mask = dropout(torch.ones_like(h0), state_dropout) if training and state_dropout else None
    keep_h, keep_c = (torch.empty_like(h0.expand(T, *h0.shape)).bernoulli_(p).unbind() if training and p else [p or None] * T
                      for p in (zoneout_h, zoneout_c))  # fmt: skip
    weights = [unpack(Q, R, Q_bias, R_bias, k) for k in range(rounds)]
    h, c, y, W_hh_t = h0, c0, [], W_hh.t()
    for t, x_t in enumerate(x.unbind()):
        h, c = step(x_t, h, c, W_ih, W_hh_t, b, weights, state_mask, keep_h[t], keep_c[t], cap_input_gate)
        y.append(h)
    return torch.stack(y), (h, c)


def unpack(Q, R, Q_bias, R_bias, k):
    """Round k: ([the weight, or its two factors, the first to be applied first], bias)."""
    weight, bias = (R, R_bias) if k % 2 else (Q, Q_bias)
    factors = [weight] if isinstance(weight, torch.Tensor) else weight[::-1]
    return [w[k // 2 % len(w)] for w in factors], None if bias is None else bias[k // 2 % len(bias)]


def mogrifier_step(x, h, c, W_ih, W_hh_t, b, weights, state_mask, keep_h, keep_c, cap_input_gate):
    h_new, c_new = h if state_mask is None else h * state_mask, c
    for k, (factors, bias) in enumerate(weights):
        z = h_new if k % 2 == 0 else x
        for W in factors[:-1]:
            z = F.linear(z, W)
        gate = 2 * F.linear(z, factors[-1], bias).sigmoid()
        if k % 2 == 0:
            x = gate * x
        else:
            h_new = gate * h_new
    i, f, g, o = torch.addmm(F.linear(x, W_ih, b), h_new, W_hh_t).chunk(4, dim=-1)
    i, f = i.sigmoid(), f.sigmoid()
    if cap_input_gate:
        i = torch.minimum(i, 1 - f)
    c_new = f * c + i * g.tanh()
    h_new = o.sigmoid() * c_new.tanh()
    if keep_c is not None:
        c_new = torch.lerp(c_new, c, keep_c)
    if keep_h is not None:
        h_new = torch.lerp(h_new, h, keep_h)
    return h_new, c_new


def without(**given):
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"the baselines take no {name}")
