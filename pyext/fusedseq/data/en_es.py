"""English-Spanish sentence pairs of Tatoeba (manythings.org/anki), with word-level Hugging Face tokenizers."""

import random
from functools import cache, partial

from fusedseq.data import SPLITS, synthetic_pairs
from fusedseq.data.locate import locate
from fusedseq.data.parallel import build
from fusedseq.data.parallel_files import read_parallel, read_tabbed, without_gaps
from fusedseq.data.vocabulary import Vocabulary

LANGUAGES = "English", "Spanish"
SPECIALS = ("[PAD]", "[UNK]", "[SOS]", "[EOS]")
FOLDERS = ("tatoeba_en_es",)
CHOICES = (
    [["spa.txt"], ["pairs.tsv"]]
    + [[f"{split}.{side}" for split in ("train", name, "test") for side in ("en", "es")] for name in ("valid", "dev")]
)  # fmt: skip


def load(data=None, *, seed=0, held_out=0.05, min_frequency=2, max_length=90):
    """The ParallelCorpus in `data` (a directory, or 'synthetic'): spa.txt or pairs.tsv (English <tab> Spanish), split
    here, or train.en, train.es, valid.en and so on, split already.

    seed: of the split (and of the synthetic pairs)    held_out: the share of English sentences in valid, and in test
    min_frequency: of a word in the training split, to be in the vocabulary    max_length: ids in a sentence
    """
    if data == "synthetic":
        pairs = synthetic_pairs.pairs("es", seed=seed)
        splits, dropped = split_by_source(pairs, seed, held_out), 0
    else:
        files = locate("en-es", CHOICES, data, FOLDERS)
        if len(files) == 1:
            pairs, dropped = without_gaps(read_tabbed(files[0]))
            splits = split_by_source(pairs, seed, held_out)
        else:
            read = [without_gaps(read_parallel(*files[i : i + 2])) for i in (0, 2, 4)]
            splits, dropped = {split: read[i][0] for i, split in enumerate(SPLITS)}, sum(n for _, n in read)
    return build(splits, LANGUAGES, tokenize, partial(count, min_frequency=min_frequency),
                 max_length=max_length, dropped={"empty": dropped})  # fmt: skip


def split_by_source(pairs, seed, held_out):
    """Train, valid and test, with all pairs of an English sentence (and of its spellings with other capitals or blanks)
    in one of them: a test sentence with another translation in train would be learnt by heart."""
    if not 0 < held_out < 0.5:
        raise ValueError(f"held_out must be between 0 and 0.5, got {held_out}")
    groups: dict = {}
    for pair in pairs:
        groups.setdefault(" ".join(pair[0].casefold().split()), []).append(pair)
    keys = sorted(groups)  # the file's order must not matter
    random.Random(f"{seed}/split").shuffle(keys)
    each = round(len(keys) * held_out)
    parts = {"valid": keys[:each], "test": keys[each : 2 * each], "train": keys[2 * each :]}
    return {split: [pair for key in parts[split] for pair in groups[key]] for split in SPLITS}


def tokenize(text):
    """Runs of letters and digits, and runs of anything else but blanks; case is kept."""
    return [word for word, _ in _whitespace().pre_tokenize_str(text)]


def count(sentences, min_frequency=2):
    """The Vocabulary of a word-level tokenizer trained on sentences, each a list of words: by frequency, ties in
    alphabetical order."""
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIALS[1]))
    tokenizer.pre_tokenizer = _whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=2**31, min_frequency=min_frequency, special_tokens=[*SPECIALS], show_progress=False
    )
    tokenizer.train_from_iterator(map(" ".join, sentences), trainer)
    ids = tokenizer.get_vocab()
    return Vocabulary(sorted(ids, key=ids.get))


@cache
def _whitespace():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Whitespace()
