"""Compiles csrc/*.cu with g++ to a library that runs the kernels on the CPU: tests/simt/README.md.

    python tests/simt/build.py [plain|checked]      # prints where the library is

What has been compiled from the same sources is not compiled again; it is kept in build/simt.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMON = (
    "-std=c++17 -g -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off -fno-gnu-unique "
    "-Wall -Wno-unknown-pragmas -Wno-maybe-uninitialized"
)
CHECKS = "-fsanitize=thread,bounds,alignment --param tsan-instrument-func-entry-exit=0"
KERNELS = {"plain": "-O2", "checked": f"-O1 {CHECKS}"}
CXX = os.environ.get("CXX", "g++")
LAUNCH = re.compile(r"(\w+(?:<[\w\s,:]+>)?)<<<(.*?)>>>\(")


def as_cpp(text):
    """CUDA C++ that g++ takes, line for line: of what a header can't give, the launches."""
    return LAUNCH.sub(r"simt::launcher(\1, \2)(", text)


# What makes a call of torch a call of the kernels, and is not of torch's CPU build alone.
OPERATORS = ("activation_regularization", "dropout", "embedding", "lstm", "memory", "mogrifier_lstm", "nt_asgd", "recurrence_cuda",
             "vendor_product")  # fmt: skip
OF_THE_CPU = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(fusedseq, CPU, m\) \{.*?\n\}\n", re.S)


def on_cpu_tensors(text):
    """A file of operators whose CUDA side is registered as torch.ops.fusedseq_simulated, for CPU tensors; without the other."""
    text = OF_THE_CPU.sub(lambda found: "\n" * found[0].count("\n"), text)
    for old, new in (("(fusedseq, CUDA,", "(fusedseq_simulated, CPU,"), ("FRAGMENT(fusedseq,", "FRAGMENT(fusedseq_simulated,"),
                     (".is_cuda()", ".is_cpu()"), ("torch::stable::accelerator::DeviceGuard", "DeviceGuard")):  # fmt: skip
        text = text.replace(old, new)
    return text


def torch_folder():
    return Path(importlib.util.find_spec("torch").origin).parent


def operators():
    """(name, text, options) of the operators' sources."""
    options = f"-O1 -ffunction-sections -Wno-unused-function -DFUSEDSEQ_CUDA -DTORCH_STABLE_ONLY -DTORCH_TARGET_VERSION=0x020b000000000000 -isystem {torch_folder() / 'include'}"
    return [(f"{name}.cpp", on_cpu_tensors((ROOT / f"csrc/{name}.cpp").read_text()), options) for name in OPERATORS]


def compiled(name, text, options, changed_headers=None):
    """The object of a source, compiled unless it has been. What it includes is part of the key."""
    headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/*.cuh"), *HERE.glob("*.h"), *HERE.glob("include/*")]
    texts = [path.read_text() for path in sorted(headers)]
    parts = [text, CXX, COMMON, options, *texts, repr(changed_headers or "")]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = ROOT / "build/simt" / key
    out = folder / f"{name}.o"
    if not out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in {
            name: text,
            **(changed_headers or {}),
        }.items():  # here, for the names in debug information;
            (folder / file).write_text(content)  # and a header beside its source is the one that is included
        part = out.with_suffix(f".{os.getpid()}")
        folders = f"-I{HERE / 'include'}", f"-I{ROOT / 'csrc'}", f"-I{HERE}"
        subprocess.run(
            [CXX, *COMMON.split(), *options.split(), *folders, "-x", "c++", "-c", folder / name, "-o", part], check=True
        )
        part.replace(out)
    return out


def library(mode, changes=None, for_torch=False):
    """The shared library with all kernels: its path.

    mode: "plain", or "checked" with a look at every access to memory    for_torch: with the operators that call them
    changes: {source: {old text: new text}}; of a header (name.cuh) for the sources that include it by name
    """

    def text_of(path):
        text = path.read_text()
        for old, new in (changes or {}).get(path.name, {}).items():
            assert text.count(old) == 1, f"{path.name} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text

    headers = {name: text_of(ROOT / "csrc" / name) for name in (changes or {}) if name.endswith(".cuh")}
    sources = [(path.name, path.read_text(), "-O2") for path in sorted(HERE.glob("*.cpp"))]
    for path in sorted([*ROOT.glob("csrc/*.cu"), *HERE.glob("*.cu")]):
        text = text_of(path)
        included = {name: content for name, content in headers.items() if f'#include "{name}"' in text}
        sources.append((path.name, as_cpp(text), KERNELS[mode], included))
    sources += operators() if for_torch else []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(lambda source: compiled(*source), sources))
    libraries = ["-Wl,--gc-sections", f"-L{torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10"] if for_torch else []
    key = hashlib.sha256(" ".join(map(str, objects)).encode()).hexdigest()[:16]
    out = ROOT / "build/simt" / f"{mode}.{key}.so"
    if not out.is_file():
        part = out.with_suffix(f".{os.getpid()}")
        subprocess.run([CXX, "-shared", "-Wl,-Bsymbolic", *objects, *libraries, "-ldl", "-o", part], check=True)
        part.replace(out)
    return out


if __name__ == "__main__":
    print(library(*sys.argv[1:] or ["plain"]))
