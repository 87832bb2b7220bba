"""Several trained word predictors that answer together."""

import torch

from fusedseq.tasks import words
from fusedseq.tasks.catalog import operators
from fusedseq.tasks.restored import restored
from fusedseq.tasks.run import told
from fusedseq.tasks.training import CheckpointError, from_dict

VOTE, AVERAGE = "majority vote", "averaged log-probabilities"


class Ensemble(words.Task):
    """The figures of each model, of their vote, and of their average.

    majority vote: the word that most models take for the likeliest; of several, the one that the first of the models has
    averaged log-probabilities: the likeliest by the geometric mean of the models' distributions, which their loss is of.
        Its logits are the mean of the models' logits but for a constant, so it is one output layer as wide as all of theirs
        together: its logits are never in memory, as a single model's are not

    models: WordPredictors of one vocabulary    the rest as Task
    """

    def __init__(self, settings, data, models, *, ops, device="cpu"):
        super().__init__(settings, data, torch.nn.ModuleList(models), seed=0, device=device)
        self.weight = torch.cat([model.output_weight.detach() for model in self.model], 1) / len(
            models
        )  # (V, sum of E)
        self._linear_cross_entropy = ops.linear_cross_entropy

    def _score(self, batch):
        pooled = [model(batch.context) for model in self.model]
        answers = [model.cross_entropy(y, batch.target, "none", return_details=True)
                   for model, y in zip(self.model, pooled, strict=True)]  # fmt: skip
        average = self._linear_cross_entropy(torch.cat(pooled, -1), self.weight, batch.target,
                                             reduction="none", return_details=True)  # fmt: skip
        sums: dict = {"contexts": batch.items}
        for name, (loss, _, _, found) in [*enumerate(answers), (AVERAGE, average)]:
            sums |= {(name, "loss"): loss.sum(), (name, "right"): self.right(found, batch.target).sum()}
        votes = majority(torch.stack([found for *_, found in answers]))
        return sums | {(VOTE, "right"): self.right(votes, batch.target).sum()}

    def _figures(self, sums):
        n = sums["contexts"]
        own = [super(Ensemble, self)._figures(_part(sums, i)) for i in range(len(self.model))]
        vote = {"accuracy": sums[VOTE, "right"] / n, "contexts": int(n)}
        return {"members": own, VOTE: vote, AVERAGE: super()._figures(_part(sums, AVERAGE))}


def _part(sums, name):
    return {"contexts": sums["contexts"], "loss": sums[name, "loss"], "right": sums[name, "right"]}


def majority(votes):
    """votes: (K, B), of K models each -> (B,): the most frequent one of each column, of equals that of the first model, as
    collections.Counter.most_common has it"""
    K = len(votes)
    counts = (votes[:, None] == votes[None]).sum(0)  # (K, B)
    first = torch.arange(K, 0, -1, device=votes.device)[:, None]
    return votes.gather(0, (counts * (K + 1) + first).argmax(0, keepdim=True))[0]


def ensemble(paths, data, *, ops, device):
    """The Ensemble of the models in `paths`, runs or checkpoints, in this order. ops: an operator set's name

    Errors: CheckpointError where one is of another task, vocabulary or data
    """
    members = [restored(path, ("words",), ops=ops, device=device) for path in paths]
    first = members[0][1]
    for path, (_, description) in zip(paths, members, strict=True):
        for what, name in (("vocabulary", "vocabulary"), ("data", "fingerprint")):
            if description[name] != first[name]:
                raise CheckpointError(f"{path} must have the {what} of {paths[0]}: an ensemble answers one question")
    settings = from_dict(words.Settings, first["settings"])
    loaded = words.load(settings, data, first)
    return Ensemble(settings, loaded, [model for model, _ in members], ops=operators(ops), device=device)


def figures(found, splits):
    """{split: figures} of an Ensemble. splits: their names"""
    if unknown := set(splits) - {*found.splits}:
        raise ValueError(f"--splits: unknown split {unknown.pop()!r}; known are {', '.join(found.splits)}")
    found.model.eval()
    return {split: found.evaluate(split) for split in splits}


def lines(paths, results):
    """What `figures` gave as text, a line for each model, for the vote and for the average."""
    for split, result in results.items():
        answers = [
            *zip(map(str, paths), result["members"], strict=True),
            *((name, result[name]) for name in (VOTE, AVERAGE)),
        ]
        for name, part in answers:
            yield f"{split}, {name}: {told(part)}"
