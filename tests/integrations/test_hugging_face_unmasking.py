"""No token that is masked changes what is visible: masks, windows, packing and caches are drawn.

The draw is derandomized: every run tests the same inputs. A masked key has the probability 0, so
results must agree in every bit.
"""

import pytest
import torch

pytest.importorskip("transformers", "5.23", reason="needs transformers")

from fusedseq.integrations.transformers import register
from fusedseq.integrations.transformers.attention import attention_forward
from fusedseq.integrations.transformers.masks import attention_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, masking_utils

from tests.support.hugging_face_models import DECODERS, VOCABULARY, model, tokens

register()
NETWORKS = {name: model(name) for name in (*DECODERS, "bert", "t5")}
# Bloom has no positions, and transformers makes GPT-OSS's masks without them.
PACKED = [(name, "position_ids") for name in DECODERS if name not in ("bloom", "gpt-oss")]
PACKED += [(name, "cu_seq_lens") for name in DECODERS if name != "bloom"]
DRAWN = settings(derandomize=True, max_examples=60, deadline=None)


def other_tokens(ids):
    """Other tokens than `ids` at every place."""
    return (ids - 3 + 17) % (VOCABULARY - 3) + 3


def drawn_padding(data, B, L):
    """A (B, L) mask: padded left or right, or with holes; each row has a token."""
    kind = data.draw(st.sampled_from(["left", "right", "holes"]))
    if kind == "holes":
        bits = st.lists(st.booleans(), min_size=L, max_size=L).filter(any)
        return torch.tensor([data.draw(bits) for _ in range(B)]).long()
    lengths = torch.tensor([data.draw(st.integers(1, L)) for _ in range(B)])
    real = torch.arange(L) < lengths[:, None]
    return (real.flip(1) if kind == "left" else real).long()


def drawn_parts(data, L):
    """Numbers of tokens that sum to L: one call, or two with a cache."""
    first = data.draw(st.integers(1, L))
    return [first, L - first] if first < L else [L]


def padded(mask, size):
    """The mask of a static cache, which Bloom reads in whole: no row past it is written yet."""
    return torch.nn.functional.pad(mask, (0, size - mask.size(1)))


def run(network, ids, mask, parts, kind):
    """The logits of a decoder or encoder that gets the tokens in parts, with a cache for more than
    one."""
    if len(parts) == 1:
        return network(input_ids=ids, attention_mask=mask).logits
    size = ids.size(1) + 3
    cache = kind(config=network.config, **{"max_cache_len": size} if kind is StaticCache else {})
    is_whole = kind is StaticCache and network.config.model_type == "bloom"
    logits, start = [], 0
    for part in parts:
        end = start + part
        seen = padded(mask[:, :end], size) if is_whole else mask[:, :end]
        given = {"attention_mask": seen, "past_key_values": cache}
        logits.append(network(input_ids=ids[:, start:end], **given).logits)
        start = end
    return torch.cat(logits, dim=1)


def run_t5(network, ids, mask, decoder_ids, parts, kind):
    """The logits of the decoder, which gets its tokens in parts."""
    size = {"max_cache_len": decoder_ids.size(1) + 3} if kind is StaticCache else {}
    config = network.config.get_text_config(decoder=True)
    # The cache of cross-attention is made by its first call, of whatever size.
    cache = EncoderDecoderCache(kind(config=config, **size), DynamicCache(config=config))
    logits = []
    for part in decoder_ids.split(parts, dim=1):
        given = {"past_key_values": cache} if len(parts) > 1 else {}
        found = network(input_ids=ids, attention_mask=mask, decoder_input_ids=part, **given)
        logits.append(found.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
@DRAWN
@given(data=st.data())
def test_a_masked_token_never_changes_a_visible_output(name, data):
    B, L = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 10))
    mask = drawn_padding(data, B, L)
    parts = [L] if name == "bert" else drawn_parts(data, L)
    kind = data.draw(st.sampled_from([DynamicCache, StaticCache]))
    ids = tokens(B, L, seed=data.draw(st.integers(0, 99)))
    changed = torch.where(mask.bool(), ids, other_tokens(ids))
    with torch.no_grad():
        before, after = (run(NETWORKS[name], t, mask, parts, kind) for t in (ids, changed))
    before, after = before[mask.bool()], after[mask.bool()]
    assert before.numel() > 0
    assert torch.equal(before, after)
    assert before.isfinite().all()


@DRAWN
@given(data=st.data())
def test_a_masked_token_of_an_encoder_never_changes_its_decoder(data):
    """The decoder's own tokens are not masked, so every one of its outputs must stay the same."""
    B, L, decoded = data.draw(st.tuples(st.integers(1, 3), st.integers(2, 10), st.integers(1, 6)))
    mask, parts = drawn_padding(data, B, L), drawn_parts(data, decoded)
    kind = data.draw(st.sampled_from([DynamicCache, StaticCache]))
    seed = data.draw(st.integers(0, 99))
    ids, decoder_ids = tokens(B, L, seed), tokens(B, decoded, seed + 1)
    changed = torch.where(mask.bool(), ids, other_tokens(ids))
    with torch.no_grad():
        before, after = (
            run_t5(NETWORKS["t5"], t, mask, decoder_ids, parts, kind) for t in (ids, changed)
        )
        visible = run_t5(NETWORKS["t5"], other_tokens(ids), mask, decoder_ids, parts, kind)
    assert torch.equal(before, after)
    assert before.isfinite().all()
    assert not torch.equal(before, visible)


@pytest.mark.parametrize(("name", "way"), PACKED)
@settings(DRAWN, max_examples=30)
@given(data=st.data())
def test_a_packed_sequence_never_changes_another(name, way, data):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    number = data.draw(st.integers(0, len(lengths) - 1))  # of the sequence that changes
    B = data.draw(st.integers(1, 2)) if way == "position_ids" else 1
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(B, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(B, -1)
    given = {"position_ids": positions, "use_cache": False}
    if way == "cu_seq_lens":
        # Without a cache transformers makes a dense mask of the positions, with one it does not.
        given["use_cache"] = data.draw(st.booleans())
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        given |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    ids = tokens(B, sum(lengths), seed=data.draw(st.integers(0, 99)))
    changed = torch.where(sequence == number, other_tokens(ids), ids)
    with torch.no_grad():
        before, after = (NETWORKS[name](input_ids=t, **given).logits for t in (ids, changed))
    assert torch.equal(before[sequence != number], after[sequence != number])
    assert not torch.equal(before[sequence == number], after[sequence == number])
    assert before.isfinite().all()


@pytest.mark.parametrize("name", DECODERS)
@DRAWN
@given(data=st.data())
def test_a_later_token_never_changes_an_earlier_output(name, data):
    B, L = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 10))
    mask = drawn_padding(data, B, L)
    parts = drawn_parts(data, L)
    j = data.draw(st.integers(1, L - 1))
    ids = tokens(B, L, seed=data.draw(st.integers(0, 99)))
    changed = torch.cat([ids[:, :j], other_tokens(ids[:, j:])], dim=1)
    with torch.no_grad():
        before, after = (run(NETWORKS[name], t, mask, parts, DynamicCache) for t in (ids, changed))
    assert torch.equal(before[:, :j], after[:, :j])
    assert not torch.equal(before[:, j:], after[:, j:])


def drawn_mask_arguments(data):
    """Arguments of a mask function, as models call it: {argument: value}."""
    B, L, past = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 6), (0, 6)))
    free = data.draw(st.integers(0, 3))  # rows of a static cache that are not written yet
    forgotten = data.draw(st.integers(0, past))  # keys that a window's cache has dropped
    S = past + L + free - forgotten
    arguments = {
        "batch_size": B,
        "q_length": L,
        "kv_length": S,
        "q_offset": torch.tensor(past) if free else past,
        "kv_offset": forgotten,
    }
    if data.draw(st.booleans()):
        arguments["attention_mask"] = drawn_padding(data, B, past + L).bool()
    size = data.draw(st.integers(1, 12))
    left = torch.tensor([data.draw(st.integers(0, 2)) for _ in range(B)])
    kind = data.draw(
        st.sampled_from(["causal", "both", "window", "window of both", "chunks", "or"])
    )
    function, allowed = {
        "causal": (masking_utils.causal_mask_function, {}),
        "both": (masking_utils.bidirectional_mask_function, {"allow_is_causal_skip": False}),
        "window": (masking_utils.sliding_window_causal_mask_function(size), {"local_size": size}),
        "window of both": (
            masking_utils.sliding_window_bidirectional_mask_function(size),
            {
                "local_size": size,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": True,
            },
        ),
        "chunks": (
            masking_utils.chunked_causal_mask_function(size, left * 0),
            {"local_size": size},
        ),
        "or": (
            masking_utils.or_masks(
                masking_utils.sliding_window_causal_mask_function(size), lambda b, h, q, k: k < 2
            ),
            {"local_size": size, "allow_is_causal_skip": False, "use_vmap": True},
        ),
    }[kind]
    return arguments | allowed | {"mask_function": function}


@settings(DRAWN, max_examples=400)
@given(data=st.data())
def test_the_mask_is_that_of_transformers(data):
    """The arguments for the operator stand for the dense mask, and compute what it computes."""
    arguments = drawn_mask_arguments(data)
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = masking_utils.sdpa_mask(**arguments | never)
    mask = attention_mask(**arguments)
    assert mask.shape == expected.shape
    assert torch.equal(mask & True, expected)
    assert torch.equal(mask[:, :, -1:], expected[:, :, -1:])
    torch.manual_seed(0)
    B, _, L, S = expected.shape
    q, (k, v) = torch.randn(B, 4, L, 8), torch.randn(2, B, 2, S, 8)
    layer = torch.nn.Module()
    got, dense = (attention_forward(layer, q, k, v, m)[0] for m in (mask, expected))
    torch.testing.assert_close(got, dense)


@pytest.mark.parametrize(
    ("L", "S", "causal", "window", "options"),
    [
        (4, 4, True, None, {"causal": True}),
        (4, 4, False, None, {}),
        (1, 4, True, None, {}),
        (4, 7, False, None, {}),
        (4, 7, True, None, "must pass a mask for 4 queries and 7 keys"),
        (4, 4, True, 3, "must pass a mask for 4 keys"),
        (1, 4, True, 3, "must pass a mask for 4 keys"),
        (4, 4, True, 4, {"causal": True}),
    ],
)
def test_without_a_mask_only_what_is_certain_is_computed(L, S, causal, window, options):
    """A model that does not call the mask function passes None, which may mean anything."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, L, 8), torch.randn(2, 2, 4, S, 8)
    layer = torch.nn.Module()
    layer.is_causal = causal
    for given_too in (None, causal):
        arguments = (layer, q, k, v, None)
        keywords = {"is_causal": given_too, "sliding_window": window}
        if isinstance(options, str):
            with pytest.raises(ValueError, match=options):
                attention_forward(*arguments, **keywords)
        else:
            got, _ = attention_forward(*arguments, **keywords)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal="causal" in options
            )
            torch.testing.assert_close(got, expected.transpose(1, 2))


def test_a_mask_with_two_dimensions_is_refused():
    """(B, S) would be taken for (L, S) where B equals L."""
    q = torch.randn(3, 4, 3, 8)
    with pytest.raises(ValueError, match="attention_mask must be"):
        attention_forward(torch.nn.Module(), q, q, q, torch.ones(3, 3, dtype=torch.bool))
