"""The model card of a run, as Hugging Face's hub shows it: what the model is and is for, and how it
was made.

Mitchell et al. (2019), Model Cards for Model Reporting, say what belongs into it.
"""

import json
from dataclasses import dataclass
from typing import Any

from fusedseq.tasks.experiments import metrics

LIBRARY = 'library_name: "fusedseq"'  # the first line of the front matter


@dataclass(frozen=True)
class About:
    """What the cards of a task's models have in common."""

    # The task in the terms of the hub, or None, and the languages' codes.
    pipeline: str | None
    languages: tuple[str, ...]
    # The documented data: their name, and what identifies them, the name of a directory or a
    # checksum, of which some depend on the settings.
    dataset: str
    directories: tuple[str, ...]
    fingerprints: tuple[int, ...]
    # The sentences of the card.
    model: str
    uses: str
    limits: str
    # Those about a model of the documented data.
    data: str
    data_limits: str
    # The arguments of `fusedseq` that use the model in RUN.
    command: str


ABOUT = {
    "words": About(
        "fill-mask",
        ("ca",),
        "catalan",
        ("catalan",),
        (5282429, 2233081591, 3166746582),
        "predicts the middle word of seven words from the six around it",
        "Word vectors (`fusedseq vectors`), and the comparison of such models.",
        "It knows the words of its vocabulary alone and reads six words, not a sentence.",
        "Catalan text of several sources",
        "",
        "vectors RUN --near casa",
    ),
    "ptb": About(
        "text-generation",
        ("en",),
        "ptb",
        (),  # a directory of this name may hold WikiText-2
        (1330988314,),
        "is a recurrent language model of words",
        "The comparison of language models, and a starting point for work on recurrent networks.",
        "Its text is not fluent over more than a sentence, and states nothing reliable about the "
        "world.",
        "the Penn Treebank as Mikolov et al. (2010) prepared it: 10,000 words in lower case, `N` "
        "for numbers and `<unk>` for every other word",
        "It has read a million words of the Wall Street Journal of 1989.",
        'generate RUN --prompt "the company said"',
    ),
    "reverse": About(
        None,
        (),
        "generated",
        ("generated", "synthetic"),
        (),
        "is a Transformer encoder that reverses a sequence of numbers",
        "A test of attention and of the training loop.",
        "It has seen no other lengths and numbers than those of its training data.",
        "sequences that are generated from the seed",
        "",
        "eval reverse RUN",
    ),
    "en-es": About(
        "translation",
        ("en", "es"),
        "tatoeba_en_es",
        ("tatoeba_en_es",),
        (283912733,),
        "translates English sentences to Spanish by a Transformer",
        "The comparison of translation models, and a starting point for training on other pairs.",
        "Words outside the vocabulary become `[UNK]`, and nothing checks that a translation is "
        "right.",
        "sentence pairs of Tatoeba",
        "Its sentences were short and of everyday life.",
        "translate RUN --in FILE",
    ),
    "en-fr": About(
        "translation",
        ("en", "fr"),
        "ted_en_fr",
        ("ted_en_fr",),
        (114267783,),
        "translates English sentences to French by a Transformer",
        "The comparison of translation models, and a starting point for training on other pairs.",
        "Words outside the vocabulary become `<UNK>`, and text is in lower case.",
        "30,000 sentence pairs of TED talks, in lower case",
        "It is a small model of a small corpus: its translations are often wrong.",
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
    name += f" ({result['label']})" if result.get("label") else ""
    parameters = metrics.text("parameters", result["parameters"]).removeprefix("parameters ")
    limits = [about.data_limits] if is_documented(result) and about.data_limits else []
    facts, versions = result["machine"], result["versions"]
    lines = [
        f"- Data: {data_text(result)}",
        f"- Command: `{result['command']}`",
        f"- Length: {', '.join(metrics.budget(result)[:1])}",
        *([f"- Note: {result['note']}"] if result.get("note") else []),
        f"- Machine: {metrics.hardware(result)}; instruction set {facts['isa']}",
        f"- Versions: fusedseq {versions['fusedseq']}, torch {versions['torch']}; commit "
        f"{result['commit']}{' and changes to it' if result.get('dirty') else ''}",
    ]
    return f"""# {name}

This model {about.model}. It has {parameters} parameters. It was made with fusedseq, fused operators
for sequence models in PyTorch, and its weights are those of the best validation.

## Uses

{about.uses}

{" ".join([*limits, about.limits])}

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


def is_documented(result: dict[str, Any]) -> bool:
    """Whether a run was trained on the documented data of its task."""
    about, data = ABOUT[result["task"]], result["data"]
    return data["name"] in about.directories or data["fingerprint"] in about.fingerprints


def data_text(result: dict[str, Any]) -> str:
    """What a run was trained on. Of data that are not documented only the name is known."""
    if is_documented(result):
        return ABOUT[result["task"]].data
    name = result["data"]["name"]
    if name == "synthetic":
        return "generated sentences"
    return f"data in a directory named {json.dumps(name, ensure_ascii=False)}"


def dataset(result: dict[str, Any]) -> str | None:
    """The name of a run's data set on the hub; None for data that are not documented."""
    if is_documented(result):
        return ABOUT[result["task"]].dataset
    return "synthetic" if result["data"]["name"] == "synthetic" else None


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


def is_card(text: str) -> bool:
    """Whether a text is a model card that was written here, perhaps by an older version."""
    return text.startswith(f"---\n{LIBRARY}\n")


def front_matter(result: dict[str, Any]) -> str:
    """The metadata as YAML, whose values are JSON, which is YAML too."""
    about = ABOUT[result["task"]]
    metadata: dict[str, Any] = {"tags": ["fusedseq", result["task"]]}
    metadata |= {"pipeline_tag": about.pipeline} if about.pipeline else {}
    if about.languages and is_documented(result):
        metadata["language"] = list(about.languages)
    if name := dataset(result):  # the hub requires one for metrics
        metadata["model-index"] = [model_index(result, name)]
    lines = [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]
    return "\n".join(["---", LIBRARY, *lines, "---"])


def model_index(result: dict[str, Any], dataset: str) -> dict[str, Any]:
    """The hub's entry with the metrics of every split."""
    about, found = ABOUT[result["task"]], []
    for split, part in splits(result).items():
        numbers = {key: value for key, value in part.items() if not isinstance(value, str)}
        found.append(
            {
                "task": {"type": about.pipeline or "other"},
                "dataset": {"name": dataset, "type": dataset, "split": split},
                "metrics": [{"type": key, "value": value} for key, value in numbers.items()],
            }
        )
    return {"name": f"{result['task']}/{result['preset']}", "results": found}
