"""An experiment of a source report: what it reports, and the command that repeats it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Experiment:
    """A documented system, or a study of several.

    The name of a metric is `SPLIT METRIC` where a result stores it as result["SPLIT"]["METRIC"],
    and `METRIC` where it stores it as result["METRIC"]. Accuracies are fractions of 1.
    """

    # TASK/NAME
    name: str
    # The source report and its table, or "paper: ..." where the value is that of a paper; None
    # where nothing is reported.
    source: str | None = None
    # The reported values, by the metric's name.
    metrics: dict[str, float] = field(default_factory=dict)
    # What the source says without a number.
    remark: str | None = None
    # The arguments of `fusedseq`, where the experiment is not the training of its preset.
    run: str | None = None

    @property
    def task(self) -> str:
        """The name of its task."""
        return self.name.partition("/")[0]

    @property
    def preset(self) -> str | None:
        """The preset that the experiment trains; None where it runs another command."""
        return None if self.run else self.name.partition("/")[2]

    @property
    def command(self) -> str:
        """The command that runs the experiment."""
        return f"fusedseq {self.run or f'train {self.task} --preset {self.preset}'}"
