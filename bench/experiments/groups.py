"""Results of one configuration with several seeds, shown as one: mean and standard deviation."""

import re
from statistics import mean, stdev

from fusedseq.tasks.experiments import metrics

UNSEEN = ("training.save_steps", "training.log_steps")  # the weights do not depend on them
SEED = re.compile(r"-?seed-\d+$")  # the end of a label that distinguishes seeds


def label_of(result):
    """Returns the label of a result without its seed; "" without a label."""
    return SEED.sub("", result.get("label", ""))


def changed_settings(result):
    """Returns the settings that differ from the preset's, except how often a run is saved and
    logged.
    """
    return [f"{key} {value}" for key, value in result["changes"].items() if key not in UNSEEN]


def of_experiment(results):
    """Returns lists of results that differ in their seed alone, in the order of their labels."""
    found = {}
    for result in sorted(results, key=lambda result: result.get("label", "")):
        key = (label_of(result), *changed_settings(result), result["epochs"], result["ops"])
        group = found.setdefault(key, [])
        if result["seed"] in [other["seed"] for other in group]:
            found[(*key, result.get("label"))] = [result]
        else:
            group.append(result)
    return list(found.values())


def name_of(experiment, group):
    """Returns the experiment's name with the label of the group and the number of its seeds."""
    label = label_of(group[0]) if len(group) > 1 else group[0].get("label", "")
    remarks = [label] if label else []
    remarks += [f"{len(group)} seeds"] if len(group) > 1 else []
    return experiment.name + (f" ({', '.join(remarks)})" if remarks else "")


def measured(experiment, group):
    """Returns lines: the metrics of a result, or their mean and standard deviation over seeds."""
    if len(group) == 1:
        return metrics.of_result(experiment, group[0])
    lines = []
    for name in metrics.names_of(experiment, group[0]):
        values = [metrics.value_of(result, name) for result in group]
        if None in values:
            continue
        lines.append(f"{metrics.text(name, mean(values))} ± {deviation(name, stdev(values))}")
    return lines


def deviation(name, value):
    """Returns a standard deviation with two digits, in the unit of its metric."""
    return f"{100 * value:.2g} points" if name.endswith("accuracy") else f"{value:.2g}"
