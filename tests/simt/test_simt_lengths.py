"""What lies past the lengths of sequences does not matter to the CUDA kernels of the recurrences:
the loop, the persistent kernels and the wavefront, on the simulated GPU.
"""

import platform
import shutil

import pytest
import torch

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.recurrence import operators
from tests.simt.test_simt_persistent import ONE
from tests.simt.test_simt_recurrence import OPTIONS, SMALL, lstm, mogrifier
from tests.simt.test_simt_wavefront import pair
from tests.support.past_lengths import assert_does_not_matter

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
SIZE = (4, 5, 9, 17)  # T, B, X, H
VARIED, EMPTY, FULL = [3, 0, 4, 1, 2], [0] * 5, [4] * 5
CALLS = {
    "lstm": None,
    "one round": OPTIONS["one round"],
    "low rank, shared": OPTIONS["low rank, shared"],
    "dropped": OPTIONS["dropped"],
    "no rounds": OPTIONS["no rounds"],
}
ENGINES = [
    ("loop", torch.float32),
    ("loop", torch.float64),
    ("loop", torch.bfloat16),
    ("persistent", torch.float32),
    ("persistent", torch.bfloat16),
]


@pytest.fixture(scope="module")
def library():
    return build.library("plain", {**SMALL, **ONE})


@pytest.mark.parametrize(
    ("call", "lengths"),
    [
        *((call, VARIED) for call in CALLS),
        *((call, lengths) for call in ("lstm", "dropped") for lengths in (EMPTY, FULL)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("engine", "own"), ENGINES, ids=str)
def test_what_is_behind_a_length_does_not_matter(library, engine, own, call, lengths):
    options = CALLS[call]
    op = "mogrifier_lstm" if options else "lstm"
    args, kwargs = mogrifier(SIZE, own, **options) if options else lstm(SIZE, own)
    kwargs = kwargs | {"lengths": torch.tensor(lengths)}
    with Simulated(library) as kernels:
        kernels.device(sms=4)
        assert_does_not_matter(operators(kernels, 3, engine)[op], args, kwargs, lengths)


@pytest.mark.parametrize(("p", "lengths"), [(0.0, VARIED), (0.4, VARIED), (0.4, EMPTY)], ids=str)
def test_what_is_behind_a_length_does_not_matter_to_two_layers(library, p, lengths):
    given = {"lengths": True}
    between = {"input_dropout": p, "locked_input": True}
    (x, *layers), _ = pair(
        (*SIZE, 12), torch.bfloat16, {"rounds": 5, **given}, {**OPTIONS["dropped"], **between}
    )
    layers = [layer | {"lengths": torch.tensor(lengths)} for layer in layers]
    with Simulated(library) as kernels:
        kernels.device(sms=8)
        function = operators(kernels, 3)["mogrifier_lstm_pair"]
        assert_does_not_matter(function, (x, *layers), {}, lengths)


DEFECTS = {  # source, old text, new text, engine, options
    "x in a round of the loop": (
        "loop_forward.cuh",
        "else if (!has_ended(r.lengths, r.t, b))",
        "else",
        "loop",
        "dropped",
    ),
    "the operand of a round, backward": (
        "loop_backward.cuh",
        "if (!has_ended(a.lengths, r.t, b)) load",
        "load",
        "loop",
        "one round",
    ),
    "recomputed operands": (
        "weight_gradients.cu",
        "if (!has_ended(o.lengths, t, b)) load(o.x",
        "load(o.x",
        "loop",
        "one round",
    ),
    "x in the gradient of W_ih": (
        "weight_gradients.cu",
        "return r.lengths && !r.rounds && g.dW_ih;",
        "return false;",
        "loop",
        "lstm",
    ),
    "the operand of a round": (
        "persistent_backward_step.cuh",
        "!has_ended(r.lengths, t, row);",
        "true;",
        "persistent",
        "dropped",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails(defect):
    source, old, new, engine, call = DEFECTS[defect]
    changes = {**SMALL, **ONE}
    path = build.library("plain", {**changes, source: {**changes.get(source, {}), old: new}})
    with pytest.raises(AssertionError):
        test_what_is_behind_a_length_does_not_matter(path, engine, torch.float32, call, VARIED)
