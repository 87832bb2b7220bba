"""Rates that the machine can reach, measured in the same run, and the peak memory of a call."""

import ctypes
import time

import fusedseq
import torch
from fusedseq import testing


def synchronize(device):
    """Waits until the device has finished; does nothing on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def seconds(call, device):
    """Returns how long a call takes."""
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def gemm_rates(device, dtype, n=2048, rounds=8):
    """Returns {name: FLOP/s}, the best of several n x n x n products.

    "torch.mm" is torch's product, "own GEMM" the one inside our recurrences, where it can run.
    """
    a, b = torch.randn(n, n).to(device, dtype), torch.randn(n, n).to(device, dtype)
    products = {"torch.mm": torch.mm}
    runs_own_gemm = dtype in (torch.float32, torch.bfloat16) and a.device.type == "cpu"
    if runs_own_gemm and hasattr(torch.ops.fusedseq, "gemm_rate"):
        products["own GEMM"] = own_gemm(a, b)
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


def own_gemm(a, b):
    """Returns a call of our product, which takes fp32 numbers: for bf16 it rounds them, as it
    multiplies tensors of bf16 numbers."""
    precision = "medium" if a.dtype == torch.bfloat16 else "highest"
    a, b = a.float(), b.float()

    def call(*_):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        torch.ops.fusedseq.gemm_rate(a, b, 1)
        torch.set_float32_matmul_precision(before)

    return call


def bandwidth_call(case, device, dtype):
    """Returns torch's call that moves as much as the case's operator, and these bytes."""
    source = torch.randn(case.copied).to(device, dtype)
    if case.roofline == "mv":
        vector = torch.randn(case.copied[-1]).to(device, dtype)
        return lambda: torch.mv(source, vector), source.nbytes
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def bind(function, args, kwargs, backward):
    """Returns a call without arguments: under no_grad, or with gradients of all float inputs."""
    if not backward:

        def forward():
            with torch.no_grad():
                return function(*args, **kwargs)

        return forward

    leaves = testing.differentiable(args, kwargs)
    for leaf in leaves:
        leaf.requires_grad_()
    output_gradients = []  # made in the first call, which is a warm-up

    def forward_backward():
        outputs = torch.utils._pytree.tree_leaves(function(*args, **kwargs))
        if not output_gradients:
            output_gradients.extend(testing.cotangents(outputs))
        return torch.autograd.grad(outputs, leaves, output_gradients)

    return forward_backward


def peak_memory(call, device):
    """Returns the most bytes in use during `call` beyond those before it; None if unknown.

    On CUDA it is that of torch's allocator. On a CPU it is the high-water mark of the resident set,
    which Linux resets on demand, after the allocator has returned what earlier calls freed. This
    includes a kernel's own workspace, but not memory that was reserved and never touched.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    try:
        fusedseq.empty_cache()  # cached blocks would hide what a call needs
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        before = resident_bytes("VmRSS")
        outputs = call()
        peak = resident_bytes("VmHWM")
    except (OSError, AttributeError):
        return None
    del outputs
    return max(0, peak - before)


def resident_bytes(field):
    """Returns VmRSS, the resident set, or VmHWM, its high-water mark, in bytes."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))
