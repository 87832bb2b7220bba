"""The benchmark cases of the picture, of docs/benchmarks.md and of README.md, with labels for
readers.
"""

# Benchmark case or TASK/PRESET: (label, what it is compared with where the baseline is torch's own
# operator).
OPERATORS = {
    "mogrifier_lstm-T35-B20-650-r5": ("Mogrifier LSTM, width 650, batch 20", None),
    "mogrifier_lstm-T70-B1-650-r5": ("Mogrifier LSTM, width 650, batch 1", None),
    "lstm-T70-B20-400-1150-weight_drop0.5": ("LSTM with weight drop, width 1,150", "nn.LSTM"),
    "lstm-T70-B20-650-650": ("LSTM, width 650", "nn.LSTM"),
    "attention-L6-B2048-N8-D32": ("Attention, 6 positions, batch 2,048", "torch SDPA"),
    "attention-L90-B64-N8-D64-lengths-causal-dropout.1": (
        "Attention, 90 positions, padding, dropout",
        "torch SDPA",
    ),
    "attention-L1024-B2-N8-D64-causal": ("Attention, 1,024 positions, causal", "torch SDPA"),
    "linear_cross_entropy-2048-256-100000": (
        "Output layer and loss, 100,000 words",
        "F.linear_cross_entropy",
    ),
    "residual_layer_norm-5760x512": ("Dropout, residual and LayerNorm", None),
    "embedding-4900-V100000-650": ("Embedding with dropout, 100,000 words", None),
}
TRAINING = {
    "words/base": "Training step, Transformer",
    "ptb/mogrifier-awd": "Training step, Mogrifier LSTM",
}
BF16 = {
    "mogrifier_lstm-T35-B20-650-r5-bfloat16": "In bf16: Mogrifier LSTM, width 650, batch 20",
    "lstm-T70-B20-650-650-bfloat16": "In bf16: LSTM, width 650",
    "linear_cross_entropy-2048-256-100000-bfloat16": (
        "In bf16: output layer and loss, 100,000 words"
    ),
    "attention-L1024-B2-N8-D64-causal-bfloat16": "In bf16: attention, 1,024 positions, causal",
}
# The cases in README.md: docs/benchmarks.md has the others.
README = (
    "mogrifier_lstm-T35-B20-650-r5",
    "lstm-T70-B20-400-1150-weight_drop0.5",
    "attention-L6-B2048-N8-D32",
    "linear_cross_entropy-2048-256-100000",
    "words/base",
    "ptb/mogrifier-awd",
    "mogrifier_lstm-T35-B20-650-r5-bfloat16",
)
