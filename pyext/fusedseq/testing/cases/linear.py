"""Cases of `linear`."""

from fusedseq.testing.cases.case import Case, dimensions


def linear_case(M, K, N, bias=True):
    """A case with a W (N, K).

    M: the number of rows of x, (M, K), or the tuple of all dimensions of x but the last
    """
    leading = M if isinstance(M, tuple) else (M,)

    def make(randn):
        return (randn(*leading, K), K**-0.5 * randn(N, K), randn(N) if bias else None), {}

    return Case("linear", f"M{dimensions(leading)}-K{K}-N{N}{'-nobias' * (not bias)}", make)


SIZES = [  # M, K, N
    (1, 1, 1),
    (3, 17, 1),
    (0, 3, 5),
    (7, 5, 33),
    (150, 33, 100),
    (20, 800, 70),
    (200, 64, 90),
    (1, 64, 5),
    (7, 1040, 37),
]
# The transposed product computes these; the rows of x are a multiple of the vector width, almost
# one, or leave a rest.
TRANSPOSED_SIZES = [
    (16, 33, 100),
    ((8, 5), 64, 131),
    (64, 48, 50),
    (29, 20, 49),
    (12, 7, 5),
    (33, 16, 3),
]

CASES = [
    *(linear_case(*size) for size in SIZES),
    linear_case(5, 7, 9, bias=False),
    *(linear_case(*size) for size in TRANSPOSED_SIZES),
    linear_case((2, 3, 6), 32, 70, bias=False),
    linear_case((), 9, 4),
    Case("linear", "T2-B3-K5-N4", lambda randn: ((randn(2, 3, 5), randn(4, 5), randn(4)), {})),
]
