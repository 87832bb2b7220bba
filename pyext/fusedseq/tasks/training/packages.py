"""The optional packages of a run, and what it lacks without them."""

from collections.abc import Mapping
from importlib.util import find_spec

OF_TRAINING = {
    "rich": "no progress bar",
    "tensorboard": "no TensorBoard log",
    "matplotlib": "no plots",
}


def remark(more: Mapping[str, str]) -> str | None:
    """One line on all missing packages; None where all are installed.

    more: {package: what is lacking without it}, besides OF_TRAINING
    """
    wanted = {**OF_TRAINING, **more}
    missing = [name for name in wanted if find_spec(name) is None]
    if not missing:
        return None
    lacking = ", ".join(dict.fromkeys(wanted[name] for name in missing))
    return f"{lacking}: that needs packages that are not installed: pip install {' '.join(missing)}"
