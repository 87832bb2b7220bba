"""Tiny random models of `transformers`, one of each kind of attention, and inputs for them."""

import torch
from fusedseq.integrations.transformers import NAME

VOCABULARY = 61
DECODERS = ("gpt2", "llama", "mistral", "bloom", "gemma2", "gemma2-softcap", "gpt-oss")
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOW = 4


def configuration(name, dropout=0.0):
    """Returns a model class and its configuration; `dropout` is of attention probabilities."""
    import transformers as hf

    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        rest = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": dropout}
        return hf.GPT2LMHeadModel, hf.GPT2Config(**SMALL, **sizes, **rest)
    if name == "llama":
        return hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA, attention_dropout=dropout)
    if name == "mistral":
        rest = {"sliding_window": WINDOW, "attention_dropout": dropout}
        return hf.MistralForCausalLM, hf.MistralConfig(**LLAMA, **rest)
    if name in ("gemma2", "gemma2-softcap"):
        rest = {"head_dim": 8, "sliding_window": WINDOW, "attention_dropout": dropout}
        rest["attn_logit_softcapping"] = 5.0 if name == "gemma2-softcap" else None
        return hf.Gemma2ForCausalLM, hf.Gemma2Config(**LLAMA, **rest)
    if name == "gpt-oss":
        rest = {"head_dim": 8, "sliding_window": WINDOW, "attention_dropout": dropout}
        # One expert, whose products are the same whatever the other tokens are, in any dtype.
        experts = {"num_local_experts": 1, "num_experts_per_tok": 1}
        config = hf.GptOssConfig(**LLAMA, **rest, **experts)
        config._experts_implementation = "eager"
        return hf.GptOssForCausalLM, config
    if name == "bloom":
        sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
        return hf.BloomForCausalLM, hf.BloomConfig(**SMALL, **sizes, attention_dropout=dropout)
    if name == "bert":
        sizes = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads",)}
        rest = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": dropout}
        return hf.BertForMaskedLM, hf.BertConfig(**sizes, **rest)
    assert name == "t5"
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    rest = {"dropout_rate": dropout, "relative_attention_num_buckets": 8}
    tokens = SMALL | {"decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration, hf.T5Config(**tokens, **sizes, **rest)


def model(name, implementation=NAME, dropout=0.0, seed=0, **changes):
    """Returns a new model; weights depend on `seed` only, and are large enough that attention
    is far from uniform."""
    kind, config = configuration(name, dropout)
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    made = kind(config).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(0, 0.25)
    return made


def tokens(B, L, seed=1):
    """Returns (B, L) random token ids, none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (B, L), generator=generator)


def padding(lengths, L, side):
    """Returns the (B, L) int64 mask of sequences that are padded on the left or right."""
    real = torch.arange(L) < torch.tensor(lengths)[:, None]
    return (real.flip(1) if side == "left" else real).long()
