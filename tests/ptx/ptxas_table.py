"""Registers, shared memory, stack and spills of every CUDA kernel, compared with a recorded table.

The build stores ptxas's report in build_info.json; ptxas_table.json has the recorded values for
each version of nvcc.

python tests/ptx/ptxas_table.py             # prints this build's values and the differences
python tests/ptx/ptxas_table.py --write     # replaces the table's values for this version of nvcc
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from fusedseq import _load

TABLE = Path(__file__).with_name("ptxas_table.json")
# A mangled anonymous namespace contains the file's name and two hashes. It is replaced by the name
# "a".
ANONYMOUS = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")
REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<gpu>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<more>[^\n]*)",
    re.S,
)


def name(mangled):
    """Returns a kernel's name without namespaces and arguments, as dropout_kernel<float, true>."""
    text = subprocess.run(
        ["c++filt", ANONYMOUS.sub("1a", mangled)], capture_output=True, text=True, check=True
    ).stdout
    return re.sub(r"^void |\(.*|\w+::", "", text.strip())


def found():
    """Returns this build's values; empty if the build has no CUDA code.

    {"dropout.cu dropout_kernel<float, true>": {"sm_80": {"registers": 20, ...}, ...}, ...}
    """
    kernels = {}
    for source, lines in _load.build_info()["ptxas"].items():
        for report in REPORT.finditer("\n".join(lines)):
            shared = re.search(r"(\d+) bytes smem", report["more"])
            kernels.setdefault(f"{source} {name(report['kernel'])}", {})[report["gpu"]] = {
                "registers": int(report["registers"]),
                "shared": int(shared[1]) if shared else 0,
                "stack": int(report["stack"]),
                "spills": int(report["stores"]) + int(report["loads"]),
            }
    return kernels


def table():
    """Returns the recorded values for this build's nvcc, or None if there are none."""
    return json.loads(TABLE.read_text()).get(_load.build_info()["nvcc"])


def main():
    now = found()
    if "--write" in sys.argv:
        whole = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
        TABLE.write_text(
            json.dumps({**whole, _load.build_info()["nvcc"]: now}, indent=1, sort_keys=True) + "\n"
        )
        return 0
    before = table() or {}
    for kernel, gpus in now.items():
        for gpu, facts in gpus.items():
            was = before.get(kernel, {}).get(gpu)
            print(f"{kernel:48} {gpu:7} {facts}", "" if facts == was else f"  recorded: {was}")
    return int(now != before)


if __name__ == "__main__":
    sys.exit(main())
