"""Shows text that came from a file on a terminal, which obeys the control characters in a text."""

import unicodedata


def escaped(text: str) -> str:
    r"""The text with control characters, such as ESC, as Python writes them: \x1b.

    Line ends and tabs stay. Half of a surrogate pair, which cannot be printed, is escaped as well.
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(c)[1:-1] if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cs") else c
        for c in text
    )
