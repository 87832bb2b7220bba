"""`fusedseq tune-kernels`: times the kernels that a call can run on this GPU, for sizes that you
name, and writes a kernel table.

    fusedseq tune-kernels --out table.json --lstm 70,20,650,650 --mogrifier 70,20,650,650,5 \\
        --pair 70,20,650,650,5,650,5 --attention 32,8,512,512,64
    FUSEDSEQ_KERNEL_TABLE=table.json python train.py

Without the variable the table changes nothing. A time is the median of several calls, forward and
backward together.
"""

import contextlib
import importlib
import json
import os
import statistics
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fusedseq import fused, kernel_table, kernels
from fusedseq.fused import recurrence_plan
from fusedseq.kernel_table import Gpu, Table

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = {  # option: the names of its numbers
    "lstm": ("T", "B", "X", "H"),
    "mogrifier": ("T", "B", "X", "H", "rounds"),
    "pair": ("T", "B", "X", "H", "rounds", "H2", "rounds2"),
    "attention": ("B", "N", "L", "S", "D"),
}
OPERATORS = {"lstm": "lstm", "mogrifier": "mogrifier_lstm", "pair": "mogrifier_lstm_pair"}
# More tiles of attention's tiled forward kernel that compile without spills (tests/triton), beside
# those of kernels/attention/plan.py: BM, BN, BD, warps and stages, by the width of the heads.
MORE_TILES = {64: [(128, 64, 64, 4, 3), (64, 64, 64, 4, 3)], 128: [], 256: []}
WARM_UP = 3
Timer = Callable[[Callable[[], Any]], float]  # milliseconds of a call


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="the table to write, a JSON file")
    for name, numbers in SIZES.items():
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            type=_sizes(numbers),
            metavar=",".join(numbers),
            help="a size; may be given several times",
        )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the calls (bfloat16)"
    )
    parser.add_argument(
        "--options",
        nargs="+",
        choices=kernel_table.OPTIONS,
        default=["plain"],
        help="of the calls of --attention: none, dropout, or dropout with a bias (plain)",
    )
    parser.add_argument("--repeats", type=int, default=20, help="calls that are timed (20)")
    parser.add_argument("--device", default="cuda:0", help="the GPU: cuda or cuda:N (cuda:0)")


def _sizes(names: tuple[str, ...]) -> Callable[[str], dict[str, int]]:
    def parse(text: str) -> dict[str, int]:
        parts = text.split(",")
        if len(parts) != len(names) or not all(part.strip().isdigit() for part in parts):
            raise ArgumentTypeError(f"must be {','.join(names)}, got {text!r}")
        found = {name: int(part) for name, part in zip(names, parts, strict=True)}
        for name, size in found.items():
            if size < ("rounds" not in name):
                raise ArgumentTypeError(f"{name} must be at least 1, got {text!r}")
        return found

    return parse


def run(args: Namespace) -> int:
    if not torch.cuda.is_available():
        raise ValueError("needs a GPU that torch sees, found none: its table would hold for no GPU")
    if args.attention and args.dtype == "float32":
        raise ValueError("--attention must be timed with --dtype bfloat16 or float16, got float32")
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    if kernel_table.cudnn or kernels.tiles or os.environ.get(kernel_table.VARIABLE):
        raise ValueError(f"{kernel_table.VARIABLE} must not be set while kernels are timed")
    device = torch.device(args.device)
    with torch.cuda.device(device):  # streams, events and graphs are of the current device
        content = tune(args, device, kernel_table.gpu_of(device), timer(args.repeats))
    write(Path(args.out), content)
    print(f"{args.out}: use it with {kernel_table.VARIABLE}={args.out}")
    return 0


def timer(repeats: int) -> Timer:
    """Returns the function that times a call by CUDA events: the replay of its CUDA graph, so that
    the time in Python is left out, or the call itself where it cannot be captured."""

    def time(call: Callable[[], Any]) -> float:
        call = captured(call)
        for _ in range(WARM_UP):
            call()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    return time


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the replay of a call's CUDA graph, or the call where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def tune(args: Namespace, device: torch.device, gpu: Gpu, time: Timer) -> dict[str, Any]:
    """Returns the content of a table for the sizes in `args`; prints what was measured."""
    content: dict[str, Any] = {
        "format": kernel_table.FORMAT,
        "gpu": asdict(gpu),
        "torch": torch.__version__,
        "recurrences": [],
        "attention": [],
    }
    dtype = DTYPES[args.dtype]
    for option, op in OPERATORS.items():
        for size in getattr(args, option):
            call = recurrence_call(op, size, dtype, device)
            found = {}
            for engine in engines(op, size, dtype, device):
                entry = {"op": op, "dtype": args.dtype, **_row(op, size), "engine": engine}
                with chosen(entry, gpu):
                    found[engine] = time(call)
            entry |= {"engine": min(found, key=found.__getitem__), "milliseconds": found}
            content["recurrences"].append(entry)
            print(f"{op} {args.dtype} {size}: {entry['engine']}; milliseconds {found}", flush=True)
    for size in args.attention:
        for options in args.options:
            content["attention"].append(tune_attention(size, options, dtype, device, gpu, time))
    return content


def _row(op: str, size: dict[str, int]) -> dict[str, int]:
    return {"T": size["T"], "B": size["B"], "X": size["X"], "H": size["H"], "rounds": 0} | size


def engines(
    op: str, size: dict[str, int], dtype: torch.dtype, device: torch.device
) -> Iterator[str]:
    """Yields the engines that can compute a size on a device."""
    args, kwargs = recurrence_inputs(op, size, dtype, torch.device("meta"))
    plan = recurrence_plan.wavefront if op == "mogrifier_lstm_pair" else None
    gpu = recurrence_plan.this_gpu(device)
    if plan:
        yield "in turn"
        if plan(gpu, *args)["persistent"]:
            yield "wavefront"
        return
    yield "loop"
    if recurrence_plan.plan(op, gpu, *args, **kwargs)["persistent"]:
        yield "persistent"
    words = recurrence_plan.plan(op, gpu, *args, protocol="words", **kwargs)
    if words["persistent"] and (words["forward"]["words"] or words["backward"]["words"]):
        yield "persistent words"
    if op == "lstm" and torch.backends.cudnn.is_available():
        yield "cudnn"


@contextlib.contextmanager
def chosen(entry: dict[str, Any], gpu: Gpu) -> Iterator[None]:
    """Lets calls of the entry's size run the entry's engine, as with a table."""
    key, engine = kernel_table._recurrence("tune-kernels", "size", entry)
    table = Table(gpu, {key: engine})
    kernel_table.use(table)
    try:
        yield
    finally:
        kernel_table.cudnn.clear()
        kernel_table.forget(table)


def weights(size: dict[str, int], H: str, X: int, rounds: int, make: Any) -> dict[str, Any]:
    """Returns the tensors of a layer of mogrifier_lstm by name."""
    h = size[H]
    found = {"W_ih": make(4 * h, X), "W_hh": make(4 * h, h), "b": make(4 * h)}
    found |= {"h0": make(size["B"], h), "c0": make(size["B"], h)}
    found["Q"] = make((rounds + 1) // 2, X, h) if rounds else None
    found["R"] = make(rounds // 2, h, X) if rounds > 1 else None
    return found


def recurrence_inputs(
    op: str, size: dict[str, int], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call of a recurrence, random numbers that need gradients."""

    def make(*shape: int) -> torch.Tensor:
        made = 0.1 * torch.randn(shape, device=device, dtype=dtype)
        return made.requires_grad_(device.type != "meta")

    x, rounds = make(size["T"], size["B"], size["X"]), size.get("rounds", 0)
    first = weights(size, "H", size["X"], rounds, make)
    if op == "lstm":
        del first["Q"], first["R"]
        return (x, *first.values()), {}
    if op == "mogrifier_lstm":
        return (x, *first.values()), {"rounds": rounds}
    second = weights(size, "H2", size["H"], size["rounds2"], make)
    return (x, first | {"rounds": rounds}, second | {"rounds": size["rounds2"]}), {}


def recurrence_call(
    op: str, size: dict[str, int], dtype: torch.dtype, device: torch.device
) -> Callable[[], Any]:
    """Returns a function that runs a recurrence forward and backward."""
    args, kwargs = recurrence_inputs(op, size, dtype, device)

    def call() -> None:
        found = getattr(fused, op)(*args, **kwargs)
        y = found[1][0] if op == "mogrifier_lstm_pair" else found[0]
        y.sum().backward()

    return call


def tune_attention(
    size: dict[str, int],
    options: str,
    dtype: torch.dtype,
    device: torch.device,
    gpu: Gpu,
    time: Timer,
) -> dict[str, Any]:
    """Times the tiles of attention's tiled kernels for heads of a size: of the forward kernel, then
    of each backward kernel in a forward and backward call, with the fastest of those before.
    """
    B, N, L, S, D = size.values()
    width = next((w for w in kernel_table.WIDTHS if w >= D), kernel_table.WIDTHS[-1])
    key = width, kernel_table.OPTIONS.index(options)
    q, k, v = (
        torch.randn(B, N, n, D, device=device, dtype=dtype, requires_grad=True) for n in (L, S, S)
    )
    kwargs: dict[str, Any] = {} if options == "plain" else {"dropout": 0.1, "seed": 1}
    if options == "rich":
        kwargs["bias"] = torch.randn(1, N, L, S, device=device, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            fused.attention(q, k, v, **kwargs)

    def both() -> None:
        fused.attention(q, k, v, **kwargs).sum().backward()

    entry: dict[str, Any] = {"D": width, "options": options}
    milliseconds: dict[str, dict[str, float]] = {}
    try:
        for kernel in kernel_table.TILED_KERNELS:
            tiles = candidates(*key, kernel, gpu)
            call, found = forward if kernel == "forward" else both, {}
            for words, numbers in tiles.items():
                kernels.tiles[(*key, kernel)] = numbers
                found[words] = time(call)
            best = min(found, key=found.__getitem__)
            kernels.tiles[(*key, kernel)] = tiles[best]
            entry[kernel], milliseconds[kernel] = json.loads(best), found
            print(f"attention {options} {size}, {kernel}: {best}; milliseconds {found}", flush=True)
    finally:
        kernels.tiles.clear()
    return entry | {"size": size, "milliseconds": milliseconds}


def candidates(width: int, pressure: int, kernel: str, gpu: Gpu) -> dict[str, tuple[int, ...]]:
    """Returns {tiles as a table has them: as kernels.tiles has them} to be timed for a kernel: its
    own, those that it has with other options, and more of the forward kernel."""
    plan = importlib.import_module("fusedseq.kernels.attention.plan")
    number = kernel_table.TILED_KERNELS.index(kernel)
    pressures = (pressure, *(p for p in range(len(kernel_table.OPTIONS)) if p != pressure))
    hopper = (True, False) if gpu.capability == "9.0" else (False,)
    sizes = [plan.sizes_of_tiles(width, p, own)[number] for own in hopper for p in pressures]
    if kernel != "forward":
        return {json.dumps(size): size for size in sizes}
    return {
        json.dumps([*size, loads]): (*size, i)
        for size in (*sizes, *MORE_TILES[width])
        for i, loads in enumerate(loads_of(gpu))
    }


def loads_of(gpu: Gpu) -> tuple[str, ...]:
    """Returns how attention's tiled kernel can load keys and values on a GPU."""
    major = int(gpu.capability.partition(".")[0])
    return kernel_table.LOADS[: 3 if 10 <= major < 12 else 2 if major >= 9 else 1]


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a table, which takes the file's place as a whole, and reads it back."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    kernel_table.read(part)
    part.replace(path)
