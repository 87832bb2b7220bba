"""Compiles every Triton kernel that ships, without a GPU, and compares the result with
triton_table.json.

    python -m tests.triton.triton_table            # compares all calls with the table
    python -m tests.triton.triton_table --write    # replaces what is not up to date

A further argument selects the calls whose names begin with it. All calls take half an hour. A
compiler gives the same result again, so the table also has a key of what each call has compiled
(`keys`), and what has the same key today needs no compiling: an edit of a launcher or of a comment
between kernels changes no key.

The launchers are called as triton_calls.py says, under a driver that only reports which GPU
to compile for. So a kernel is compiled exactly as that call would compile it on that GPU, by the
`ptxas` that Triton contains.
"""

import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from fusedseq import kernels

from tests.triton.triton_calls import CALLS

TABLE = Path(__file__).with_name("triton_table.json")
CAPABILITIES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}


class Driver:
    """The part of Triton's CUDA driver that compiling needs."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


def compiled(call, capability):
    """Returns {kernel: facts} of the kernels that CALLS[call] launches on a GPU of this
    capability."""
    from triton.runtime import JITFunction, driver

    driver.set_active(Driver(capability))
    found, run = {}, JITFunction.run

    def compile_only(kernel, *args, **kwargs):
        name = kernel.fn.__name__
        assert name not in found, f"{call} launches {name} twice"
        found[name] = facts(run(kernel, *args, **{**kwargs, "warmup": True}))

    JITFunction.run = compile_only
    try:
        CALLS[call]()
    finally:
        JITFunction.run = run
    return found


def facts(kernel):
    usage = resources(kernel.asm["cubin"])
    return {
        "registers": usage["REG"],
        "shared": kernel.metadata.shared,
        "stack": usage["STACK"],  # bytes that a thread spills; LOCAL stays 0
        "narrow loads": narrow_loads(kernel.asm["ptx"]),
        "wide operands": wide_operands(kernel.asm["ttgir"]),
    }


def wide_operands(ttgir):
    """Counts the operands of products, in registers, of which four threads hold more elements than
    there are: the product is wrong then, see `operand` in kernels/attention/tile.py."""
    operands = re.findall(
        r"tensor<([\dx]+)x\w+, #ttg\.dot_op<{opIdx = (\d), parent = #\w+, kWidth = (\d+)}>>", ttgir
    )
    sizes = (([int(n) for n in shape.split("x")], index, width) for shape, index, width in operands)
    # The products are over the last dimension of the first operand, the last but one of the second.
    return sum(shape[-1 - int(index)] < 4 * int(width) for shape, index, width in sizes)


def narrow_loads(ptx):
    """Counts the loads from global memory that read two bytes per thread."""
    loads = re.findall(r"\bld\.global([\w.:]*)", ptx)
    return sum(
        bool(re.search(r"\.[bu]16$", load)) and not re.search(r"\.v\d", load) for load in loads
    )


def resources(cubin):
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


@functools.cache
def keys():
    """Returns {call: {GPU: key}}, a hash of all that Triton compiles for each call: the sources of
    the kernels and of the functions that they call, types, constants, alignments and options; and
    of the functions here that read what was compiled.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(keys_in_this_process).result()


def keys_in_this_process():
    import triton
    from triton.runtime import JITFunction, driver

    place = str(Path(triton.__file__).parent)  # the options name a library of Triton by its path
    for module in pkgutil.walk_packages(kernels.__path__, "fusedseq.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if hasattr(value, "starting_line_number"):
                value.starting_line_number = 0  # part of Triton's hash of a function
    reading = "".join(map(inspect.getsource, (facts, narrow_loads, wide_operands, resources)))
    found = {}
    for call, gpu in all_jobs():
        compiles = []

        def instead_of_compiling(kernel, _, *settings, to=compiles):
            *arguments, _warmup = settings  # signature, device, constants, options, attributes
            to.append(repr((kernel.cache_key, arguments)).replace(place, "triton"))

        JITFunction._do_compile = instead_of_compiling
        driver.set_active(Driver(CAPABILITIES[gpu]))
        CALLS[call]()
        assert compiles, f"{call} launches no kernel"
        digest = hashlib.sha256("".join((reading, *compiles)).encode())
        found.setdefault(call, {})[gpu] = digest.hexdigest()[:16]
    return found


def all_jobs(calls=tuple(CALLS)):
    """Returns [(call, GPU)] of each call on every GPU."""
    return [(call, gpu) for call in calls for gpu in CAPABILITIES]


def compile_all(jobs):
    """Returns {call: {GPU: {kernel: facts}}} of these (call, GPU).

    It uses as many processes as there are processors. A lock admits one caller at a time, so that
    of several test processes the later ones find the first one's results in Triton's cache.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    cache = Path(
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[2] / ".cache/triton"))
    )
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "compile_all.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _compile_all(jobs)


def _compile_all(jobs):
    found = {call: {} for call, _ in jobs}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        results = pool.map(
            compiled, *zip(*((call, CAPABILITIES[gpu]) for call, gpu in jobs), strict=True)
        )
        for (call, gpu), result in zip(jobs, results, strict=True):
            found[call][gpu] = result
    return found


@functools.cache
def version():
    return importlib.metadata.version("triton")


def table():
    """Returns the installed Triton's part of the table, or None if there is none."""
    return json.loads(TABLE.read_text()).get(version())


def outdated_jobs():
    """Returns [(call, GPU)] of what the installed Triton would compile otherwise than for the
    table."""
    known, now = json.loads(TABLE.read_text())["keys"].get(version(), {}), keys()
    return [
        (call, gpu) for call, gpu in all_jobs() if known.get(call, {}).get(gpu) != now[call][gpu]
    ]


def updated(table, jobs, found):
    """Returns {call: {GPU: facts}} of all calls: what was found of these jobs, and the rest of the
    table."""
    return {
        call: {gpu: (found if (call, gpu) in jobs else table)[call][gpu] for gpu in CAPABILITIES}
        for call in CALLS
    }


def write():
    """Compiles what is not up to date, and replaces it in the table."""
    jobs = outdated_jobs()
    found = compile_all(jobs) if jobs else {}
    whole = json.loads(TABLE.read_text())
    whole[version()] = updated(whole.get(version(), {}), jobs, found)
    whole["keys"][version()] = keys()
    TABLE.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    return 0


def main():
    if "--write" in sys.argv:
        return write()
    prefix = "".join(sys.argv[1:])
    found = compile_all(all_jobs([call for call in CALLS if call.startswith(prefix)]))
    known = table() or {}
    differs = False
    for call, gpus in found.items():
        for gpu, kernel_facts in gpus.items():
            for kernel, got in kernel_facts.items():
                expected = known.get(call, {}).get(gpu, {}).get(kernel)
                print(
                    f"{call:40} {gpu:7} {kernel:28} {got}",
                    "" if got == expected else f"  was {expected}",
                )
                differs |= got != expected
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
