"""Cases of `locked_dropout`."""

import torch

from fusedseq.testing.cases.dropout import dropout_case

SHAPES = (1, 1, 1), (4, 3, 5), (3, 0, 5)

CASES = [
    *(dropout_case("locked_dropout", shape, p) for shape in SHAPES for p in (0.0, 0.5, 1.0)),
    dropout_case("locked_dropout", (3, 5, 7), 0.4, torch.tensor(2**40)),
    dropout_case("locked_dropout", (20, 11, 650), 0.1, 2**63 - 1),
]
