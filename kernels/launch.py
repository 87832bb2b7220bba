"""The one place that starts a kernel."""


def run(kernel, blocks, *args, warps, stages=1, **constants):
    """Starts `blocks` programs of a kernel, on the grid's first axis: the others end at 65,535.

    Floating-point contraction is asked for by name, because its default is to change in Triton 3.10.
    """
    if blocks:
        kernel[(blocks,)](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True)
