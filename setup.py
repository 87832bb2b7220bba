"""Packaging. csrc/build.py and csrc/rules.ninja say how fusedseq/_ops.so, fusedseq/_C and fusedseq/_autograd are compiled."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def need(condition, sentence):  # in place of a traceback, all of which pip would show
    if not condition:
        sys.exit(f"fusedseq: {sentence}")


def package(name, least):  # its directory; not imported, which takes torch seconds
    spec = importlib.util.find_spec(name)
    got = importlib.metadata.version(name) if spec else "none"
    need(spec and [int(n) for n in re.findall(r"\d+", got)[:2]] >= [int(n) for n in least.split(".")],
         f"a build needs {name} >= {least} in the environment it is for, got {got}: pip install '{name}>={least}', "
         "then pip install --no-build-isolation .")  # fmt: skip
    return Path(spec.origin).parent


TORCH, PYBIND11 = package("torch", "2.11"), package("pybind11", "2.12")
package("ninja", "1.8"), package("setuptools", "70.1")
need((ROOT / "pyext/fusedseq/kernels/__init__.py").is_file(), "pyext/fusedseq/kernels must be a link to ../../kernels, "
     "which this copy of the sources has lost: copy or check it out again, with symbolic links")  # fmt: skip

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

sys.path.insert(0, str(ROOT / "csrc"))
from build import build  # noqa: E402


class Build(build_ext):
    def get_ext_filename(self, name):  # nothing of Python is in _ops.so, nor in its name
        return name.replace(".", "/") + ".so" if name.endswith("_ops") else super().get_ext_filename(name)

    def run(self):
        os.chdir(ROOT)
        # Not self.build_temp, which an editable install throws away: a second build compiles only what has changed.
        temp = Path("build", f"{self.plat_name}-{sys.implementation.cache_tag}")
        facts = build(temp, self.plat_name.rpartition("-")[2], TORCH, PYBIND11)
        (temp / "build_info.json").write_text(json.dumps(facts, indent=1))
        paths = {f"{extension.name.rpartition('.')[2]}.so": Path(self.get_ext_fullpath(extension.name))
                 for extension in self.extensions}  # fmt: skip
        operators = paths["_ops.so"]
        targets = {**paths, "build_info.json": operators.with_name("build_info.json")}
        operators.parent.mkdir(parents=True, exist_ok=True)
        for name, target in targets.items():  # renamed, for a process that runs the old one keeps it
            shutil.copy2(temp / name, f"{target}.new")
            os.replace(f"{target}.new", target)


class Wheel(bdist_wheel):
    def run(self):  # what an earlier wheel left there may since have been deleted from the sources
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self):  # any Python: _C and _autograd are for one, and without them nothing but speed and facts is lost
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"fusedseq.{name}", []) for name in ("_ops", "_C", "_autograd")],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
