"""Triton kernels, imported as `fusedseq.kernels`. The first of them come with the attention operators."""
