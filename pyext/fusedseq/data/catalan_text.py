"""Running Catalan text as words: what the files hold besides text, and where a word ends."""

import html
import re

NUMBERED = re.compile(r"\d{5}\. ")  # Apertium's Wikipedia corpus numbers its sentences
MARKUP = [(re.compile(pattern), to) for pattern, to in (
    (r"[\u00ad\u200b-\u200d\u2060\ufeff]", ""),  # soft hyphens and blanks of no width, which would part a word
    (r"'{2,}", ""),  # bold and italic, before what may leave an apostrophe beside them
    (r"\{\{'\}\}", "'"),  # Wikipedia's template for an apostrophe before bold: L{{'}}'''aigua'''
    (r"\{\{[^{}]*\}\}", " "),
    (r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1"),  # [[article|text]]
    (r"\[([^\[\]]*)\]\([^()]*\)", r"\1"),  # [text](address), Markdown
    (r"</?[a-zA-Z][^<>]*>", " "),
    (r"\S+@\S+\.\S+|(?:https?://|www\.)[^\s)\]]+", " "),
    (r"={2,}", " "),  # headings
)]  # fmt: skip
# A middle dot is inside a word (col·lecció), an apostrophe ends one (l'aigua is l' aigua), a hyphen stands alone.
WORD = re.compile(r"\w+(?:·\w+)*(?:'(?=\w))?|[^\w\s]")


def sentences(lines, lower=False):
    """For each line of a file that has a word its words, a list; markup, addresses and line numbers are not among them.
    lower: in lower case"""
    numbered = None
    for line in lines:
        if numbered is None:
            numbered = NUMBERED.match(line) is not None
        if numbered:
            line = NUMBERED.sub("", line, count=1) if NUMBERED.match(line) else line
        words = tokenize(line.lower() if lower else line)
        if words:
            yield words


def tokenize(text):
    text = html.unescape(text)
    for pattern, to in MARKUP:
        text = pattern.sub(to, text)
    return WORD.findall(text.replace("’", "'"))
