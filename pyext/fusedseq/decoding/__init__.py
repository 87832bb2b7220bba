"""Decoding: beam search over a translator, samples of a language model, and BLEU."""
