"""The cross-entropy of a linear map's rows, computed by blocks of logits.

cuBLAS, called through torch, computes the products. One Triton kernel turns a block of logits into
the rows' statistics, into its own gradient, or into both.

On an H100 (3.0 TB/s, 777 TFLOP/s in bf16), forward and backward
(bench/results/nvidia-h100-cuda-linear-cross-entropy.json):
- 2,048 x 256 x 100,000 (N x E x V): 1.56 ms. Four products, since each block is computed twice,
  take 0.54 ms at that rate; the logits, moved seven times, 0.95 ms.
- 4,900 x 650 x 10,000: 0.73 ms. Three products, 0.25 ms; the logits, moved five times, 0.16 ms.

Blocks of 32 MiB, which the L2 cache of 50 MB would hold, took 1.65 and 0.94 ms: they are more and
smaller products, and more launches, 26 to 43 us of host time each. Rows that do not begin at
multiples of 16 bytes took 1.68 ms in the second case, in place of 1.01 then: cuBLAS has fast
kernels for aligned rows alone. Sums of products of parts of the classes for dx, which have more
tiles than one product, saved nothing.
"""

import torch
from fusedseq.kernels import shapes
from fusedseq.kernels.linear_cross_entropy.call import NONE, Call
from fusedseq.kernels.linear_cross_entropy.plan import plan
from fusedseq.kernels.linear_cross_entropy.sums import Sums


def linear_cross_entropy(
    x,  # arguments as of Call
    W,
    target,
    b,
    class_weights,
    ignore_index,
    label_smoothing,
    z_loss,
    temperature,
    reduction,
    needs,
):
    """Returns loss, log_prob, lse, argmax, dx, dW, db.

    The gradients are those for a gradient of 1 of the loss, which `linear_cross_entropy_scale`
    multiplies later; they are computed here because the blocks of logits are at hand.
    """
    options = ignore_index, label_smoothing, z_loss, temperature, reduction
    call = Call(x, W, target, b, class_weights, *options)
    loss, log_prob, lse = call.z.new_empty(3, call.N, dtype=torch.float32)
    results = loss, log_prob, lse, torch.empty_like(call.target), loss.new_empty(call.N, 4)
    sums = Sums(call, needs)
    # In fp16 a gradient divided by the number of rows would underflow: it is divided after the
    # products.
    divide_late = x.dtype == torch.float16
    output_grads = torch.ones_like(call.factor) if divide_late else call.factor, None, None
    whole_rows = len(call.blocks) == 1
    for chunk in call.chunks(output_grads, results):
        for block in call.blocks:
            z = call.logits(chunk, block)
            call.run(z, chunk, block, True, bool(needs) and whole_rows)
            if needs and whole_rows:
                sums.add(z, chunk, block)
        # Blocks of some columns are recomputed once the log-sum-exp of all columns is known.
        for block in call.blocks if needs and not whole_rows else ():
            z = call.logits(chunk, block)
            call.run(z, chunk, block, False, True)
            sums.add(z, chunk, block)
    gradients = sums.finish(call.factor if divide_late else None)
    if reduction != NONE:
        loss = loss.sum() * call.factor
    return (loss, log_prob.clone(), lse.clone(), results[3], *gradients)


def linear_cross_entropy_backward(
    dloss,  # of the loss, or None
    dlog_prob,  # (N,) or None
    dlse,  # (N,) or None
    lse,  # (N,) fp32, saved by forward
    x,  # from here as of Call
    W,
    target,
    b,
    class_weights,
    ignore_index,
    label_smoothing,
    z_loss,
    temperature,
    reduction,
    needs,
):
    """Returns dx, dW, db for any output gradients, from recomputed logits."""
    options = ignore_index, label_smoothing, z_loss, temperature, reduction
    call = Call(x, W, target, b, class_weights, *options)
    of_rows = {"dlog_prob": dlog_prob, "dlse": dlse, "lse": lse}
    wanted = {name: (t, (call.N,)) for name, t in of_rows.items()}
    wanted["dloss"] = dloss, (call.N,) if reduction == NONE else ()
    shapes.require("linear_cross_entropy_backward", **wanted)
    if dloss is None:
        dloss = torch.zeros_like(call.factor)
    elif reduction != NONE:
        dloss = dloss * call.factor
    output_grads = [t if t is None else t.contiguous() for t in (dloss, dlog_prob, dlse)]
    results = None, None, lse.contiguous(), None, None
    sums = Sums(call, needs)
    for chunk in call.chunks(output_grads, results):
        for block in call.blocks:
            z = call.logits(chunk, block)
            call.run(z, chunk, block, False, True)
            sums.add(z, chunk, block)
    return sums.finish()


def linear_cross_entropy_scale(dx, dW, db, dloss, x, needs):
    """Returns the gradients of `linear_cross_entropy` times dloss, in the dtype of x; empty tensors
    where not needed."""
    return tuple(
        torch.mul(g, dloss, out=torch.empty_like(g, dtype=x.dtype))
        if needs >> i & 1
        else x.new_empty(0)
        for i, g in enumerate((dx, dW, db))
    )


def explain(x, W, *args, **kwargs):
    """Returns which kernel a call runs, and why."""
    N, V = x.numel() // max(1, x.size(-1)), len(W)
    rows, columns = plan(N, V, x.element_size())
    how = (
        f"{min(rows, N)} rows of all classes at a time"
        if columns >= V
        else f"{columns} classes of all rows at a time, twice"
    )
    return f"kernels/linear_cross_entropy; torch's products, {how}"
