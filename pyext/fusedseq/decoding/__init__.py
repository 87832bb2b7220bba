"""What trained models write: search over a translator, samples of a language model, and BLEU."""
