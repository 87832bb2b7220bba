"""English-French sentence pairs: TED talks or Multi30k.

Text is in lower case, numbers are replaced by <NUM>, and NLTK splits it into words.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from fusedseq.data import SPLITS, synthetic_pairs
from fusedseq.data.locate import locate, named_data
from fusedseq.data.parallel import ParallelCorpus, TextPair, build
from fusedseq.data.parallel_files import read_parallel, without_gaps
from fusedseq.data.vocabulary import Vocabulary

LANGUAGES = "English", "French"
SPECIALS = ("<PAD>", "<UNK>", "<s>", "</s>")
FOLDERS = ("ted_en_fr", "multi30k_en_fr", "multi30k_en_fr/raw", "raw")
NAMES = product(("dev", "valid", "val"), ("test", "test_2016_flickr"))
# Each list is a complete set of files.
CHOICES = [
    [f"{name}.{side}" for name in ("train", *names) for side in ("en", "fr")] for names in NAMES
]
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
# Abbreviations whose period does not end a sentence.
ABBREVIATIONS = {"mr", "mrs", "ms", "dr", "prof", "st", "vs", "m", "mm", "u.s"}
REPLACEMENT_CHARACTER = "\ufffd"  # of a decoder, for bytes that are not valid text


def load(
    data: str | None = None, *, seed: int = 0, min_frequency: int = 2, max_length: int = 100
) -> ParallelCorpus:
    """Loads the ParallelCorpus in `data`, a directory or 'synthetic'; None reads FUSEDSEQ_DATA.

    The files are train.en, train.fr, dev.en (or val.en, valid.en) and so on; line i of one file is
    the translation of line i of the other. The splits are those of the files.

    These training pairs are dropped: pairs with an empty side or a replacement character, those of
    more than `max_length` ids, and those that are also in valid or test.
    seed: of the synthetic pairs
    min_frequency: the least frequency of a word of the vocabulary in train
    max_length: of a sentence in ids
    Errors: FileNotFoundError, see `locate`; ValueError, which names the data, as `build`.
    """
    if data == "synthetic":
        splits = synthetic_pairs.splits("fr", seed=seed)
    else:
        files = locate("en-fr", CHOICES, data, FOLDERS)
        pairs = zip(SPLITS, files[::2], files[1::2], strict=True)
        with named_data("en-fr", data):
            splits = {split: read_parallel(en, fr) for split, en, fr in pairs}
    dropped: dict[str, int] = {}
    for split in SPLITS:
        splits[split], gaps = without_gaps(splits[split])
        dropped["empty"] = dropped.get("empty", 0) + gaps
    splits["train"], reasons = cleaned(splits["train"], {*splits["valid"], *splits["test"]})
    with named_data("en-fr", data):
        return build(
            splits,
            LANGUAGES,
            tokenize,
            partial(count, min_frequency=min_frequency),
            max_length=max_length,
            dropped=dropped | reasons,
        )


def cleaned(
    pairs: Sequence[TextPair], held_out: Collection[TextPair]
) -> tuple[list[TextPair], dict[str, int]]:
    """Returns the usable training pairs, and for each reason how many others were dropped."""
    unseen = [pair for pair in pairs if pair not in held_out]
    clean = [pair for pair in unseen if REPLACEMENT_CHARACTER not in "".join(pair)]
    return clean, {
        "also in valid or test": len(pairs) - len(unseen),
        "broken": len(unseen) - len(clean),
    }


def tokenize(text: str) -> list[str]:
    """Returns the words of a sentence as nltk.word_tokenize splits them, in lower case.

    Each number is replaced by <NUM> ("20th" becomes "<NUM>th"), after splitting, because NLTK would
    split <NUM> into three words.
    word_tokenize finds the sentences within the line with a trained Punkt model, whose file must be
    downloaded first. Here an untrained model that knows ABBREVIATIONS finds them.
    """
    sentence_tokenizer, word_tokenizer = _tokenizers()
    words = (
        word
        for sentence in sentence_tokenizer.tokenize(text.lower())
        for word in word_tokenizer.tokenize(sentence)
    )
    return [NUMBER.sub("<NUM>", word) for word in words]


def count(sentences: Iterable[Iterable[str]], min_frequency: int = 2) -> Vocabulary:
    """Returns the Vocabulary of sentences, each a list of words, the most frequent first."""
    return Vocabulary.count(
        (word for sentence in sentences for word in sentence), SPECIALS, min_frequency
    )


@cache
def _tokenizers() -> tuple[Any, Any]:
    """Returns NLTK's sentence tokenizer and word tokenizer."""
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types |= ABBREVIATIONS
    return PunktSentenceTokenizer(parameters), NLTKWordTokenizer()
