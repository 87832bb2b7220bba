"""Generated lines of two domains for the word task, determined by a seed.

The general domain has the grammar of `synthetic`. The news domain has the same grammar but other
frequent nouns, so verbs follow other nouns; words of its own; and a source that is named before or
after the sentence, which shifts the words by some positions.
"""

import random
from collections.abc import Mapping

from fusedseq.data import synthetic

OPENINGS = ("yesterday", "according to the minister ,", "the agency says that", "in the capital ,")
CLOSINGS = (", the mayor said", "during the campaign", "after the vote")
SIZES = {"general": 3000, "news": 1500}  # lines


def lines(seed: int | str = 0, sizes: Mapping[str, int] = SIZES) -> dict[str, list[str]]:
    """Returns the lines of each domain of `sizes`."""
    draw = {"general": synthetic.sentence, "news": news}
    return {
        domain: [draw[domain](rng) for _ in range(n)]
        for domain, n in sizes.items()
        for rng in [random.Random(f"{seed}/{domain}")]
    }


def news(rng: random.Random) -> str:
    """Draws a line of the news domain."""
    nouns = synthetic.NOUNS.split()
    swapped = dict(zip(nouns, reversed(nouns), strict=True))
    swapped |= {noun + "s": other + "s" for noun, other in swapped.items()}
    text = " ".join(swapped.get(word, word) for word in synthetic.sentence(rng).split())
    opening = synthetic.zipf(rng, OPENINGS) + " " if rng.random() < 0.5 else ""
    return opening + text + (" " + synthetic.zipf(rng, CLOSINGS) if rng.random() < 0.3 else "")
