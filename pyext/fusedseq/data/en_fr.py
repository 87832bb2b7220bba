"""English-French sentence pairs, TED talks or Multi30k: lower case, numbers as <NUM>, NLTK's words, a least frequency."""

import re
from functools import cache, partial
from itertools import product

from fusedseq.data import SPLITS, synthetic_pairs
from fusedseq.data.locate import locate
from fusedseq.data.parallel import build
from fusedseq.data.parallel_files import read_parallel, without_gaps
from fusedseq.data.vocabulary import Vocabulary

LANGUAGES = "English", "French"
SPECIALS = ("<PAD>", "<UNK>", "<s>", "</s>")
FOLDERS = ("ted_en_fr", "multi30k_en_fr", "multi30k_en_fr/raw", "raw")
NAMES = product(("dev", "valid", "val"), ("test", "test_2016_flickr"))
CHOICES = [[f"{name}.{side}" for name in ("train", *names) for side in ("en", "fr")] for names in NAMES]
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
ABBREVIATIONS = {"mr", "mrs", "ms", "dr", "prof", "st", "vs", "m", "mm", "u.s"}  # after which no sentence ends
BROKEN = "\ufffd"  # where a decoder met bytes that were no text


def load(data=None, *, seed=0, min_frequency=2, max_length=100):
    """The ParallelCorpus in `data` (a directory, or 'synthetic'): train.en, train.fr, dev.en (or val.en, valid.en) and
    so on, line i of the one file being line i of the other. The splits are the files' own.

    Of train are dropped: pairs with an empty side or a broken character, those over `max_length` ids, and those that also
    stand in valid or test.
    seed: of the synthetic pairs    min_frequency: of a word in train, to be in the vocabulary
    """
    if data == "synthetic":
        splits = synthetic_pairs.splits("fr", seed=seed)
    else:
        files = locate("en-fr", CHOICES, data, FOLDERS)
        splits = {split: read_parallel(*files[2 * i : 2 * i + 2]) for i, split in enumerate(SPLITS)}
    dropped: dict = {}
    for split in SPLITS:
        splits[split], gaps = without_gaps(splits[split])
        dropped["empty"] = dropped.get("empty", 0) + gaps
    splits["train"], why = cleaned(splits["train"], {*splits["valid"], *splits["test"]})
    return build(splits, LANGUAGES, tokenize, partial(count, min_frequency=min_frequency),
                 max_length=max_length, dropped=dropped | why)  # fmt: skip


def cleaned(pairs, held_out):
    """The training pairs that are to be learnt from, and how many were dropped for what."""
    unseen = [pair for pair in pairs if pair not in held_out]
    kept = [pair for pair in unseen if BROKEN not in "".join(pair)]
    return kept, {"also in valid or test": len(pairs) - len(unseen), "broken": len(unseen) - len(kept)}


def tokenize(text):
    """The words of a sentence: lower-cased, as nltk.word_tokenize parts them, each number <NUM> ("20th": "<NUM>th").

    word_tokenize reads a trained Punkt model from a file that must be downloaded first, to find sentences within the
    line; here an untrained one that knows ABBREVIATIONS finds them.
    The numbers are replaced afterwards, for NLTK would part <NUM> into three words.
    """
    sentences, words = _tokenizers()
    parted = (word for sentence in sentences.tokenize(text.lower()) for word in words.tokenize(sentence))
    return [NUMBER.sub("<NUM>", word) for word in parted]


def count(sentences, min_frequency=2):
    """The Vocabulary of sentences, each a list of words, the most frequent first."""
    return Vocabulary.count((word for sentence in sentences for word in sentence), SPECIALS, min_frequency)


@cache
def _tokenizers():
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types |= ABBREVIATIONS
    return PunktSentenceTokenizer(parameters), NLTKWordTokenizer()
