"""What `accelerate` did to a model: a table, and the way back."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Entry:
    """What happened to one module.

    name: its name in the model, "" for the model itself    kind: the name of its class
    replaced: whether the fused operators compute it, or would without dry_run
    reason: why it was left as it is, "" if it was replaced
    gain: how many times as fast a training step of this kind of module was in docs/benchmarks,
        from the least to the greatest, or that of a whole block or model that has such modules, or
        "unknown"
    """

    name: str
    kind: str
    replaced: bool
    reason: str = ""
    gain: str = "unknown"


@dataclass
class Report:
    """The result of `accelerate`; `print` shows it as a table.

    entries: one for each module that is of a kind that can be replaced
    dry_run: whether the model was left as it was
    """

    entries: list[Entry] = field(default_factory=list)
    dry_run: bool = False
    # (module, class before, class after)
    changed: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = field(
        default_factory=list, repr=False
    )
    undos: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> list[Entry]:
        """The modules that were replaced, or would be without dry_run."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left(self) -> list[Entry]:
        """The modules that were left as they are, each with its reason."""
        return [entry for entry in self.entries if not entry.replaced]

    def undo(self) -> None:
        """Gives every replaced module its own class again, and a model its attention.

        Parameters keep the values that they have now. A module whose class somebody else has
        changed since is left as it is. Copies of the model are not changed.
        """
        for module, before, after in self.changed:
            if type(module) is after:
                module.__class__ = before
        for undo in self.undos:
            undo()
        self.changed.clear()
        self.undos.clear()

    def __str__(self) -> str:
        rows = [("module", "class", "replaced", "gain of this kind, or why not")]
        for e in self.entries:
            note = e.gain if e.replaced else e.reason
            rows.append((e.name or "(the model)", e.kind, "yes" if e.replaced else "no", note))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(t.ljust(w) for t, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        return "\n".join(lines)
