"""Generated lines of two domains for the word task, the same ones for the same seed.

The general domain is the grammar of `synthetic`. The news have the same grammar, but other frequent nouns, so that verbs
follow other nouns; words of their own; and a source named before or after, which moves the words by some places.
"""

import random

from fusedseq.data import synthetic

OPENINGS = ("yesterday", "according to the minister ,", "the agency says that", "in the capital ,")
CLOSINGS = (", the mayor said", "during the campaign", "after the vote")
SIZES = {"general": 3000, "news": 1500}  # lines


def lines(seed=0, sizes=SIZES):
    """For each domain its lines."""
    make = {"general": synthetic.sentence, "news": news}
    return {domain: [make[domain](rng) for _ in range(n)]
            for domain, n in sizes.items() for rng in [random.Random(f"{seed}/{domain}")]}  # fmt: skip


def news(rng):
    nouns = synthetic.NOUNS.split()
    swapped = dict(zip(nouns, reversed(nouns), strict=True))
    swapped |= {noun + "s": other + "s" for noun, other in swapped.items()}
    text = " ".join(swapped.get(word, word) for word in synthetic.sentence(rng).split())
    opening = synthetic.zipf(rng, OPENINGS) + " " if rng.random() < 0.5 else ""
    return opening + text + (" " + synthetic.zipf(rng, CLOSINGS) if rng.random() < 0.3 else "")
