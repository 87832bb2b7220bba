"""Corpora, vocabularies, batching and the generated miniature data sets."""

SPLITS = ("train", "valid", "test")
PAD = 0  # the id of padding, in every task that pads sequences
