"""Adds up the gradients of a call, block by block of logits."""

import torch


class Sums:
    """dx, dW and db in fp32, of those that the bits 1, 2, 4 of `needs` ask for, while blocks are
    added to them."""

    def __init__(self, call, needs):
        self.call, self.needs = call, needs
        width = call.x.size(1)
        shapes = ((call.N, width), (call.V, width), (call.V,))
        self.dx, self.dW, self.db = (
            call.x.new_empty(shape if needs & 1 << i else (0,), dtype=torch.float32)
            for i, shape in enumerate(shapes)
        )

    def add(self, z, chunk, block):
        """Adds what the gradient z of a block contributes; the first block of some rows or columns
        writes."""
        rows, columns = chunk.rows, block.columns
        if self.needs & 1:
            add_product(self.dx[rows], z, block.W, columns.start > 0)
        if self.needs & 2:
            add_product(self.dW[columns], z.T, chunk.x, rows.start > 0)
        if self.needs & 4:
            total = z.sum(0, dtype=torch.float32)
            self.db[columns] = self.db[columns] + total if rows.start > 0 else total

    def finish(self, factor=None):
        """Returns dx, dW and db times a factor: bf16 tensors if x is a bf16 tensor, else fp32
        tensors. Gradients in fp16 could underflow before they are multiplied by a loss scale. The
        gradients of an empty batch, which no block has written, are zeros."""
        found = self.dx, self.dW, self.db
        for total in found:
            if self.call.N == 0:
                total.zero_()
            elif factor is not None:
                total.mul_(factor)
        dtype = torch.bfloat16 if self.call.x.dtype == torch.bfloat16 else torch.float32
        return tuple(
            (t if t.dim() == 1 else t[:, : self.call.E].contiguous()).to(dtype) for t in found
        )


def add_product(total, A, B, accumulate):
    """total = A B, or total += A B if `accumulate`: operands in their dtype, sums in fp32."""
    if A.dtype == total.dtype:
        torch.addmm(total, A, B, out=total) if accumulate else torch.mm(A, B, out=total)
    elif A.device.type == "cuda":
        wide = {"out_dtype": total.dtype, "out": total}
        torch.addmm(total, A, B, **wide) if accumulate else torch.mm(A, B, **wide)
    else:  # Triton's interpreter
        add_product(total, A.float(), B.float(), accumulate)
