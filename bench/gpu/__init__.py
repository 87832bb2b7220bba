"""The cases of `make gpu`: their measurement with CUDA events and graphs, their tables."""
