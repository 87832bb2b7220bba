"""The parameters of the recurrent modules, with the names and shapes of torch's."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedseq.nn.recurrent_settings import RecurrentSettings

GATE_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class RecurrentParameters(nn.Module):
    """The settings and the parameters of each direction of each layer."""

    GATES = 4  # rows of the weights for each hidden unit
    STATE: tuple[str, ...] = ("h", "c")  # the names of the tensors of a state
    PARAMETERS: tuple[str, ...] = GATE_PARAMETERS  # of each direction of a layer
    forget_bias: float | None = None
    # Of modules that older versions have pickled.
    bidirectional, proj_size, zoneout_h, zoneout_c = False, 0, 0.0, 0.0

    def __init__(self, settings: RecurrentSettings) -> None:
        super().__init__()
        s = settings.typed(type(self).__name__)
        hidden = s.hidden_sizes(type(self).__name__)
        self.input_size, self.hidden_size, self.num_layers = (
            s.input_size,
            s.hidden_size,
            s.num_layers,
        )
        self.bias, self.batch_first = s.bias, s.batch_first
        self.residual, self.output = s.residual, s.output
        self.zoneout_h, self.zoneout_c = s.zoneout_h, s.zoneout_c
        self.weight_drop, self.variational = s.weight_drop, s.variational
        self.bidirectional, self.proj_size = s.bidirectional, s.proj_size
        # (X, H) of each layer
        below = [s.input_size, *[s.directions * self._output_size(H) for H in hidden[:-1]]]
        self.sizes = list(zip(below, hidden, strict=True))
        G = self.GATES
        for l, (X, H) in enumerate(self.sizes):
            for reverse in self._directions():
                self._add("weight_ih", l, (G * H, X), s, reverse)
                self._add("weight_hh", l, (G * H, self._output_size(H)), s, reverse)
                if s.bias:
                    self._add("bias_ih", l, (G * H,), s, reverse)
                    self._add("bias_hh", l, (G * H,), s, reverse)
                if s.proj_size:
                    self._add("weight_hr", l, (s.proj_size, H), s, reverse)

    def _output_size(self, H: int) -> int:
        """Returns the width of h."""
        return self.proj_size or H

    def _directions(self) -> tuple[bool, ...]:
        """Returns for each direction of a layer whether it is the reverse one."""
        return (False, True) if self.bidirectional else (False,)

    def _add(
        self, name: str, l: int, shape: tuple[int, ...], s: RecurrentSettings, reverse: bool
    ) -> None:
        values = torch.empty(shape, device=s.device, dtype=s.dtype)
        self.register_parameter(parameter_name(name, l, reverse), nn.Parameter(values))

    def _parameter(self, name: str, l: int, reverse: bool) -> nn.Parameter | None:
        """Returns a parameter of layer l, or None if the module does not have it."""
        full_name = parameter_name(name, l, reverse)
        if full_name in self._parameters:
            return self._parameters[full_name]
        # torch.nn.utils.parametrize, weight_norm and prune replace a parameter by an attribute.
        parameter: nn.Parameter | None = getattr(self, full_name, None)
        return parameter

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws the parameters from U(-1/sqrt(H), 1/sqrt(H)), as torch.nn.LSTM.

        forget_bias: the bias of the forget gate; by default the constructor's
        Parametrized weights (torch.nn.utils.parametrize) are set to what is drawn.
        Errors: ValueError for a forget_bias of a cell without a forget gate, and of parameters that
        are sharded among processes; for weights that are computed from other parameters, without a
        right_inverse.
        """
        forget_bias = self.forget_bias if forget_bias is None else forget_bias
        if forget_bias is not None and "c" not in self.STATE:
            raise ValueError(
                f"{type(self).__name__}: forget_bias must be None, since the cell has no forget "
                f"gate, got {forget_bias}"
            )
        if forget_bias is not None and any(hasattr(p, "full_tensor") for p in self.parameters()):
            # A slice of a DTensor may be a copy, which would take the forget bias and be lost.
            raise ValueError(
                f"{type(self).__name__}: reset_parameters with forget_bias must come before the "
                "parameters are sharded, got DTensors: load a full state dict into them"
            )
        for l, (_, H) in enumerate(self.sizes):
            for reverse in self._directions():
                for name in GATE_PARAMETERS:

                    def fill(values: Tensor, name: str = name, H: int = H) -> None:
                        nn.init.uniform_(values, -1 / math.sqrt(H), 1 / math.sqrt(H))
                        if forget_bias is not None and name.startswith("bias"):
                            values[H : 2 * H].fill_(forget_bias if name == "bias_ih" else 0)

                    self._reset(name, l, reverse, fill)

    def _reset(self, name: str, l: int, reverse: bool, fill: Callable[[Tensor], object]) -> None:
        """Fills a parameter of layer l, if the module has it: in place, or by the inverse of its
        parametrization.
        """
        values = self._parameter(name, l, reverse)
        if values is None:
            return
        full_name = parameter_name(name, l, reverse)
        with torch.no_grad():
            if full_name in self._parameters:
                fill(values)
                return
            fill(drawn := torch.empty_like(values))
            try:
                if not parametrize.is_parametrized(self, full_name):
                    raise NotImplementedError
                setattr(self, full_name, drawn)
            except (NotImplementedError, RuntimeError) as error:
                raise ValueError(
                    f"{type(self).__name__}: {full_name} must be a parameter, or have a "
                    "parametrization with a right_inverse, to be drawn again, got a tensor that "
                    "is computed from other parameters"
                ) from error

    def flatten_parameters(self) -> None:
        """Does nothing: the weights are packed for the kernels in each call. torch's modules have
        this method for cuDNN.
        """

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each direction of each layer, in the order of torch's modules."""
        return [
            [
                parameter
                for name in self.PARAMETERS
                if (parameter := self._parameter(name, l, reverse)) is not None
            ]
            for l in range(self.num_layers)
            for reverse in self._directions()
        ]

    def _gates(self, l: int, reverse: bool) -> dict[str, Tensor | None]:
        """Returns the operator's arguments W_ih, W_hh and b."""
        bias_ih = self._parameter("bias_ih", l, reverse)
        bias_hh = self._parameter("bias_hh", l, reverse)
        return {
            "W_ih": self._parameter("weight_ih", l, reverse),
            "W_hh": self._parameter("weight_hh", l, reverse),
            "b": None if bias_ih is None or bias_hh is None else self._bias(bias_ih, bias_hh),
        }

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        """Returns the operator's b from the two biases of torch's modules."""
        return bias_ih + bias_hh


def parameter_name(name: str, l: int, reverse: bool) -> str:
    """Returns the name of a parameter of layer l, as torch's modules have it."""
    return f"{name}_l{l}_reverse" if reverse else f"{name}_l{l}"
