from torch import Tensor


def activation_regularization(dropped: Tensor, raw: Tensor, alpha: float, beta: float) -> Tensor:
    """Activation regularization (AR) and temporal activation regularization (TAR) of AWD-LSTM
    (Merity et al., 2017, equations 1 and 2; Merity et al., 2018):

        alpha * mean(dropped**2) + beta * mean((raw[1:] - raw[:-1])**2)

    dropped: (T, B, H), the last layer's output after its dropout
    raw: (T, B, H), the last layer's output before its dropout
    alpha, beta: the factors of AR and of TAR
    returns a scalar; TAR is 0 where T is 1
    """
    ar = alpha * dropped.square().mean()
    if len(raw) < 2:
        return ar + 0 * raw.sum()
    return ar + beta * (raw[1:] - raw[:-1]).square().mean()
