"""Cases of `weight_drop`."""

import torch

from fusedseq.testing.cases.dropout import dropout_case

CASES = [
    *(
        dropout_case("weight_drop", (5, 3), p, variational=variational)
        for p in (0.0, 0.5, 1.0)
        for variational in (False, True)
    ),
    dropout_case("weight_drop", (1, 1), 0.5),
    dropout_case("weight_drop", (12, 3), 0.5, torch.tensor(-5), variational=True),
    dropout_case("weight_drop", (520, 650), 0.3),
    dropout_case("weight_drop", (2600, 17), 0.3, variational=True),
]
