"""Packaging. csrc/build.py and csrc/rules.ninja say how _ops.so, _C and _autograd are compiled."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def require(condition, sentence):
    """Ends the build with one sentence; an exception would make pip print its whole traceback."""
    if not condition:
        sys.exit(f"fusedseq: {sentence}")


def package_folder(name, minimum):
    """The folder of a package, which is not imported: importing torch takes seconds."""
    spec = importlib.util.find_spec(name)
    found = importlib.metadata.version(name) if spec else "none"
    versions = [[int(n) for n in re.findall(r"\d+", v)[:2]] for v in (found, minimum)]
    require(
        spec and versions[0] >= versions[1],
        f"a build needs {name} >= {minimum} in the environment it is for, got {found}: "
        f"pip install '{name}>={minimum}', then pip install --no-build-isolation .",
    )
    return Path(spec.origin).parent


TORCH, PYBIND11 = package_folder("torch", "2.11"), package_folder("pybind11", "2.12")
package_folder("ninja", "1.8"), package_folder("setuptools", "77.0")
KERNELS = ROOT / "pyext/fusedseq/kernels/__init__.py"
require(
    KERNELS.is_file(),
    "pyext/fusedseq/kernels must be a link to ../../kernels, which this copy of the sources has "
    "lost: copy or check it out again, with symbolic links",
)

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

sys.path.insert(0, str(ROOT / "csrc"))
from build import build  # noqa: E402


class Build(build_ext):
    def get_ext_filename(self, name):  # _ops.so does not depend on Python, and so has no tag
        plain, machine = name.replace(".", "/") + ".so", self.plat_name.rpartition("-")[2]
        tagged = super().get_ext_filename(name).replace(platform.machine(), machine)
        return plain if name.endswith("_ops") else tagged

    def run(self):
        os.chdir(ROOT)
        # An editable install deletes self.build_temp; this folder stays, so that a second build
        # compiles only what has changed.
        temp = Path("build", f"{self.plat_name}-{sys.implementation.cache_tag}")
        facts = build(temp, self.plat_name.rpartition("-")[2], TORCH, PYBIND11)
        (temp / "build_info.json").write_text(json.dumps(facts, indent=1))
        targets = {
            f"{extension.name.rpartition('.')[2]}.so": Path(self.get_ext_fullpath(extension.name))
            for extension in self.extensions
        }
        targets["build_info.json"] = targets["_ops.so"].with_name("build_info.json")
        targets["_ops.so"].parent.mkdir(parents=True, exist_ok=True)
        for name, target in targets.items():
            # Renamed into place, because a running process may have the old file open.
            shutil.copy2(temp / name, f"{target}.new")
            os.replace(f"{target}.new", target)


class Wheel(bdist_wheel):
    def run(self):  # an earlier wheel may have left files that the sources no longer have
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self):  # any Python: only speed and facts are lost without _C and _autograd
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"fusedseq.{name}", []) for name in ("_ops", "_C", "_autograd")],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
