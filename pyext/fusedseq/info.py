"""`fusedseq info`: what is built and found on this machine, and every operator compared with its
oracle on every device.

The exit code is 1 if anything is wrong: every line that reads "WRONG" is repeated at the end.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
from argparse import ArgumentParser, Namespace
from typing import Any

from fusedseq import __version__, _load

MAX_NUMBERS = 3000  # in the inputs of a case that is run; all such cases take a second or two


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="print the facts only, without running the operators",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["float32"],
        choices=["float32", "float64", "bfloat16"],
        help="compare the operators in these dtypes (default: float32); in bfloat16 the products "
        "are those of the processor's instructions for it, where it has any",
    )


def run(args: Namespace) -> int:
    report = Report()
    versions(report)
    if loaded := build(report):
        library(report)
    threads(report)
    devices = [*["cpu"] * loaded, *gpus(report)]
    triton(report)
    for device in devices if loaded and not args.no_check else []:
        for dtype in args.dtype:
            operators(report, device, dtype)
    for device in devices[1:] if loaded else []:
        kernel_choice(report, device)
    return report.close()


class Report:
    """Prints facts, and collects what is wrong."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def fact(self, name: str, value: str) -> None:
        print(f"{name:26} {value}", flush=True)

    def wrong(self, name: str, sentence: str) -> None:
        self.fact(name, f"WRONG: {sentence}")
        self.problems.append(f"{name}: {sentence}")

    def close(self) -> int:
        """Prints the summary; returns the exit code."""
        lines = [f"{len(self.problems)} wrong", *(f"  {p}" for p in self.problems)]
        print("\n" + ("\n".join(lines) if self.problems else "nothing wrong"))
        return 1 if self.problems else 0


def installed(package: str, otherwise: str) -> str:
    """The version of a package, or a remark if it is not installed."""
    if not importlib.util.find_spec(package):
        return otherwise
    return importlib.metadata.version(package)


def versions(report: Report) -> None:
    import torch

    report.fact("fusedseq", __version__)
    report.fact("python", f"{platform.python_version()} on {platform.platform()}")
    report.fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    report.fact("numpy", installed("numpy", "not installed"))


def build(report: Report) -> bool:
    """Reports how _ops.so was built; returns whether it loads."""
    built = _load.build_info()
    if built:
        made = f"{built['compiler']}, torch {built['torch']}, Python {built['python']}"
        report.fact("built with", f"{made}, for {built['machine']}")
        nvcc, codes = built["nvcc"], " ".join(built["cuda_codes"])
        report.fact("built for CUDA", f"{nvcc}, {codes}" if nvcc else "no CUDA kernels")
    try:
        _load.operators()
    except ImportError as error:
        report.wrong("operators", str(error).removeprefix("fusedseq: "))
        return False
    if not built:
        report.wrong("built with", "build_info.json is missing or damaged: install again")
    report.fact("operators", "loaded")
    return True


def library(report: Report) -> None:
    """Reports on _C, _autograd and the CPU kernels."""
    built = _load.build_info()
    try:
        from fusedseq import _C

        features = " ".join(name for name, found in _C.cpu_features().items() if found)
        machine = f"this machine has {features or 'no x86 features'}"
        report.fact("fusedseq._C", f"compiled by {_C.compiler}; {machine}")
    except ImportError as error:
        if importlib.util.find_spec("fusedseq._C"):
            report.wrong("fusedseq._C", " ".join(str(error).split()))
        else:
            python = f"not for this Python: the build was for {built.get('python')}"
            report.fact("fusedseq._C", f"{python}; no operator needs it")
    if _load.recorder():
        report.fact("autograd", "small calls are recorded in C++")
    else:
        made = f"torch {built.get('torch')} and Python {built.get('python')}"
        report.fact(
            "autograd",
            "in Python, which makes a small call 15 to 60 us slower: fusedseq._autograd was "
            f"built for {made}, or FUSEDSEQ_AUTOGRAD is python",
        )
    for question in ("compiled", "found"):
        report.fact(f"CPU kernels {question}", _load.isa(question))
    chosen = "by FUSEDSEQ_ISA" if os.environ.get("FUSEDSEQ_ISA") else "the widest found"
    report.fact("CPU kernels used", f"{_load.isa('used')}, {chosen}")


def threads(report: Report) -> None:
    import torch

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    settings = "".join(f" {k}={os.environ[k]}" for k in variables if k in os.environ)
    used = f"{torch.get_num_threads()} of torch's on {allowed} processors"
    report.fact("threads", f"{used}{settings}")


def gpus(report: Report) -> list[str]:
    """Reports on the GPUs that torch sees; returns the devices."""
    import torch

    if not torch.cuda.is_available():
        report.fact("GPUs", "none that torch sees")
        return []
    codes = _load.build_info().get("cuda_codes", [])
    for i in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(i)
        name = (
            f"{torch.cuda.get_device_name(i)}, compute capability {'.'.join(map(str, capability))}"
        )
        if any(runs_on(code, capability) for code in codes):
            report.fact(f"cuda:{i}", name)
        else:
            only = " ".join(codes) or "those of the CPU"
            report.wrong(f"cuda:{i}", f"{name}: the build has no CUDA kernel for it, only {only}")
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def runs_on(code: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability runs sm_90a (machine code) or compute_100 (PTX)."""
    ((kind, major, minor, exact),) = re.findall(r"^(sm|compute)_(\d+)(\d)([af]?)$", code)
    built = int(major), int(minor)
    if exact == "a":
        return built == capability
    if exact == "f":  # and later GPUs of the same family
        return built[0] == capability[0] and built <= capability
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def triton(report: Report) -> None:
    report.fact("triton", installed("triton", "not installed; only GPUs need it"))


def kernel_choice(report: Report, device: str) -> None:
    """Reports the verdicts of the comparisons at the first use on a GPU, and the kernel table."""
    import torch

    from fusedseq import kernel_table
    from fusedseq.first_use import guard, verdicts

    identity = verdicts.identity_of(torch.device(device))
    found = verdicts.Verdicts(identity)
    first_use(report, device, identity["capability"] in guard.VERIFIED, found.path, found.read())
    if path := os.environ.get(kernel_table.VARIABLE):
        table, gpu = kernel_table.read(path), kernel_table.gpu_of(device)
        if table.gpu == gpu:
            report.fact(f"kernel table, {device}", path)
        else:
            sentence = f"{path} is of {table.gpu}, this GPU is {gpu}"
            report.wrong(f"kernel table, {device}", sentence)


def first_use(report: Report, device: str, verified: bool, path: Any, found: Any) -> None:
    """found: {operator: its verdict}    path: of the file that holds them"""
    from fusedseq.first_use.verdicts import AGREES

    name = f"first use, {device}"
    if verified:
        report.fact(name, "not compared: a committed result is of this compute capability")
        return
    mode = os.environ.get("FUSEDSEQ_VERIFY") or "first"
    agreeing = [op for op, verdict in found.items() if verdict.found == AGREES]
    report.fact(name, f"FUSEDSEQ_VERIFY is {mode}; agree: {', '.join(agreeing) or 'none yet'}")
    for op, verdict in found.items():
        if op not in agreeing:
            report.wrong(f"{name}, {op}", f"{verdict.found}: {verdict.why}; cached in {path}")


def operators(report: Report, device: str, dtype: str = "float32") -> None:
    """Compares every operator with its oracle on small cases, forward and backward."""
    import torch

    from fusedseq import fused, reference
    from fusedseq.testing import CASES, check, differentiable

    print(f"\noperators on {device}, {dtype}, compared with their oracles")
    for op in reference.__all__:
        cases = [
            case
            for case in CASES
            if case.op == op
            and sum(t.numel() for t in differentiable(*case.inputs())) <= MAX_NUMBERS
        ]
        errors = []
        for case in cases:
            args, kwargs = case.inputs(device, getattr(torch, dtype))
            try:
                errors.append(check(op, args, kwargs))
            except Exception as error:
                report.wrong(f"{op} on {device}", f"{case}: {' '.join(str(error).split())}")
                break
        else:
            kernel = fused.explain(op, *args, **kwargs).removeprefix(f"{op} ")
            largest = f"largest error {max(errors):.2f} of what is allowed"
            report.fact(op, f"{len(errors)} cases agree, {largest}; {kernel}")
