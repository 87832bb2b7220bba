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

    "torch.mm" is torch's product, "own GEMM" the one inside our recurrences, where it can run. A
    product that would take more than a second, as torch's in bf16 on a processor without
    instructions for it, is measured with smaller matrices.
    """
    products = {"torch.mm": lambda a, b: lambda: torch.mm(a, b)}
    runs_own_gemm = dtype in (torch.float32, torch.bfloat16) and torch.device(device).type == "cpu"
    if runs_own_gemm and hasattr(torch.ops.fusedseq, "gemm_rate"):
        products["own GEMM"] = own_gemm
    return {
        name: product_rate(product, device, dtype, n, rounds) for name, product in products.items()
    }


def product_rate(product, device, dtype, n, rounds):
    """Returns the best FLOP/s of products of matrices of n x n, or of a half, a quarter, ... of n
    where one would take more than a second.

    product: a function of two matrices that returns the call to be measured
    """
    size = min(n, 256)
    while True:
        call = product(*(torch.randn(size, size).to(device, dtype) for _ in range(2)))
        once = [seconds(call, device) for _ in range(2)][-1]  # the first call is a warm-up
        if size == n or 8 * once > 1:
            break
        size = min(n, 2 * size)
    return 2 * size**3 / min([once, *(seconds(call, device) for _ in range(rounds - 1))])


def own_gemm(a, b):
    """Returns a call of our product, which takes fp32 numbers: for bf16 it rounds them, as it
    multiplies tensors of bf16 numbers."""
    precision = "medium" if a.dtype == torch.bfloat16 else "highest"
    a, b = a.float(), b.float()

    def call():
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
            # A loss is differentiated as by backward().
            output_gradients.extend(
                torch.ones_like(y) if y.dim() == 0 else g
                for y, g in zip(outputs, testing.cotangents(outputs), strict=True)
            )
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
