"""Small calls of every operator, forward and backward: python -m tools.gpu.small_calls [DEVICE].

compute-sanitizer runs this program, and so does the part first-use, with FUSEDSEQ_VERIFY=always: it
fails where the kernels of an operator disagree with the oracle. For each operator it takes the
smallest case of fusedseq.testing and the two with the most options, in fp32 and bf16, the
recurrences first. Each call prints its name before it runs. An operator without a kernel in this
build is named at the end; that is no failure.
"""

import faulthandler
import os
import sys

import torch
from fusedseq import fused, testing
from fusedseq.fused import autograd

FIRST = ("mogrifier_lstm", "lstm", "attention", "linear_cross_entropy")
STUCK = 60  # seconds after which the log gets what every thread is doing
MAX_ELEMENTS = 3000  # a launch is slow under the sanitizer


def selected_cases():
    """Yields for each operator its smallest nonempty case and the two with the longest names."""
    found = {}
    for case in testing.CASES:
        size = sum(t.numel() for t in testing.differentiable(*case.inputs()))
        if size <= MAX_ELEMENTS and (size or case.op == "dropout_mask"):
            found.setdefault(case.op, []).append((size, case))
    for op in sorted(found, key=lambda op: FIRST.index(op) if op in FIRST else len(FIRST)):
        smallest = min(found[op], key=lambda pair: pair[0])
        # A case's name lists its options.
        most_options = sorted(found[op], key=lambda pair: -len(pair[1].id))[:2]
        yield from {str(case): case for _, case in [smallest, *most_options]}.values()


def main(device="cuda"):
    missing = set()
    # The comparison at the first use sets it where only the persistent kernels disagree.
    loop_was_asked_for = os.environ.get("FUSEDSEQ_RECURRENCE") == "loop"
    faulthandler.dump_traceback_later(STUCK, repeat=True)
    for case in selected_cases():
        for dtype in (torch.float32, torch.bfloat16):
            print(f"{case} {dtype}", flush=True)
            args, kwargs = case.inputs(device, dtype)
            try:
                results, grads = testing.run(getattr(fused, case.op), args, kwargs)
            except NotImplementedError:
                missing.add(case.op)
                continue
            for t in [*results, *grads]:
                is_dense_float = t.is_floating_point() and not t.is_sparse
                assert not is_dense_float or not t.isnan().any(), f"{case}: NaN"
    if missing:
        print(f"no kernel on {device}: {', '.join(sorted(missing))}")
    else:
        print(f"every operator ran on {device}")
    disagreeing = sorted(op for op, _ in autograd.switched_off)
    if disagreeing or (os.environ.get("FUSEDSEQ_RECURRENCE") == "loop" and not loop_was_asked_for):
        sys.exit(f"the kernels disagree with the oracle: {', '.join(disagreeing) or 'recurrences'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
