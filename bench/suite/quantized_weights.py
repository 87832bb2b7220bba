"""Inference with weights in 8 bits (`fusedseq.quantize_`), against the same call with weights in
fp32 and bf16, and against what torch and torchao offer.

Providers: `fused` with weights in 8 bits; `fp32` and `bf16`: `fused` with weights of those types;
`eager`: torch's module in fp32, or of a Mogrifier LSTM the loop in plain PyTorch; `torch`: its
dynamically quantized module, which rounds the activations to 8 bits too; `torchao`:
Int8WeightOnlyConfig, of linear layers, where it is installed.
"""

import copy
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import fusedseq
import torch
from fusedseq import reference
from torch import nn

from bench.suite.case import BenchmarkCase

TOLERANCE = 1e-4  # of the norm of a result, against the same weights as fp32 numbers


def ours(module):
    """torch's module as this package's, with the same parameters."""
    if isinstance(module, nn.Linear):
        made = copy.deepcopy(module)
        fusedseq.accelerate(made)
        return made
    made = made_of(module)(module.input_size, module.hidden_size)
    made.load_state_dict(module.state_dict())
    return made.eval()


def made_of(module):
    """Returns the class of this package for a recurrent module of torch or of its own."""
    kinds = {nn.LSTM: fusedseq.nn.LSTM, nn.GRU: fusedseq.nn.GRU}
    return kinds.get(type(module), type(module))


def mogrifier_loop(input_size, hidden_size):
    """A Mogrifier LSTM as a loop in plain PyTorch."""
    return fusedseq.nn.MogrifierLSTM(input_size, hidden_size, ops=reference)


def quantized(module):
    made = ours(module)
    fusedseq.quantize_(made)
    return made


def in_bf16(module):
    made = ours(module).to(torch.bfloat16)
    return lambda x: made(x.bfloat16())


def dynamic(module):
    with warnings.catch_warnings(action="ignore"):  # torch will drop it in favour of torchao
        return torch.ao.quantization.quantize_dynamic(
            nn.Sequential(copy.deepcopy(module)), {type(module)}, torch.qint8
        )[0]


def by_torchao(module):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    made = copy.deepcopy(module)
    quantize_(made, Int8WeightOnlyConfig())
    return made


BUILD = {
    "fused": quantized,
    "eager": copy.deepcopy,
    "fp32": ours,
    "bf16": in_bf16,
    "torch": dynamic,
    "torchao": by_torchao,
}


@dataclass(frozen=True)
class QuantizedCase(BenchmarkCase):
    """module: makes torch's module, whose inputs are those of the case."""

    module: Callable = nn.Linear
    sizes: tuple = ()

    def build(self):
        torch.manual_seed(0)
        return self.module(*self.sizes).eval()

    def providers(self, full):
        names = set(BUILD)
        if self.module is mogrifier_loop:
            names.remove("torch")
        if self.module is not nn.Linear or importlib.util.find_spec("torchao") is None:
            names.remove("torchao")
        return {name: self.provider(name) for name in BUILD if name in names}

    def provider(self, name):
        made = []

        def call(x):
            if not made:
                made.append(BUILD[name](self.build()))
            with torch.inference_mode():
                return made[0](x)

        return call


def check(case, args):
    """Asserts that the results are those of the rounded weights as fp32 numbers, in torch's module.

    Returns the error as a fraction of the tolerance.
    """
    module = case.build()
    rounded = quantized(module)
    module.load_state_dict(
        {
            name: p.dequantize() if type(p) is not torch.Tensor else p
            for name, p in rounded.state_dict().items()
        }
    )
    with torch.inference_mode():
        found, wanted = (m(*args) for m in (rounded, module))
    found, wanted = (y if isinstance(y, torch.Tensor) else y[0] for y in (found, wanted))
    error = ((found - wanted).norm() / wanted.norm() / TOLERANCE).item()
    assert error <= 1, f"{case.name}: the error is {error:.3g} tolerances"
    return error
