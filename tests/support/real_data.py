"""Finds the real data sets of the tasks, whose tests are skipped where they are missing."""

import os
from pathlib import Path


def real(*folders):
    """The first of `folders` that exists in the directory FUSEDSEQ_DATA, or None."""
    root = os.environ.get("FUSEDSEQ_DATA")
    candidates = [Path(root) / folder for folder in folders] if root else []
    return next((path for path in candidates if path.is_dir()), None)
