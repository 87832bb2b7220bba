"""What the attention kernels require of a call, beyond the checks of the public function: see
fusedseq.kernels.shapes.
"""

from fusedseq.kernels import shapes

LARGEST_TILE = 256  # queries or keys: a kernel computes positions up to that many behind the last


def require_shapes(q, k, v, sizes, bias, mask, key_lengths, alibi, key_rows, extra):
    """Checks the shapes of all tensors but rope and relative_keys.    sizes: (B, N, L, S)"""
    B, N, _, S = sizes
    op = "attention" if extra.cu_seqlens_q is None else "attention_varlen"
    heads = k.size(1) if k.dim() == 4 else 0
    if not heads or N % heads:
        shapes.refuse(op, "k", f"(B, N_kv, S, D) with an N_kv that divides N = {N}", k)
    # key_rows says which rows of k and v are keys: k may have another batch size then.
    batch = q.size(0) if key_rows is None else k.size(0)
    shapes.require(
        op,
        k=(k, (batch, heads, k.size(2), q.size(3))),
        v=(v, k.shape),
        key_lengths=(key_lengths, (B,)),
        alibi=(alibi, (N,)),
        sinks=(extra.sinks, (N,)),
        key_rows=(key_rows, (B, S)),
        cu_seqlens_k=(extra.cu_seqlens_k, (B + 1,)),
    )
    shapes.require_broadcast(op, bias=(bias, sizes), mask=(mask, sizes))


def require_positions(q, rope, offset, L, S):
    """Checks that rope has all positions, and that the kernels compute these in 32 bits, or in 64
    bits if the offset needs them.
    """
    if rope is not None:
        positions, R = max(offset + L, S), q.size(3)
        if rope.dim() != 2 or rope.size(0) < positions or offset < 0 or rope.size(1) > R:
            wanted = f"(P, R) with P at least {positions}, R at most {R} and offset at least 0"
            shapes.refuse("attention", "rope", wanted, rope)
    if abs(offset) < 2**31 <= abs(offset) + L + S + LARGEST_TILE:
        raise RuntimeError(
            "attention: offset must be at least 2^31, or leave positions of 32 bits on a GPU, got "
            f"{offset} with {L} queries and {S} keys"
        )


def within_reach(option):
    """Returns a bias or mask whose keys are reached by offsets of 32 bits, which the kernels
    compute: a copy where its last stride is too large.
    """
    if option is None or option.stride(-1) * option.size(-1) < 2**31:
        return option
    return option.contiguous()
