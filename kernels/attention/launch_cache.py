"""Launch cache for attention: when shapes, strides, pointer alignment and options equal an earlier
call's, its compiled kernels and launch arguments are reused.

It serves calls without relative keys, key_rows and the options of the tiled kernels alone. Short
calls are limited by host time, and so are those of a few hundred positions.

Host time of a call, measured with launches that do nothing (Triton 3.7, measured manually, no
result file): at L 5 26 us forward and 36 us backward without this cache, 9 and 16 us with it, of
which allocating the results takes 4; at L 512 94 and 194 us without, 18 and 45 us with it, on a
slower processor.
"""

from typing import Any, NamedTuple

import torch
from fusedseq.kernels import launch
from fusedseq.kernels import tiles as measured
from fusedseq.kernels.attention.arguments import OptionalTensors


class Options(NamedTuple):
    """The tensors among a call's options, or None."""

    bias: Any
    mask: Any
    key_lengths: Any
    alibi: Any
    rope: Any
    seed: Any  # None without dropout


class CachedLaunch(NamedTuple):
    """A compiled kernel and those of its arguments that the key of the call determines."""

    compiled: Any  # returned by launch.run
    blocks: int
    strides: tuple[Any, ...]  # arguments between the tensors and the options
    sizes: tuple[Any, ...]  # arguments behind the options
    rope: Any  # tile.Rope without its table, or None
    bias_strides: Any  # as in arguments.OptionalTensors, as the next two
    mask_strides: Any
    alignment: Any

    def run(self, tensors, options):
        bias, mask, key_lengths, alibi, rope, seed = options
        if rope is not None:
            rope = self.rope._replace(table=rope)
        optional = OptionalTensors(
            bias,
            self.bias_strides,
            mask,
            self.mask_strides,
            self.alignment,
            key_lengths,
            alibi,
            rope=rope,
            seed=seed,
        )
        launch.relaunch(self.compiled, self.blocks, *tensors, *self.strides, optional, *self.sizes)


_cache: dict[tuple[Any, ...], Any] = {}  # a CachedLaunch, or what a caller has stored


def cache_key(tensors, options, rope_interleaved, *more):
    """Returns what determines how a call is launched, or None if the call cannot be cached.

    tensors: (B, N, L or S, D) each    options: Options    more: the remaining arguments of the
    operator, which are numbers
    """
    if not launch.on_gpu(tensors[0]):
        return None
    key = [tensors[0].dtype, tensors[0].get_device(), *more]
    if measured:  # a table of tiles is in use, and can be replaced
        key += measured.items()
    bias, mask, key_lengths, alibi, rope, seed = options
    if rope is not None:
        key.append(rope_interleaved)
    for x in tensors:
        if x.stride(-1) != 1:
            return None
        key += (x.shape, x.stride(), x.data_ptr() & 15)
    if key[0] == torch.float32:
        key.append(torch.backends.cuda.matmul.fp32_precision)
    for x in (bias, mask):
        if x is None:
            key.append(None)
        else:  # up to 16 elements of 4 bytes are loaded at once, see call.element_alignment
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() & 63)
    for x in (key_lengths, alibi, rope, seed):
        if x is None:
            key.append(None)
        elif x.is_contiguous():
            key += (x.dtype, x.shape, x.data_ptr() & 15)
        else:  # the launcher copies it first, to another address in each call
            return None
    return tuple(key)


def find(key):
    """Returns what was stored for a key, or None."""
    return _cache.get(key)


def store(key, found):
    launch.insert(_cache, key, found)


def run(key, kernel, blocks, args, constants):
    """Launches a kernel as launch.run does. Returns the launch, which is stored unless its key is
    None; None where nothing was compiled.

    args: tensors, then strides, then the options, then sizes
    """
    compiled = launch.run(kernel, blocks, *args, **constants)
    if compiled is None:
        return None
    place = next(i for i, x in enumerate(args) if isinstance(x, OptionalTensors))
    strides = next(i for i, x in enumerate(args) if isinstance(x, tuple))
    options = args[place]
    cached = CachedLaunch(
        compiled,
        blocks,
        args[strides:place],
        args[place + 1 :],
        None if options.rope is None else options.rope._replace(table=None),
        options.bias_strides,
        options.mask_strides,
        options.alignment,
    )
    if key is not None:
        store(key, cached)
    return cached
