def activation_regularization(dropped, raw, alpha, beta):
    """Activation and temporal activation regularization of AWD-LSTM (Merity et al., 2017; 2018):

        alpha * mean(dropped**2) + beta * mean((raw[1:] - raw[:-1])**2)

    dropped: (T, B, H), the last layer's output after its dropout    raw: (T, B, H), the same before it
    returns a scalar; with T = 1 the temporal term is 0
    """
    ar = alpha * dropped.square().mean()
    if len(raw) < 2:
        return ar + 0 * raw.sum()
    return ar + beta * (raw[1:] - raw[:-1]).square().mean()
