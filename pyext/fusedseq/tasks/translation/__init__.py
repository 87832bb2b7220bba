"""Translation with an encoder-decoder Transformer: the task, batched beam search, BLEU."""
