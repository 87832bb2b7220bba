"""Compiles every Triton kernel that ships, without a GPU, and compares the result with
triton_table.json.

    python tests/triton/triton_table.py            # compares all calls with the table
    python tests/triton/triton_table.py --write    # replaces what is not up to date

A further argument selects the calls whose names begin with it. All calls take half an hour. A
compiler gives the same result again, so the table also has a key of what each call has compiled
(`keys`), and what has the same key today needs no compiling: an edit of a launcher or of a comment
between kernels changes no key.

The launchers are called with tensors of the meta device, under a driver that only reports which GPU
to compile for. So a kernel is compiled exactly as that call would compile it on that GPU, by the
`ptxas` that Triton contains.
"""

import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from fusedseq import kernels
from fusedseq.kernels.attention.plan import DESCRIBED_LOADS, SPECIALIZED_LOADS, TILED

TABLE = Path(__file__).with_name("triton_table.json")
CAPABILITIES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def norm(shape, dtype=torch.bfloat16, prenorm=False):
    """Calls of residual_layer_norm and its backward, with every tensor that they accept."""
    x, weight, seed = (
        empty(*shape, dtype=dtype),
        empty(shape[-1], dtype=dtype),
        empty(1, dtype=torch.int64),
    )
    module = kernels.module("residual_layer_norm")

    def forward():
        module.residual_layer_norm(x, x, weight, weight, 0.1, 1e-5, prenorm, seed)

    def backward():
        statistics = [empty(x.numel() // x.size(-1), dtype=torch.float32)] * 2
        ds, s = (x, x) if prenorm else (None, None)
        module.residual_layer_norm_backward(x, ds, x, x, weight, s, *statistics, 0.1, seed, 15)

    name = f"{shape[0]}x{shape[1]}-{str(dtype)[6:]}" + "-prenorm" * prenorm
    return {
        f"residual_layer_norm-{name}": forward,
        f"residual_layer_norm_backward-{name}": backward,
    }


def activation(shape, name, dtype=torch.bfloat16):
    """Calls of bias_activation_dropout and its backward."""
    x, b, seed = (
        empty(*shape, dtype=dtype),
        empty(shape[-1], dtype=dtype),
        empty(1, dtype=torch.int64),
    )
    module = kernels.module("bias_activation_dropout")
    label = f"{shape[0]}x{shape[1]}-{name}-{str(dtype)[6:]}"
    return {
        f"bias_activation_dropout-{label}": lambda: module.bias_activation_dropout(
            x, b, name, 0.1, seed
        ),
        f"bias_activation_dropout_backward-{label}": lambda: (
            module.bias_activation_dropout_backward(x, x, b, name, 0.1, seed, 3)
        ),
    }


def cross_entropy(label, dtype=torch.bfloat16, options=False):
    """Calls of linear_cross_entropy with and without gradients, and of its backward."""
    x, W, b = (
        empty(512, 640, dtype=dtype),
        empty(10_000, 640, dtype=dtype),
        empty(10_000, dtype=dtype),
    )
    inputs = (
        x,
        W,
        empty(512, dtype=torch.int64),
        b,
        empty(10_000, dtype=torch.float32) if options else None,
    )
    settings = -100, 0.1 * options, 1e-4 * options, 1.0, 1
    lse = empty(512, dtype=torch.float32)
    output_grads = empty(dtype=torch.float32), lse if options else None, lse if options else None
    module = kernels.module("linear_cross_entropy")
    return {
        f"linear_cross_entropy-{label}": lambda: module.linear_cross_entropy(*inputs, *settings, 7),
        f"linear_cross_entropy-{label}-forward": lambda: module.linear_cross_entropy(
            *inputs, *settings, 0
        ),
        f"linear_cross_entropy_backward-{label}": lambda: module.linear_cross_entropy_backward(
            *output_grads, lse, *inputs, *settings, 7
        ),
        "linear_cross_entropy_scale": lambda: module.linear_cross_entropy_scale(
            W, W, W, output_grads[0], W, 7
        ),
    }


def attention(
    L,
    S,
    D,
    dtype=torch.bfloat16,
    *,
    B=8,
    N=8,
    N_kv=8,
    causal=False,
    dropout=0.0,
    lengths=False,
    projected=False,
    bias=None,
    mask=None,
    alibi=False,
    relative=None,
    rope=False,
    rows=False,
    window=None,
    softcap=0.0,
    sinks=False,
    varlen=False,
):
    """A forward call and, except for decoding with key_rows, a backward call.

    varlen: the B sequences are packed in one row
    """
    floats, module = functools.partial(empty, dtype=dtype), kernels.module("attention")
    q, k, v = (floats(B, n, heads, D) for n, heads in ((L, N), (S, N_kv), (S, N_kv)))
    if varlen:
        q, k, v = (floats(1, B * n, heads, D) for n, heads in ((L, N), (S, N_kv), (S, N_kv)))
    if projected:
        q, k, v = floats(B, L, 3, N, D).unbind(2)
    bias, relative = bias and floats(*bias), relative and floats(2 * relative + 1, D)
    options = [
        bias,
        mask and empty(*mask, dtype=torch.bool),
        empty(B, dtype=torch.int64) if lengths else None,
        empty(N, dtype=torch.float32) if alibi else None,
        relative,
        empty(S, int(rope * D), dtype=torch.float32) if rope else None,
        rope is True,
    ]
    inputs = [*(x.transpose(1, 2) for x in (q, k, v)), *options]
    settings = [empty(1, dtype=torch.int64), D**-0.5, causal, S - L, dropout]
    cu_seqlens = empty(B + 1, dtype=torch.int64)
    extra = [empty(N, dtype=torch.float32) if sinks else None, softcap, *(window or (-1, -1))]
    extra += [cu_seqlens, cu_seqlens, L, S] if varlen else [None, None, 0, 0]
    out, lse = module.attention(
        *inputs, empty(B, S, dtype=torch.int64) if rows else None, *settings, *extra
    )
    if not rows:
        needs = 7 + 8 * (bias is not None) + 16 * (relative is not None) + 32 * sinks
        module.attention_backward(out, out, lse, *inputs, *settings, *extra, needs)


def attention_call(L, S, D, *, dtype=torch.bfloat16, **settings):
    name = f"attention-L{L}-S{S}-D{D}" + "-fp32" * (dtype == torch.float32)
    words = [
        f"{k}" if v is True else f"{k}{v:g}" if isinstance(v, float | int) else k
        for k, v in settings.items()
    ]
    return "-".join([name, *words]), functools.partial(attention, L, S, D, dtype, **settings)


def everything(L, S):
    """Returns every option except relative keys, with which the rope is applied outside of the
    kernel."""
    return {
        "causal": True,
        "dropout": 0.1,
        "lengths": True,
        "alibi": True,
        "bias": (1, 8, L, S),
        "mask": (8, 1, L, S),
    }


FP32 = torch.float32
ATTENTION = [
    *(attention_call(6, 6, D, lengths=True, dropout=0.1) for D in (32, 64, 2048)),
    attention_call(5, 5, 20, projected=True, causal=True, lengths=True, dropout=0.3),
    attention_call(6, 6, 64, rope=True, **everything(6, 6)),
    attention_call(6, 6, 64, relative=5, **everything(6, 6)),
    attention_call(6, 6, 32, dtype=FP32, lengths=True, dropout=0.1),
    attention_call(6, 6, 2048, dtype=FP32, rope=True, **everything(6, 6)),
    *(attention_call(90, 90, D, projected=True, lengths=True, dropout=0.3) for D in (10, 20, 60)),
    attention_call(90, 90, 64, causal=True, lengths=True, dropout=0.1),
    attention_call(90, 90, 64, rope=True, **everything(90, 90)),
    attention_call(90, 90, 64, relative=16, **everything(90, 90)),
    attention_call(90, 90, 64, dtype=FP32, causal=True, lengths=True, dropout=0.1),
    *(attention_call(1024, 1024, D, causal=True) for D in (64, 128, 256)),
    *(attention_call(1024, 1024, D, lengths=True, dropout=0.1, N_kv=2) for D in (64, 128, 512)),
    *(attention_call(1024, 1024, D, rope=True, **everything(1024, 1024)) for D in (64, 128, 256)),
    attention_call(1024, 1024, 64, relative=64, **everything(1024, 1024)),
    *(attention_call(512, 512, D, bias=(8, 8, 512, 512)) for D in (64, 128)),
    attention_call(1024, 1024, 128, causal=True, lengths=True, alibi=True, N_kv=2),
    *(
        attention_call(1024, 1024, D, **everything(1024, 1024) | {"dropout": 0.0})
        for D in (64, 128)
    ),
    attention_call(1024, 1024, 128, dtype=FP32, rope=True, **everything(1024, 1024)),
    *(
        attention_call(1024, 1024, D, causal=True, dropout=0.1, **option)
        for option in ({"window": (256, 0)}, {"softcap": 30.0}, {"sinks": True}, {"varlen": True})
        for D in (64, 128)
    ),
    attention_call(
        1024, 1024, 64, window=(256, 0), softcap=30.0, sinks=True, **everything(1024, 1024)
    ),
    attention_call(1024, 1024, 64, varlen=True, window=(256, 0), softcap=30.0, sinks=True),
    attention_call(1024, 1024, 64, dtype=FP32, varlen=True, window=(256, 0), sinks=True),
    *(
        attention_call(n, n, D, mask=(8, 1, n, n), dropout=0.1)
        for n, D in ((6, 10), (6, 64), (90, 20), (90, 64), (1024, 64), (1024, 128), (1024, 256))
    ),
    attention_call(1, 1024, 64, causal=True, rows=True),
    attention_call(1, 1024, 128, causal=True, rows=True, rope=True),
]


def described_attention(D, dropout, loads):
    """A causal forward call whose tiled kernel loads keys and values in this way; see
    kernels/attention/plan.py."""
    module, key = kernels.module("attention"), (D, int(dropout > 0), "forward")
    q, seed = empty(8, 1024, 8, D).transpose(1, 2), empty(1, dtype=torch.int64)
    kernels.tiles[key] = (*TILED[key[:2]][0], loads)
    try:
        module.attention(q, q, q, *[None] * 6, False, None, seed, D**-0.5, True, 0, dropout)
    finally:
        kernels.tiles.clear()


# On sm_80 they load by pointers, and only on sm_100 in warps of their own.
LOADS = {"descriptors": DESCRIBED_LOADS, "specialized": SPECIALIZED_LOADS}
DESCRIBED = {
    f"attention-L1024-S1024-D{D}-causal{label}-{name}": functools.partial(
        described_attention, D, dropout, loads
    )
    for D in (64, 128)
    for label, dropout in (("", 0.0), ("-dropout0.1", 0.1))
    for name, loads in LOADS.items()
}
# Calls of launchers that cover each kernel and configuration that ships.
CALLS = {
    **dict(ATTENTION),
    **DESCRIBED,
    "dropout_mask": lambda: kernels.module("dropout_mask").dropout_mask(
        empty(1, dtype=torch.int64), 0.3, (90, 90)
    ),
    **norm((12288, 256), torch.float32),
    **norm((5760, 512)),
    **norm((5760, 512), torch.float32, prenorm=True),
    **norm((64, 4096), torch.float32),
    **norm((64, 16384), prenorm=True),
    **activation((5760, 2048), "relu", torch.float32),
    **activation((5760, 2048), "gelu"),
    **activation((5760, 2048), "gelu_tanh"),
    **activation((5760, 2048), "tanh"),
    **cross_entropy("bfloat16"),
    **cross_entropy("bfloat16-options", options=True),
    **cross_entropy("float32", torch.float32),
}


class Driver:
    """The part of Triton's CUDA driver that compiling needs."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


def compiled(call, capability):
    """Returns {kernel: facts} of the kernels that CALLS[call] launches on a GPU of this
    capability."""
    from triton.runtime import JITFunction, driver

    driver.set_active(Driver(capability))
    found, run = {}, JITFunction.run

    def compile_only(kernel, *args, **kwargs):
        name = kernel.fn.__name__
        assert name not in found, f"{call} launches {name} twice"
        found[name] = facts(run(kernel, *args, **{**kwargs, "warmup": True}))

    JITFunction.run = compile_only
    try:
        CALLS[call]()
    finally:
        JITFunction.run = run
    return found


def facts(kernel):
    usage = resources(kernel.asm["cubin"])
    return {
        "registers": usage["REG"],
        "shared": kernel.metadata.shared,
        "stack": usage["STACK"],  # bytes that a thread spills; LOCAL stays 0
        "narrow loads": narrow_loads(kernel.asm["ptx"]),
        "wide operands": wide_operands(kernel.asm["ttgir"]),
    }


def wide_operands(ttgir):
    """Counts the operands of products, in registers, of which four threads hold more elements than
    there are: the product is wrong then, see `operand` in kernels/attention/tile.py."""
    operands = re.findall(
        r"tensor<([\dx]+)x\w+, #ttg\.dot_op<{opIdx = (\d), parent = #\w+, kWidth = (\d+)}>>", ttgir
    )
    sizes = (([int(n) for n in shape.split("x")], index, width) for shape, index, width in operands)
    # The products are over the last dimension of the first operand, the last but one of the second.
    return sum(shape[-1 - int(index)] < 4 * int(width) for shape, index, width in sizes)


def narrow_loads(ptx):
    """Counts the loads from global memory that read two bytes per thread."""
    loads = re.findall(r"\bld\.global([\w.:]*)", ptx)
    return sum(
        bool(re.search(r"\.[bu]16$", load)) and not re.search(r"\.v\d", load) for load in loads
    )


def resources(cubin):
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


@functools.cache
def keys():
    """Returns {call: {GPU: key}}, a hash of all that Triton compiles for each call: the sources of
    the kernels and of the functions that they call, types, constants, alignments and options; and
    of the functions here that read what was compiled.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(keys_in_this_process).result()


def keys_in_this_process():
    from triton.runtime import JITFunction, driver

    for module in pkgutil.walk_packages(kernels.__path__, "fusedseq.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if hasattr(value, "starting_line_number"):
                value.starting_line_number = 0  # part of Triton's hash of a function
    reading = "".join(map(inspect.getsource, (facts, narrow_loads, wide_operands, resources)))
    found = {}
    for call, gpu in all_jobs():
        digest = hashlib.sha256(reading.encode())

        def instead_of_compiling(kernel, _, *settings, to=digest):
            *arguments, _warmup = settings  # signature, device, constants, options, attributes
            to.update(repr((kernel.cache_key, arguments)).encode())

        JITFunction._do_compile = instead_of_compiling
        driver.set_active(Driver(CAPABILITIES[gpu]))
        CALLS[call]()
        found.setdefault(call, {})[gpu] = digest.hexdigest()[:16]
    return found


def all_jobs(calls=tuple(CALLS)):
    """Returns [(call, GPU)] of each call on every GPU."""
    return [(call, gpu) for call in calls for gpu in CAPABILITIES]


def compile_all(jobs):
    """Returns {call: {GPU: {kernel: facts}}} of these (call, GPU).

    It uses as many processes as there are processors. A lock admits one caller at a time, so that
    of several test processes the later ones find the first one's results in Triton's cache.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    cache = Path(
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[2] / ".cache/triton"))
    )
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "compile_all.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _compile_all(jobs)


def _compile_all(jobs):
    found = {call: {} for call, _ in jobs}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        results = pool.map(
            compiled, *zip(*((call, CAPABILITIES[gpu]) for call, gpu in jobs), strict=True)
        )
        for (call, gpu), result in zip(jobs, results, strict=True):
            found[call][gpu] = result
    return found


@functools.cache
def version():
    return importlib.metadata.version("triton")


def table():
    """Returns the installed Triton's part of the table, or None if there is none."""
    return json.loads(TABLE.read_text()).get(version())


def outdated_jobs():
    """Returns [(call, GPU)] of what the installed Triton would compile otherwise than for the
    table."""
    known = json.loads(TABLE.read_text())["keys"].get(version(), {})
    return [
        (call, gpu) for call, gpu in all_jobs() if known.get(call, {}).get(gpu) != key(call, gpu)
    ]


def key(call, gpu):
    return keys()[call][gpu]


def updated(table, jobs, found):
    """Returns {call: {GPU: facts}} of all calls: what was found of these jobs, and the rest of the
    table."""
    return {
        call: {gpu: (found if (call, gpu) in jobs else table)[call][gpu] for gpu in CAPABILITIES}
        for call in CALLS
    }


def write():
    """Compiles what is not up to date, and replaces it in the table."""
    jobs = outdated_jobs()
    found = compile_all(jobs) if jobs else {}
    whole = json.loads(TABLE.read_text())
    whole[version()] = updated(whole.get(version(), {}), jobs, found)
    whole["keys"][version()] = keys()
    TABLE.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    return 0


def main():
    if "--write" in sys.argv:
        return write()
    prefix = "".join(sys.argv[1:])
    found = compile_all(all_jobs([call for call in CALLS if call.startswith(prefix)]))
    known = table() or {}
    differs = False
    for call, gpus in found.items():
        for gpu, kernel_facts in gpus.items():
            for kernel, got in kernel_facts.items():
                expected = known.get(call, {}).get(gpu, {}).get(kernel)
                print(
                    f"{call:40} {gpu:7} {kernel:28} {got}",
                    "" if got == expected else f"  was {expected}",
                )
                differs |= got != expected
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
