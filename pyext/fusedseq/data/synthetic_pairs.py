"""Generated sentence pairs, English with Spanish or French: one meaning said twice, the same pairs for the same seed.

What there is to learn: a dictionary, of which some words have two translations; adjectives that change sides (in French
some do not); articles and adjectives that agree with a gender English does not show; verbs that agree in number over
the object; an adverb from the end to the front; a pronoun that Spanish leaves out; French elision; numbers kept as they are.
"""

import random
from typing import NamedTuple

# English, Spanish (translations parted by |), its gender, French, its gender
NOUNS = [line.split() for line in """
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
""".strip().splitlines()]  # fmt: skip
# English, Spanish and French masculine, whether before the French noun
ADJECTIVES = [line.split() for line in """
red rojo rouge after
small pequeño petit before
black negro noir after
big grande grand before
green verde vert after
cold frío froid after
blue azul bleu after
pretty bonito joli before
""".strip().splitlines()]  # fmt: skip
# English plural; Spanish singular and plural; French likewise
VERBS = [line.split() for line in """
see ve ven voit voient
follow sigue siguen suit suivent
find encuentra encuentran trouve trouvent
open abre abren ouvre ouvrent
seek busca buscan cherche cherchent
leave deja dejan quitte quittent
carry lleva llevan porte portent
lose pierde pierden perd perdent
""".strip().splitlines()]  # fmt: skip
ADVERBS = [("today", "hoy", "aujourd'hui"), ("often", "a menudo", "souvent"), ("now", "ahora", "maintenant")]
ARTICLES = {
    "es": {"the": {"m": "el los", "f": "la las"}, "a": {"m": "un unos", "f": "una unas"}},
    "fr": {"the": {"m": "le les", "f": "la les"}, "a": {"m": "un des", "f": "une des"}},
}
SIZES = {"train": 2000, "valid": 200, "test": 200}  # pairs


class Phrase(NamedTuple):
    """A noun phrase before it is said in a language."""

    determiner: str  # the, a, or a number
    adjective: list | None
    noun: list
    plural: bool


def splits(language, seed=0, sizes=SIZES):
    """For each split of `sizes` its pairs; one may stand in two splits."""
    return {split: pairs(language, f"{seed}/{split}", n) for split, n in sizes.items()}


def pairs(language, seed=0, n=2400):
    """`n` distinct pairs (English, other) of sentences. language: es or fr"""
    rng = random.Random(f"{language}/{seed}")
    found: dict = {}
    while len(found) < n:
        found[pair(rng, language)] = None
    return list(found)


def pair(rng, language):
    subject = phrase(rng) if rng.random() < 0.75 else None
    plural = subject.plural if subject else rng.random() < 0.4
    verb, object_ = zipf(rng, VERBS), phrase(rng)
    adverb = rng.choice(ADVERBS) if rng.random() < 0.3 else None
    english = [*(english_phrase(subject) if subject else ["they" if plural else "he"]),
               verb[0] if plural else verb[0] + "s", *english_phrase(object_), *([adverb[0]] if adverb else [])]  # fmt: skip
    first = 1 if language == "es" else 3
    pronoun = [] if language == "es" else ["ils" if plural else "il"]
    other = [*([adverb[1 + (language == "fr")]] if adverb else []),
             *(other_phrase(rng, subject, language) if subject else pronoun),
             verb[first + plural], *other_phrase(rng, object_, language)]  # fmt: skip
    return sentence(english), sentence(other)


def phrase(rng):
    determiner = rng.choice(["the", "the", "a", str(rng.randint(2, 30))])
    plural = determiner.isdigit() or rng.random() < 0.4
    return Phrase(determiner, zipf(rng, ADJECTIVES) if rng.random() < 0.5 else None, zipf(rng, NOUNS), plural)


def english_phrase(phrase):
    determiner = "some" if phrase.determiner == "a" and phrase.plural else phrase.determiner
    noun = phrase.noun[0] if not phrase.plural else english_plural(phrase.noun[0])
    return [determiner, *([phrase.adjective[0]] if phrase.adjective else []), noun]


def other_phrase(rng, phrase, language):
    column = {"es": 1, "fr": 3}[language]
    gender, plural = phrase.noun[column + 1], phrase.plural
    ending = {"es": spanish_plural, "fr": lambda word: word + "s"}[language]
    words = [rng.choice(phrase.noun[column].split("|"))]
    if phrase.adjective:
        adjective = agreeing(phrase.adjective[1 + (language == "fr")], gender, language)
        words.insert(0 if language == "fr" and phrase.adjective[3] == "before" else 1, adjective)
    words = [ending(word) for word in words] if plural else words
    if phrase.determiner.isdigit():
        return [phrase.determiner, *words]
    article = ARTICLES[language][phrase.determiner][gender].split()[plural]
    if language == "fr" and article in ("le", "la") and words[0][0] in "aî":
        return [f"l'{words[0]}", *words[1:]]
    return [article, *words]


def agreeing(adjective, gender, language):
    if gender == "m" or adjective.endswith("e"):
        return adjective
    if language == "fr":
        return adjective + "e"
    return adjective[:-1] + "a" if adjective.endswith("o") else adjective


def english_plural(noun):
    return noun[:-1] + "ies" if noun == "city" else noun + "s"


def spanish_plural(word):
    return word + ("s" if word[-1] in "aeo" else "es")


def sentence(words):
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."


def zipf(rng, entries):
    return rng.choices(entries, [1 / (rank + 1) for rank in range(len(entries))])[0]
