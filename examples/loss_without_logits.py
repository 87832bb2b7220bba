"""Computes the loss of a large output layer without keeping its logits.

The usual way multiplies hidden states (rows, E) by the output weight (V, E) and gives the logits
(rows, V) to cross_entropy. These logits and their gradient are often the largest tensors of a
language model. `linear_cross_entropy` computes the logits in chunks of at most
some 160 MiB, together with their gradients, and keeps none for backward.
"""

import torch
from fusedseq import fused
from torch.nn import functional as F

torch.manual_seed(0)
rows, E, V = 512, 128, 20_000
x = torch.randn(rows, E, requires_grad=True)
weight = (0.05 * torch.randn(V, E)).requires_grad_()
bias = torch.zeros(V, requires_grad=True)
target = torch.randint(V, (rows,))
target[-10:] = -100  # rows without a target, as at the end of a padded batch

loss = fused.linear_cross_entropy(x, weight, target, bias)
gradients = torch.autograd.grad(loss, (x, weight, bias))

logits = F.linear(x, weight, bias)
expected = F.cross_entropy(logits, target)
expected_gradients = torch.autograd.grad(expected, (x, weight, bias))

print(f"loss: {loss:.6f} fused, {expected:.6f} by torch")
size = f"{logits.nbytes / 2**20:.0f} MiB"
print(f"not kept for backward: logits of {size}, and their gradient of the same size")
torch.testing.assert_close(loss, expected)
for name, ours, theirs in zip(("x", "weight", "bias"), gradients, expected_gradients, strict=True):
    print(f"gradient of {name}: largest difference {(ours - theirs).abs().max():.0e}")
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)

# With return_details the operator also returns the log-probability of every target, the log-sum-exp
# of the logits, and the most likely class.
smoothed, log_prob, lse, likeliest = fused.linear_cross_entropy(
    x, weight, target, bias, label_smoothing=0.1, return_details=True
)
print(f"with label smoothing: {smoothed:.6f}; accuracy {(likeliest == target).float().mean():.4f}")
