"""Corpora, vocabularies, batching and the generated miniatures."""
