import inspect
from typing import Any

from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.mogrifier_lstm import fake as fake_layer
from fusedseq.fused.mogrifier_lstm import mogrifier_lstm, operator_inputs
from fusedseq.fused.mogrifier_lstm import oracle as layer_oracle
from fusedseq.fused.schema import Named, Schema
from fusedseq.reference.mogrifier_lstm_pair import State

OP = "mogrifier_lstm_pair"
LAYERS = ("first", "second")  # suffixes of the operator's names
PAIRED = {"cuda"}  # device types with a kernel for both layers; on others they are two calls
PARAMETERS = inspect.signature(mogrifier_lstm).parameters
DEFAULTS = {name: p.default for name, p in PARAMETERS.items() if p.default is not p.empty}
REQUIRED = {*PARAMETERS} - {*DEFAULTS}


def mogrifier_lstm_pair(
    x: Tensor, first: dict[str, Any], second: dict[str, Any]
) -> tuple[tuple[Tensor, State], tuple[Tensor, State]]:
    """Computes `fusedseq.reference.mogrifier_lstm_pair`: two Mogrifier LSTM layers.

    On CUDA, where both layers fit, they run at the same time, each on half of the multiprocessors,
    the second layer one step behind the first; `fused.explain` reports whether a call does. On
    other devices this is two calls of `mogrifier_lstm`.

    Errors: those of `mogrifier_lstm` for either layer; TypeError for a layer that is not a dict.
    """
    for name, layer in (("first", first), ("second", second)):
        if not isinstance(layer, dict):
            raise TypeError(
                f"{OP}: {name} must be a dict of mogrifier_lstm's arguments, got "
                f"{type(layer).__name__}"
            )
    check.tensor(OP, "x", x)
    in_order = all(
        layer.get("starts") is None and not layer.get("reverse") for layer in (first, second)
    )
    if x.device.type not in PAIRED or not in_order:
        y, state = mogrifier_lstm(x, **first)
        return (y, state), mogrifier_lstm(y, **second)
    below = operator_inputs(completed("first", x, first))
    # The second layer's checks need the shape and dtype of the first layer's output, not its
    # values.
    y_like = below["x"].new_empty(()).expand(*x.shape[:2], below["h0"].size(1))
    given = completed("second", y_like, second)
    p, locked = given["input_dropout"], given["locked_input"]
    check.probability("mogrifier_lstm", "input_dropout", p)
    above = operator_inputs(given | {"input_dropout": 0.0})
    named = {f"{name}_first": value for name, value in below.items()}
    named |= {f"{name}_second": value for name, value in above.items()}
    named |= {"x": below["x"], "p": p if above["training"] else 0.0, "locked": locked}
    found = dict(zip(OUTPUTS, autograd.call_by_name(OP, named), strict=True))
    y_first, h_first, c_first, y_second, h_second, c_second = (found[name] for name in RESULTS)
    return (y_first, (h_first, c_first)), (y_second, (h_second, c_second))


def completed(name: str, x: Tensor, layer: dict[str, Any]) -> Named:
    """All arguments of a layer by name."""
    given = DEFAULTS | layer | {"x": x}
    if given.keys() != PARAMETERS.keys() or "x" in layer:
        missing, unknown = REQUIRED - {*given}, ({*given} - {*PARAMETERS}) | ({"x"} & {*layer})
        raise TypeError(
            f"{OP}: {name} must have the arguments of mogrifier_lstm but x, got {sorted(unknown)} "
            f"too many and {sorted(missing)} missing"
        )
    return given


def of_layer(named: Named, layer: str) -> Named:
    """The entries of one layer under the names that they have in `mogrifier_lstm`."""
    suffix = f"_{layer}"
    return {n.removesuffix(suffix): v for n, v in named.items() if n.endswith(suffix)}


def fake(named: Named) -> tuple[Tensor, ...]:
    first = fake_layer(of_layer(named, "first") | {"x": named["x"]})
    y = first[0]
    second = fake_layer(of_layer(named, "second") | {"x": y})
    return *first, *second, y.new_empty(y.shape[0] if named["p"] else 0, *y.shape[1:])


def oracle(named: Named) -> Any:
    first, second = (of_layer(named, layer) for layer in LAYERS)
    y, state = layer_oracle(first | {"x": named["x"]})
    dropped = y
    if named["p"]:
        drop = reference.locked_dropout if named["locked"] else reference.dropout
        dropped = drop(y, named["p"], second["seed"])
    return (y, state), layer_oracle(second | {"x": dropped})


OUTPUTS = Schema(OP).outputs
RESULTS = tuple(f"{name}_{layer}" for layer in LAYERS for name in ("y", "h", "c"))
autograd.register(
    OP, fake, Gradient(results=RESULTS, backwards=("mogrifier_lstm_pair_backward",), oracle=oracle)
)
autograd.register_fake_backward(OP)
