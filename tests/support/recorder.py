"""Which registered operators are called, and with what."""

from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Collects the calls of fusedseq's registered operators with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedseq":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def names(self):
        """The names of the operators, without that of their namespace."""
        return [function.name().removeprefix("fusedseq::") for function, *_ in self.calls]
