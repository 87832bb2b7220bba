"""The model card of a run, as Hugging Face's hub shows it: what the model is and is for, and how it
was made.

Mitchell et al. (2019), Model Cards for Model Reporting, say what belongs into it.
"""

import json
from dataclasses import dataclass
from typing import Any

from fusedseq.tasks.experiments import metrics


@dataclass(frozen=True)
class About:
    """What the cards of a task's models have in common."""

    # The task in the terms of the hub, or None, and the languages' codes.
    pipeline: str | None
    languages: tuple[str, ...]
    # The data set's name.
    dataset: str
    # The sentences of the card.
    model: str
    data: str
    uses: str
    limits: str
    # The arguments of `fusedseq` that use the model in RUN.
    command: str


ABOUT = {
    "words": About(
        "fill-mask",
        ("ca",),
        "catalan",
        "predicts the middle word of seven Catalan words from the six around it",
        "Catalan text of several sources",
        "Word vectors (`fusedseq vectors`), and the comparison of such models.",
        "It knows the words of its vocabulary alone and reads six words, not a sentence.",
        "vectors RUN --near casa",
    ),
    "ptb": About(
        "text-generation",
        ("en",),
        "ptb",
        "is a recurrent language model of English words",
        "the Penn Treebank as Mikolov et al. (2010) prepared it: 10,000 words in lower case, `N` "
        "for numbers and `<unk>` for every other word",
        "The comparison of language models on the Penn Treebank, and a starting point for work on "
        "recurrent networks.",
        "It has read a million words of the Wall Street Journal of 1989. Its text is not fluent "
        "over more than a sentence, and states nothing reliable about the world.",
        'generate RUN --prompt "the company said"',
    ),
    "reverse": About(
        None,
        (),
        "generated",
        "is a Transformer encoder that reverses a sequence of numbers",
        "sequences that are generated from the seed",
        "A test of attention and of the training loop.",
        "It has seen no other lengths and numbers than those of its training data.",
        "eval reverse RUN",
    ),
    "en-es": About(
        "translation",
        ("en", "es"),
        "tatoeba_en_es",
        "translates English sentences to Spanish by a Transformer",
        "sentence pairs of Tatoeba",
        "The comparison of translation models, and a starting point for training on other pairs.",
        "Its sentences were short and of everyday life. Words outside the vocabulary become "
        "`<UNK>`, and nothing checks that a translation is right.",
        "translate RUN --in FILE",
    ),
    "en-fr": About(
        "translation",
        ("en", "fr"),
        "ted_en_fr",
        "translates English sentences to French by a Transformer",
        "30,000 sentence pairs of TED talks, in lower case",
        "The comparison of translation models, and a starting point for training on other pairs.",
        "It is a small model of a small corpus: its translations are often wrong. Words outside "
        "the vocabulary become `<UNK>`, and text is in lower case.",
        "translate RUN --in FILE",
    ),
}


def model_card(result: dict[str, Any]) -> str:
    """The model card of a run in Markdown, with the metadata of the hub as its front matter.

    result: the content of its result.json
    """
    return f"{front_matter(result)}\n{body(result)}"


def body(result: dict[str, Any]) -> str:
    """The model card without its front matter."""
    about, name = ABOUT[result["task"]], f"{result['task']}/{result['preset']}"
    parameters = metrics.text("parameters", result["parameters"]).removeprefix("parameters ")
    facts, versions = result["machine"], result["versions"]
    lines = [
        f"- Data: {about.data if is_real(result) else 'generated sentences'}",
        f"- Command: `{result['command']}`",
        f"- Length: {', '.join(metrics.budget(result)[:1])}",
        f"- Machine: {metrics.hardware(result)}; instruction set {facts['isa']}",
        f"- Versions: fusedseq {versions['fusedseq']}, torch {versions['torch']}; commit "
        f"{result['commit']}",
    ]
    return f"""# {name}

This model {about.model}. It has {parameters} parameters. It was made with fusedseq, fused operators
for sequence models in PyTorch, and its weights are those of the best validation.

## Uses

{about.uses}

{about.limits}

## How to load it

`RUN` is the directory of the run, or its `best.safetensors`, which has no pickle in it.

```sh
fusedseq {about.command}
```

```python
from fusedseq.tasks import load_model

model, description = load_model("RUN")  # an nn.Module in eval mode; its settings and vocabulary
```

## Evaluation

{table(result)}

## Training

{chr(10).join(lines)}

All settings:

```json
{json.dumps(result["settings"], indent=1)}
```
"""


def is_real(result: dict[str, Any]) -> bool:
    """Whether a run was trained on its task's own data, and not on generated sentences."""
    return bool(result["data"]["name"] != "synthetic")


def splits(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{split: its metrics} of a result."""
    return {name: part for name, part in result.items() if name == "valid" or name.endswith("test")}


def table(result: dict[str, Any]) -> str:
    """The metrics of every split as a table in Markdown."""
    lines = ["| split | metric | value |", "|---|---|---|"]
    for split, part in splits(result).items():
        for name, value in part.items():
            shown = metrics.number(name, value) if isinstance(value, float) else f"`{value}`"
            shown = shown.replace("|", "\\|")  # which would end the cell
            lines.append(f"| {split} | {name} | {shown} |")
    return "\n".join(lines)


def front_matter(result: dict[str, Any]) -> str:
    """The metadata as YAML, whose values are JSON, which is YAML too."""
    about, name = ABOUT[result["task"]], f"{result['task']}/{result['preset']}"
    dataset = about.dataset if is_real(result) else "synthetic"
    found = []
    for split, part in splits(result).items():
        numbers = {key: value for key, value in part.items() if not isinstance(value, str)}
        found.append(
            {
                "task": {"type": about.pipeline or "other"},
                "dataset": {"name": dataset, "type": dataset, "split": split},
                "metrics": [{"type": key, "value": value} for key, value in numbers.items()],
            }
        )
    metadata: dict[str, Any] = {"library_name": "fusedseq", "tags": ["fusedseq", result["task"]]}
    metadata |= {"pipeline_tag": about.pipeline} if about.pipeline else {}
    metadata |= {"language": list(about.languages)} if about.languages else {}
    metadata["model-index"] = [{"name": name, "results": found}]
    lines = [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]
    return "\n".join(["---", *lines, "---"])
