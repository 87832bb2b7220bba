from fusedseq.reference.mogrifier_lstm import mogrifier_lstm


def mogrifier_lstm_pair(x, first, second):
    """Two layers of a Mogrifier LSTM: the second reads the first's y, after its own `input_dropout`.

    x: (T, B, X)    first, second: all other arguments of `mogrifier_lstm`, by name, for the layer; the second's X is the first's H
    returns (y, (h, c)) of the first layer, and of the second
    """
    y, state = mogrifier_lstm(x, **first)
    return (y, state), mogrifier_lstm(y, **second)
