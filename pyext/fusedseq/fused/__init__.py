"""The operators: one public function each, over `torch.ops.fusedseq`. `fusedseq.reference` says
what they mean.

The docstring of an operator is that of its oracle, which describes the arguments and the result,
followed by what is special to the fused function.
"""

import inspect

from fusedseq import _load, kernel_table, kernels, reference

_load.operators()
kernel_table.use_environment()
kernels.register("CUDA")

from fusedseq.fused.activation_regularization import activation_regularization  # noqa: E402
from fusedseq.fused.attention import attention  # noqa: E402
from fusedseq.fused.attention_varlen import attention_varlen  # noqa: E402
from fusedseq.fused.bias_activation_dropout import bias_activation_dropout  # noqa: E402
from fusedseq.fused.bidirectional_lstm import bidirectional_lstm  # noqa: E402
from fusedseq.fused.dropout import dropout  # noqa: E402
from fusedseq.fused.dropout_mask import dropout_mask  # noqa: E402
from fusedseq.fused.embedding import embedding  # noqa: E402
from fusedseq.fused.explain import explain  # noqa: E402
from fusedseq.fused.gru import gru  # noqa: E402
from fusedseq.fused.layer_norm_gru import layer_norm_gru  # noqa: E402
from fusedseq.fused.layer_norm_lstm import layer_norm_lstm  # noqa: E402
from fusedseq.fused.linear import linear  # noqa: E402
from fusedseq.fused.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from fusedseq.fused.locked_dropout import locked_dropout  # noqa: E402
from fusedseq.fused.lstm import lstm  # noqa: E402
from fusedseq.fused.mogrifier_lstm import mogrifier_lstm  # noqa: E402
from fusedseq.fused.mogrifier_lstm_pair import mogrifier_lstm_pair  # noqa: E402
from fusedseq.fused.peephole_lstm import peephole_lstm  # noqa: E402
from fusedseq.fused.projected_lstm import projected_lstm  # noqa: E402
from fusedseq.fused.residual_layer_norm import residual_layer_norm  # noqa: E402
from fusedseq.fused.rnn import rnn  # noqa: E402
from fusedseq.fused.split_cross_entropy import split_cross_entropy  # noqa: E402
from fusedseq.fused.weight_drop import weight_drop  # noqa: E402

__all__ = [
    "activation_regularization",
    "attention",
    "attention_varlen",
    "bias_activation_dropout",
    "bidirectional_lstm",
    "dropout",
    "dropout_mask",
    "embedding",
    "explain",
    "gru",
    "layer_norm_gru",
    "layer_norm_lstm",
    "linear",
    "linear_cross_entropy",
    "locked_dropout",
    "lstm",
    "mogrifier_lstm",
    "mogrifier_lstm_pair",
    "peephole_lstm",
    "projected_lstm",
    "residual_layer_norm",
    "rnn",
    "split_cross_entropy",
    "weight_drop",
]

from fusedseq.first_use import guard as _guard  # noqa: E402

_guards = _guard.install()

for _op in reference.__all__:
    _function = globals()[_op]
    if _function.__doc__:  # python -OO removes the docstrings
        _definition = inspect.getdoc(getattr(reference, _op))
        _function.__doc__ = f"{_definition}\n\n{inspect.getdoc(_function)}"
