"""Several trained word predictors that predict together."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fusedseq.tasks import words
from fusedseq.tasks.catalog import operators
from fusedseq.tasks.runs.restore import restored
from fusedseq.tasks.runs.run import metrics_line
from fusedseq.tasks.training import CheckpointError, from_dict

VOTE, AVERAGE = "majority vote", "averaged log-probabilities"


class Ensemble(words.Task):
    """Computes the metrics of each model, of their vote, and of their average.

    majority vote: the word that most models rank first; among words with equally many votes, the
        one that the first of the models ranks first
    averaged log-probabilities: the most probable word under the geometric mean of the models'
        distributions, which the loss refers to as well. Its logits are the mean of the models'
        logits up to a constant, so it is computed as a single output layer, as wide as the models'
        layers together, whose logits are never stored as a whole, as for a single model

    models: WordPredictors with one vocabulary    the other arguments as for words.Task
    """

    def __init__(
        self,
        settings: words.Settings,
        data: Any,
        models: Iterable[torch.nn.Module],
        *,
        ops: ModuleType,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(settings, data, torch.nn.ModuleList(models), seed=0, device=device)
        weights = [model.output_weight.detach() for model in self.model]
        self.weight = torch.cat(weights, 1) / len(weights)  # (V, sum of E)
        self._linear_cross_entropy = ops.linear_cross_entropy

    def _score(self, batch: Any) -> dict[Any, Any]:
        pooled = [model(batch.context) for model in self.model]
        members = [
            model.cross_entropy(y, batch.target, "none", return_details=True)
            for model, y in zip(self.model, pooled, strict=True)
        ]
        average = self._linear_cross_entropy(
            torch.cat(pooled, -1), self.weight, batch.target, reduction="none", return_details=True
        )
        sums: dict[Any, Any] = {"contexts": batch.items}
        for name, (loss, _, _, best) in [*enumerate(members), (AVERAGE, average)]:
            sums[name, "loss"] = loss.sum()
            sums[name, "right"] = self.right(best, batch.target).sum()
        votes = majority(torch.stack([best for *_, best in members]))
        return sums | {(VOTE, "right"): self.right(votes, batch.target).sum()}

    def _metrics(self, sums: dict) -> dict[str, Any]:
        n = sums["contexts"]
        members = [super(Ensemble, self)._metrics(_part(sums, i)) for i in range(len(self.model))]
        vote = {"accuracy": sums[VOTE, "right"] / n, "contexts": int(n)}
        return {"members": members, VOTE: vote, AVERAGE: super()._metrics(_part(sums, AVERAGE))}


def _part(sums: dict, name: Any) -> dict[str, Any]:
    """The sums of one member, or of the average, as words.Task names them."""
    return {"contexts": sums["contexts"], "loss": sums[name, "loss"], "right": sums[name, "right"]}


def majority(votes: torch.Tensor) -> torch.Tensor:
    """The most frequent vote of each column; votes: (K, B) of K models, returns (B,).

    Among equally frequent votes the first model's wins, as with collections.Counter.most_common.
    """
    K = len(votes)
    counts = (votes[:, None] == votes[None]).sum(0)  # (K, B)
    first = torch.arange(K, 0, -1, device=votes.device)[:, None]
    return votes.gather(0, (counts * (K + 1) + first).argmax(0, keepdim=True))[0]


def ensemble(
    paths: Sequence[Path], data: str | None, *, ops: str, device: torch.device | str
) -> Ensemble:
    """The Ensemble of the models in `paths`, runs or checkpoints, in this order.

    ops: the name of an operator set
    Errors: CheckpointError where one has another task, vocabulary or data than the first
    """
    members = [restored(path, ("words",), ops=ops, device=device) for path in paths]
    first = members[0][1]
    for path, (_, description) in zip(paths, members, strict=True):
        for what, name in (("vocabulary", "vocabulary"), ("data", "fingerprint")):
            if description[name] != first[name]:
                raise CheckpointError(
                    f"{path} must have the {what} of {paths[0]}: the members of an ensemble "
                    "predict the same words of the same contexts"
                )
    settings = from_dict(words.Settings, first["settings"])
    loaded = words.load(settings, data, first)
    return Ensemble(
        settings, loaded, [model for model, _ in members], ops=operators(ops), device=device
    )


def metrics(models: Ensemble, splits: Sequence[str]) -> dict[str, dict]:
    """{split: metrics} of an Ensemble."""
    models.model.eval()
    return {split: models.evaluate(split) for split in splits}


def lines(paths: Sequence[Path], results: dict[str, dict]) -> Iterator[str]:
    """The result of `metrics` as text: a line for each model, for the vote and for the average."""
    for split, result in results.items():
        parts = [
            *zip(map(str, paths), result["members"], strict=True),
            *((name, result[name]) for name in (VOTE, AVERAGE)),
        ]
        for name, part in parts:
            yield f"{split}, {name}: {metrics_line(part)}"
