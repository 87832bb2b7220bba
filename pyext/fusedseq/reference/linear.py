def linear(x, W, b=None):
    """A linear map, x W^T + b: torch.nn.functional.linear.

    x: (..., K)    W: (N, K)    b: (N,) or None
    returns (..., N)
    """
    y = x @ W.T
    return y if b is None else y + b
