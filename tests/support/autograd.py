"""Calls that autograd records."""

import pytest
import torch
from fusedseq.fused import autograd

LINEAR = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
recorded = pytest.mark.skipif(
    autograd.recorder is None, reason="fusedseq._autograd is for another torch or Python"
)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]
