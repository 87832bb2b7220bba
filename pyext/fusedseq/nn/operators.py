"""The type of the argument `ops` of every module and model, and how modules are printed."""

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from fusedseq import fused, reference

State = tuple[Tensor, Tensor]  # (h, c) of one recurrent layer, (B, H) each
LayerOutput = tuple[Tensor, State]  # y (T, B, H) and the final state of one recurrent layer


class Operators(Protocol):
    """The operators that modules call: `fusedseq.fused` or `fusedseq.reference`.

    Only the types of the results are declared here. Arguments and shapes are documented in the
    functions of `fusedseq.reference`.
    """

    @property
    def activation_regularization(self) -> Callable[..., Tensor]: ...

    @property
    def attention(self) -> Callable[..., Tensor]: ...

    @property
    def attention_varlen(self) -> Callable[..., Tensor]: ...

    @property
    def bias_activation_dropout(self) -> Callable[..., Tensor]: ...

    @property
    def bidirectional_lstm(self) -> Callable[..., tuple[Tensor, tuple[State, State]]]: ...

    @property
    def dropout(self) -> Callable[..., Tensor]: ...

    @property
    def embedding(self) -> Callable[..., Tensor]: ...

    @property
    def gru(self) -> Callable[..., tuple[Tensor, Tensor]]: ...

    @property
    def layer_norm_gru(self) -> Callable[..., tuple[Tensor, Tensor]]: ...

    @property
    def layer_norm_lstm(self) -> Callable[..., LayerOutput]: ...

    @property
    def linear(self) -> Callable[..., Tensor]: ...

    @property
    def linear_cross_entropy(self) -> Callable[..., Any]:
        """Returns one tensor, or four with return_details."""

    @property
    def locked_dropout(self) -> Callable[..., Tensor]: ...

    @property
    def lstm(self) -> Callable[..., LayerOutput]: ...

    @property
    def mogrifier_lstm(self) -> Callable[..., LayerOutput]: ...

    @property
    def mogrifier_lstm_pair(self) -> Callable[..., tuple[LayerOutput, LayerOutput]]: ...

    @property
    def peephole_lstm(self) -> Callable[..., LayerOutput]: ...

    @property
    def projected_lstm(self) -> Callable[..., LayerOutput]: ...

    @property
    def residual_layer_norm(self) -> Callable[..., Any]:
        """Returns one tensor, or two with prenorm."""

    @property
    def rnn(self) -> Callable[..., tuple[Tensor, Tensor]]: ...

    @property
    def split_cross_entropy(self) -> Callable[..., Tensor]: ...

    @property
    def weight_drop(self) -> Callable[..., Tensor]: ...


class _OperatorSet(ModuleType):
    """A module whose repr is its name, because the signature of every module of `fusedseq.nn` shows
    the default of `ops`. The repr of an ordinary module includes the path of its file.
    """

    def __repr__(self) -> str:
        return self.__name__


for _operator_set in (fused, reference):
    _operator_set.__class__ = _OperatorSet

NOT_SHOWN = ("self", "device", "dtype", "ops")


def shown_options(module: nn.Module, *always: str, **values: Any) -> str:
    """Returns the text of a module's `extra_repr`.

    The text has the required arguments of the constructor, each further argument that differs from
    its default or is named in `always`, and `ops` if it is not `fusedseq.fused`. An argument's
    value is the attribute of its name, unless `values` has it. Submodules are not included, as
    torch prints them itself.
    """
    texts = []
    for name, parameter in inspect.signature(_constructor(module)).parameters.items():
        if name in NOT_SHOWN:
            continue
        # A module that an older version has pickled lacks the attributes that were added since.
        value = values[name] if name in values else getattr(module, name, parameter.default)
        if parameter.default is parameter.empty:
            texts.append(f"{value!r}")
        elif name in always or not (isinstance(value, nn.Module) or value == parameter.default):
            texts.append(f"{name}={value!r}")
    operators = _operator_set_name(module)
    return ", ".join(texts if operators == "fused" else [*texts, f"ops={operators}"])


def _constructor(module: nn.Module) -> Callable[..., None]:
    """Returns the constructor in this package, also for a user's subclass with its own."""
    ours = [c for c in type(module).__mro__ if c.__module__.startswith("fusedseq.nn.")]
    constructor: Callable[..., None] = ours[0].__init__  # type: ignore[misc]  # it is not called
    return constructor


def _operator_set_name(module: nn.Module) -> str:
    """Returns "fused", "reference" or the name of another module of operators.

    A module stores the functions that it calls, and each function knows where it is defined.
    """
    for value in vars(module).values():
        if isinstance(value, FunctionType):
            names = value.__module__.split(".")
            return names[1] if names[0] == "fusedseq" else value.__module__
    return "fused"
