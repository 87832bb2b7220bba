"""`fusedseq info`: what is built and found here, and each operator run against its oracle on every device.

Exit code 1 where anything is wrong: whatever reads "WRONG" on the way is listed again at the end.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re

from fusedseq import __version__, _load

SMALL = 3000  # numbers in the inputs of a case that is run: a second or two for all of them


def add_arguments(parser):
    parser.add_argument("--no-check", action="store_true", help="print the facts only, without running the operators")


def run(args):
    report = Report()
    versions(report)
    loaded = library(report)
    threads(report)
    devices = [*["cpu"] * loaded, *gpus(report)]
    triton(report)
    for device in devices if loaded and not args.no_check else []:
        operators(report, device)
    return report.close()


class Report:
    """Lines on the screen, and a list of what is wrong."""

    def __init__(self):
        self.problems = []

    def fact(self, name, value):
        print(f"{name:26} {value}", flush=True)

    def wrong(self, name, sentence):
        self.fact(name, f"WRONG: {sentence}")
        self.problems.append(f"{name}: {sentence}")

    def close(self):
        print(
            f"\n{len(self.problems)} wrong" + "".join(f"\n  {p}" for p in self.problems)
            if self.problems
            else "\nnothing wrong"
        )
        return 1 if self.problems else 0


def versions(report):
    import torch

    report.fact("fusedseq", __version__)
    report.fact("python", f"{platform.python_version()} on {platform.platform()}")
    report.fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    report.fact("numpy", importlib.metadata.version("numpy") if importlib.util.find_spec("numpy") else "not installed")


def library(report):
    """Reports on _ops.so, _C and _autograd; returns whether the operators can run."""
    built = _load.build_info()
    if built:
        report.fact(
            "built with",
            f"{built['compiler']}, torch {built['torch']}, Python {built['python']}, for {built['machine']}",
        )
        cuda = f"{built['nvcc']}, {' '.join(built['cuda_codes'])}" if built["nvcc"] else "no CUDA kernels in this build"
        report.fact("built for CUDA", cuda)
    try:
        _load.operators()
    except ImportError as error:
        report.wrong("operators", str(error).removeprefix("fusedseq: "))
        return False
    if not built:
        report.wrong("built with", "build_info.json is missing: install again")
    report.fact("operators", "loaded")
    try:
        from fusedseq import _C

        features = [name for name, found in _C.cpu_features().items() if found]
        report.fact(
            "fusedseq._C", f"compiled by {_C.compiler}; this machine has {' '.join(features) or 'no x86 features'}"
        )
    except ImportError as error:
        if importlib.util.find_spec("fusedseq._C"):
            report.wrong("fusedseq._C", " ".join(str(error).split()))
        else:
            report.fact(
                "fusedseq._C", f"not for this Python: the build was for {built.get('python')}; no operator needs it"
            )
    if _load.recorder():
        report.fact("autograd", "small operators are recorded in C++")
    else:
        report.fact("autograd", f"in Python, which costs a small call some 15 us: fusedseq._autograd is for torch {built.get('torch')} and "
                    f"Python {built.get('python')}, or FUSEDSEQ_AUTOGRAD is python")  # fmt: skip
    for question in ("compiled", "found"):
        report.fact(f"CPU kernels {question}", _load.isa(question))
    used = _load.isa("used")
    if used.startswith("error: "):
        report.wrong("CPU kernels used", used.removeprefix("error: "))
        return False
    chosen = "by FUSEDSEQ_ISA" if os.environ.get("FUSEDSEQ_ISA") else "the widest found"
    report.fact("CPU kernels used", f"{used}, {chosen}")
    return True


def threads(report):
    import torch

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = [f"{k}={os.environ[k]}" for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if k in os.environ]
    report.fact("threads", " ".join([f"{torch.get_num_threads()} of torch's on {allowed} processors", *settings]))


def gpus(report):
    """Reports on the GPUs that torch sees; returns the devices."""
    import torch

    if not torch.cuda.is_available():
        report.fact("GPUs", "none that torch sees")
        return []
    codes = _load.build_info().get("cuda_codes", [])
    for i in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(i)
        what = f"{torch.cuda.get_device_name(i)}, compute capability {capability[0]}.{capability[1]}"
        if any(runs_on(code, capability) for code in codes):
            report.fact(f"cuda:{i}", what)
        else:
            report.wrong(
                f"cuda:{i}",
                f"{what}: the build has no CUDA kernel for it, only {' '.join(codes) or 'those of the CPU'}",
            )
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def runs_on(code, capability):
    """Whether a GPU of this (major, minor) runs code such as sm_90a (machine code) or compute_100 (PTX)."""
    ((kind, major, minor, exact),) = re.findall(r"^(sm|compute)_(\d+)(\d)([af]?)$", code)
    built = int(major), int(minor)
    if exact:
        return built == capability
    return built <= capability if kind == "compute" else built[0] == capability[0] and built <= capability


def triton(report):
    found = importlib.util.find_spec("triton")
    report.fact("triton", importlib.metadata.version("triton") if found else "not installed; only GPUs need it")


def operators(report, device):
    """Runs every operator's small cases, forward and backward, against its oracle."""
    from fusedseq import fused, reference
    from fusedseq.testing import CASES, check, differentiable

    print(f"\noperators on {device}, float32, against their oracles")
    for op in reference.__all__:
        cases = [c for c in CASES if c.op == op and sum(t.numel() for t in differentiable(*c.inputs())) <= SMALL]
        errors = []
        for case in cases:
            args, kwargs = case.inputs(device)
            try:
                errors.append(check(op, args, kwargs))
            except Exception as error:
                report.wrong(f"{op} on {device}", f"{case}: {' '.join(str(error).split())}")
                break
        else:
            kernel = fused.explain(op, *args, **kwargs).removeprefix(f"{op} ")
            report.fact(op, f"{len(errors)} cases agree, largest error {max(errors):.2f} of its budget; {kernel}")
