"""Where and in which dtype a test that names neither runs: see the fixture `on_device`."""

import torch
from fusedseq.testing import convert


def exact():
    """The dtype for what should hold but for rounding: fp64, or on a GPU fp32, as Triton's kernels take no wider one."""
    return torch.float64 if torch.get_default_device().type == "cpu" else torch.float32


def here(tree, dtype=None):
    """What a table of a module has, on the device, and its floats in `dtype`."""
    return convert(tree, torch.get_default_device(), dtype)
