"""Small calls of every operator, forward and backward, for compute-sanitizer: python .ci/gpu_small_calls.py [DEVICE].

Of each operator the shortest cases of fusedseq.testing and the ones with the most options, in fp32 and bf16; the recurrences first.
A call says its name before it runs. An operator without a kernel in this build is named, and is no failure.
"""

import sys

import torch
from fusedseq import fused, testing

FIRST = ("mogrifier_lstm", "lstm", "attention", "linear_cross_entropy")
MOST = 3000  # elements: under the sanitizer a launch takes long


def chosen():
    """[case]: for each operator its smallest with something in it and its two with the longest names."""
    found = {}
    for case in testing.CASES:
        size = sum(t.numel() for t in testing.differentiable(*case.inputs()))
        if size <= MOST and (size or case.op == "dropout_mask"):
            found.setdefault(case.op, []).append((size, case))
    for op in sorted(found, key=lambda op: FIRST.index(op) if op in FIRST else len(FIRST)):
        smallest = min(found[op], key=lambda pair: pair[0])
        richest = sorted(found[op], key=lambda pair: -len(pair[1].id))[:2]
        yield from {str(case): case for _, case in [smallest, *richest]}.values()


def main(device="cuda"):
    missing = set()
    for case in chosen():
        for dtype in (torch.float32, torch.bfloat16):
            print(f"{case} {dtype}", flush=True)
            args, kwargs = case.inputs(device, dtype)
            try:
                results, grads = testing.run(getattr(fused, case.op), args, kwargs)
            except NotImplementedError:
                missing.add(case.op)
                continue
            for t in [*results, *grads]:
                assert t.is_sparse or not t.is_floating_point() or not t.isnan().any(), f"{case}: NaN"
    print(f"no kernel on {device}: {', '.join(sorted(missing))}" if missing else f"every operator ran on {device}")


if __name__ == "__main__":
    main(*sys.argv[1:])
