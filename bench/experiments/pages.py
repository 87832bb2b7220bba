"""Writes docs/results.md and a page for each task, the reproductions; docs/smoke_runs.md, runs of a
few steps; model cards; and the curves.
"""

from fusedseq.tasks.catalog import TASKS
from fusedseq.tasks.experiments import metrics
from fusedseq.tasks.experiments import results as package_results
from fusedseq.tasks.experiments.documented import experiments as experiments_of
from fusedseq.tasks.runs import model_card

from bench.experiments import curves, groups, task_pages
from bench.experiments.results import CARRIED, committed, is_smoke_run, name_of
from bench.experiments.task_pages import COMMANDS, GENERATED
from bench.suite.report import markdown_table

RULE = (
    "A run counts as a reproduction if it finished at least one pass over its training data. Every "
    "other run is a smoke run."
)
OVERVIEW = f"""{GENERATED}
# Results of the experiments

This page compares the experiments of the five [source reports](tasks.md) with what this package
measured. {RULE}
Smoke runs have [a page of their own](smoke_runs.md).

Each experiment with a reproduction has a line here; its page has the runs with other settings, the
losses of every epoch as curves, translations, commands and machines. The weights are not
committed; the commands make them. Only a training "in full" has
all epochs and every setting that the source report gives; any other value is not comparable with
the reported one.

Metrics are those of the weights with the lowest validation loss, where the reports have those of
the last epoch; only the training loss is that of the last epoch here too, with dropout.
*tempered perplexity* is the perplexity at the softmax temperature, of 0.5 to 2,
that is best on the validation split (Melis et al., 2020, search 0.8 to 1), *dynamic perplexity*
that of dynamic evaluation (Krause et al., 2018).

*bleu*, from 0 to 1, is the mean of NLTK's BLEU of each sentence, smoothed by its method1, over the
words of the vocabulary, so that `<UNK>` matches `<UNK>`. *bleu_unsmoothed* is the same without
smoothing, which is NLTK's default. The reports do not say which of the two they used; by the second
none of the values that they report is reached. *sacrebleu* and *chrf*, from 0 to 100, are those of
the whole test set, on the text as it was tokenized (`tok:none`), of en-fr in lower case; they are
not comparable with published values of sacreBLEU.
"""
SMOKE_RUNS = f"""{GENERATED}
# Smoke runs

{RULE} A smoke run shows that the experiment's training and evaluation run on the real data. Its
accuracy or BLEU would say nothing about the model, so this page does not have them: it has the
number of steps, and the loss on the validation data after them. For comparison: a uniform
distribution over the 5,000 words that the words runs use has a loss of ln 5,000 = 8.52, over the
10,000 words of ptb of 9.21. Runs with `--from` start from the weights of another run, and therefore
with a smaller loss.

The reproductions are on [the page of results](results.md). {COMMANDS}
"""
# The results with a model card among the pages.
CARDS = ("en-fr-base", "ptb-mogrifier-fast", "ptb-mogrifier-wide", "reverse-tuned-found")
# Metrics that depend on the machine.
TIMES = ("seconds", "seconds per epoch")
SMOKE_HEAD = ("experiment", "steps", "validation loss", "changed settings", "machine", "command")


def write(args):
    results, docs = committed(args.root), args.root / "docs"
    for name, text in of_results(results).items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text)
    (args.root / CARRIED).parent.mkdir(parents=True, exist_ok=True)
    (args.root / CARRIED).write_text(package_results.packed(results), encoding="utf-8")
    written = [f"docs/{name}" for name in of_results(results)]
    print("written:", *written, CARRIED, *curves.draw(results, docs / "assets"))


def of_results(results):
    """Returns {path under docs: page} of all pages."""
    return {
        "results.md": overview(results),
        **{task_pages.name_of_page(task): task_pages.page(results, task) for task in TASKS},
        "smoke_runs.md": smoke_runs(results),
        **{
            f"model-cards/{name_of(result)}.md": f"{GENERATED}\n{model_card.body(result)}"
            for found in results.values()
            for result in found
            if name_of(result) in CARDS
        },
    }


def overview(results):
    parts = [OVERVIEW]
    for task in TASKS:
        title, _ = task_pages.ABOUT[task]
        lines = []
        for experiment in experiments_of(task):
            for group in task_pages.reproductions_of(results, experiment)[:1]:
                lines.append(overview_cells(experiment, group))
        table = markdown_table([("experiment", "reported", "measured", "training"), *lines])
        link = f"[Runs, curves and commands]({task_pages.name_of_page(task)})"
        parts.append(f"## {title}\n\n{table}\n\n{link}\n")
    cards = "\n".join(f"- [{name}](model-cards/{name}.md)" for name in CARDS)
    parts.append(f"## Model cards\n\n{cards}\n")
    return "\n".join(parts)


def overview_cells(experiment, group):
    """Returns the cells of an experiment in the overview."""
    training = [task_pages.budget(group[0])]
    if changed := groups.changed_settings(group[0]):
        training.append(metrics.counted(len(changed), "settings") + " changed")
    if any(name in TIMES for name in metrics.names_of(experiment, group[0])):
        training.append(f"on {task_pages.where(group[0])}")
    return (
        groups.name_of(experiment, group),
        ", ".join(metrics.of_experiment(experiment)),
        ", ".join(groups.measured(experiment, group)),
        ", ".join(training),
    )


def smoke_runs(results):
    parts = [SMOKE_RUNS]
    for task in TASKS:
        lines = [
            smoke_cells(result)
            for experiment in experiments_of(task)
            for result in results.get(experiment.name, [])
            if is_smoke_run(result)
        ]
        if lines:
            parts.append(f"## {task}\n\n{markdown_table([SMOKE_HEAD, *lines])}\n")
    return "\n".join(parts)


def smoke_cells(result):
    label = f" ({result['label']})" if "label" in result else ""
    return (
        result["row"] + label,
        f"{result['steps']:,}",
        f"{result['valid']['loss']:.2f}",
        "<br>".join(groups.changed_settings(result)),
        task_pages.machine(result),
        f"`{task_pages.command(result)}`",
    )
