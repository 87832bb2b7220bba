"""All benchmark cases: the sizes of the documented models, and the targets of each."""

import torch

from bench.suite.case import Target
from bench.suite.cases.attention import attention, decoding, encoder_layer, packed_sequences
from bench.suite.cases.elementwise import (
    elementwise,
    embedding,
    feed_forward,
    norm,
    nt_asgd,
    regularization,
)
from bench.suite.cases.losses import cross_entropy, split_cross_entropy
from bench.suite.cases.models import accelerated
from bench.suite.cases.products import (
    linear,
    quantized_gru,
    quantized_linear,
    quantized_lstm,
    quantized_mogrifier_lstm,
)
from bench.suite.cases.recurrence import (
    bidirectional_lstm,
    gru,
    layer_norm_gru,
    lstm,
    lstm_with_vectors,
    mogrifier,
    mogrifier_pair,
    projected_lstm,
    rnn,
)

# T, B, input width and hidden width of nn.LSTM, from a single row to large batches: a grid that
# shows where torch's operator is level or ahead.
LSTM_GRID = [
    (1, 1, 128, 128),
    (1, 64, 512, 512),
    (1, 128, 1500, 1500),
    (5, 20, 32, 128),
    (10, 1, 256, 256),
    (10, 128, 128, 128),
    (20, 1, 650, 650),
    (20, 32, 256, 512),
    (20, 128, 64, 256),
    (35, 1, 1024, 1024),
    (35, 20, 200, 200),
    (35, 20, 650, 650),
    (35, 64, 256, 256),
    (50, 16, 300, 300),
    (50, 64, 1024, 1024),
    (70, 80, 1500, 1500),
    (100, 1, 512, 512),
    (100, 8, 128, 256),
    (100, 32, 300, 512),
    (128, 16, 64, 128),
    (150, 10, 256, 512),
    (200, 1, 128, 256),
    (200, 4, 512, 1024),
    (200, 32, 128, 128),
]

# Of these, the shapes at which the other recurrences are compared with torch's.
OTHER_RECURRENCES = [
    (20, 32, 256, 512),
    (20, 128, 64, 256),
    (35, 1, 1024, 1024),
    (35, 20, 650, 650),
    (35, 64, 256, 256),
    (50, 16, 300, 300),
    (100, 8, 128, 256),
    (200, 32, 128, 128),
]

CASES = [
    mogrifier(70, 70, 650, Target("eager", 2.0), Target("roof", 0.8)),
    mogrifier(35, 20, 650, Target("eager", 3.3), whole=True),
    mogrifier(70, 20, 1150, Target("eager", 2.8)),
    mogrifier(70, 1, 650, Target("eager", 3.3), roofline="mv", whole=True),
    mogrifier(70, 1, 650, Target("eager", 1.4), backward=False, roofline="mv"),
    lstm(70, 20, 650, 650, Target("torch", 1.0)),
    lstm(70, 20, 650, 650, Target("torch", 1.15), dropped=0.5),
    lstm(70, 20, 400, 1150, Target("torch", 1.0)),
    lstm(70, 20, 400, 1150, Target("torch", 1.15), dropped=0.5),
    lstm_with_vectors("layer_norm_lstm", 70, 20, 650, 650, Target("eager", 3.0)),
    layer_norm_gru(70, 20, 650, 650),
    lstm_with_vectors("peephole_lstm", 70, 20, 650, 650),
    rnn(70, 20, 650, 650),
    projected_lstm(70, 20, 400, 1150, 400, Target("torch", 1.0)),
    lstm(70, 20, 650, 650, packed=True, full=True),
    elementwise("dropout", (4900, 650), 0.5, Target("eager", 5.0), Target("roof", 0.7)),
    elementwise("locked_dropout", (70, 70, 650), 0.5, Target("roof", 0.7)),
    elementwise("weight_drop", (2600, 650), 0.5, Target("eager", 8.0)),
    embedding(10_000, Target("eager", 4.0)),
    embedding(100_000, Target("eager", 4.0)),
    embedding(10_000, backward=False),
    # The forward time must not depend on the size of the vocabulary.
    embedding(100_000, Target("V10000", 0.8), backward=False, smaller=10_000),
    regularization(70, 70, 650, Target("eager", 3.0)),
    linear(1400, 400, 10_000),
    # Attention: sentence pairs of two to six words (en-es), sequence reversal, and en-fr.
    attention(
        2048,
        8,
        6,
        32,
        Target("torch", 5.0),
        Target("eager", 12.0),
        Target("roof", 0.4),
        roofline="copy",
    ),
    attention(
        2048,
        8,
        6,
        32,
        Target("torch", 10.0),
        tensors=("lengths",),
        suffix="-lengths-dropout.1",
        dropout=0.1,
        seed=5,
        roofline="copy",
    ),
    *(
        attention(8, 1, 5, D, Target("torch", 3.0 if D <= 256 else 2.0), roofline="copy")
        for D in (32, 256, 512, 2048)
    ),
    # The smallest calls: what a call costs beside its work.
    attention(1, 1, 1, 4, roofline="copy", full=True),
    decoding(1, 1, 1, 4, full=True),
    lstm(1, 1, 16, 16, roofline="mv", full=True),
    gru(1, 1, 16, 16, roofline="mv", full=True),
    mogrifier(1, 1, 16, roofline="mv", full=True),
    attention(
        64,
        8,
        90,
        64,
        Target("torch", 2.0),
        tensors=("lengths",),
        suffix="-lengths-causal-dropout.1",
        causal=True,
        dropout=0.1,
        seed=5,
    ),
    attention(64, 8, 90, 64, Target("torch", 1.0), suffix="-causal", causal=True),
    *(
        attention(
            64,
            N,
            90,
            D,
            Target("torch", 2.0),
            Target("eager", 2.0),
            tensors=("lengths", *positions),
            suffix=f"-lengths-dropout.3{''.join('-' + p for p in positions)}",
            dropout=0.3,
            seed=5,
        )
        for N, D, *positions in (
            (5, 20),
            (10, 10),
            (5, 60, "rope"),
            (10, 30, "alibi"),
            (5, 20, "relative16"),
            (10, 10, "biasNLS"),
        )
    ),
    attention(2, 8, 1024, 64, suffix="-causal", causal=True),
    # A window of 256 keys against a mask, and sequences without padding against half padding.
    attention(
        1,
        8,
        4096,
        64,
        Target("torch", 4.0),
        suffix="-causal-window256",
        causal=True,
        window=(255, 0),
        full=True,
    ),
    # As in Gemma 2 and gpt-oss: logits that are capped, and a sink for each head.
    attention(2, 8, 1024, 64, suffix="-causal-softcap50", causal=True, softcap=50.0, full=True),
    attention(2, 8, 1024, 64, tensors=("sinks",), suffix="-causal-sinks", causal=True, full=True),
    packed_sequences(16, 8, 128, 64, Target("torch", 1.3)),
    packed_sequences(8, 8, 512, 64, Target("torch", 1.3), full=True),
    decoding(1, 8, 200, 64, Target("torch", 1.2)),
    *(
        decoding(*sizes, full=True)
        for sizes in (
            (1, 8, 50, 64),
            (32, 8, 200, 64),
            (1, 12, 1024, 64),
            (8, 12, 1024, 64),  # keys and values of 50 MB
        )
    ),
    encoder_layer(64, 20, 512, Target("torch", 1.6)),
    *(
        encoder_layer(*sizes, Target("torch", 1.6), full=True)
        for sizes in ((32, 128, 256), (8, 512, 512))
    ),
    nt_asgd(Target("eager", 3.0), Target("torch", 3.0)),
    norm(2048 * 6, 256, Target("eager", 3.0)),
    norm(64 * 90, 512, Target("eager", 3.0)),
    norm(64 * 90, 512, prenorm=True),
    feed_forward(64 * 90, 2048, "relu", Target("eager", 3.0)),
    feed_forward(64 * 90, 2048, "gelu", Target("eager", 3.0)),
    cross_entropy(
        2048,
        256,
        100_000,
        Target("eager", 1.55),
        Target("torch", 1.05),
        Target("memory of eager", 0.15),
    ),
    cross_entropy(
        4900,
        650,
        10_000,
        Target("eager", 1.2),
        Target("torch", 1.03),
        Target("memory of eager", 0.25),
        bias=True,
    ),
    cross_entropy(64, 512, 32_000, full=True),
    # The splits of the AWD-LSTM code.
    split_cross_entropy(1400, 400, 100_000, (2800, 20_000, 76_000), Target("eager", 1.0)),
    # Only in the full set: the Mogrifier paper's model, its dropouts, varying lengths, bf16, sparse
    # gradients.
    mogrifier(70, 64, 912, rank=84, suffix="-rank84", full=True),
    mogrifier(
        70,
        64,
        912,
        rank=84,
        suffix="-rank84-paper",
        full=True,
        input_dropout=0.729,
        state_dropout=0.387,
        cap_input_gate=True,
        seed=5,
    ),
    mogrifier(
        70,
        20,
        650,
        suffix="-zoneout.1-state_dropout.3",
        full=True,
        zoneout_h=0.1,
        zoneout_c=0.1,
        state_dropout=0.3,
        seed=5,
    ),
    mogrifier(75, 20, 650, suffix="-varied", full=True, lengths_of_T=(70, 35, 68, 73, 64, 75)),
    mogrifier_pair(35, 20, 650, full=True),
    embedding(100_000, sparse=True, full=True),
    linear(1024, 768, 3072, targets=(Target("eager", 1.0),), dtype=torch.bfloat16, full=True),
    # The product alone, with few rows.
    *(
        linear(
            M,
            2600,
            1300,
            targets=(Target("eager", 1.0),),
            backward=False,
            dtype=torch.bfloat16,
            full=True,
        )
        for M in (70, 20)
    ),
    mogrifier(70, 70, 650, Target("eager", 1.9), dtype=torch.bfloat16, full=True),
    mogrifier(35, 20, 650, Target("eager", 2.8), dtype=torch.bfloat16, full=True),
    lstm(35, 64, 256, 256, Target("torch", 1.1), dtype=torch.bfloat16, full=True),
    lstm(50, 64, 1024, 1024, Target("torch", 1.6), dtype=torch.bfloat16, full=True),
    lstm(70, 20, 650, 650, Target("torch", 2.0), dtype=torch.bfloat16, full=True),
    lstm(70, 20, 400, 1150, dropped=0.5, dtype=torch.bfloat16, full=True),
    elementwise("dropout", (4900, 650), 0.5, dtype=torch.bfloat16, full=True),
    norm(64 * 90, 512, dtype=torch.bfloat16, full=True),
    feed_forward(64 * 90, 2048, "relu", dtype=torch.bfloat16, full=True),
    cross_entropy(2048, 256, 100_000, backward=False, full=True),
    cross_entropy(1024, 512, 32_000, Target("eager", 1.5), dtype=torch.bfloat16, full=True),
    cross_entropy(4900, 650, 10_000, bias=True, dtype=torch.bfloat16, full=True),
    *(
        attention(*sizes, Target("torch", 2.0), dtype=torch.bfloat16, full=True)
        for sizes in ((64, 8, 128, 64), (1, 8, 2048, 64))
    ),
    *(
        lstm(*sizes, Target("torch", 1.1), backward=backward, full=True)
        for backward in (True, False)
        for sizes in LSTM_GRID
    ),
    *(
        recurrence(*sizes, Target("torch", 1.1), full=True)
        for recurrence in (gru, bidirectional_lstm)
        for sizes in OTHER_RECURRENCES
    ),
    *(
        lstm_with_vectors("layer_norm_lstm", *sizes, Target("eager", 3.0), full=True)
        for sizes in OTHER_RECURRENCES
    ),
    # Single steps, as a model that generates text makes them: reading the weights limits them.
    *(
        lstm(1, B, H, H, Target("torch", 1.1), backward=False, roofline="mv", full=True)
        for B, H in ((1, 650), (8, 650), (1, 1024))
    ),
    gru(1, 1, 650, 650, Target("torch", 1.1), backward=False, roofline="mv", full=True),
    mogrifier(1, 1, 650, Target("eager", 1.4), backward=False, roofline="mv", full=True),
    # Whole models before and after `accelerate`: the shapes of BERT-base and GPT-2 small.
    *(
        accelerated(*sizes, Target("torch", 1.5), dtype=dtype, full=True)
        for dtype in (torch.float32, torch.bfloat16)
        for sizes in (
            ("bert", 8, 128, 768, 12),
            ("gpt2", 8, 128, 768, 12),
            ("transformer", 32, 32, 512, 8, 2),
            ("lstm", 35, 20, 650, 10_000),
        )
    ),
    # Weights in 8 bits: steps of decoding, an output layer, and more rows than 8 bits pay for.
    *(quantized_linear(M, 650, 2600) for M in (1, 2, 8, 64)),
    *(quantized_linear(M, 400, 10_000) for M in (1, 8)),
    quantized_linear(1, 1024, 4096),
    *(quantized_lstm(1, B, 650, 650) for B in (1, 8)),
    *(quantized_lstm(T, 1, 1024, 1024) for T in (1, 20)),
    quantized_gru(1, 1, 650, 650),
    *(quantized_mogrifier_lstm(T, 1, 650) for T in (1, 20)),
]
