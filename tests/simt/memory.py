"""Python bindings of a library built by tests/simt/build.py, and tensors in the memory that the
library guards.
"""

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_ulong,
    c_void_p,
)

import torch


class NtAsgdTensor(Structure):  # csrc/cpu/kernels.h
    _fields_ = [
        ("type", c_int),
        ("n", c_int64),
        ("g", c_void_p),
        ("p", c_void_p),
        ("average", c_void_p),
    ]


# The structures of csrc/cuda/recurrence/arguments.h.
MAX_ROUNDS = 64
ROUNDS = c_void_p * MAX_ROUNDS


class Mask(Structure):
    _fields_ = [("stream", c_uint32), ("threshold", c_uint64), ("p", c_double), ("scale", c_double)]


def fields(text, kind):
    return [(name, kind) for name in text.split()]


class Recurrence(Structure):
    _fields_ = [
        ("type", c_int),
        *fields("cell steps B X H rounds Xp Hp round_width", c_int64),
        *fields("cap_input_gate training reverse", c_bool),
        ("seed", c_void_p),
        *fields("state zoneout_h zoneout_c weight", Mask),
        ("variational", c_bool),
        *fields("lengths starts x W_ih W_hh b vectors", c_void_p),
        ("eps", c_double),
        *fields("h0 c0", c_void_p),
        ("rank", c_int64),
        *fields("Q A F bias", ROUNDS),
        *fields("y h c gates cells statistics round_gates", c_void_p),
    ]


class RecurrenceBackward(Structure):
    _fields_ = [("forward", Recurrence), *fields("dy dh dc dz terms dround dx dh0 dc0", c_void_p)]


class LayerInterface(Structure):  # csrc/cuda/recurrence/persistent.h
    _fields_ = [("mask", Mask), ("locked", c_bool), ("seed", c_void_p), ("tensor", c_void_p)]


class Layers(Structure):  # entries.cpp
    _fields_ = [
        ("first", POINTER(Recurrence)),
        ("second", POINTER(Recurrence)),
        ("between", LayerInterface),
    ]


class LayersBackward(Structure):
    _fields_ = [
        ("first", POINTER(RecurrenceBackward)),
        ("second", POINTER(RecurrenceBackward)),
        ("between", LayerInterface),
    ]


class RecurrenceGradients(Structure):
    _fields_ = [
        ("backward", RecurrenceBackward),
        *fields("dx dW_ih dW_hh db dvectors", c_void_p),
        *fields("dQ dF dbias", ROUNDS),
    ]


# Entry points that take one of these structures and a workspace: the function that returns the
# workspace's size, and the structure.
RECURRENCES = {
    "multiply_out": ("multiplied_out_bytes", POINTER(Recurrence)),
    "loop_forward": ("loop_bytes", POINTER(Recurrence)),
    "loop_backward": ("loop_backward_bytes", POINTER(RecurrenceBackward)),
    "persistent_forward": ("persistent_bytes", POINTER(Recurrence)),
    "persistent_backward": ("persistent_backward_bytes", POINTER(RecurrenceBackward)),
    "words_forward": ("words_bytes", POINTER(Recurrence)),
    "words_backward": ("words_backward_bytes", POINTER(RecurrenceBackward)),
    "wavefront_forward": ("wavefront_bytes", POINTER(Layers)),
    "wavefront_backward": ("wavefront_backward_bytes", POINTER(LayersBackward)),
    "gradients": ("gradients_bytes", POINTER(RecurrenceGradients)),
}

TABLE = [POINTER(NtAsgdTensor), c_int64]
# Entry points that return an error message, or null: their arguments.
KERNELS = {
    "probe": [c_int] * 3 + [c_void_p],
    "probe_exchange": [c_int] * 3 + [c_void_p] * 2,
    "probe_rotate": [c_int] * 3 + [c_void_p] * 2,
    "probe_rotate_in_groups": [c_int] * 3 + [c_void_p] * 2,
    "probe_device": [c_int] * 3 + [c_bool] + [c_void_p] * 3,
    "probe_turn_around": [c_int] * 3 + [c_void_p],
    "probe_product": [c_int, c_int] + [c_void_p] * 3,
    "dropout": [c_int, *[c_int64] * 3, *[c_void_p] * 3, c_uint64, c_double, c_bool],
    "nt_asgd_norm": [*TABLE, c_void_p, c_void_p, c_bool],
    "nt_asgd_step": [*TABLE, c_void_p, c_bool, *[c_double] * 4],
    "embedding": [c_int, *[c_int64] * 3, *[c_void_p] * 4, c_uint64, c_double],
    "embedding_ids": [c_int64, c_int64, c_void_p, c_void_p],
    "embedding_backward": [c_int, *[c_int64] * 3, *[c_void_p] * 7, c_uint64, c_double],
    "activation_regularization": [
        c_int,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
        c_double,
        c_double,
        c_void_p,
        c_void_p,
    ],
    "activation_regularization_backward": [
        c_int,
        c_int64,
        c_int64,
        *[c_void_p] * 2,
        c_double,
        c_double,
        *[c_void_p] * 3,
    ],
    **{name: [structure, c_void_p] for name, (_, structure) in RECURRENCES.items()},
}


class Simulated:
    """The kernels of one library. Errors are raised as RuntimeError. Its tensors are freed at the
    end of a `with` block.
    """

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        for name, arguments in KERNELS.items():
            getattr(self.library, name).argtypes = arguments
            getattr(self.library, name).restype = c_char_p
        self.library.nt_asgd_partials.argtypes = TABLE
        self.library.nt_asgd_partials.restype = c_int64
        for size, structure in RECURRENCES.values():
            getattr(self.library, size).argtypes = [structure]
            getattr(self.library, size).restype = c_int64
        self.library.embedding_tiles.argtypes = [c_int64]
        self.library.embedding_tiles.restype = c_int64
        self.library.activation_regularization_blocks.argtypes = [c_int, c_int64, c_int64]
        self.library.activation_regularization_blocks.restype = c_int64
        self.library.simt_seed.argtypes = [c_ulong]
        self.library.simt_device.argtypes = [c_int] * 4
        self.library.simt_allocate.argtypes = [c_size_t, c_size_t]
        self.library.simt_allocate.restype = c_void_p
        self.library.simt_free.argtypes = [c_void_p]
        self.library.set_lost_wait.argtypes = [c_uint32] * 4
        self.library.simt_count_requests.argtypes = [c_bool]
        self.library.simt_sectors_of_request.argtypes = [c_char_p]
        self.library.simt_sectors_of_request.restype = c_double
        self.allocated = []
        self.device()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for p in self.allocated:
            self.library.simt_free(p)
        self.allocated.clear()

    def run(self, name, *arguments, seed):
        """Calls an entry point. seed: of the order in which threads and blocks run; 0: by their
        numbers
        """
        self.library.simt_seed(seed)
        if error := getattr(self.library, name)(*arguments):
            raise RuntimeError(error.decode())

    def forget_lost_wait(self):
        """Stands in for a new process after a kernel that has given up."""
        self.library.set_lost_wait(0, 0, 0, 0)

    def device(self, sms=4, shared=232448, cooperative=True, capability=90, resident=1 << 20):
        """Replaces the simulated device. shared: bytes that a block can have    capability: 90 is
        9.0    resident: the most blocks of a cooperative launch, which no attribute tells
        """
        self.library.simt_device(sms, shared, cooperative, capability)
        self.library.simt_limit_residency(resident)

    def sectors_of_request(self, line):
        """Returns how many sectors of global memory (32 bytes) a load of a line, "file:number",
        touches for a warp, on average; of the checked build, since simt_count_requests(True).
        """
        return self.library.simt_sectors_of_request(line.encode())

    def recur(self, name, structure, seed):
        """Calls one of RECURRENCES with a new workspace, which it returns."""
        size = getattr(self.library, RECURRENCES[name][0])(structure)
        workspace = self.empty((size,), torch.uint8)
        self.run(name, structure, workspace.data_ptr(), seed=seed)
        return workspace

    def empty(self, shape, dtype, misaligned=0):
        """Returns poisoned memory between guard zones, `misaligned` elements after a multiple of
        256 bytes.
        """
        n, size = torch.Size(shape).numel(), dtype.itemsize
        if n == 0:
            return torch.empty(shape, dtype=dtype)
        self.allocated.append(self.library.simt_allocate(n * size, misaligned * size))
        bytes_ = (ctypes.c_byte * (n * size)).from_address(self.allocated[-1])
        return torch.frombuffer(bytes_, dtype=dtype).view(shape)

    def copy(self, t, misaligned=0):
        return self.empty(t.shape, t.dtype, misaligned).copy_(t)
