"""The fused operators beside other libraries that a CPU user can install with pip."""
