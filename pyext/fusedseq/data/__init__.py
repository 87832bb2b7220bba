"""Corpora, vocabularies, batching and the generated miniatures."""

SPLITS = ("train", "valid", "test")
PAD = 0  # the id that fills short sequences up, in every task that has such
