"""The calls that are timed beside JAX and ONNX Runtime: the suite's sizes, in fp32.

The ids are those of the suite, so that a case of the same name is the same call. The suite's
attention has dropout at some sizes. Dropout differs by library in its random numbers, so these
sizes run without it here, under an id of their own.
"""

from dataclasses import replace

from bench.suite.cases.attention import attention
from bench.suite.cases.recurrence import lstm, mogrifier


def with_keys(case):
    """Returns the case with at least one key for every query.

    What attention to no key returns differs: zeros here, the mean of the values in JAX.
    """

    def make(randn):
        args, kwargs = case.make(randn)
        return args, kwargs | {"key_lengths": kwargs["key_lengths"].clamp(min=1)}

    return replace(case, make=make)


SIZES = [
    *(
        lstm(*sizes)
        for sizes in (
            (70, 20, 650, 650),
            (35, 64, 256, 256),
            (100, 1, 512, 512),
            (70, 20, 400, 1150),
        )
    ),
    *(mogrifier(*sizes) for sizes in ((70, 70, 650), (35, 20, 650), (70, 1, 650))),
    attention(2048, 8, 6, 32),
    attention(8, 1, 5, 32),
    attention(64, 8, 90, 64, suffix="-causal", causal=True),
    *(
        with_keys(
            attention(64, N, 90, D, tensors=("lengths",), suffix=f"-lengths{suffix}", **options)
        )
        for N, D, suffix, options in (
            (8, 64, "-causal", {"causal": True}),
            (5, 20, "", {}),
            (10, 10, "", {}),
        )
    ),
    attention(2, 8, 1024, 64, suffix="-causal", causal=True),
]
CASES = [replace(case, backward=backward) for case in SIZES for backward in (True, False)]
