"""A generated miniature corpus: sentences of a small probabilistic grammar, determined by a seed.

A model can learn from it word frequencies (Zipf), word order, the agreement of subject and verb in
number, also across a relative clause (which needs memory), and that nouns prefer certain verbs.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")
NOUNS = (
    "dog cat king ship bird child fund share bank trader market price plan law city river house "
    "book song star"
)
VERBS = "see like follow find lose hold move open help watch carry build leave meet call push"
ADJECTIVES = "old new small big quiet dark bright red heavy slow"
ADVERBS = "often never soon today again here"
SIZES = {"train": 2000, "valid": 200, "test": 200}  # sentences


def sentences(seed: int | str = 0, sizes: Mapping[str, int] = SIZES) -> dict[str, list[str]]:
    """Returns the sentences of each split of `sizes`: about 7 words each, 93 word types."""
    return {
        split: [sentence(rng) for _ in range(n)]
        for split, n in sizes.items()
        for rng in [random.Random(f"{seed}/{split}")]
    }


def sentence(rng: random.Random) -> str:
    """Draws a sentence."""
    plural = rng.random() < 0.4
    subject, noun = noun_phrase(rng, plural, depth=0)
    words = subject + verb_phrase(rng, plural, noun)
    return " ".join(words + ([zipf(rng, ADVERBS.split())] if rng.random() < 0.3 else []))


def noun_phrase(rng: random.Random, plural: bool, depth: int) -> tuple[list[str], int]:
    """Draws a noun phrase; returns its words and the index of its head noun in NOUNS."""
    nouns = NOUNS.split()
    head = zipf(rng, nouns)
    words = [rng.choice(["the", "the", "some" if plural else "a"])]
    if rng.random() < 0.4:
        words.append(zipf(rng, ADJECTIVES.split()))
    words.append(head + "s" if plural else head)
    if depth == 0 and rng.random() < 0.3:  # "the dogs that the king sees follow ..."
        inner = rng.random() < 0.4
        clause, inner_head = noun_phrase(rng, inner, depth=1)
        words += ["that", *clause, verb(rng, inner, inner_head)]
    return words, nouns.index(head)


def verb_phrase(rng: random.Random, plural: bool, noun: int) -> list[str]:
    """Draws a verb and its object; noun: the index of the subject's head noun."""
    return [verb(rng, plural, noun), *noun_phrase(rng, rng.random() < 0.4, depth=1)[0]]


def verb(rng: random.Random, plural: bool, noun: int) -> str:
    """Draws a verb, in 80% of the cases one of those that the subject's noun prefers."""
    verbs = VERBS.split()
    preferred = verbs[noun % 4 :: 4]
    word = zipf(rng, preferred if rng.random() < 0.8 else verbs)
    return word if plural else word + "s"


def zipf(rng: random.Random, entries: Sequence[Entry]) -> Entry:
    """Draws an entry with a probability proportional to 1 / rank."""
    return rng.choices(entries, [1 / (rank + 1) for rank in range(len(entries))])[0]
