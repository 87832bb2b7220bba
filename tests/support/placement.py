"""Device and dtype of tests with the fixture `on_device`, which sets the default device."""

import torch
from fusedseq.testing import convert


def exact():
    """The dtype for properties that hold up to rounding: fp64 on the CPU, fp32 on a GPU.

    Triton kernels have no fp64.
    """
    return torch.float64 if torch.get_default_device().type == "cpu" else torch.float32


def tolerances(device=None):
    """The tolerances of torch.testing.assert_close and torch.allclose for sums in another order:
    torch's own on a CPU, wider ones for fp32 on a GPU.    device: default torch's default device
    """
    on_cpu = torch.device(device or torch.get_default_device()).type == "cpu"
    return {} if on_cpu else {"rtol": 1e-5, "atol": 5e-5}


def here(tree, dtype=None):
    """Moves the tensors of a table to the default device and converts floats to `dtype`."""
    return convert(tree, torch.get_default_device(), dtype)
