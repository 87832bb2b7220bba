"""Whether the programs of this folder can run here, and for which GPU they build."""

import importlib.util
import subprocess
import sys


def architecture(environment):
    """Returns the GPU's architecture for TORCH_CUDA_ARCH_LIST: only this one has to be compiled
    here.
    """
    script = "import torch; print(*torch.cuda.get_device_capability(), sep='.')"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    version = found.stdout.strip()
    return environment.get("TORCH_CUDA_ARCH_LIST") or {"9.0": "9.0a"}.get(version, version)


def unavailable(fake):
    """Returns why nothing can run here, or None; fake: a rehearsal on the CPU was requested."""
    if importlib.util.find_spec("torch") is None:
        return f"needs torch, which {sys.executable} does not have"
    import torch

    if not fake and not torch.cuda.is_available():
        return "needs a GPU, and torch finds none here; FUSEDSEQ_FAKE_GPU=1 rehearses it on the CPU"
    return None
