"""With `attn_implementation="fusedseq"` outputs, losses and gradients are those of `eager`."""

import importlib
import sys
import types

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import assert_within_budget

transformers = pytest.importorskip("transformers", "5.23", reason="needs transformers")

from fusedseq.integrations.transformers import register  # noqa: E402
from fusedseq.integrations.transformers.attention import attention_forward  # noqa: E402

from tests.support.hugging_face_models import DECODERS, WINDOW, model, padding, tokens  # noqa: E402

register()
B, L = 3, 9
LENGTHS = (9, 5, 2)
TERMS = 4096  # products that an element is the sum of, over two layers
IMPLEMENTATIONS = (("eager", torch.float64), ("eager", torch.float32), ("fusedseq", torch.float32))


@pytest.fixture(autouse=True)
def masks_of_eager_in_fp64_fit_into_fp32(monkeypatch):
    """Eager computes its softmax in fp32, also of an fp64 model. There the least number of fp64 is
    -inf, and a row of padding, which sees no key, would be NaN."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    def fits(**arguments):
        mask = eager_mask(**arguments | {"dtype": torch.float32})
        return mask if mask is None else mask.to(arguments["dtype"])

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "eager", fits)


def results(name, implementation, dtype, mask=None, **inputs):
    """Returns the logits, loss and gradients of a model for the tokens of a batch.

    A token without a label is padding, or the first after it, which padding would predict.
    """
    network = model(name, implementation).to(dtype)
    ids = tokens(B, L) if inputs.get("input_ids") is None else inputs.pop("input_ids")
    labels = ids
    if mask is not None:
        after_padding = torch.nn.functional.pad(mask[:, :-1], (1, 0)) == 0
        labels = ids.masked_fill((mask == 0) | after_padding, -100)
        inputs["attention_mask"] = mask
        if name == "t5":
            inputs["decoder_attention_mask"] = mask
    out = network(input_ids=ids, labels=labels, **inputs)
    out.loss.backward()
    logits = out.logits if mask is None else out.logits[mask.bool()]
    gradients = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": out.loss.detach(), **gradients}


def assert_equal_to_eager(name, mask=None, **inputs):
    exact, plain, got = (
        results(name, *implementation, mask=mask, **inputs) for implementation in IMPLEMENTATIONS
    )
    assert [*got] == [*exact]
    for key in got:
        assert_within_budget(key, got[key], plain[key], exact[key], torch.float32, TERMS)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, "bert", "t5"])
def test_outputs_loss_and_gradients_are_those_of_eager(name, side):
    assert_equal_to_eager(name, None if side == "none" else padding(LENGTHS, L, side))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_packed_sequences_are_those_of_eager_and_do_not_see_each_other(name):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    packed = tokens(1, L)
    inputs = {"position_ids": positions, "input_ids": packed, "use_cache": False}
    assert_equal_to_eager(name, **inputs)
    network = model(name)
    together = network(**inputs).logits
    for start, end in ((0, 4), (4, 6), (6, 9)):
        alone = network(input_ids=packed[:, start:end]).logits
        torch.testing.assert_close(together[:, start:end], alone)


@pytest.mark.parametrize("use_cache", [False, True])
def test_cu_seq_lens_keep_packed_sequences_apart(use_cache, monkeypatch):
    """With a cache transformers does not look at the positions, so these are what separates."""
    packed = tokens(1, L)
    ends = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    network = model("llama")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    inputs = {"position_ids": positions, "input_ids": packed, "use_cache": use_cache}
    lengths = {"max_length_q": 4, "max_length_k": 4}
    calls = []
    varlen = fused.attention_varlen
    monkeypatch.setattr(
        fused, "attention_varlen", lambda *a, **k: calls.append(a) or varlen(*a, **k)
    )
    together = network(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=ends.clone(), **lengths).logits
    assert len(calls) == (2 if use_cache else 0)  # without a cache the mask is dense
    expected = network(**inputs | {"use_cache": False}).logits
    torch.testing.assert_close(together, expected)
    with pytest.raises(ValueError, match="batch of 3"):
        network(tokens(B, L), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2-softcap", "gpt-oss"])
def test_packed_sequences_have_the_gradients_of_a_dense_mask(name, monkeypatch):
    """Also with windows, softcap, sinks and grouped heads; `mistral` has a window of 4 keys."""
    ends, found = torch.tensor([0, 6, 9], dtype=torch.int32), []
    inputs = {"input_ids": tokens(1, L), "use_cache": True}
    module = importlib.import_module("fusedseq.integrations.transformers.attention")
    for is_varlen in (True, False):
        if not is_varlen:
            monkeypatch.setattr(module, "common_ends", lambda *_: None)
        network = model(name)
        out = network(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=ends, labels=inputs["input_ids"])
        out.loss.backward()
        gradients = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
        found.append({"logits": out.logits.detach(), **gradients})
    torch.testing.assert_close(*found)


def test_an_encoder_of_images_which_passes_no_mask():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    network = transformers.ViTModel(config).eval()
    images = torch.randn(2, 3, 16, 16)
    expected = network(images).last_hidden_state
    network.set_attn_implementation("fusedseq")
    torch.testing.assert_close(network(images).last_hidden_state, expected)


def prefix_mask(prefix=3):
    """(1, 1, L, L), true for the keys of the prefix and of the past."""
    i, j = torch.arange(L)[:, None], torch.arange(L)
    return ((j < prefix) | (j <= i))[None, None]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_mask_with_four_dimensions_is_bool_or_added(name):
    """Bool and float masks mean the same; eager knows the float one."""
    visible = prefix_mask().expand(B, -1, -1, -1)
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    ids = tokens(B, L)
    expected = model(name, "eager")(ids, attention_mask=added).logits
    for mask in (visible, added):
        torch.testing.assert_close(model(name)(ids, attention_mask=mask).logits, expected)


def test_a_mask_of_whole_numbers_with_four_dimensions_is_refused():
    mask = prefix_mask().long().expand(B, -1, -1, -1)
    with pytest.raises(TypeError, match="must be bool"):
        model("llama")(tokens(B, L), attention_mask=mask)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bloom", "bert"])
def test_half_precision(name):
    mask = padding(LENGTHS, L, "right")
    exact, plain, got = (
        results(name, implementation, dtype, mask=mask)["logits"]
        for implementation, dtype in (
            ("eager", torch.float64),
            ("eager", torch.bfloat16),
            ("fusedseq", torch.bfloat16),
        )
    )
    assert_within_budget("logits", got, plain, exact, torch.bfloat16, TERMS)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast(name):
    inputs = {"input_ids": tokens(B, L), "labels": tokens(B, L)}
    with torch.autocast("cpu", torch.bfloat16):
        plain, got = (model(name, way)(**inputs).logits for way in ("eager", "fusedseq"))
    exact = model(name, "eager").double()(**inputs).logits
    args = (t.detach().to(torch.bfloat16) for t in (got, plain))
    assert_within_budget("logits", *args, exact.detach(), torch.bfloat16, TERMS)


@pytest.mark.parametrize("name", [*DECODERS, "bert", "t5"])
def test_dropout_of_every_probability_and_of_none(name):
    """In training p = 1 is what eager computes, p = 0 is eval mode, and eval mode drops nothing."""
    extra = {"decoder_input_ids": tokens(B, L)} if name == "t5" else {}
    if name != "t5":  # the dropout of T5 is also that of its other layers, which p = 1 would erase
        all_dropped = [
            model(name, way, dropout=1.0).train()(tokens(B, L)).logits
            for way in ("eager", "fusedseq")
        ]
        torch.testing.assert_close(*all_dropped)
        kept = model(name, dropout=0.0).train()(tokens(B, L)).logits
        assert (kept - all_dropped[1]).abs().max() > 0.01
    none = [
        network(tokens(B, L), **extra).logits
        for network in (model(name), model(name, dropout=0.9), model(name, dropout=0.0).train())
    ]
    for other in none[1:]:
        torch.testing.assert_close(none[0], other)


def test_dropout_in_training_has_the_strength_of_eager():
    """With values of 1 a result is the sum of S kept probabilities 1 / S over 1 - p: its mean is 1
    and its variance p / ((1 - p) S)."""
    from fusedseq.integrations.transformers.attention import attention_forward

    p, S, rows = 0.3, 16, 4096
    layer = torch.nn.Module()
    layer.is_causal = False
    q, k, v = torch.zeros(1, 4, rows // 4, 8), torch.zeros(1, 4, S, 8), torch.ones(1, 4, S, 8)

    def drawn(seed):
        torch.manual_seed(seed)
        return attention_forward(layer, q, k, v, None, dropout=p)[0][..., 0]

    variance = p / ((1 - p) * S)
    assert abs(drawn(0).mean() - 1) < 5 * (variance / rows) ** 0.5
    assert abs(drawn(0).var() / variance - 1) < 5 * (2 / rows) ** 0.5
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    layer.eval()
    torch.testing.assert_close(drawn(0), torch.ones(1, rows // 4, 4))


def test_a_softcap_changes_gemma2():
    x = tokens(B, L)
    assert not torch.allclose(model("gemma2")(x).logits, model("gemma2-softcap")(x).logits)


def test_sinks_change_gpt_oss_and_have_a_gradient():
    x, gpt = tokens(B, L), model("gpt-oss")
    with_sinks = gpt(x).logits
    with_sinks.sum().backward()
    sinks = [layer.self_attn.sinks for layer in gpt.model.layers]
    assert all(s.grad.any() for s in sinks)
    with torch.no_grad():
        for s in sinks:
            s.fill_(-1e4)
    assert not torch.allclose(gpt(x).logits, with_sinks)


def test_sinks_that_a_layer_has_and_does_not_pass_are_refused():
    layer = torch.nn.Module()
    layer.sinks = torch.zeros(2)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="attention sinks as the argument s_aux"):
        attention_forward(layer, q, q, q, None)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt-oss"])
def test_a_sliding_window_is_a_window_and_not_a_dense_mask(name, monkeypatch):
    seen, compute = [], fused.attention

    def attention(*args, **options):
        seen.append(options)
        return compute(*args, **options)

    monkeypatch.setattr(fused, "attention", attention)
    model(name)(tokens(B, L))
    windows = [options["window"] for options in seen if "window" in options]
    assert {*windows} == {(WINDOW - 1, 0)}
    assert not any("mask" in options for options in seen)


def test_a_mask_function_that_is_more_than_a_window_is_not_taken_for_one():
    from fusedseq.integrations.transformers.masks import sliding_window
    from transformers import masking_utils as masks

    window = masks.sliding_window_causal_mask_function(5)
    assert sliding_window(window) == 5
    others = [
        masks.causal_mask_function,
        masks.and_masks(window, masks.causal_mask_function),
        masks.and_masks(masks.causal_mask_function, masks.sliding_window_overlay(5)),
        masks.or_masks(masks.sliding_window_overlay(5), masks.causal_mask_function),
        masks.sliding_window_overlay(5),
        masks.chunked_causal_mask_function(5, torch.zeros(1)),
        masks.sliding_window_bidirectional_mask_function(5),
    ]
    assert [sliding_window(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize(
    "kind", ["MptForCausalLM", "CodeGenForCausalLM", "RoFormerForMaskedLM", "MPNetForMaskedLM"]
)
def test_a_model_with_attention_code_of_its_own_is_refused(kind):
    """Such code would add the bool mask to its logits, which masks nothing."""
    sizes = {"vocab_size": 61, "pad_token_id": 0, "intermediate_size": 32}
    widths = dict.fromkeys(("n_embd", "d_model", "hidden_size"), 32)
    heads = dict.fromkeys(("n_head", "n_heads", "num_attention_heads"), 4)
    layers = dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers"), 1)
    cls = getattr(transformers, kind)
    config = cls.config_class(**sizes, **widths, **heads, **layers)
    config._attn_implementation = "fusedseq"
    if cls._can_set_attn_implementation():
        pytest.skip("this version of transformers computes its attention by AttentionInterface")
    with pytest.raises(ValueError, match="code of its own"):
        cls(config)(tokens(B, L))


def test_a_model_outside_transformers_with_attention_code_of_its_own_is_refused(monkeypatch):
    from fusedseq.integrations.transformers.masks import require_attention_interface

    class Model(transformers.PreTrainedModel):
        calls_attention_interface = False

        @classmethod
        def _can_set_attn_implementation(cls):
            return cls.calls_attention_interface

    module = types.ModuleType("own.modeling_own")
    module.Model = Model
    monkeypatch.setitem(sys.modules, "own.modeling_own", module)
    Model.__module__ = "own.modeling_own"
    with pytest.raises(ValueError, match=r"own\.modeling_own is code of its own"):
        require_attention_interface("own.configuration_own")
    Model.calls_attention_interface = True
    require_attention_interface("own.configuration_own")


def test_a_mask_that_is_added_to_logits_raises():
    """As does attention code that is in no modeling file of transformers."""
    from fusedseq.integrations.transformers.masks import attention_mask

    mask = attention_mask(batch_size=B, q_length=L, kv_length=L)
    logits = torch.zeros(B, 1, L, L)
    for add in (lambda: logits + mask, lambda: mask + logits, lambda: logits.add_(mask)):
        with pytest.raises(ValueError, match="would mask nothing"):
            add()


def test_bloom_is_replaced_once_and_eager_remains_what_it_was():
    register()
    (cls,) = {type(block.self_attention) for block in model("bloom").transformer.h}
    assert cls.__mro__[1].__module__ == "transformers.models.bloom.modeling_bloom"
    assert cls.__mro__[1].__name__ == "BloomAttention"
    ids = tokens(B, L)
    out = model("bloom", "eager")(ids, output_attentions=True)
    assert out.attentions[0].shape == (B, 4, L, L)
    with pytest.raises(ValueError, match="attention probabilities"):
        model("bloom")(ids, output_attentions=True)


@pytest.mark.parametrize("name", [*DECODERS, "bert", "t5"])
def test_probabilities_are_refused(name):
    """GPT-2 does not pass the argument on, and returns an empty tuple, as it does with sdpa."""
    inputs = {"input_ids": tokens(B, L), "output_attentions": True}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens(B, L, seed=2)
    if name == "gpt2":
        assert model(name)(**inputs).attentions == model(name, "sdpa")(**inputs).attentions == ()
        return
    with pytest.raises(ValueError, match="attention probabilities"):
        model(name)(**inputs)


def test_a_mask_of_three_dimensions_is_refused():
    mask = torch.ones(B, L, L, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"attention_mask must be \(B, S\), or .* got \(3, 9, 9\)"):
        model("llama")(tokens(B, L), attention_mask=mask)


def test_values_of_another_width_than_keys_are_refused():
    q, v = torch.randn(B, 2, L, 8), torch.randn(B, 2, L, 6)
    with pytest.raises(ValueError, match="another width than keys: Module passed 6 and 8"):
        attention_forward(torch.nn.Module(), q, q, v, None)


def test_the_implementation_of_a_model_that_exists_is_changed():
    network, ids = model("llama", "sdpa"), tokens(B, L)
    expected = network(ids).logits
    network.set_attn_implementation("fusedseq")
    assert network.config._attn_implementation == "fusedseq"
    torch.testing.assert_close(network(ids).logits, expected)


def test_an_old_version_of_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "4.57.6")
    with pytest.raises(ImportError, match=r"5\.23 or newer, .* got 4\.57\.6"):
        register()


@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
def test_compiled_models_compute_the_same(name):
    inputs = {"input_ids": tokens(B, L), "attention_mask": padding(LENGTHS, L, "left")}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens(B, L, seed=2)
    network = model(name)
    with torch.no_grad():
        expected = network(**inputs).logits
        compiled = torch.compile(network, backend="aot_eager")(**inputs).logits
    torch.testing.assert_close(compiled, expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    expected = results("mistral", "fusedseq", torch.float32, padding(LENGTHS, L, "right"))
    for reentrant in (False, True):
        network = model("mistral").train()
        network.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids, mask = tokens(B, L), padding(LENGTHS, L, "right")
        after_padding = torch.nn.functional.pad(mask[:, :-1], (1, 0)) == 0
        labels = ids.masked_fill((mask == 0) | after_padding, -100)
        network(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        for key, p in network.named_parameters():
            torch.testing.assert_close(p.grad, expected[key])


def test_no_tensor_of_the_attention_is_copied(monkeypatch):
    """The operator gets the views that the projections and rotations made, and its result is
    already stored as the output projection reads it."""
    from fusedseq.integrations.transformers import attention

    seen, fused = [], attention.fused.attention
    monkeypatch.setattr(
        "fusedseq.fused.attention",
        lambda *qkv, **options: seen.append(qkv) or fused(*qkv, **options),
    )
    q, k, v = torch.randn(3, 2, 5, 4, 8).transpose(2, 3)
    layer = torch.nn.Module()
    layer.is_causal = True
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out, _ = attention.attention_forward(layer, q, k, v, None)
        out.reshape(2, 5, 32).contiguous()
    assert {t.data_ptr() for t in seen[0]} == {t.data_ptr() for t in (q, k, v)}
    copies = {"aten::copy_", "aten::clone", "aten::contiguous"}
    assert not copies & {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("window", [WINDOW, 100])
def test_a_window_reaches_exactly_as_far_as_it_says(window):
    """Of one layer, the output at i depends on the tokens i - window + 1 .. i alone."""
    network = model("mistral", sliding_window=window, num_hidden_layers=1)
    ids = tokens(1, L)
    before = network(ids).logits[0]
    for j in range(L):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] - 3 + 1) % 58 + 3
        differs = (network(changed).logits[0] != before).any(-1)
        expected = torch.tensor([j <= i < j + window for i in range(L)])
        assert torch.equal(differs, expected)
