"""Compiles the CUDA sources with g++ to a library that runs them on the CPU: see README.md here.

    python tests/simt/build.py [plain|checked]      # prints the path of the library

Objects are cached in build/simt by a hash of their sources.
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
    "-std=c++17 -g -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off "
    "-fno-gnu-unique -Wall -Wno-unknown-pragmas -Wno-maybe-uninitialized"
)
CHECKS = "-fsanitize=thread,bounds,alignment --param tsan-instrument-func-entry-exit=0"
KERNELS = {"plain": "-O2", "checked": f"-O1 {CHECKS}"}
CXX = os.environ.get("CXX", "g++")
LAUNCH = re.compile(r"(\w+(?:<[\w\s,:]+>)?)<<<(.*?)>>>\(", re.S)


def as_cpp(text):
    """CUDA C++ as g++ compiles it, line for line: no header can define the syntax of launches."""
    return LAUNCH.sub(r"simt::launcher(\1, \2)(", text)


# The sources in csrc/ops with operators that have CUDA kernels.
OPERATORS = (
    "activation_regularization",
    "dropout",
    "embedding",
    "engine_table",
    "gru_rnn",
    "layer_norm_gru",
    "layer_norm_lstm",
    "lstm",
    "mogrifier_lstm",
    "nt_asgd",
    "peephole_lstm",
    "recurrence_cuda_arguments",
    "recurrence_cuda_engines",
    "recurrence_on_cuda",
    "vendor_product",
)
CPU_REGISTRATION = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(fusedseq, CPU, m\) \{.*?\n\}\n", re.S)


def on_cpu_tensors(text):
    """The source with its CUDA side registered for CPU tensors, as torch.ops.fusedseq_simulated.

    The registration of its CPU side is removed.
    """
    text = CPU_REGISTRATION.sub(lambda found: "\n" * found[0].count("\n"), text)
    for old, new in (
        ("(fusedseq, CUDA,", "(fusedseq_simulated, CPU,"),
        ("FRAGMENT(fusedseq,", "FRAGMENT(fusedseq_simulated,"),
        (".is_cuda()", ".is_cpu()"),
        ("torch::stable::accelerator::DeviceGuard", "DeviceGuard"),
    ):
        text = text.replace(old, new)
    return text


def torch_folder():
    return Path(importlib.util.find_spec("torch").origin).parent


def operators():
    """(name, text, options, changed headers) of the operators' sources."""
    options = (
        "-O1 -ffunction-sections -Wno-unused-function -DFUSEDSEQ_CUDA -DTORCH_STABLE_ONLY "
        f"-DTORCH_TARGET_VERSION=0x020b000000000000 -isystem {torch_folder() / 'include'}"
    )
    sources = [ROOT / f"csrc/ops/{name}.cpp" for name in OPERATORS] + [ROOT / "csrc/cpu/memory.cpp"]
    texts = {f"ops/{path.name}": path.read_text() for path in sorted(ROOT.glob("csrc/ops/*.h"))}
    headers = {  # those that ask for the device of a tensor
        name: changed for name, text in texts.items() if (changed := on_cpu_tensors(text)) != text
    }
    return [
        (f"{path.stem}.operator.cpp", on_cpu_tensors(path.read_text()), options, headers)
        for path in sources
    ]


def compiled(name, text, options, changed_headers=None):
    """The object of a source, from the cache or compiled. All headers are part of the cache key."""
    headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh"), *HERE.glob("*.h")]
    headers += [path for path in HERE.glob("include/**/*") if path.is_file()]
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
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(
                content
            )  # and the folder is the first in which headers are looked for
        part = out.with_suffix(f".{os.getpid()}")
        folders = f"-I{folder}", f"-I{HERE / 'include'}", f"-I{ROOT / 'csrc'}", f"-I{HERE}"
        subprocess.run(
            [
                CXX,
                *COMMON.split(),
                *options.split(),
                *folders,
                "-x",
                "c++",
                "-c",
                folder / name,
                "-o",
                part,
            ],
            check=True,
        )
        part.replace(out)
    return out


def headers_of(text):
    """The headers of csrc that a source includes, directly or through other headers."""
    found, texts = set(), [text]
    while texts:
        for name in re.findall(r'#include ["<](.*?)[">]', texts.pop()):
            if name not in found and (ROOT / "csrc" / name).is_file():
                found.add(name)
                texts.append((ROOT / "csrc" / name).read_text())
    return found


def library(mode, changes=None, for_torch=False):
    """The shared library with all kernels: its path.

    mode: "plain", or "checked", which checks every access to memory
    for_torch: whether to include the operators that call the kernels
    changes: {source: {old text: new text}}; of a header in csrc/cuda for what includes it
    """

    def text_of(path):
        text = path.read_text()
        for old, new in (changes or {}).get(path.name, {}).items():
            assert text.count(old) == 1, f"{path.name} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text

    all_headers = [*ROOT.glob("csrc/cuda/**/*.cuh"), *ROOT.glob("csrc/cuda/**/*.h")]
    changed = [path for path in all_headers if path.name in (changes or {})]
    headers = {path.relative_to(ROOT / "csrc").as_posix(): text_of(path) for path in changed}
    sources = [(path.name, path.read_text(), "-O2") for path in sorted(HERE.glob("*.cpp"))]
    for path in sorted([*ROOT.glob("csrc/cuda/**/*.cu"), *HERE.glob("*.cu")]):
        text = text_of(path)
        included = headers_of(text) if headers else ()
        included = {name: content for name, content in headers.items() if name in included}
        sources.append((path.name, as_cpp(text), KERNELS[mode], included))
    sources += operators() if for_torch else []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(lambda source: compiled(*source), sources))
    libraries = (
        ["-Wl,--gc-sections", f"-L{torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10"]
        if for_torch
        else []
    )
    return linked(mode, objects, libraries)


def linked(name, objects, libraries=()):
    """Returns the path of the shared library of some objects, from the cache or linked."""
    key = hashlib.sha256(" ".join(map(str, objects)).encode()).hexdigest()[:16]
    out = ROOT / "build/simt" / f"{name}.{key}.so"
    if not out.is_file():
        part = out.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [CXX, "-shared", "-Wl,-Bsymbolic", *objects, *libraries, "-ldl", "-o", part], check=True
        )
        part.replace(out)
    return out


if __name__ == "__main__":
    print(library(*sys.argv[1:] or ["plain"]))
