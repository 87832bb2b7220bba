"""Generated sentence pairs, English with Spanish or French, determined by a seed.

A model can learn from them a dictionary in which some words have two translations; adjectives that
come after the noun (some French ones do not); articles and adjectives that agree with a gender that
English does not show; verbs that agree in number across the object; an adverb that moves from the
end to the front; a pronoun that Spanish omits; French elision; and numbers that are copied.
"""

import random
from collections.abc import Mapping
from typing import NamedTuple

from fusedseq.data.synthetic import zipf

# English, Spanish (alternatives separated by |), its gender, French, its gender
NOUNS = [
    line.split()
    for line in """
cat gato m chat m
dog perro m chien m
house casa f maison f
book libro m livre m
car coche|auto m voiture f
tree árbol m arbre m
door puerta f porte f
letter carta f lettre f
flower flor f fleur f
ship barco|navío m navire m
road camino m route|voie f
city ciudad f ville f
table mesa f table f
island isla f île f
key llave f clé f
""".strip().splitlines()
]
# English, masculine Spanish, masculine French, position relative to the French noun
ADJECTIVES = [
    line.split()
    for line in """
red rojo rouge after
small pequeño petit before
black negro noir after
big grande grand before
green verde vert after
cold frío froid after
blue azul bleu after
pretty bonito joli before
""".strip().splitlines()
]
# English plural, Spanish singular and plural, French singular and plural
VERBS = [
    line.split()
    for line in """
see ve ven voit voient
follow sigue siguen suit suivent
find encuentra encuentran trouve trouvent
open abre abren ouvre ouvrent
seek busca buscan cherche cherchent
leave deja dejan quitte quittent
carry lleva llevan porte portent
lose pierde pierden perd perdent
""".strip().splitlines()
]
ADVERBS = [
    ("today", "hoy", "aujourd'hui"),
    ("often", "a menudo", "souvent"),
    ("now", "ahora", "maintenant"),
]
ARTICLES = {
    "es": {"the": {"m": "el los", "f": "la las"}, "a": {"m": "un unos", "f": "una unas"}},
    "fr": {"the": {"m": "le les", "f": "la les"}, "a": {"m": "un des", "f": "une des"}},
}
SIZES = {"train": 2000, "valid": 200, "test": 200}  # pairs


class Phrase(NamedTuple):
    """A noun phrase, independent of the language."""

    determiner: str  # the, a, or a number
    adjective: list[str] | None  # an entry of ADJECTIVES
    noun: list[str]  # an entry of NOUNS
    plural: bool


def splits(
    language: str, seed: int | str = 0, sizes: Mapping[str, int] = SIZES
) -> dict[str, list[tuple[str, str]]]:
    """Returns the pairs of each split of `sizes`; a pair may be in two splits."""
    return {split: pairs(language, f"{seed}/{split}", n) for split, n in sizes.items()}


def pairs(language: str, seed: int | str = 0, n: int = 2400) -> list[tuple[str, str]]:
    """Returns `n` distinct pairs (English, other) of sentences; language: es or fr."""
    rng = random.Random(f"{language}/{seed}")
    found: dict[tuple[str, str], None] = {}
    while len(found) < n:
        found[pair(rng, language)] = None
    return list(found)


def pair(rng: random.Random, language: str) -> tuple[str, str]:
    """Draws a sentence and returns it in English and in the other language."""
    subject = phrase(rng) if rng.random() < 0.75 else None
    plural = subject.plural if subject else rng.random() < 0.4
    verb, object_ = zipf(rng, VERBS), phrase(rng)
    adverb = rng.choice(ADVERBS) if rng.random() < 0.3 else None
    english = [
        *(english_phrase(subject) if subject else ["they" if plural else "he"]),
        verb[0] if plural else verb[0] + "s",
        *english_phrase(object_),
        *([adverb[0]] if adverb else []),
    ]
    first = 1 if language == "es" else 3
    pronoun = [] if language == "es" else ["ils" if plural else "il"]
    other = [
        *([adverb[1 + (language == "fr")]] if adverb else []),
        *(other_phrase(rng, subject, language) if subject else pronoun),
        verb[first + plural],
        *other_phrase(rng, object_, language),
    ]
    return sentence(english), sentence(other)


def phrase(rng: random.Random) -> Phrase:
    """Draws a noun phrase."""
    determiner = rng.choice(["the", "the", "a", str(rng.randint(2, 30))])
    plural = determiner.isdigit() or rng.random() < 0.4
    return Phrase(
        determiner, zipf(rng, ADJECTIVES) if rng.random() < 0.5 else None, zipf(rng, NOUNS), plural
    )


def english_phrase(phrase: Phrase) -> list[str]:
    """Returns the English words of a noun phrase."""
    determiner = "some" if phrase.determiner == "a" and phrase.plural else phrase.determiner
    noun = phrase.noun[0] if not phrase.plural else english_plural(phrase.noun[0])
    return [determiner, *([phrase.adjective[0]] if phrase.adjective else []), noun]


def other_phrase(rng: random.Random, phrase: Phrase, language: str) -> list[str]:
    """Returns the Spanish or French words of a noun phrase; draws among a noun's translations."""
    column = {"es": 1, "fr": 3}[language]
    gender, plural = phrase.noun[column + 1], phrase.plural
    words = [rng.choice(phrase.noun[column].split("|"))]
    if phrase.adjective:
        adjective = agreeing(phrase.adjective[1 + (language == "fr")], gender, language)
        words.insert(0 if language == "fr" and phrase.adjective[3] == "before" else 1, adjective)
    if plural:
        words = [word + "s" if language == "fr" else spanish_plural(word) for word in words]
    if phrase.determiner.isdigit():
        return [phrase.determiner, *words]
    article = ARTICLES[language][phrase.determiner][gender].split()[plural]
    if language == "fr" and article in ("le", "la") and words[0][0] in "aî":
        return [f"l'{words[0]}", *words[1:]]
    return [article, *words]


def agreeing(adjective: str, gender: str, language: str) -> str:
    """Returns the adjective's form for a gender, m or f."""
    if gender == "m" or adjective.endswith("e"):
        return adjective
    if language == "fr":
        return adjective + "e"
    return adjective[:-1] + "a" if adjective.endswith("o") else adjective


def english_plural(noun: str) -> str:
    """Returns the plural of an English noun."""
    return noun[:-1] + "ies" if noun == "city" else noun + "s"


def spanish_plural(word: str) -> str:
    """Returns the plural of a Spanish noun or adjective."""
    return word + ("s" if word[-1] in "aeo" else "es")


def sentence(words: list[str]) -> str:
    """Joins words to a sentence with a capital letter and a period."""
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."
