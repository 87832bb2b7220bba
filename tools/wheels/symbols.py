"""python -m tools.wheels.symbols LIBRARY_OR_WHEEL ...: which symbols of other libraries are used.

Prints, for each shared library, how many symbols it uses of whom, and the newest version of each
system library. allowed.toml says what is allowed; every symbol beyond that is named, and the exit
code is 1.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ALLOWED = tomllib.loads(Path(__file__).with_name("allowed.toml").read_text())


@dataclass(frozen=True)
class Uses:
    """What a shared library uses of others."""

    libraries: list[str]  # its DT_NEEDED entries
    symbols: list[tuple[str, str]]  # (name, version such as GLIBC_2.14, or "" if it has none)


def readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def uses(library: Path) -> Uses:
    """Reads a library of any processor."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", library))
    # Number, value, size, type, binding, visibility, section UND, name@version (index).
    undefined = re.findall(r" UND (\S+)", readelf("--dyn-syms", library))
    symbols = sorted(
        {(name, version) for name, _, version in (s.partition("@") for s in undefined)}
    )
    return Uses(needed, symbols)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def numbers(version: str) -> list[int]:
    return [int(n) for n in version.split(".")]


def problems(name: str, used: Uses, allowed: dict[str, Any] = ALLOWED) -> Iterator[str]:
    """Yields a sentence for every library and symbol that is not allowed, and for every library
    that is missing.

    name: of the library, up to the first dot: _ops, _C or _autograd
    """
    own = allowed.get(name)
    if own is None:
        yield f"{name}: allowed.toml has no table for this library"
        return
    for needed in used.libraries:
        if not matches(needed, [*allowed["system"]["libraries"], *own["libraries"]]):
            yield f"{name}: needs the library {needed}"
    if any(not version and matches(symbol, own["symbols"]) for symbol, version in used.symbols):
        for library in own.get("required", ()):
            if library not in used.libraries:
                yield f"{name}: does not name {library}, whose symbols it uses"
    for symbol, version in used.symbols:
        family, _, number = version.rpartition("_")
        limit = allowed["versions"].get(family)
        if not version:
            if not matches(symbol, [*allowed["system"]["symbols"], *own["symbols"]]):
                yield f"{name}: uses {symbol}, which allowed.toml does not list"
        elif limit is None:
            yield f"{name}: uses {symbol} of {version}, of which allowed.toml has no versions"
        elif not re.fullmatch(r"[\d.]+", number) or numbers(number) > numbers(limit):
            yield f"{name}: uses {symbol} of {version}, newer than {family}_{limit}"


def summary(used: Uses) -> str:
    """Returns a line: the number of symbols by whose they are, and the newest versions."""
    newest: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for symbol, version in used.symbols:
        family, _, number = version.rpartition("_")
        if re.fullmatch(r"[\d.]+", number):
            newest[family] = max(newest.get(family, "0"), number, key=numbers)
        kind = "Python" if re.match("_?Py", symbol) else "torch or the linker"
        counts[family or kind] += 1
    return ", ".join(
        f"{count} of {family}" + (f" (to {newest[family]})" if family in newest else "")
        for family, count in sorted(counts.items())
    )


def shared_libraries(path: Path, folder: Path) -> list[Path]:
    """Returns the shared libraries of a wheel, unpacked into `folder`, or the library itself."""
    if path.suffix != ".whl":
        return [path]
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return [Path(archive.extract(name, folder)) for name in names]


def check(path: Path) -> list[str]:
    """Prints what the libraries of a wheel, or a library, use; returns what is not allowed."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        libraries = shared_libraries(path, Path(folder))
        if not libraries:
            found.append(f"{path.name}: has no shared library")
        for library in libraries:
            used = uses(library)
            print(f"{library.name}: {summary(used)}")
            found += problems(library.name.partition(".")[0], used)
            found += folders_in(library)
    return found


def folders_in(library: Path) -> list[str]:
    """Returns a sentence for each folder of the environment that a library names.

    Headers name their file in the texts of assertions, see csrc/rules.ninja. (nvcc has the folder
    of the sources in the lines that profilers show.)
    """
    content = library.read_bytes()
    folders = {sys.prefix, sys.base_prefix}
    return [
        f"{library.name}: names the folder {folder} of the machine that compiled it"
        for folder in sorted(folders - {"/", "/usr", "/usr/local"})
        if f"{folder}/".encode() in content
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels.symbols", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="LIBRARY_OR_WHEEL")
    found = [problem for file in parser.parse_args().files for problem in check(file)]
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
