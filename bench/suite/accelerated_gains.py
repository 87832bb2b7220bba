"""The gains that `fusedseq.accelerate` reports for each kind of module, from the committed results.

`python -m bench.suite.pages` writes them into the package.
"""

import json

from bench.suite import metrics

PATH = "pyext/fusedseq/acceleration/gains.json"
# {the kind of module or the whole block: (the operator's cases that stand for it, by the beginning
# of their names, and the provider that computes what the model computed before)}
# The cases of Embedding drop rows of the table, which torch's does not. LinearCrossEntropyLoss
# keeps all logits unless it has options; its chunks are the fastest of some sizes.
CASES = {
    "LSTM": ("lstm-", "torch"),
    "GRU": ("gru-", "torch"),
    "RNN": ("rnn-", "torch"),
    "TransformerEncoderLayer": ("encoder_layer-", "torch"),
    "Transformer": ("accelerate-transformer-", "torch"),
    "BERT layer": ("accelerate-bert-", "torch"),
    "GPT-2 layer": ("accelerate-gpt2-", "torch"),
    "Dropout": ("dropout-", "eager"),
    "Linear": ("linear-", "eager"),
    "LockedDropout": ("locked_dropout-", "eager"),
    "bidirectional LSTM": ("bidirectional_lstm-", "torch"),
    "projected LSTM": ("projected_lstm-", "torch"),
    "WeightDrop": ("lstm-", "torch"),
    "output layer": ("linear_cross_entropy-", "eager"),
    "LinearCrossEntropyLoss": ("linear_cross_entropy-", "eager"),
    "LinearCrossEntropyLoss in chunks": ("linear_cross_entropy-", "torch"),
}


def stands_for(name, kind):
    """Returns whether a case is one of a kind."""
    return name.startswith(CASES[kind][0]) and (kind == "WeightDrop") == ("weight_drop" in name)


def of(machines):
    """Returns {kind: [the least gain, the greatest]} of forward and backward in fp32, on all
    machines.

    A case's gain is over the provider with MKL unthrottled where that was measured on the machine,
    and otherwise with MKL as installed. Kinds without a result are left out.
    """
    found = {}
    for machine in machines:
        # Of equal names the later ones count.
        cases = machine.cases["as-installed"] | machine.cases["unthrottled"]
        for name, (_, entry) in cases.items():
            for kind, (_, against) in CASES.items():
                if entry["mode"] == "forward" or not stands_for(name, kind):
                    continue
                if (gain := metrics.gain(entry, against)) is not None:
                    found.setdefault(kind, []).append(round(gain, 2))
    return {kind: [min(found[kind]), max(found[kind])] for kind in CASES if kind in found}


def text(machines):
    return json.dumps(of(machines), indent=1) + "\n"
