"""Calls of attention like one before, but for what is in the tensors: what the launch takes beside these is kept with what was
compiled. For short sequences, which the host's time limits: the packed and row kernels without a bias, mask, relative keys or cache.

The host's time of a call, with a launch that does nothing (L 5, Triton 3.7, by hand): 26 us forward and 36 backward without this,
9 and 16 with it; the memory of the results alone takes 4 of the 9.
"""

from typing import Any, NamedTuple

import torch
from fusedseq.kernels import launch
from fusedseq.kernels.attention_tile import Terms


class Kept(NamedTuple):
    found: Any  # of launch.run
    blocks: int
    strides: tuple[Any, ...]  # between the tensors and the terms
    sizes: tuple[Any, ...]  # behind the terms

    def run(self, tensors, key_lengths, alibi, rope, seed):
        terms = Terms(None, None, None, None, None, key_lengths, alibi, None, None, rope, None, seed)
        launch.again(self.found, self.blocks, *tensors, *self.strides, terms, *self.sizes)


_kept: dict[tuple[Any, ...], Kept] = {}


def key_of(tensors, key_lengths, alibi, rope, seed, dropout, *more):
    """What decides how a call is launched; None for a call that cannot be kept.    tensors: (B, N, L or S, D)"""
    if not launch.on_gpu(tensors[0]):
        return None
    key = [tensors[0].dtype, tensors[0].get_device(), dropout, *more]
    for x in tensors:
        if x.stride(-1) != 1:
            return None
        key += (x.shape, x.stride(), x.data_ptr() & 15)
    if key[0] == torch.float32:
        key.append(torch.backends.cuda.matmul.fp32_precision)
    for x in (key_lengths, alibi, rope, seed if dropout else None):
        if x is None:
            key.append(None)
        elif x.is_contiguous():
            key += (x.dtype, x.data_ptr() & 15)
        else:  # it is copied first
            return None
    return tuple(key)


def find(key):
    return _kept.get(key)


def run(key, kernel, blocks, args, constants):
    """launch.run, kept under a key that is not None.    args: tensors, strides, the terms, sizes"""
    found = launch.run(kernel, blocks, *args, **constants)
    if found is None or key is None:
        return
    terms = next(i for i, x in enumerate(args) if isinstance(x, Terms))
    strides = next(i for i, x in enumerate(args) if isinstance(x, tuple))
    launch.keep(_kept, key, Kept(found, blocks, args[strides:terms], args[terms + 1 :]))
