"""How many instructions the persistent kernels execute between a wait and the loads after it, and
how many of these loads they start before they multiply.

For every wait for an exchanged vector: the instructions of sm_90a from the load that polls a flag
to the first load of the vector, in the order of the machine code, all of them on the critical path
(the call of give_up is not: it is jumped over).
wait_table.json has the recorded counts for each version of nvcc, and under "before" those of the
kernels whose addresses, zeros and first weights were computed after the wait (only of the variants
that existed then). Under the version of nvcc with ", loads" are the numbers of loads of the vector,
16 bytes each, that stand in a row before a product with what they load. Kernels that exchange words
poll the vector itself, and have no such wait.

python -m tests.ptx.wait_table             # prints this build's counts and the differences
python -m tests.ptx.wait_table --write     # replaces the counts for this version of nvcc
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import triton
from fusedseq import _load

from tests.ptx import ptxas_table

TABLE = Path(__file__).with_name("wait_table.json")
GPU = "sm_90a"
WORDS = ", true> >"  # the end of the name of a kernel that exchanges words
POLL = re.compile(r"LDG?\.E\.STRONG\.GPU\b")
LOAD = re.compile(r"LDG\.E\.128\.STRONG\.GPU\b")
CALL = re.compile(r"CALL\b")
PRODUCT = re.compile(r"HMMA\b")
JUMP = re.compile(r"@!?U?P\d+ BRA 0x([0-9a-f]+)")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.M)


def counts(listing):
    """Returns the counts of one kernel, from its machine code as cuobjdump or nvdisasm lists it."""
    code = INSTRUCTION.findall(listing)
    found, poll = [], None
    for i, (_, instruction) in enumerate(code):
        if POLL.search(instruction):
            poll = i
        elif LOAD.search(instruction) and poll is not None:
            found.append(executed(code[poll:i]))
            poll = None
    return found


def loads_in_a_row(listing):
    """Returns how many loads of the vector of one kernel stand in a row before a product."""
    found, loads = [], 0
    for _, instruction in INSTRUCTION.findall(listing):
        if LOAD.search(instruction):
            loads += 1
        elif PRODUCT.search(instruction) and loads:
            found.append(loads)
            loads = 0
    return found


def executed(code):
    """How many instructions a wait executes that ends: it jumps over the call that gives up."""
    addresses = [int(address, 16) for address, _ in code]
    call = next((i for i, (_, instruction) in enumerate(code) if CALL.match(instruction)), None)
    if call is None:
        return len(code)
    for i, (_, instruction) in enumerate(code[:call]):
        jump = JUMP.match(instruction)
        if jump and addresses[call] < (target := int(jump[1], 16)) <= addresses[-1]:
            return len(code) - (addresses.index(target) - i - 1)
    raise ValueError("the call after a wait is not jumped over")


def of_listing(text, separator, counts=counts):
    """{kernel: counts} of the persistent kernels of a listing."""
    found = {}
    for part in re.split(separator, text)[1:]:
        mangled = re.match(r"\w+", part)[0]
        if re.search(r"persistent_\w+_kernel", mangled):
            kernel = ptxas_table.name(mangled)
            if not kernel.endswith(WORDS):
                found[kernel] = counts(part)
    return dict(sorted(found.items()))


@functools.cache
def machine_code():
    """Returns this build's machine code for GPU as text."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "-sass", "-arch", GPU, _load.PACKAGE / "_ops.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def found():
    """Returns this build's counts: {kernel: [count of each wait, in the order of the code]}."""
    return of_listing(machine_code(), r"Function : ")


def found_loads():
    """Returns {kernel: [loads in a row before a product, in the order of the code]}."""
    return of_listing(machine_code(), r"Function : ", loads_in_a_row)


def key(loads=False):
    """Returns under which key of the table the counts of this build's nvcc are, or its loads."""
    version: str = _load.build_info()["nvcc"]
    return version + ", loads" * loads


def table(loads=False):
    """Returns the recorded counts for this build's nvcc, or None if there are none."""
    return json.loads(TABLE.read_text()).get(key(loads))


def write(key, values):
    whole = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    lines = ",\n".join(
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in kernels.items())
        + "\n }"
        for name, kernels in sorted({**whole, key: values}.items())
    )
    TABLE.write_text(f"{{\n{lines}\n}}\n")


def main():
    differs = False
    for loads, now in ((False, found()), (True, found_loads())):
        if "--write" in sys.argv:
            write(key(loads), now)
            continue
        before = table(loads) or {}
        differs |= now != before
        print(key(loads))
        for kernel, values in now.items():
            was = before.get(kernel)
            print(f"{kernel:80} {values}", "" if values == was else f"  recorded: {was}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
