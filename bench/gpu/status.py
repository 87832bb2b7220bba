"""What has been verified of each GPU kernel: a table, and docs/gpu-kernels.md.

python -m bench.gpu.status                  prints the table
python -m bench.gpu.status --write          writes the page

`make gpu` prints the table before anything runs on the GPU, and its report has the table with the
last column filled in. The page has that column from the committed results of `make gpu`.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.cases import gpu_cases
from bench.gpu.report import EXCHANGE, LAUNCH, least_time, median, microseconds
from bench.suite import report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gpu-kernels.md"
RESULTS = ROOT / "bench/results"
# An H100 SXM5 by its data sheet: dense FLOP/s of the tensor cores (fp32: of the CUDA cores), and
# bytes/s of its memory.
H100 = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "copy": 3.35e12}
NVCC = "sm_80, sm_90a, sm_100, sm_120"
TRITON = "sm_80, sm_90, sm_100, sm_120"
INTERPRETER = "in Triton's interpreter: `tests/triton`"
NO = "no"


@dataclass(frozen=True)
class Kernel:
    """One or more kernels that were verified alike.

    sources: files below the repository's root; every file with GPU kernels belongs to one Kernel
    as_source, as_ptx: how they were executed without a GPU, and by which tests
    proved: what is proved about them, and by which tests
    case: the name of the case of bench/gpu/cases.py that times them, or None
    least: without a case, the least time in words
    """

    name: str
    sources: tuple[str, ...]
    as_source: str
    as_ptx: str
    proved: str = NO
    case: str | None = None
    least: str = ""

    @property
    def compiled_for(self):
        return NVCC if self.sources[0].startswith("csrc") else TRITON


def microseconds_of_masks(elements):
    """Returns the least microseconds of a random mask: its integer operations, 18 for each element
    (kernels/dropout_mask.py), at a quarter of the FLOP/s in fp32."""
    return microseconds(18 * elements / (H100["float32"] / 4))


RECURRENCE = "csrc/cuda/recurrence/"
ATTENTION = "kernels/attention/"
NORM = "kernels/residual_layer_norm/"
KERNELS = (
    Kernel(
        "persistent recurrence, forward and backward",
        (f"{RECURRENCE}persistent_forward.cu", f"{RECURRENCE}persistent_backward.cu"),
        "all variants: `tests/simt/test_simt_persistent.py`, `test_simt_words.py`",
        "all variants of sm_90a (weights in registers in bf16), bf16 of sm_80: "
        "`tests/ptx/test_ptx_recurrence.py`, `..._sm_80.py`",
        "the exchange between blocks: `tests/memory_model/test_exchange.py`, `test_words.py`",
        "mogrifier_lstm-T70-B20-650-r5-bfloat16",
    ),
    Kernel(
        "persistent recurrence of peephole LSTM and GRU, and of LSTM with `starts` or in reverse",
        (f"{RECURRENCE}persistent_cells.cu",),
        "all variants: `tests/simt/test_simt_cells.py`",
        "bf16, fp32 of sm_90a, bf16 of sm_80: `tests/ptx/test_ptx_recurrence.py`, `..._sm_80.py`",
        "the exchange between blocks: `tests/memory_model/test_exchange.py`",
        "peephole_lstm-T70-B20-650-650-bfloat16",
    ),
    Kernel(
        "wavefront of two layers",
        (f"{RECURRENCE}wavefront.cu",),
        "bf16, fp16: `tests/simt/test_simt_wavefront.py`",
        "bf16, fp16: `tests/ptx/test_ptx_recurrence.py`",
        "the hand-over between layers: `tests/memory_model/test_exchange.py`",
        "mogrifier_lstm-T70-B20-650-r5-3layers-bfloat16",
    ),
    Kernel(
        "loop of a recurrence, its weights and their gradients",
        (
            f"{RECURRENCE}loop.cu",
            f"{RECURRENCE}weight_gradients.cu",
            f"{RECURRENCE}weight_preparation.cu",
        ),
        "all dtypes: `tests/simt/test_simt_recurrence.py`",
        "LSTM in all dtypes and other cells in bf16 and fp32 of sm_90a, bf16 of sm_80: "
        "`tests/ptx/test_ptx_recurrence.py`, `..._sm_80.py`",
        case="mogrifier_lstm-T70-B20-1600-r5-bfloat16",
    ),
    Kernel(
        "report of a block that never arrives",
        (f"{RECURRENCE}lost_wait.cu",),
        "with lost blocks: `tests/simt/test_simt_lost_block.py`",
        "with lost blocks: `tests/ptx/test_ptx_mutants.py`",
        "that a report ends the kernel: `tests/memory_model/test_compiled_exchange.py`",
        least="none: it runs once, if a block is lost",
    ),
    Kernel(
        "dropout, locked dropout and weight drop",
        ("csrc/cuda/dropout.cu",),
        "all dtypes: `tests/simt/test_simt_operators.py`",
        "all dtypes: `tests/ptx/test_ptx_pointwise.py`",
        case="locked_dropout-70x704x650-bfloat16",
    ),
    Kernel(
        "embedding",
        ("csrc/cuda/embedding.cu",),
        "all dtypes: `tests/simt/test_simt_embedding.py`",
        "all dtypes: `tests/ptx/test_ptx_pointwise.py`",
        case="embedding-50000-V100000-650-bfloat16",
    ),
    Kernel(
        "activation regularization, NT-ASGD",
        ("csrc/cuda/regularization.cu", "csrc/cuda/nt_asgd.cu"),
        "all dtypes: `tests/simt/test_simt_operators.py`",
        "all dtypes: `tests/ptx/test_ptx_pointwise.py`",
        case="activation_regularization-70x704x650-bfloat16",
    ),
    Kernel(
        "attention of short sequences",
        (f"{ATTENTION}packed.py", f"{ATTENTION}row.py"),
        INTERPRETER,
        "small sizes: all of sm_80, `packed.py` of sm_90: `tests/ptx/test_ptx_triton_operators.py`",
        case="attention-L6-B2048-N8-D32-bfloat16",
    ),
    Kernel(
        "attention of long sequences",
        (
            f"{ATTENTION}arguments.py",
            f"{ATTENTION}tile.py",
            f"{ATTENTION}logits.py",
            f"{ATTENTION}probabilities.py",
            f"{ATTENTION}tiled.py",
            f"{ATTENTION}tiled_backward.py",
            f"{ATTENTION}tiled_backward_keys.py",
            f"{ATTENTION}tiled_backward_queries.py",
        ),
        INTERPRETER,
        "small sizes, all tiles: sm_80, fp32 of sm_90: `tests/ptx/test_ptx_triton_operators.py`",
        case="attention-L2048-B8-N16-D128-causal-bfloat16",
    ),
    Kernel(
        "attention: gradients of bias and of relative keys, splits of the keys",
        (f"{ATTENTION}tiled_bias.py", f"{ATTENTION}split.py"),
        INTERPRETER,
        "small sizes: sm_80, `split.py` of sm_90: `tests/ptx/test_ptx_triton_operators.py`",
        case="attention-L512-B8-N8-D64-bias-bfloat16",
    ),
    Kernel(
        "output layer with its loss",
        ("kernels/linear_cross_entropy/kernel.py",),
        INTERPRETER,
        "small sizes, sm_80 and sm_90: `tests/ptx/test_ptx_triton_operators.py`",
        case="linear_cross_entropy-2048-256-100000-bfloat16",
    ),
    Kernel(
        "dropout, residual and LayerNorm",
        (f"{NORM}tile.py", f"{NORM}forward.py", f"{NORM}backward.py", "kernels/row_tiles.py"),
        INTERPRETER,
        "small sizes; long rows on sm_80 only: `tests/ptx/test_ptx_triton_operators.py`",
        case="residual_layer_norm-65536x512-bfloat16",
    ),
    Kernel(
        "bias, activation and dropout",
        ("kernels/bias_activation_dropout.py",),
        INTERPRETER,
        "small sizes, sm_80 and sm_90: `tests/ptx/test_ptx_triton_operators.py`",
        case="bias_activation_dropout-65536x2048-gelu-bfloat16",
    ),
    Kernel(
        "random masks",
        ("kernels/dropout_mask.py", "kernels/philox.py"),
        INTERPRETER,
        "small sizes: `tests/ptx/test_ptx_triton.py`",
        least=f"{microseconds_of_masks(2**30)}, by its integer operations (2^30 elements)",
    ),
)
HEAD = [
    "kernels",
    "executed as source",
    "executed as PTX",
    "proved",
    "compiled for",
    "least time on an H100, µs",
    "run on a GPU",
]
TEXT = """# GPU kernels: what has been verified

`python -m bench.gpu.status --write` writes this page. [GPU status](gpu-status.md) says how kernels
are executed without a GPU and what that cannot show, and [what is proved](gpu-proofs.md) gives the
statements.

The least time is arithmetic, not a measurement: an H100's data sheet (989 TFLOP/s in bf16, 67 in
fp32, 3.35 TB/s) and two estimates, {exchange:g} µs for each exchange between the blocks of a
persistent kernel and {launch:g} µs for each launch of the loop in a CUDA graph. It is that of the
case in brackets, forward and backward.

{table}

The last column is filled in from the committed results of `make gpu`, of which there {are}:
the time of the case in brackets, or "tests" where no benchmark calls the kernel. The times are
those of the day of the result; [GPU status](gpu-status.md) says what has become faster since.
"""


def shown(path):
    """Returns the path of a source below the folder of all CUDA or all Triton kernels."""
    return path.removeprefix("csrc/cuda/").removeprefix("kernels/")


def limit(kernel):
    """Returns the least microseconds of the kernel in words."""
    if kernel.case is None:
        return kernel.least
    (case,) = [case for case in gpu_cases() if case.name == kernel.case]
    seconds, reason = least_time(case, H100)
    return f"{microseconds(seconds)}, by its {reason} (`{kernel.case}`)"


def ran(kernel, result):
    """Returns what a result of `make gpu` says of the kernel; {} for none."""
    if not result or result.get("rehearsal"):
        return NO
    if kernel.case in result.get("failed", {}):
        return f"FAILED: {result['failed'][kernel.case]}"
    entries = {entry["name"]: entry for entry in result.get("rows", [])}
    way = "graph" if median(entries.get(kernel.case), "fused", "graph") else "call"
    seconds = median(entries.get(kernel.case), "fused", way)
    return f"{microseconds(seconds)} µs" if seconds else "tests" if tests_part(result) else "no"


def tests_part(result):
    """Returns the part of a result of `make gpu` that ran the tests, or None."""
    parts = [part for part in result.get("parts", []) if part["name"] == "tests"]
    return parts[0] if parts and not result.get("rehearsal") else None


def tests_line(result):
    """Returns a paragraph on the tests of a result of `make gpu`; empty where none ran."""
    if not (part := tests_part(result)):
        return ""
    counts = ", ".join(
        word for word in part.get("said", "").split(", ") if not word.startswith(("0 ", "1 of"))
    )
    return f"\n\nTests of all kernels on the GPU: {counts if 'passed' in counts else part['what']}."


def table(result):
    """Returns the table in Markdown, with the last column from a result of `make gpu`, and below it
    what its tests came to."""
    lines = [
        [
            f"{kernel.name} ({', '.join(f'`{shown(path)}`' for path in kernel.sources)})",
            kernel.as_source,
            kernel.as_ptx,
            kernel.proved,
            kernel.compiled_for,
            limit(kernel),
            ran(kernel, result),
        ]
        for kernel in KERNELS
    ]
    return report.markdown_table([HEAD, *lines]) + tests_line(result)


def committed_result():
    """Returns the newest committed result of `make gpu`, or {}."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*-make-gpu.json"))]
    return found[-1] if found else {}


def page():
    result = committed_result()
    return TEXT.format(
        table=table(result),
        exchange=EXCHANGE * 1e6,
        launch=LAUNCH * 1e6,
        are="is one: see `bench/results`" if result else "are none yet",
    )


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.status", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="write docs/gpu-kernels.md")
    if parser.parse_args(argv).write:
        PAGE.write_text(page())
    else:
        print(table(committed_result()))


if __name__ == "__main__":
    sys.exit(main())
