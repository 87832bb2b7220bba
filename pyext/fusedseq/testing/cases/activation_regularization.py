"""Cases of `activation_regularization`."""

from fusedseq.testing.cases.case import Case


def activation_regularization_case(T, B, H, alpha=2.0, beta=1.0):
    """A case with outputs (T, B, H)."""
    return Case(
        "activation_regularization",
        f"T{T}-B{B}-H{H}-alpha{alpha:g}-beta{beta:g}",
        lambda randn: ((randn(T, B, H), randn(T, B, H), alpha, beta), {}),
    )


SIZES = (1, 1, 1), (1, 3, 5), (2, 1, 1), (5, 3, 17), (20, 7, 650)

CASES = [
    *(activation_regularization_case(*size) for size in SIZES),
    activation_regularization_case(5, 3, 17, 0.0, 1.0),
    activation_regularization_case(5, 3, 17, 1.0, 0.0),
]
