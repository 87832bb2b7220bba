import inspect

import torch

from fusedseq import reference
from fusedseq.fused import autograd, check
from fusedseq.fused.lstm import upstream
from fusedseq.fused.mogrifier_lstm import SEED, TENSORS, arguments, mogrifier_lstm, needed
from fusedseq.fused.mogrifier_lstm import fake as fake_layer
from fusedseq.fused.mogrifier_lstm import fake_backward as fake_layer_backward
from fusedseq.fused.mogrifier_lstm import oracle as layer_oracle
from fusedseq.reference.mogrifier_lstm import INPUT

OF_A_PAIR = {"cuda"}  # devices with an operator for both layers; on others they are two calls
DEFAULTS = {
    name: p.default for name, p in inspect.signature(mogrifier_lstm).parameters.items() if p.default is not p.empty
}


def mogrifier_lstm_pair(x, first, second):
    """As `fusedseq.reference.mogrifier_lstm_pair`. On CUDA, where both fit, the layers run at the same time, each on half of the
    multiprocessors, the second a step behind the first: `fused.explain` says whether. Elsewhere it is two calls of `mogrifier_lstm`.

    Errors: those of `mogrifier_lstm` for either layer; TypeError for one that is no dict.
    """
    op = "mogrifier_lstm_pair"
    for name, layer in (("first", first), ("second", second)):
        if not isinstance(layer, dict):
            raise TypeError(f"{op}: {name} must be a dict of mogrifier_lstm's arguments, got {type(layer).__name__}")
    check.tensor(op, "x", x)
    if x.device.type not in OF_A_PAIR:
        y, state = mogrifier_lstm(x, **first)
        return (y, state), mogrifier_lstm(y, **second)
    below, above = arguments(x, **DEFAULTS | first), DEFAULTS | second
    y_like = below[0].new_empty(()).expand(*x.shape[:2], below[4].size(1))  # for the checks
    p, locked = above["input_dropout"], above["locked_input"]
    check.probability("mogrifier_lstm", "input_dropout", p)
    _, *of_second = arguments(y_like, **above | {"input_dropout": 0.0})
    found = autograd.call(op, *below, *of_second, p if above["training"] else 0.0, locked)
    return (found[0], tuple(found[1:3])), (found[OUTPUTS], tuple(found[OUTPUTS + 1 : OUTPUTS + 3]))


SETTINGS = 8  # of a layer, behind its tensors
OUTPUTS = 7  # of a layer


def halves(inputs):
    """(x, the first layer's arguments, the second's, p, locked) of the operator's."""
    x, *rest, p, locked = inputs
    each = TENSORS - 1 + SETTINGS
    return x, tuple(rest[:each]), tuple(rest[each:]), p, locked


def fake(*inputs):
    x, first, second, p, _ = halves(inputs)
    found = fake_layer(x, *first)
    y = found[0]
    return *found, *fake_layer(y, *second), y.new_empty(y.shape[0] if p else 0, *y.shape[1:])


def fake_backward(dy, dh, dc, dy_2, dh_2, dc_2, *rest):
    inputs, y, (needs, needs_2) = rest[:-13], rest[-13], rest[-2:]  # 13: what each layer saved, x_2 and these
    x, first, second, *_ = halves(inputs)
    of_first = fake_layer_backward(dy, dh, dc, x, *first, needs)
    return *of_first, *fake_layer_backward(dy_2, dh_2, dc_2, y, *second, needs_2 | 1)


def setup(ctx, inputs, output):
    x, first, second, p, locked = halves(inputs)
    tensors = TENSORS - 1
    saved = [output[0], *output[3:OUTPUTS], output[OUTPUTS], *output[OUTPUTS + 3 :]]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:OUTPUTS], *output[OUTPUTS + 3 :])
    ctx.save_for_backward(x, *first[:tensors], *second[:tensors], *saved)
    ctx.settings = first[tensors:], second[tensors:], p, locked


def oracle(*inputs):
    x, first, second, p, locked = halves(inputs)
    y, state = layer_oracle(x, *first)
    if p:
        seed = second[SEED - 1]
        dropped = (reference.locked_dropout if locked else reference.dropout)(y, p, seed + INPUT)
    return (y, state), layer_oracle(dropped if p else y, *second)


def backward(ctx, *grads):
    tensors = TENSORS - 1
    x, *rest = ctx.saved_tensors
    first, second, saved = rest[:tensors], rest[tensors : 2 * tensors], rest[2 * tensors :]
    settings, settings_2, p, locked = ctx.settings
    inputs = x, *first, *settings, *second, *settings_2, p, locked
    needs = ctx.needs_input_grad
    results = (*grads[:3], *grads[OUTPUTS : OUTPUTS + 3])
    if all(g is None for g in results):
        return (None,) * len(needs)
    if torch.is_grad_enabled():
        return tuple(autograd.through_oracle(oracle, [*inputs], needs, results))
    dy, dh, dc, dy_2, dh_2, dc_2 = results
    dh, dc = (torch.zeros_like(first[3]) if d is None else d for d in (dh, dc))
    of_second = upstream(dy_2, dh_2, dc_2, saved[5], second[3])
    _, first_needs, second_needs, _, _ = halves(needs)
    bits = needed((needs[0], *first_needs[: tensors - 1])), needed((True, *second_needs[: tensors - 1]))
    found = torch.ops.fusedseq.mogrifier_lstm_pair_backward(dy, dh, dc, *of_second, *inputs, *saved, *bits)
    none = [None] * (SETTINGS + 1)
    grads = [*found[:6], None, *found[6:12], *none, *found[13:18], None, *found[18:], *none, None, None]
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


autograd.register("mogrifier_lstm_pair", fake, backward, setup, fakes=[("mogrifier_lstm_pair_backward", fake_backward)])
