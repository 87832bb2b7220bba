"""Decoding: beam search over a translator, samples of a language model, and BLEU."""

from fusedseq.decoding.beam import beam_search
from fusedseq.decoding.bleu import corpus_bleu, corpus_chrf, sentence_bleu
from fusedseq.decoding.sample import sample

__all__ = ["beam_search", "corpus_bleu", "corpus_chrf", "sample", "sentence_bleu"]
