"""accelerate on the whole layer of GPT-2: the residual sum in one pass with the norm after it."""

import copy

import fusedseq
import pytest
import torch
from fusedseq.testing import assert_within_budget

transformers = pytest.importorskip("transformers", "5.23", reason="needs transformers")

B, L, V, D = 2, 6, 40, 32
# In fp32, the rounding of sums in another order through two layers: 84 times its epsilon.
SAME = {"rtol": 1e-5, "atol": 1e-5}


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=V,
        n_embd=D,
        n_layer=2,
        n_head=4,
        n_positions=16,
        pad_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **options,
    )
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)


def count_calls(monkeypatch):
    """Returns a list that grows by one with each call of residual_layer_norm."""
    calls, operator = [], fusedseq.fused.residual_layer_norm

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return operator(*args, **kwargs)

    monkeypatch.setattr(fusedseq.fused, "residual_layer_norm", counted)
    return calls


def run(model, **given):
    out = model(**given)
    out.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return out.loss.detach(), gradients


def tokens():
    ids = torch.randint(3, V, (B, L))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_layer_has_one_pass_and_torchs_gradients(monkeypatch, checkpointing):
    model, given = gpt2().train(), tokens()
    expected = run(model, **given)
    report = fusedseq.accelerate(model)
    assert [entry.kind for entry in report.replaced].count("GPT2Block") == 2
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = count_calls(monkeypatch)
    torch.testing.assert_close(run(model, **given), expected, **SAME)
    # A checkpointed layer is computed again for its gradients.
    assert len(calls) == (4 if checkpointing else 2)


def test_the_stream_of_sums_stays_fp32_under_autocast():
    model, x = gpt2().eval(), torch.randn(B, L, D)
    block = model.transformer.h[0]
    exact = copy.deepcopy(block).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        plain = block(x)
        fusedseq.accelerate(model)
        y = block(x)
    assert y.dtype == plain.dtype == torch.float32
    assert_within_budget("y", y, plain, exact, torch.bfloat16, 4 * D)


def test_hidden_states_are_those_before_acceleration():
    model, ids = gpt2().eval(), torch.randint(3, V, (B, L))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        fusedseq.accelerate(model)
        found = model(ids, output_hidden_states=True).hidden_states
    assert len(found) == 3
    torch.testing.assert_close(found, expected, **SAME)


def test_a_hook_on_the_norm_runs_and_attention_to_an_encoder_is_computed(monkeypatch):
    model = gpt2(add_cross_attention=True).eval()
    given = {"encoder_hidden_states": torch.randn(B, 5, D), **tokens()}
    crossed, plain = run(model, **given), run_without_encoder(model, given)
    fusedseq.accelerate(model)
    calls = count_calls(monkeypatch)
    torch.testing.assert_close(run(model, **given), crossed, **SAME)
    assert not calls
    seen = []
    model.transformer.h[0].ln_2.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(run_without_encoder(model, given), plain, **SAME)
    assert len(seen) == len(calls) == 1


def run_without_encoder(model, given):
    out = model(given["input_ids"], labels=given["labels"])
    return out.loss.detach(), out.logits.detach()


def test_generation_with_a_cache_is_that_without_one():
    model = gpt2().eval()
    fusedseq.accelerate(model)
    ids = torch.randint(3, V, (B, 4))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cached = model.generate(ids, use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
