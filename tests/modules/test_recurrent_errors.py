"""What the recurrent modules say of wrong arguments: which one, what was wanted and what came."""

import numpy as np
import pytest
import torch
from fusedseq import nn
from torch.nn.utils.rnn import pack_padded_sequence

pytestmark = pytest.mark.cpu
T, B, X, H = 5, 3, 4, 6
x, h = torch.zeros(T, B, X), torch.zeros(1, B, H)
lstm, batch_first = nn.LSTM(X, H), nn.LSTM(X, H, batch_first=True)
two, gru, both = nn.LSTM(X, H, 2), nn.GRU(X, H, 2), nn.GRU(X, H, bidirectional=True)
nested = torch.nested.nested_tensor([x[:3, 0], x[:5, 1]], layout=torch.jagged)
CONSTRUCTORS = {
    "hidden_size must be a whole number or one for each layer, got float": lambda: nn.LSTM(X, 6.0),
    "hidden_size must be a whole number or one for each layer, got str": lambda: nn.LSTM(X, "6"),
    "hidden_size must be a whole number or one for each layer, got NoneType": lambda: nn.LSTM(
        X, [6, None], 2
    ),
    "input_size must be a whole number, got float": lambda: nn.GRU(4.0, H),
    "num_layers must be a whole number, got float": lambda: nn.RNN(X, H, 2.0),
    "num_layers must be a whole number, got bool": lambda: nn.LSTM(X, H, True),
    "proj_size must be a whole number, got float": lambda: nn.LSTM(X, H, proj_size=2.0),
    "rounds must be a whole number, got float": lambda: nn.MogrifierLSTM(X, H, rounds=2.0),
    "rank must be a whole number, or None for full rank, got float": lambda: nn.MogrifierLSTM(
        X, H, rank=2.0
    ),
    "dropout must be a number, got NoneType": lambda: nn.LSTM(X, H, dropout=None),
    "dropout must be a number, got str": lambda: nn.MogrifierLSTM(X, H, dropout="a"),
    "zoneout_h must be a number, got NoneType": lambda: nn.GRU(X, H, zoneout_h=None),
    "bias must be True or False, got 'relu'": lambda: nn.LSTM(X, H, 1, "relu"),
    "bias must be True or False, got 1": lambda: nn.RNN(X, H, 1, "relu", 1),
    "batch_first must be True or False, got 0.5": lambda: nn.LayerNormGRU(X, H, batch_first=0.5),
    "bidirectional must be True or False, got None": lambda: nn.PeepholeLSTM(
        X, H, bidirectional=None
    ),
    "locked_input must be True or False, got 0.3": lambda: nn.LayerNormLSTM(X, H, locked_input=0.3),
    "share_rounds must be True or False, got 2": lambda: nn.MogrifierLSTM(X, H, share_rounds=2),
}
HAS_H = "h (num_layers, B, H) or a list with an entry (B, H) for each of 2 layers"
HAS_C = "(h, c), each (num_layers, B, H) or a list with an entry (B, H) for each of"
FLAGS = torch.zeros(T, B, dtype=torch.bool)
CALLS = {
    "starts must be (B, T) = (3, 5), got (5, 3)": lambda: batch_first(
        x.transpose(0, 1), starts=FLAGS
    ),
    "starts must be (B, T) = (3, 5), got (5,)": lambda: batch_first(
        x.transpose(0, 1), starts=FLAGS[:, 0]
    ),
    "starts must be (T, B) = (5, 3), got ()": lambda: lstm(x, starts=FLAGS[0, 0]),
    "starts must be (T,) = (5,), got (5, 1)": lambda: lstm(x[:, 0], starts=FLAGS[:, :1]),
    "starts must be (T,) = (5,), got ()": lambda: lstm(x[:, 0], starts=FLAGS[0, 0]),
    "starts must be a tensor, got list": lambda: batch_first(x, starts=[[False]]),
    "x must be a tensor or a PackedSequence, got list": lambda: lstm([[1.0]]),
    "x must be a tensor or a PackedSequence, got ndarray": lambda: lstm(x.numpy()),
    "x must be a tensor or a PackedSequence, got NoneType": lambda: lstm(None),
    "x must be a dense tensor, got the layout torch.sparse_coo": lambda: lstm(x.to_sparse()),
    "x must be a PackedSequence with data (tokens, 4), as input_size is 4, got data (5, 7)": (
        lambda: lstm(pack_padded_sequence(torch.zeros(3, 2, 7), [3, 2]))
    ),
    "a nested x must be (B, ragged, 5) in the layout torch.jagged, got (2, j": lambda: nn.GRU(5, H)(
        nested
    ),
    "a nested x must be (B, ragged, 4) in the layout torch.jagged, got (2, 4, j": lambda: lstm(
        nested.transpose(1, 2)
    ),
    "lengths must be in [0, T] = [0, 5], got 1180591620717411303424": lambda: lstm(
        x, lengths=[2**70, 2, 3]
    ),
    f"state must be {HAS_C} 1 layers, got (a tensor (1, 3, 6), NoneType)": lambda: lstm(
        x, (h, None)
    ),
    f"state must be {HAS_C} 1 layers, got int": lambda: lstm(x, 0),
    f"state must be {HAS_C} 1 layers, got (a tensor (), a tensor ())": lambda: lstm(
        x, (h.sum(), h.sum())
    ),
    f"state must be {HAS_C} 2 layers, got a tensor (2, 3, 6)": lambda: two(x, h.expand(2, B, H)),
    f"state must be {HAS_H}, got (a tensor (2, 3, 6), a tensor (2, 3, 6))": lambda: gru(
        x, (h.expand(2, B, H), h.expand(2, B, H))
    ),
    "state must be h (2 * num_layers, B, H) or a list with an entry (B, H) for each of 1 layers "
    "and direction, got a tensor (1, 3, 6)": lambda: both(x, h),
    "state must be h (num_layers, H) or a list with an entry (H,) for each of 2 layers, for an x "
    "without a batch dimension, got a tensor (2, 3, 6)": lambda: gru(x[:, 0], h.expand(2, B, H)),
}


@pytest.mark.parametrize("message", CONSTRUCTORS)
def test_a_wrong_argument_of_a_constructor_is_named(message):
    with pytest.raises(TypeError) as error:
        CONSTRUCTORS[message]()
    assert message in str(error.value)


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_argument_of_a_call_is_named(message):
    with pytest.raises((TypeError, ValueError)) as error:
        CALLS[message]()
    assert message in str(error.value)


def test_sizes_may_be_numbers_of_numpy():
    module = nn.MogrifierLSTM(np.int64(X), np.int64(H), np.int64(2), rounds=np.int64(3))
    assert module(x)[0].shape == (T, B, H)
    assert type(module.hidden_size) is int
    assert nn.LSTM(X, [np.int64(5), H], 2)(x)[0].shape == (T, B, H)
