"""What the page of one machine says beside its tables, and what only one machine needs."""

AMD = """
!!! note "MKL on AMD processors"
    On an AMD processor MKL, which torch uses for matrix products, takes its AVX2 kernels although
    the processor has AVX-512. {rates} Part of every gain of a case with large products comes from
    that. It is also what somebody who installs torch on this processor gets. `fusedseq bench --mkl
    unthrottled` lifts the limit by preloading a library of one line, and measures again. {measured}
"""
OPERATORS_PICTURE = """## All operators

![Speed-ups of all operators](../assets/speedup-operators-light.svg#only-light)
![Speed-ups of all operators](../assets/speedup-operators-dark.svg#only-dark)
"""
TRAINING_PICTURE = """
![Speed-ups of training steps](../assets/speedup-training-light.svg#only-light)
![Speed-ups of training steps](../assets/speedup-training-dark.svg#only-dark)
"""
FAMILIES = {
    "Recurrences": (
        (
            "mogrifier_lstm",
            "mogrifier_lstm_pair",
            "lstm",
            "bidirectional_lstm",
            "layer_norm_lstm",
            "layer_norm_gru",
            "peephole_lstm",
            "gru",
            "rnn",
            "projected_lstm",
        ),
        "`T70-B20-650-r5` means 70 steps, batch 20, width 650 and 5 rounds of the Mogrifier; "
        "`400-1150` are the input "
        "and the hidden width of an LSTM.",
    ),
    "Dropouts, embedding, linear map": (
        (
            "dropout",
            "locked_dropout",
            "weight_drop",
            "embedding",
            "activation_regularization",
            "linear",
        ),
        "`4900-V10000-650` means 4,900 tokens, a vocabulary of 10,000 and width 650. The forward "
        "with a vocabulary of "
        "100,000 is compared with that of 10,000, because its time must not depend on the "
        "vocabulary.",
    ),
    "Attention": (
        ("attention", "attention_varlen", "encoder_layer", "accelerate"),
        "`L90-B64-N8-D64` means 90 positions, batch 64, 8 heads and 64 dimensions per head; "
        "`L1-S200` is one query over 200 cached keys, forward only. `encoder_layer` is "
        "`nn.TransformerEncoderLayer` in training, as it is and converted to this package. "
        "`attention_varlen` is packed sequences, with half as many tokens as the baselines' padded "
        "ones; `accelerate` is a training step of a whole model, before and after.",
    ),
    "Output layer, norms, activations, optimizer": (
        (
            "linear_cross_entropy",
            "split_cross_entropy",
            "residual_layer_norm",
            "bias_activation_dropout",
            "nt_asgd",
        ),
        "`2048-256-100000` means 2,048 rows, width 256 and 100,000 classes.",
    ),
    "Weights in 8 bits": (
        ("quantize",),
        "Inference after `fusedseq.quantize_`, which rounds weights to 8 bits and nothing else. "
        "**torch** is torch's dynamic quantization, which also rounds the activations to 8 bits; "
        "eager is the same module in fp32. `1-650-2600` means 1 row, 650 inputs and 2,600 outputs.",
    ),
}
TRAINING = """## Training steps

Whole training steps at the sizes of the source reports, on the real texts. "baselines" is the same
model in plain PyTorch, with torch's own dropouts and attention, and with `F.linear` and
`F.cross_entropy` as its loss, which keep all logits. "chunked-loss" is that with torch's
`F.linear_cross_entropy` where it can compute the loss, with the fastest of its chunk sizes; a
machine without this column was measured before it existed, and by the times of the loss alone it
would take much of the gain of the Transformers in fp32, on Zen 5 all of that of words/base with MKL
unthrottled. "compiled" is "baselines" under `torch.compile`, of ptb each operator alone and an LSTM
as a loop of compiled steps, which is slower than torch's own LSTM. None is the oracle, which is
slower. Items are numbers, words, contexts or tokens. `python -m bench.training.compare speed --data
DATA` measures the steps again.
"""
# Explanations that belong to one machine's results.
REMARKS = {
    "amd-epyc-family-26-model-2-2-cores-cpu": """
- **Attention with 5 positions and batch 8**: the time of such a call is host overhead, much of it
  autograd's own. The targets are two and three times the speed of torch's operator.
- **Attention with 6 positions and batch 2,048**: the targets of 12 times eager and, with dropout,
  10 times torch's operator were set on a machine whose baselines ran many times slower. The limit
  is the gain that the rate of a copy leaves here.
- **LSTMs below 1.1 times torch**: torch's own operator multiplies at nearly the rate of ours, and
  the products alone take most of the time (less of it with 8 or 16 rows): see "Recurrences: time
  beside the products" below.
- **Attention of one query**: a call of some ten microseconds is mostly host time.

- **bf16**: the products alone, at the rate of our own product of 2048 × 2048 matrices, would take
  29 of the 44 ms of the LSTM of width 650, 7.3 of the 14 ms at width 256, and 104 of the 137 ms of
  the loss of 32,000 words. In a training step, Adam and the casts of autocast take the same time
  with all operators.

Two targets are not met in every run. `dropout` is limited by the Philox generator and not by
memory: in an earlier run it reached 51 % of the copy bandwidth, below its target of 70 %. The
baseline of the embedding, the published masked copy, depends on the memory that the allocator has
available: once the gain was 3.6, below its target of 4.
""",
    "intel-xeon-family-6-model-207-2-cores-cpu": """
The targets were set on Zen 5. A core of this processor runs two threads, and on this virtual
machine the second thread of each core seems to belong to other machines: the same call takes much
longer at one time than at another. A gain compares times of the same rounds. Times of an operator
in fp32 and in bf16 are not compared with each other, because they were measured in two runs; those
of a training step were measured in one. All cores share a cache, and a cache line takes some 80
nanoseconds from one core to the other, so that ‡ means little here.

- **fp32**: MKL takes its AVX-512 kernels, so that torch's products are as fast as those here.
- **bf16**: torch's oneDNN and the kernels here (`avx512_amx`) multiply in AMX tiles.
""",
    "intel-xeon-family-6-model-167-2-cores-cpu": """
The targets were set on Zen 5. The processor of this virtual machine does not say its name; it has
AMX and an L3 cache of 480 MB. MKL takes its AVX-512 kernels; torch's oneDNN and the kernels here
(`avx512_amx`) multiply bf16 numbers in AMX tiles. Some of the runs were ended before their last
case, so that the tables lack cases that other machines have.

- **LSTMs**: in fp32 torch's products are as fast as those here, and with a batch of one row both
  are limited by reading the weights.
- **Attention with 5 positions and batch 8, and of one query**: the time of such a call is mostly
  that of the host.
""",
    "amd-epyc-family-25-model-17-2-cores-cpu": """
The targets were set on Zen 5. Zen 4 computes vectors of 512 bits in two halves, so that MKL's AVX2
kernels are nearly at the limit of its arithmetic, and a faster product gains little.

- **LSTMs below 1.1 times torch**: torch's own operator and ours both multiply near that limit; see
  "Recurrences: time beside the products" below. What is left includes keeping two threads in step.
- **Bidirectional LSTMs**: each direction runs on half of the threads, so that with two threads no
  step waits. What is left is the rate of the products. With MKL unthrottled the times differ from
  run to run, with one row torch's by 1.7 times and ours by 1.3: in an earlier run, whose file is in
  `bench/results`, the gains were 0.99 to 1.23.
- **Attention with 5 positions and batch 8, and of one query**: the smallest calls of all,
  `L1-B1-N1-D4` in training and `L1-S1-B1-N1-D4` in inference, have nothing to compute. They take
  55 to 70 % of the time of those with 5 positions and a width of up to 512, and half of that of one
  query over 200 keys: the time of the host from Python to the kernel, of which much is
  autograd's own in training. In inference the smallest call of torch is the faster one.
- **Whole models after `accelerate`**: the products are most of a step, and torch's are nearly as
  fast. In fp32 a gain of 1.5 needs the whole step, with its attention, norms and dropouts, at about
  the rate that a product of large matrices alone reaches: see the column "target, of the limit".
""",
}
TRAINING_REMARKS = {
    "amd-epyc-family-26-model-2-2-cores-cpu": """A step of reverse/base has 40 rows and is
limited by memory; a quarter of its time is Adam, which is the same for all operator sets. Alone in
a process, on a quiet machine, it was 1.80 times as fast as the baselines
(`-training-speed-reverse.json`). Against the oracle (`--ops reference`) reverse/base is 2.6 times
as fast and reverse/tuned 2.4 times (`-training-speed-reference.json`).
"""
}
