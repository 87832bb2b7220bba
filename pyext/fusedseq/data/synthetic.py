"""A generated miniature corpus: sentences of a small probabilistic grammar, the same ones for the same seed.

What there is to learn: word frequencies (Zipf), word order, agreement of subject and verb in number, also across a
relative clause (which needs a memory), and nouns that prefer certain verbs.
"""

import random

NOUNS = "dog cat king ship bird child fund share bank trader market price plan law city river house book song star"
VERBS = "see like follow find lose hold move open help watch carry build leave meet call push"
ADJECTIVES = "old new small big quiet dark bright red heavy slow"
ADVERBS = "often never soon today again here"
SIZES = {"train": 2000, "valid": 200, "test": 200}  # sentences


def sentences(seed=0, sizes=SIZES):
    """For each split of `sizes` its sentences, as strings; about 7 words a sentence, 93 word types."""
    return {split: [sentence(rng) for _ in range(n)]
            for split, n in sizes.items() for rng in [random.Random(f"{seed}/{split}")]}  # fmt: skip


def sentence(rng):
    plural = rng.random() < 0.4
    subject, noun = noun_phrase(rng, plural, depth=0)
    words = subject + verb_phrase(rng, plural, noun)
    return " ".join(words + ([zipf(rng, ADVERBS.split())] if rng.random() < 0.3 else []))


def noun_phrase(rng, plural, depth):
    """Its words, and the number of its head noun."""
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


def verb_phrase(rng, plural, noun):
    return [verb(rng, plural, noun), *noun_phrase(rng, rng.random() < 0.4, depth=1)[0]]


def verb(rng, plural, noun):
    verbs = VERBS.split()
    favourites = verbs[noun % 4 :: 4]
    word = zipf(rng, favourites if rng.random() < 0.8 else verbs)
    return word if plural else word + "s"


def zipf(rng, words):
    return rng.choices(words, [1 / (rank + 1) for rank in range(len(words))])[0]
