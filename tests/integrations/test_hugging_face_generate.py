"""Models with `attn_implementation="fusedseq"` write what they write with `eager`."""

import pytest
import torch

pytest.importorskip("transformers", "5.23", reason="needs transformers")

from fusedseq.integrations.transformers import register
from transformers import DynamicCache, StaticCache

from tests.support.hugging_face_models import DECODERS, model, padding, tokens

register()
B, L, NEW = 3, 7, 12
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prefill in chunks": {"prefill_chunk_size": 3},
}
# Without T5 in chunks: transformers does not prefill the prompt of an encoder in chunks.
PAIRS = [(name, way) for name in DECODERS for way in WAYS]
PAIRS += [("t5", way) for way in WAYS if way != "prefill in chunks"]


def written(name, implementation, way):
    prompt = {"input_ids": tokens(B, L), "attention_mask": padding((7, 4, 1), L, "left")}
    if name == "t5":
        prompt["attention_mask"] = padding((7, 4, 1), L, "right")
    lengths = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False}
    return model(name, implementation).generate(**prompt, **lengths, **WAYS[way])


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_every_token_that_is_generated_is_that_of_eager(name, way):
    got, expected = (written(name, implementation, way) for implementation in ("fusedseq", "eager"))
    assert torch.equal(got, expected)
    assert len({*got[0].tolist()}) > 2, "the model repeats itself"


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2"])
def test_a_prompt_in_parts_gives_the_logits_of_the_whole(name, kind):
    """The queries of a later part come after the keys of the cache, not at its start; and in a
    static cache the rows that are not written yet are seen by nobody."""
    network, ids = model(name), tokens(B, 11)
    size = {"max_cache_len": 16} if kind is StaticCache else {}
    cache = kind(config=network.config, **size)
    with torch.no_grad():
        whole = network(ids).logits
        parts = [
            network(part, past_key_values=cache).logits for part in ids.split([4, 3, 1, 3], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
