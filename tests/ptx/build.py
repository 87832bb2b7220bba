"""Compiles csrc's CUDA kernels by way of nvcc's PTX to a library that runs them on the CPU.

    python -m tests.ptx.build [plain|checked] [sm_80|sm_90a]     # prints the path of the library

nvcc compiles each .cu file to PTX, and parse.py and generate.py turn that into C++, which g++
compiles. g++ also compiles the .cu file itself, as tests/simt does, for its host code; at the end
of that file, each kernel's PTX is registered as its translation, by the kernel's mangled name,
which is the same in both compilers. Everything is cached in build/simt and build/ptx by hashes of
the sources.
"""

import ctypes
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.ptx import fragments, generate, parse
from tests.simt import build as simt

HERE = Path(__file__).parent
ROOT = simt.ROOT
GPUS = ("sm_80", "sm_90a")
SOURCES = sorted(path for path in ROOT.glob("csrc/cuda/**/*.cu"))
# nvcc names an anonymous namespace after the file and a hash.
ANONYMOUS = re.compile(r"\d+(_GLOBAL__N_)_[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")
OPTIONS = "-O1 -g1 -w"
UNIT = 6000  # at most, except where a kernel has more: instructions that are compiled together
HEADERS = ("memory.h", "values.h", "warp.h")


# The kernels of a build, since each takes some seconds to translate and compile: regular
# expressions of their mangled names. Recurrences of checked builds are in bf16 and fp32, the
# persistent ones of one variant, and in bf16 also of the same variant with words. On sm_80 they are
# run in bf16 alone, and on sm_90a the cells other than the LSTM's, and LSTMs in another order, in
# bf16 and fp32.
RECURRENCE = r"(persistent|wavefront|cell|round|layer_norm)_\w*kernelI"
OTHER_CELLS = (
    r"((layer_norm|persistent_cells)_\w*kernelI(d|6__half)"
    r"|kernelI(d|6__half)NS_\w*(Gru|Rnn|Peephole))"
)
PLAIN = {"sm_80": rf"^(?!.*{RECURRENCE}(f|d|6__half))", "sm_90a": rf"^(?!.*{OTHER_CELLS})"}
CHECKED = (
    rf"^(?!.*persistent_(cells_)?(forward|backward)_kernel)(?!.*{RECURRENCE}(d|6__half))"
    r"|kernelI(f|13__nv_bfloat16)NS0_(7VariantI|11CellVariantILi\dE)Li1ELi2ELb0E"
)


def nvcc():
    return shutil.which("nvcc")


@functools.cache
def version():
    return subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout


def keyed(*parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def headers():
    found = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh")]
    return "\0".join(path.read_text() for path in sorted(found))


def ptx(source, gpu):
    """The PTX of a .cu file as nvcc compiles it for a GPU: its text."""
    key = keyed(source.read_text(), headers(), version(), gpu)
    out = ROOT / "build/ptx" / f"{source.stem}.{gpu}.{key}.ptx"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}")
        command = [nvcc(), "-O3", "-std=c++17", f"-arch={gpu}", f"-I{ROOT / 'csrc'}", "-ptx"]
        subprocess.run([*command, source, "-o", part], check=True)
        part.replace(out)
    return out.read_text()


def translate(text, file, only=""):
    """Translates the kernels of a module whose mangled names match `only`. Returns C++ sources, and
    the kernels' names, functions and sizes.

    {"units": [text, ...], "kernels": [[mangled name, function, shared bytes, [sizes]], ...]}
    """
    translator = [(HERE / f"{name}.py").read_text() for name in TRANSLATOR]
    key = keyed(text, file, only, *translator)
    out = ROOT / "build/ptx" / f"{key}.json"
    if out.is_file():
        return json.loads(out.read_text())
    module, units, kernels, count = parse.module(text, file, only), [], [], UNIT
    for entry in module.entries:
        name = ANONYMOUS.sub(r"12\g<1>1", entry.name)
        function = f"ptx_{keyed(name)}"
        g = generate.Generator(entry, module)
        code = g.function(function)
        count += len(entry.body)
        if count > UNIT:
            units.append(generate.HEADER)
            count = len(entry.body)
        units[-1] += '#include "warp.h"\n' * g.uses_warp + code
        kernels.append([name, function, g.shared_bytes, [p.bytes for p in entry.parameters]])
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"units": units, "kernels": kernels}))
    part.replace(out)
    return json.loads(out.read_text())


TRANSLATOR = ("parse", "cpp", "arithmetic", "effects", "fragments", "generate")


def registration(kernels):
    """C++ that registers the kernels' translations, at the end of the .cu file that defines them.

    A declared name stands for the kernel's symbol, which is local to the object file.
    """
    lines = ["", '#define HIDDEN __attribute__((visibility("hidden")))']
    for i, (name, function, shared, sizes) in enumerate(kernels):
        values = ", ".join(map(str, sizes))
        lines += [
            f'extern "C" void {function}(void* const*);',
            f'extern "C" HIDDEN char kernel_{i}[] __asm__("{name}");',
            f"static const bool translated_{i} = simt::translate("
            f"{{kernel_{i}, {function}, {shared}, {{{values}}}}});",
        ]
    return "\n".join(lines) + "\n"


def library(mode, gpu, only=None, mutate=None, sources=SOURCES):
    """The path of the library in which the kernels are the PTX of a GPU.

    mode: "plain", or "checked", which checks every access to memory
    only: a regular expression of the mangled names of kernels, others cannot be launched; None:
        PLAIN or CHECKED
    mutate: a function of (file, PTX) that returns other PTX
    sources: the .cu files whose kernels can be launched; of others the host code is compiled alone
    """
    if only is None:
        only = CHECKED if mode == "checked" else PLAIN[gpu]
    own, options = own_headers(), options_of(mode)
    objects = [*runtime(own), ("entries.cpp", (simt.HERE / "entries.cpp").read_text(), "-O2")]
    for source in [*SOURCES, *sorted(simt.HERE.glob("*.cu"))]:
        text, kernels = simt.as_cpp(source.read_text()), []
        if source in sources:
            code = ptx(source, gpu)
            code = mutate(source.name, code) if mutate else code
            translated = translate(code, f"{source.stem}.ptx", only)
            kernels = translated["kernels"]
            objects += [
                (f"{source.stem}.{i}.cpp", unit, options, own)
                for i, unit in enumerate(translated["units"])
            ]
        objects.append((source.name, text + registration(kernels), "-O0 -w"))
    return compiled(f"{mode}.{gpu}", objects)


def options_of(mode):
    return OPTIONS + " -DPTX_CHECKED" * (mode == "checked")


def own_headers():
    """{name: text} of the headers of the generated code."""
    tables = f'#pragma once\n#include "memory.h"\n{fragments.as_cpp()}'
    return {name: (HERE / name).read_text() for name in HEADERS} | {"fragments.h": tables}


def runtime(own):
    """The sources of tests/simt without its kernels, and what the generated code calls."""
    paths = [path for path in sorted(simt.HERE.glob("*.cpp")) if path.name != "entries.cpp"]
    sources = [(path.name, path.read_text(), "-O2") for path in paths]
    return [*sources, ("fragments.cpp", (HERE / "fragments.cpp").read_text(), "-O3", own)]


def compiled(name, objects):
    """The library of some sources. A lock keeps other processes from compiling the same."""
    (ROOT / "build/ptx").mkdir(parents=True, exist_ok=True)
    with open(ROOT / "build/ptx/lock", "w") as lock, ThreadPoolExecutor(os.cpu_count()) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return simt.linked(name, list(threads.map(lambda s: simt.compiled(*s), objects)))


KERNEL = """struct Kernel {
  const char* name;
  void (*run)(void* const*);
  size_t shared;
  std::vector<size_t> sizes;
};"""


def module_library(mode, modules):
    """The path of a library with the kernels of PTX modules {file: text}, for `launch`."""
    own, options = own_headers(), options_of(mode)
    units, kernels = [], []
    for file, text in modules.items():
        found = translate(text, file)
        kernels += found["kernels"]
        units += [(f"{file}.{i}.cpp", unit) for i, unit in enumerate(found["units"])]
    table = ['#include "memory.h"']
    table += [f'extern "C" void {function}(void* const*);' for _, function, *_ in kernels]
    table += ["namespace ptx {", KERNEL, "static const Kernel KERNELS[] = {"]
    for name, function, shared, sizes in kernels:
        table.append(f'{{"{name}", {function}, {shared}, {{{", ".join(map(str, sizes))}}}}},')
    table.append("};\n}")
    launcher = (HERE / "launch.cpp").read_text()
    objects = [
        *runtime(own),
        ("launch.cpp", launcher, "-O1", own | {"modules.h": "\n".join(table)}),
        *((name, unit, options, own) for name, unit in units),
    ]
    return compiled(f"module.{mode}", objects)


def launch(library, name, grid, threads, shared, arguments, seed=0):
    """Launches a kernel of a module_library. arguments: tensors, whose addresses it gets, or ctypes
    values; where the kernel has more parameters, they are null pointers
    """
    library.ptx_launch.restype = ctypes.c_char_p
    count = library.ptx_parameter_count(name.encode())
    values = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments
    ]
    values += [ctypes.c_void_p(None)] * (count - len(values))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    library.simt_seed(ctypes.c_ulong(seed))
    library.simt_accept_any_memory()
    error = library.ptx_launch(name.encode(), (ctypes.c_uint * 5)(*grid, threads, shared), pointers)
    if error:
        raise RuntimeError(error.decode())


if __name__ == "__main__":
    print(library(*(sys.argv[1:] or ["plain", "sm_90a"])))
