"""The gains that `fusedseq.accelerate` reports for each kind of module, from the committed results.

`python -m bench.suite.pages` writes them into the package.
"""

import json

from bench.suite import metrics

PATH = "pyext/fusedseq/acceleration/gains.json"
# {the kind of module: the operator's cases that stand for it, by the beginning of their names}
CASES = {
    "LSTM": "lstm-",
    "GRU": "gru-",
    "TransformerEncoderLayer": "encoder_layer-",
    "Dropout": "dropout-",
    "Linear": "linear-",
    "LockedDropout": "locked_dropout-",
    "WeightDrop": "lstm-",
    "output layer": "linear_cross_entropy-",
}


def of(machine):
    """Returns {kind: [the least gain, the greatest]} of forward and backward in fp32, with MKL as
    installed, over the provider that the case's target names; kinds without a result are left out.
    """
    found = {}
    for name, (_, entry) in machine.cases["as-installed"].items():
        if entry["mode"] == "forward":
            continue
        gain = metrics.gain(entry, metrics.baseline(entry))
        for kind, begin in CASES.items():
            if name.startswith(begin) and (kind == "WeightDrop") == ("weight_drop" in name):
                found.setdefault(kind, []).append(round(gain, 2))
    return {kind: [min(found[kind]), max(found[kind])] for kind in CASES if kind in found}


def text(machine):
    return json.dumps(of(machine), indent=1) + "\n"
