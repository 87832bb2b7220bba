"""MultiheadAttention with a cache of keys and values: decoding step by step equals the whole
sequence, beams share and reorder keys without copies, and a cache is for inference only.
"""

import pytest
import torch
from fusedseq import fused, nn

from tests.support.attention_modules import B, E, N, inputs, pair
from tests.support.placement import here

pytestmark = pytest.mark.usefixtures("in_exact_dtype")


@pytest.mark.parametrize("batch_first", [False, True], ids=["LBE", "BLE"])
def test_cached_decoding_equals_the_whole_sequence(ops, positions, batch_first):
    """A prefix in one call, then further positions."""
    module = nn.MultiheadAttention(
        E, N, positions=positions, batch_first=batch_first, ops=ops
    ).eval()
    x = torch.randn((B, 9, E) if batch_first else (9, B, E))
    with torch.no_grad():
        expected, _ = module(x, x, x, is_causal=True)
        cache, time, got = module.cache(B, 9), int(batch_first), []
        for part in x.split([4, 1, 1, 2, 1], dim=time):
            got.append(module(part, part, part, is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(got, time), expected)


def test_cross_attention_reads_its_keys_from_the_cache(ops):
    module = nn.MultiheadAttention(E, N, ops=ops).eval()
    query, memory, _ = inputs("cross")
    lengths = torch.tensor([6, 4])
    with torch.no_grad():
        expected, _ = module(query, memory, memory, key_lengths=lengths)
        cache = module.cache(B, 6)
        got = [module(query[:1], memory, memory, key_lengths=lengths, cache=cache)[0]]
        got += [module(q[None], cache=cache, key_lengths=lengths)[0] for q in query[1:]]
    torch.testing.assert_close(torch.cat(got), expected)


def test_reordering_a_beam_copies_no_keys(ops, positions):
    """Hypotheses are dropped, duplicated and exchanged at each step."""
    module = nn.MultiheadAttention(E, N, positions=positions, batch_first=True, ops=ops).eval()
    rows = 4
    history, cache = torch.empty(rows, 0, E), module.cache(rows, 6)
    with torch.no_grad():
        for step in range(6):
            x = torch.randn(rows, 1, E)
            history = torch.cat([history, x], 1)
            expected = module(history, history, history, is_causal=True)[0][:, -1:]
            torch.testing.assert_close(module(x, x, x, is_causal=True, cache=cache)[0], expected)
            address = cache.k.data_ptr()
            drawn = torch.Generator().manual_seed(step)
            parents = here(torch.randint(rows, (rows,), generator=drawn, device="cpu"))
            history = history[parents]
            cache.reorder(parents)
            assert cache.k.data_ptr() == address


@torch.no_grad()
def test_the_number_of_hypotheses_may_change(ops):
    """Up to the reserved rows; each step equals attention over each hypothesis's own history."""
    module = nn.MultiheadAttention(E, N, batch_first=True, ops=ops).eval()
    history, cache = torch.empty(4, 0, E), module.cache(4, 6)
    for step, parents in enumerate(([0, 2], [1, 0, 0], [2], [0, 0, 0, 0], [3, 1])):
        cache.reorder(torch.tensor(parents))
        x = torch.randn(len(parents), 1, E)
        history = torch.cat([history[parents], x], 1)
        expected = module(history, history, history, is_causal=True)[0][:, -1:]
        torch.testing.assert_close(module(x, x, x, is_causal=True, cache=cache)[0], expected)
        assert cache.length == step + 1


def test_a_beam_shares_the_keys_of_its_sentence(ops):
    module = nn.MultiheadAttention(E, N, batch_first=True, ops=ops).eval()
    memory, query, sentence = (
        torch.randn(2, 6, E),
        torch.randn(5, 1, E),
        torch.tensor([0, 0, 0, 1, 1]),
    )
    with torch.no_grad():
        cache = module.cache(2, 6)
        module(query[:2], memory, memory, cache=cache)
        cache.reorder(sentence)
        torch.testing.assert_close(
            module(query, cache=cache)[0], module(query, memory[sentence], memory[sentence])[0]
        )


def test_a_cache_rejects_gradients(ops):
    module, x = nn.MultiheadAttention(E, N, ops=ops), torch.randn(1, B, E)
    with pytest.raises(
        RuntimeError, match="KeyValueCache: keys and values must not require a gradient"
    ):
        module(x, x, x, cache=module.cache(B, 3))


def test_fp16_equals_torchs_module():
    """Forward and backward, also on the CPU, within fp16's rounding error."""
    theirs, ours = (module.half() for module in pair(fused, E, N))
    x = torch.randn(5, B, E).half()
    for module in (theirs, ours):
        module(x, x, x, need_weights=False)[0].sum().backward()
    y, expected = (module(x, x, x, need_weights=False)[0] for module in (ours, theirs))
    torch.testing.assert_close(
        y, expected, atol=16 * torch.finfo(x.dtype).eps * expected.abs().max().item(), rtol=0
    )
    assert all(p.grad.dtype == torch.float16 for p in ours.parameters())


@pytest.mark.cpu
@torch.no_grad()
def test_a_full_cache_and_other_rows_are_rejected():
    module, x = nn.MultiheadAttention(E, N), torch.randn(2, B, E)
    cache = module.cache(B, 3)
    module(x, x, x, cache=cache)
    with pytest.raises(
        ValueError, match="KeyValueCache: positions must be at most max_length = 3, got 4"
    ):
        module(x, x, x, cache=cache)
    with pytest.raises(
        ValueError, match="KeyValueCache: keys must be for 2 rows, as many as reserved, got 1"
    ):
        module(x[:, :1], x[:, :1], x[:, :1], cache=cache)
    cache.reorder(torch.tensor([0]))
    with pytest.raises(
        ValueError,
        match="KeyValueCache: keys must be for 2 rows, as many as reserved, got 2 for 1 hypo",
    ):
        module(x, x, x, cache=cache)


@pytest.mark.cpu
@torch.no_grad()
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_mask_that_is_refused_leaves_the_cache_as_it_was(name):
    module, x = nn.MultiheadAttention(E, N), torch.randn(1, B, E)
    cache = module.cache(B, 5)
    module(x, x, x, cache=cache)
    with pytest.raises(ValueError, match=f"^MultiheadAttention: {name} must be"):
        module(x, x, x, cache=cache, **{name: torch.zeros(1, 7) > 0})
    assert cache.length == 1
    module(x, x, x, cache=cache, attn_mask=torch.zeros(1, 2) > 0)
    assert cache.length == 2


SHAPES = {
    "one head": ((B, 1, 2, E // N), (B, 1, 2, E // N)),
    "other width": ((B, N, 2, E // N + 1), (B, N, 2, E // N + 1)),
    "other values": ((B, N, 2, E // N), (B, N, 2, 1)),
    "other positions": ((B, N, 2, E // N), (B, N, 1, E // N)),
    "no heads": ((B, 2, E // N), (B, 2, E // N)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_keys_of_another_shape_are_rejected(name):
    cache = nn.KeyValueCache(B, N, 5, E // N)
    k, v = (torch.zeros(shape) for shape in SHAPES[name])
    with pytest.raises(ValueError, match=r"^KeyValueCache: (keys|values) must be \(B, N, S, D\)"):
        cache.append(k, v)
    assert cache.length == 0


def test_keys_of_another_dtype_are_rejected_and_leave_the_cache_as_it_was():
    module = nn.MultiheadAttention(E, N).eval()
    cache = nn.KeyValueCache(B, N, 5, E // N, dtype=torch.bfloat16)
    x = torch.zeros(1, B, E)
    with torch.no_grad(), pytest.raises(TypeError, match=r"^KeyValueCache: keys must be of the dt"):
        module(x, x, x, cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize(
    ("parents", "error"),
    [
        (torch.tensor([True, False]), TypeError),
        (torch.tensor([0.0]), TypeError),
        ([0, 1], TypeError),
        (torch.tensor([[0, 1]]), ValueError),
    ],
    ids=str,
)
def test_parents_of_another_kind_are_rejected(parents, error):
    with pytest.raises(error, match=r"^KeyValueCache: parents must be "):
        nn.KeyValueCache(2, N, 5, E // N).reorder(parents)


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (2.5, TypeError)])
def test_sizes_that_no_cache_has_are_rejected(size, error):
    with pytest.raises(error, match=r"^KeyValueCache: max_length must be "):
        nn.KeyValueCache(2, N, size, E // N)


def test_a_call_that_is_refused_leaves_the_cache_as_it_was():
    module, x = nn.MultiheadAttention(E, N).eval(), torch.randn(2, B, E)
    cache = module.cache(B, 4)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(ValueError, match="key_lengths must be in"):
                module(x, x, x, key_lengths=[9] * B, cache=cache)
        assert cache.length == 0
        module(x, x, x, cache=cache)
    assert cache.length == 2


def test_a_cache_that_was_made_in_inference_mode_serves_later_calls():
    module, x = nn.MultiheadAttention(E, N).eval(), torch.randn(1, B, E)
    with torch.inference_mode():
        cache = module.cache(B, 4)
        module(x, x, x, cache=cache)
    with torch.no_grad():
        module(x, x, x, cache=cache)
    assert cache.length == 2
