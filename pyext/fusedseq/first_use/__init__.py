"""The first CUDA call of an operator on a GPU that no committed result is of: its kernels are
compared with the oracle once, before the call (guard.py). The verdicts are cached (verdicts.py).

It happens by itself, unless FUSEDSEQ_VERIFY is "off"; docs/gpus.md describes it for users.
"""
