"""Griffe extension: turns the argument lines of this project's docstrings into Markdown lists.

A docstring describes several arguments on one line, separated by four blanks:

    x: (T, B, X)    W_ih: (4H, X)    b: (4H,) or None
    lengths: (B,) int64, in [0, T], or None for T: steps past the length of a
        sequence leave its state unchanged

Markdown would join these lines into one paragraph; this extension makes each argument a list item.
A paragraph indented by four blanks is a formula, which Markdown shows as code; it is not changed.
"""

import re

import griffe

GAP = re.compile(r" {4,}(?=\S)")
ERRORS = "- **Errors**:"
NAME = r"[A-Za-z_]\w*"
ITEM = re.compile(
    rf"(?P<names>`?{NAME}`?(?:, `?{NAME}`?)*): (?P<rest>.+)"
    r"|returns (?P<result>.+)"
)


class DocstringArguments(griffe.Extension):
    """Rewrites the docstring of every object before mkdocstrings renders it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(docstring: str) -> str:
    """The docstring with its argument lines as a Markdown list and its prose escaped."""
    return "\n\n".join(paragraph(text) for text in re.split(r"\n\s*\n", docstring.strip("\n")))


def paragraph(text: str) -> str:
    lines = text.split("\n")
    if all(line.startswith("    ") for line in lines):
        return text  # a formula
    blocks: list[str] = []  # prose, or one list item each, in the order of the docstring
    for line in lines:
        continues = bool(blocks) and line.startswith(" ")
        for part in GAP.split(line.strip()):
            continues = continues or (bool(blocks) and is_unfinished_prose(blocks[-1]))
            found = None if continues else ITEM.fullmatch(part)
            if found:
                blocks.append(item(found))
            elif blocks and (continues or not starts_prose(part, blocks[-1])):
                blocks[-1] += f" {escape(part)}"
            else:
                blocks.append(escape(part))
            continues = False
    return join(blocks)


def is_unfinished_prose(block: str) -> bool:
    return not block.startswith("- ") and not block.endswith((".", ":", ")"))


def starts_prose(part: str, previous: str) -> bool:
    """Whether a line after the block `previous` is a sentence of its own, not its continuation."""
    is_sentence = part[:1].isupper() or part.startswith("`")
    return is_sentence and previous.startswith("- ") and not previous.startswith(ERRORS)


def item(found: re.Match[str]) -> str:
    if found["result"]:
        return f"- **returns** {escape(found['result'])}"
    if found["names"] == "Errors":
        return f"{ERRORS} {escape(found['rest'])}"
    names = ", ".join(f"`{name.strip('`')}`" for name in found["names"].split(", "))
    return f"- {names}: {escape(found['rest'])}"


def join(blocks: list[str]) -> str:
    """The blocks as Markdown: list items on consecutive lines, blank lines around other blocks."""
    text = ""
    for previous, block in zip(["", *blocks], blocks, strict=False):
        both_items = previous.startswith("- ") and block.startswith("- ")
        text += ("\n" if both_items else "\n\n") + block
    return text.strip("\n")


def escape(text: str) -> str:
    """Escapes what Markdown would take for HTML or emphasis, except inside of code spans."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if i % 2 else part.replace("<", "&lt;").replace("*", r"\*")
        for i, part in enumerate(parts)
    )
