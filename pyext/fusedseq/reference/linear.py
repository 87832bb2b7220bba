from torch import Tensor


def linear(x: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
    """A linear map, x W^T + b, as torch.nn.functional.linear.

    x: (..., K)
    W: (N, K)
    b: (N,) or None
    returns (..., N)
    """
    y = x @ W.T
    return y if b is None else y + b
