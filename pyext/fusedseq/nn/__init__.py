"""Modules over the operators: parameters and state. Each takes its operators as `ops`: `fusedseq.fused` (the
default) or `fusedseq.reference`; parameters, initialisation, `state_dict` and random masks are the same for both."""

from fusedseq.nn.dropout import Dropout, LockedDropout, WeightDrop
from fusedseq.nn.embedding import Embedding
from fusedseq.nn.recurrent import LSTM, MogrifierLSTM

__all__ = ["LSTM", "Dropout", "Embedding", "LockedDropout", "MogrifierLSTM", "WeightDrop"]
