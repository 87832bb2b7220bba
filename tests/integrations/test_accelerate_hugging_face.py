"""accelerate on models of Hugging Face transformers: blocks, attention and loss."""

import copy

import fusedseq
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("in_exact_dtype")
transformers = pytest.importorskip("transformers", "5.23", reason="needs transformers")

from tests.support import hugging_face_models as tiny  # noqa: E402

B, L, V = 2, 6, 40
SMALL = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(dropout=0.0, attention="eager", **options):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(**SMALL, **sizes, **drops, **options)
    config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


def bert(dropout=0.0, attention="eager", **options):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = transformers.BertConfig(
        **SMALL, **sizes, **drops, intermediate_size=48, max_position_embeddings=16, **options
    )
    config._attn_implementation = attention
    return transformers.BertForMaskedLM(config)


MODELS = {"gpt2": gpt2, "bert": bert}
BLOCKS = {
    "gpt2": {"GPT2MLP", "Conv1D"},
    "bert": {"BertIntermediate", "BertSelfOutput", "BertOutput"},
}
both = pytest.mark.parametrize("name", MODELS)


def inputs():
    ids = torch.randint(3, V, (B, L))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def run(model, given):
    out = model(**given)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return out.loss, out.logits[0], torch.autograd.grad(out.loss, parameters, allow_unused=True)


@both
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_the_same_and_undo_restores_every_bit(name, attention, training):
    """In training mode without dropout, and with the loss without logits."""
    model, given = MODELS[name](attention=attention).train(training), inputs()
    expected, parameters = run(model, given), dict(model.named_parameters())
    options = {"loss": nn.CrossEntropyLoss()} if training else {}
    report = fusedseq.accelerate(model, **options)
    assert {entry.kind for entry in report.replaced} >= BLOCKS[name]
    assert any(entry.kind.startswith("attention of") for entry in report.replaced)
    assert model.config._attn_implementation == "fusedseq"
    # transformers computes softmax and loss in fp32 also of an fp64 model.
    torch.testing.assert_close(run(model, given), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run(copy.deepcopy(model), given), expected, rtol=1e-5, atol=1e-6)
    assert all(model.get_parameter(key) is p for key, p in parameters.items())
    report.undo()
    assert model.config._attn_implementation == attention
    torch.testing.assert_close(run(model, given), expected, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_llama_and_mistral_have_the_same_outputs_loss_and_gradients(name, attention, training):
    """Of grouped heads, and in Mistral of a window that is shorter than the sequence."""
    assert L > tiny.WINDOW
    model, given = tiny.model(name, attention).train(training), inputs()
    options = {"loss": nn.CrossEntropyLoss()} if training else {}
    expected = run(model, given)
    report = fusedseq.accelerate(model, **options)
    kinds = {entry.kind for entry in report.replaced}
    assert kinds == {"Embedding", "Linear", f"attention of {type(model).__name__}"}
    assert model.config._attn_implementation == "fusedseq"
    torch.testing.assert_close(run(model, given), expected, rtol=1e-5, atol=1e-6)
    report.undo()
    torch.testing.assert_close(run(model, given), expected, rtol=0, atol=0)


@both
def test_a_compiled_layer_in_training_is_that_of_eager_mode_with_the_same_seed(name):
    """Torch's own dropout would draw other masks after the same seed."""
    model = MODELS[name](0.2).train()
    fusedseq.accelerate(model)
    layer = model.transformer.h[0] if name == "gpt2" else model.bert.encoder.layer[0]
    results, x = [], torch.randn(B, L, 32, requires_grad=True)
    try:
        for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(1)
            y = function(x)
            results.append((y, torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
        assert not torch.equal(function(x), function(x))
    finally:
        torch._dynamo.reset()  # which would skip more functions of torch from here on
    torch.testing.assert_close(results[1], results[0])


def test_the_output_layer_of_gpt2_is_deferred_in_training():
    """Also in bf16, whose logits transformers converts to fp32 before its loss."""
    model, given = gpt2().to(torch.float32), inputs()
    fusedseq.accelerate(model.train(), loss=nn.CrossEntropyLoss(), output="lm_head")
    assert model(**given).logits.is_deferred
    assert model.to(torch.bfloat16)(**given).logits.is_deferred
    assert type(model.eval()(**given).logits) is torch.Tensor


def test_blocks_drop_with_torchs_strength():
    block = gpt2(0.25, n_inner=64).transformer.h[0].mlp
    nn.init.zeros_(block.c_proj.weight)
    nn.init.ones_(block.c_proj.bias)
    fusedseq.accelerate(block)
    y = block(torch.randn(8, 400, 32))
    # 102,400 elements: the standard deviation of the fraction is 0.0014.
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.007)
    torch.testing.assert_close(y.max(), torch.tensor(4 / 3))
    block.eval()
    assert (block(torch.randn(2, 3, 32)) == 1).all()


def test_the_output_block_of_bert_drops_with_torchs_strength():
    """Before its LayerNorm a row has dropped elements, 0, and kept ones: the norm has 2 values."""
    block = bert(0.25).bert.encoder.layer[0].output
    nn.init.zeros_(block.dense.weight)
    nn.init.ones_(block.dense.bias)
    fusedseq.accelerate(block)
    y = block(torch.randn(3200, 48), torch.zeros(3200, 32))
    assert (y < 0).double().mean().item() == pytest.approx(0.25, abs=0.007)


@both
def test_norms_in_fp32_of_a_model_in_bf16_are_torchs(name):
    model, given = MODELS[name]().eval().bfloat16(), inputs()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    with torch.no_grad():
        expected = model(**given).logits
        fusedseq.accelerate(model)
        found = model(**given).logits
    assert found.dtype == expected.dtype
    # The products are the operators', whose bf16 results may be rounded in another way.
    atol = 8 * torch.finfo(torch.bfloat16).eps * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@both
def test_a_hook_on_a_sublayer_runs(name):
    model, given, called = MODELS[name]().eval(), inputs(), []
    fusedseq.accelerate(model)
    expected = run(model, given)
    (kind,) = {"GPT2MLP", "BertOutput"} & BLOCKS[name]
    block = next(m for m in model.modules() if type(m).__name__ == kind)
    block.dropout.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(run(model, given), expected)
    assert called


@pytest.mark.parametrize("way", ["another", "its forward"])
@both
def test_an_activation_that_is_replaced_later_is_called(name, way):
    model, given = MODELS[name]().eval(), inputs()
    kind, attribute = {"gpt2": ("GPT2MLP", "act")}.get(
        name, ("BertIntermediate", "intermediate_act_fn")
    )

    def replace_activations(model):
        for block in (m for m in model.modules() if type(m).__name__ == kind):
            if way == "another":
                setattr(block, attribute, nn.SiLU())
            else:
                getattr(block, attribute).forward = torch.sin

    other = copy.deepcopy(model)
    before = run(model, given)
    fusedseq.accelerate(other)
    for m in (model, other):
        replace_activations(m)
    expected = run(model, given)
    assert not torch.equal(expected[0], before[0])
    torch.testing.assert_close(run(other, given), expected)


@pytest.mark.parametrize("act", ["silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_activations_are_computed_or_left_with_a_reason(act):
    model, given = gpt2(activation_function=act).eval(), inputs()
    expected = run(model, given)
    report = fusedseq.accelerate(model)
    left = {entry.kind: entry.reason for entry in report.left}
    assert ("GPT2MLP" in left) == (act == "silu")
    torch.testing.assert_close(run(model, given), expected, rtol=1e-5, atol=1e-6)


def test_other_attention_is_left_with_a_reason():
    config = transformers.Gemma2Config(
        **SMALL,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    model = transformers.Gemma2ForCausalLM(config)
    before = config._attn_implementation
    report = fusedseq.accelerate(model)
    (reason,) = [e.reason for e in report.left if e.kind == "attention of Gemma2ForCausalLM"]
    assert "gemma2 is not one of" in reason
    assert config._attn_implementation == before


def test_a_dry_run_leaves_the_attention():
    model = gpt2()
    planned = fusedseq.accelerate(model, dry_run=True)
    assert model.config._attn_implementation == "eager"
    assert fusedseq.accelerate(model).entries == planned.entries
    assert fusedseq.accelerate(model).replaced == []
