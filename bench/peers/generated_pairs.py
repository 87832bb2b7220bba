"""Generated English-French text for a model with en-fr/base's vocabularies.

A line is one to four sentences of the package's generated pairs, so that lines are about as long as
those of the real text. The words that the generated text lacks are added to the vocabularies under
made-up names: the output layer has the size that it has on the real text.
"""

import random
import re

from fusedseq.data import synthetic_pairs
from fusedseq.data.en_fr import LANGUAGES, SPECIALS
from fusedseq.data.parallel import Language, Pairs
from fusedseq.data.vocabulary import Vocabulary

SIZES = 12_878, 17_030  # words of en-fr/base's vocabularies on the TED talks
MOST = 4  # sentences in a line
SENTENCES = 4000  # different ones


def tokenize(text):
    """Splits a line into words, in lower case and with numbers replaced, as `data.en_fr` does."""
    return re.sub(r"\d+", "<NUM>", text.lower()).replace(".", " .").split()


def lines(n, seed):
    """Returns n pairs of lines (English words, French words)."""
    rng = random.Random(seed)
    sentences = synthetic_pairs.pairs("fr", "peers", SENTENCES)
    found = []
    for _ in range(n):
        chosen = rng.choices(sentences, k=rng.randint(1, MOST))
        found.append(tuple(tokenize(" ".join(side)) for side in zip(*chosen, strict=True)))
    return found


def languages(pairs, sizes=SIZES):
    """Returns the two languages of some lines, with vocabularies of these sizes."""
    found = []
    for side, (name, size) in enumerate(zip(LANGUAGES, sizes, strict=True)):
        words = Vocabulary.count((w for pair in pairs for w in pair[side]), SPECIALS).words
        added = [f"<unused {i}>" for i in range(size - len(words))]
        found.append(Language(name, Vocabulary([*words, *added]), tokenize))
    return tuple(found)


def encoded(pairs, languages):
    """Returns the lines as Pairs of these languages."""
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    ids = [
        [lang.encode(words) for words in side] for lang, side in zip(languages, sides, strict=True)
    ]
    text = [tuple(map(" ".join, pair)) for pair in pairs]
    return Pairs(text, *sides, *ids)
