"""Fine-tunes a small causal model of Hugging Face `transformers` on one sentence, with the fused
attention, and compares it with transformers' own `eager` attention.

Needs `pip install --no-build-isolation '.[transformers]'`. The model is random and nothing is
downloaded; with a checkpoint of yours it is
`from_pretrained(name, attn_implementation="fusedseq")`.
"""

import sys

import torch
from fusedseq.integrations.transformers import register

try:
    register()
except ImportError as error:
    print(error)
    sys.exit()

from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,  # grouped queries
    bos_token_id=0,
    eos_token_id=None,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="fusedseq")

text = "the model that you have, with one more argument"
ids = torch.tensor([[ord(letter) for letter in text]])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.2f}")

# Two prompts of different lengths in one batch, padded on the left; and a cache.
prompts = torch.tensor([[ord(letter) for letter in prompt] for prompt in ("the mod", "    you")])
real = (prompts != ord(" ")) | (torch.arange(7) > 3)
written = {}
for implementation in ("fusedseq", "eager"):
    model.set_attn_implementation(implementation)
    written[implementation] = model.eval().generate(
        prompts, attention_mask=real.long(), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
print("".join(map(chr, written["fusedseq"][0].tolist())))
assert torch.equal(written["fusedseq"], written["eager"])
