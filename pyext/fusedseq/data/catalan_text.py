"""Splits running Catalan text into words and removes markup."""

import html
import re
from collections.abc import Iterable, Iterator

NUMBERED = re.compile(r"\d{5}\. ")  # Apertium's Wikipedia corpus numbers its sentences
# (pattern, replacement), applied in this order
MARKUP = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # soft hyphens and zero-width spaces, which would split a word
        (r"[\u00ad\u200b-\u200d\u2060\ufeff]", ""),
        # bold and italic, before the next patterns leave an apostrophe next to them
        (r"'{2,}", ""),
        # Wikipedia's template for an apostrophe before bold text: L{{'}}'''aigua'''
        (r"\{\{'\}\}", "'"),
        (r"\{\{[^{}]*\}\}", " "),
        (r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1"),  # [[article|text]]
        (r"\[([^\[\]]*)\]\([^()]*\)", r"\1"),  # [text](address), Markdown
        (r"</?[a-zA-Z][^<>]*>", " "),
        # an address of electronic mail with what stands around it, and one of the web. The former
        # is \S+@\S+\.\S+, which needs quadratic time where a long text has no blanks
        (r"(?<!\S)\S[^\s@]*@\S[^\s.]*\.\S+|(?:https?://|www\.)[^\s)\]]+", " "),
        (r"={2,}", " "),  # headings
    )
]
# A middle dot is part of a word (col·lecció), an apostrophe ends one (l'aigua is l' aigua), and a
# hyphen is a token of its own.
WORD = re.compile(r"\w+(?:·\w+)*(?:'(?=\w))?|[^\w\s]")


def sentences(lines: Iterable[str], lower: bool = False) -> Iterator[list[str]]:
    """Yields the words of each line of a file that has any, without markup and line numbers.

    lower: converts the words to lower case
    """
    numbered = None
    for line in lines:
        if numbered is None:
            numbered = NUMBERED.match(line) is not None
        if numbered:
            line = NUMBERED.sub("", line, count=1) if NUMBERED.match(line) else line
        words = tokenize(line.lower() if lower else line)
        if words:
            yield words


def tokenize(text: str) -> list[str]:
    """Returns the words and punctuation marks of a text without its markup."""
    text = html.unescape(text)
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return WORD.findall(text.replace("’", "'"))
