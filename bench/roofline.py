"""What the machine can do, measured in the same run, and what a call does to its memory."""

import ctypes
import time

import fusedseq
import torch
from fusedseq import testing


def synchronize(device):
    """Waits for the device; nothing to wait for on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def gemm_rates(device, dtype, n=2048, rounds=8):
    """{name: FLOP/s}, the best of several n x n x n products: torch's, and that of our recurrences where it runs."""
    a, b = torch.randn(n, n).to(device, dtype), torch.randn(n, n).to(device, dtype)
    products = {"torch.mm": torch.mm}
    if dtype == torch.float32 and a.device.type == "cpu" and hasattr(torch.ops.fusedseq, "gemm_rate"):
        products["own GEMM"] = lambda a, b: torch.ops.fusedseq.gemm_rate(a, b, 1)
    rates = {}
    for name, product in products.items():
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            product(a, b)
            synchronize(device)
            times.append(time.perf_counter() - start)
        rates[name] = 2 * n**3 / min(times[1:])
    return rates


def bandwidth_roof(row, device, dtype):
    """(a call, the bytes it moves): torch's own way of moving as much as the row's operator moves."""
    source = torch.randn(row.copied).to(device, dtype)
    if row.roof == "mv":
        vector = torch.randn(row.copied[-1]).to(device, dtype)
        return lambda: torch.mv(source, vector), source.nbytes
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def bound(function, args, kwargs, backward):
    """A call without arguments: `function` alone under no_grad, or with the gradients of all float inputs."""
    if not backward:

        def forward():
            with torch.no_grad():
                return function(*args, **kwargs)

        return forward

    leaves = testing.differentiable(args, kwargs)
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = []  # made in the first call, which is a warm-up

    def forward_backward():
        outputs = torch.utils._pytree.tree_leaves(function(*args, **kwargs))
        if not upstream:
            upstream.extend(testing.cotangents(outputs))
        return torch.autograd.grad(outputs, leaves, upstream)

    return forward_backward


def peak_memory(call, device):
    """Bytes in use at the worst moment of `call` above those before it; None where the system can't tell.

    CUDA: of torch's allocator. CPU: the resident set's high-water mark (Linux resets it on demand), after the
    allocator has given back what earlier calls freed: this sees a kernel's own workspace, and not memory that was
    reserved and never touched.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    try:
        fusedseq.empty_cache()  # kept blocks would hide what a call needs
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        before = resident("VmRSS")
        kept = call()
        peak = resident("VmHWM")
    except (OSError, AttributeError):
        return None
    del kept
    return max(0, peak - before)


def resident(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))
