"""Tests an operator against its oracle: used by tests/, bench/ and `fusedseq info`.

    from fusedseq import testing

    for case in testing.CASES:
        testing.check(case.op, *case.inputs(dtype=torch.bfloat16))

`CASES` is the case table, `check` compares `fused.<op>` with the oracle `reference.<op>` on one
case, results and gradients, and `budget` says how large an error may be.
"""

from fusedseq.testing.budget import (
    assert_within_budget,
    budget,
    longest_sum,
    plain_dtype,
    roundings,
)
from fusedseq.testing.cases import CASES
from fusedseq.testing.cases.activation_regularization import activation_regularization_case
from fusedseq.testing.cases.attention import attention_case
from fusedseq.testing.cases.attention_varlen import varlen_case
from fusedseq.testing.cases.bias_activation_dropout import bias_activation_dropout_case
from fusedseq.testing.cases.bidirectional_lstm import bidirectional_lstm_case
from fusedseq.testing.cases.case import Case
from fusedseq.testing.cases.dropout import dropout_case
from fusedseq.testing.cases.dropout_mask import dropout_mask_case
from fusedseq.testing.cases.embedding import embedding_case
from fusedseq.testing.cases.hidden_state import hidden_state_case
from fusedseq.testing.cases.linear import linear_case
from fusedseq.testing.cases.linear_cross_entropy import linear_cross_entropy_case
from fusedseq.testing.cases.lstm import lstm_case
from fusedseq.testing.cases.lstm_with_vectors import lstm_with_vectors_case
from fusedseq.testing.cases.mogrifier_lstm import mogrifier_lstm_case
from fusedseq.testing.cases.mogrifier_lstm_pair import mogrifier_lstm_pair_case
from fusedseq.testing.cases.projected_lstm import projected_lstm_case
from fusedseq.testing.cases.residual_layer_norm import residual_layer_norm_case
from fusedseq.testing.cases.split_cross_entropy import split_cross_entropy_case
from fusedseq.testing.check import CONSTANTS, check, convert, cotangents, differentiable, names, run

__all__ = [
    "CASES",
    "CONSTANTS",
    "Case",
    "activation_regularization_case",
    "assert_within_budget",
    "attention_case",
    "bias_activation_dropout_case",
    "bidirectional_lstm_case",
    "budget",
    "check",
    "convert",
    "cotangents",
    "differentiable",
    "dropout_case",
    "dropout_mask_case",
    "embedding_case",
    "hidden_state_case",
    "linear_case",
    "linear_cross_entropy_case",
    "longest_sum",
    "lstm_case",
    "lstm_with_vectors_case",
    "mogrifier_lstm_case",
    "mogrifier_lstm_pair_case",
    "names",
    "plain_dtype",
    "projected_lstm_case",
    "residual_layer_norm_case",
    "roundings",
    "run",
    "split_cross_entropy_case",
    "varlen_case",
]
