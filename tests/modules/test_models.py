"""The Transformers of `fusedseq.models`: equality of both operator sets, and their properties."""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.data import contexts, en_es, parallel, reverse, words
from fusedseq.models import torch_mha
from fusedseq.models.reversal import Reversal, ReversalSettings
from fusedseq.models.transformer_layers import Decoder, Encoder
from fusedseq.models.translator import POSITIONS, Translator, TranslatorSettings
from fusedseq.models.word_predictor import WordPredictor, WordPredictorSettings
from safetensors.torch import load_file, save_file

from tests.support.judge import equal_modules
from tests.support.placement import exact, tolerances

pytestmark = pytest.mark.usefixtures("on_device")
V, E, B, L = 23, 12, 4, 6
WORDS = {"embedding": E, "heads": 3, "layers": 2, "feedforward": 20}
REVERSE = {"embedding": E, "heads": 2, "layers": 2, "feedforward": 20}
TRANSLATE = {
    "embedding": E,
    "heads": 2,
    "layers": 2,
    "feedforward": 20,
    "max_length": 8,
    "max_distance": 2,
}
MODELS = {
    "words": lambda ops: WordPredictor(V, WordPredictorSettings(**WORDS), ops=ops),
    "words-prenorm": lambda ops: WordPredictor(
        V, WordPredictorSettings(**WORDS, prenorm=True, pooling="mean"), ops=ops
    ),
    "words-extra-tied": lambda ops: WordPredictor(
        V, WordPredictorSettings(**WORDS, extra_feedforward=True, tied=True, pooling="max"), ops=ops
    ),
    "words-masking": lambda ops: WordPredictor(
        V, WordPredictorSettings(**WORDS, masking=0.4), ops=ops
    ),
    "reverse": lambda ops: Reversal(V, ReversalSettings(**REVERSE), ops=ops),
    "reverse-mask": lambda ops: Reversal(
        V, ReversalSettings(**REVERSE, mask=True, train_padding=False), ops=ops
    ),
    "translate-postnorm-tied": lambda ops: translator(
        ops=ops, prenorm=False, tied=True, label_smoothing=0.1
    ),
    **{f"translate-{p}": (lambda ops, p=p: translator(p, ops)) for p in POSITIONS},
}
LENGTHS = torch.tensor([6, 3, 1, 5])


def translator(positions="sinusoidal", ops=fused, **settings):
    return Translator(
        V, V + 2, TranslatorSettings(**{**TRANSLATE, "positions": positions, **settings}), ops=ops
    )


def ids(rows=B, length=L, seed=2):
    return torch.randint(
        1, V, (rows, length), generator=torch.Generator().manual_seed(seed), device="cpu"
    ).to(torch.get_default_device())


def padded(x, lengths):
    return torch.where(torch.arange(x.size(1)) < lengths.to(x.device)[:, None], x, 0)


def batch(model):
    """Returns the model's arguments and its targets."""
    x, lengths = ids(), LENGTHS.to(torch.get_default_device())
    if isinstance(model, WordPredictor):
        return (x,), ids(seed=3)[:, 0]
    if isinstance(model, Reversal):
        return (padded(x, lengths), lengths), padded(ids(seed=3), lengths)
    return (padded(x, lengths), lengths, ids(length=5, seed=4)), padded(
        ids(length=5, seed=3), lengths
    )


def outputs(model):
    """Returns y and the loss."""
    return call(model, *batch(model))


def call(model, inputs, targets):
    if isinstance(model, WordPredictor) and model.settings.masking:
        return model.objective(*inputs, targets)
    y = model(*inputs)
    return y, model.cross_entropy(y, targets)


@pytest.mark.parametrize("name", MODELS)
def test_both_operator_sets_give_the_same_model(name):
    """The same parameters and random masks; outputs and gradients within the error budget."""
    models = []
    for ops in (fused, reference, reference):
        torch.manual_seed(0)
        models.append(MODELS[name](ops))
    states = [m.state_dict() for m in models]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states[:2]), strict=True))
    equal_modules(*models, [], steps=8, call=outputs)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_gradient(name, ops):
    model = MODELS[name](ops)
    outputs(model)[1].backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None, parameter
        assert p.grad.abs().sum() > 0, parameter


@pytest.mark.parametrize("name", MODELS)
def test_only_training_is_random(name, ops):
    model = MODELS[name](ops)
    assert not torch.equal(outputs(model)[1], outputs(model)[1])
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(outputs(model)[1], outputs(model)[1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_cross_entropy_of_the_logits(name, ops):
    model = MODELS[name](ops).to(exact()).eval()
    inputs, targets = batch(model)
    y = model(*inputs)
    logp = model.logits(y).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    padding = isinstance(model, Translator) or (
        isinstance(model, Reversal) and not model.settings.train_padding
    )
    counted = targets != 0 if padding else torch.ones_like(targets, dtype=torch.bool)
    torch.testing.assert_close(model.cross_entropy(y, targets), -logp[counted].mean())


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_alone_equals_the_sequence_in_its_batch(name, ops):
    model = MODELS[name](ops).to(exact()).eval()
    inputs, _ = batch(model)
    torch.testing.assert_close(model(*(t[1:2] for t in inputs))[0], model(*inputs)[1])


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_can_be_written_by_safetensors(name, ops, tmp_path):
    """safetensors rejects tensors that share memory, such as one weight with two names."""
    save_file(MODELS[name](fused).state_dict(), tmp_path / "weights")
    model = MODELS[name](ops)
    model.load_state_dict(load_file(tmp_path / "weights"))
    assert all(
        torch.equal(t, load_file(tmp_path / "weights")[k].to(t.device))
        for k, t in model.state_dict().items()
    )


@pytest.mark.parametrize("build", [Encoder, Decoder])
def test_with_dropout_of_1_only_the_residual_remains(build, ops):
    """The input itself is not dropped. In post-norm each norm normalizes it."""
    x, memory = torch.randn(B, L, E), torch.randn(B, 3, E)
    given = (x,) if build is Encoder else (x, memory)
    torch.testing.assert_close(build(2, E, 3, 20, 1.0, prenorm=True, ops=ops)(*given), x)
    normed = torch.nn.functional.layer_norm(x, (E,))
    torch.testing.assert_close(
        build(2, E, 3, 20, 1.0, prenorm=True, final_norm=True, ops=ops)(*given), normed
    )
    postnorm = build(2, E, 3, 20, 1.0, ops=ops)(*given)
    # eps reduces the variance at each norm
    torch.testing.assert_close(postnorm, normed, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(build(2, E, 3, 20, 0.0, prenorm=True, ops=ops)(*given), x, atol=1e-2)


def test_dropouts_are_where_the_settings_say():
    """The probabilities of attention, feed-forward, and what both add to the residual."""
    predictor = WordPredictorSettings(**WORDS, dropout=0.3, extra_feedforward=True)
    models = [
        Reversal(V, ReversalSettings(**REVERSE, dropout=0.3)),
        WordPredictor(V, predictor),
        translator("rope", dropout=0.3),
    ]
    found = [
        (layer.self_attn.dropout, layer.feed_forward.dropout, *norms)
        for model in models
        for layer in model.encoder.layers[1:]
        for norms in [(layer.norm1.dropout, layer.norm2.dropout)]
    ]
    assert found == [(0.0, 0.0, 0.3, 0.3), (0.0, 0.3, 0.3, 0.3), (0.3, 0.3, 0.3, 0.3)]
    assert models[1].extra[1].dropout == 0.3


def test_both_attentions_of_a_decoder_have_its_scale(ops):
    for layer in Decoder(2, E, 3, 20, scale=0.7, ops=ops).layers:
        assert layer.self_attn.scale == layer.multihead_attn.scale == 0.7


def batches():
    """Yields a small model, its arguments and its targets for each task with generated data."""
    domains, reversals, pairs = words.load("synthetic"), reverse.load(), en_es.load("synthetic")
    sizes = {"embedding": 24, "heads": 4, "layers": 1, "feedforward": 48, "dropout": 0.0}
    b = contexts.ContextBatches(domains.train, 32)[0]
    yield (
        WordPredictor(len(domains.vocabulary), WordPredictorSettings(**sizes, prenorm=True)),
        (b.context,),
        b.target,
    )
    b = reverse.ReversalBatches(reversals.train, 32)[0]
    yield (
        Reversal(len(reversals.vocabulary), ReversalSettings(**sizes)),
        (b.source, b.lengths),
        b.target,
    )
    b = parallel.PairBatches(pairs.train, 32)[0]
    model = Translator(
        len(pairs.source.vocabulary), len(pairs.target.vocabulary), TranslatorSettings(**sizes)
    )
    yield model, (b.source, b.source_lengths, b.target[:, :-1]), b.target[:, 1:]


@pytest.mark.cpu
def test_a_batch_of_generated_data_can_be_memorized():
    for model, inputs, targets in batches():
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
        for _ in range(40):
            loss = call(model, inputs, targets)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.3 * losses[0], type(model).__name__


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["words-prenorm", "translate-relative"])
def test_compiles_without_graph_breaks(name):
    model = MODELS[name](fused).eval()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(model, *batch(model)), outputs(model))


# WordPredictor


def test_pooling_equals_its_formula(ops):
    for pooling, formula in (
        ("sum", lambda x: x.sum(1)),
        ("mean", lambda x: x.mean(1)),
        ("max", lambda x: x.max(1)[0]),
    ):
        model = WordPredictor(V, WordPredictorSettings(**WORDS, pooling=pooling), ops=ops).eval()
        assert torch.equal(model(ids()), formula(model.encode(ids())))


def test_the_output_does_not_depend_on_a_masked_word(ops):
    model, masked = MODELS["words-masking"](ops).eval(), torch.zeros(B, L, dtype=torch.bool)
    masked[:, 2] = True
    other = ids()
    other[:, 2] += 1
    y = model.encode(ids(), masked)
    assert torch.equal(model.encode(other, masked), y)
    assert not torch.allclose(model.encode(ids()), y)


def test_masked_words_are_predicted_too(ops):
    model = WordPredictor(V, WordPredictorSettings(**WORDS, masking=0.4, dropout=0.0), ops=ops)
    torch.manual_seed(7)
    context, target = padded(ids(), LENGTHS), ids()[:, 0]
    objective, loss = model.objective(context, target)
    torch.manual_seed(7)
    masked = (torch.rand(B, L) < 0.4) & (context != 0)
    x = model.encode(context, masked)
    torch.testing.assert_close(loss, model.cross_entropy(x.sum(1), target))
    torch.testing.assert_close(objective - loss, model.cross_entropy(x[masked], context[masked]))
    objective, loss = model.eval().objective(context, target)
    assert objective is loss


def test_the_order_of_words_matters(ops):
    model = MODELS["words"](ops).eval()
    assert not torch.allclose(model(ids().flip(1)), model(ids()))


def test_a_tied_output_has_no_weight_of_its_own():
    model = MODELS["words-extra-tied"](fused)
    assert model.output_weight is model.embedding.weight
    assert not [name for name in model.state_dict() if name.startswith("output")]


def test_numbers_of_parameters_equal_the_reported_ones():
    """words/base 51.7M, with the extra feed-forward 52M, words/final (12 layers) 58M."""
    counts = []
    for settings in ({}, {"extra_feedforward": True}, {"layers": 12, "heads": 8, "prenorm": True}):
        with torch.device("meta"):
            model = WordPredictor(100_000, WordPredictorSettings(**settings), ops=reference)
        counts.append(sum(p.numel() for p in model.parameters()) / 1e6)
    assert counts == pytest.approx([51.7, 52.0, 57.5], abs=0.06)


# Reversal


def test_padding_matters_only_without_the_mask(ops):
    lengths, other = LENGTHS.to(torch.get_default_device()), ids()
    for name, differs in (("reverse", True), ("reverse-mask", False)):
        model = MODELS[name](ops).to(exact()).eval()
        y, y_other = model(padded(ids(), lengths), lengths), model(other, lengths)
        present = torch.arange(L) < lengths[:, None]
        assert torch.allclose(y[present], y_other[present]) != differs


def test_the_mask_requires_lengths():
    with pytest.raises(ValueError, match=r"Reversal: lengths must be \(B,\) with mask, got None"):
        MODELS["reverse-mask"](fused)(ids())


@pytest.mark.parametrize(
    ("scale", "expected_scale"), [("embedding", E**-0.5), ("head", (E // 2) ** -0.5)]
)
def test_reversal_scales_logits_by_the_embedding_size_or_the_head_size(scale, expected_scale):
    model = Reversal(V, ReversalSettings(**REVERSE, scale=scale)).to(exact()).eval()
    attention = model.encoder.layers[0].self_attn
    x = torch.randn(2, L, E, dtype=exact())
    q, k, v = attention.in_proj_weight.chunk(3)
    N, D = 2, E // 2
    heads = [(x @ w.T).view(2, L, N, D).transpose(1, 2) for w in (q, k, v)]
    p = (heads[0] @ heads[1].mT * expected_scale).softmax(-1)
    expected = attention.out_proj((p @ heads[2]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, x, x)[0], expected)


# Translator

TRANSLATORS = {
    **{p: {"positions": p} for p in POSITIONS},
    "postnorm": {"prenorm": False},
    "tied": {"tied": True},
}
translators = pytest.mark.parametrize("settings", TRANSLATORS.values(), ids=TRANSLATORS)


def exact_translator(settings, ops):
    model = translator(ops=ops, **settings).to(exact()).eval()
    return model, *batch(model)[0]


@translators
def test_source_padding_does_not_matter(settings, ops):
    model, source, lengths, prefix = exact_translator(settings, ops)
    other = torch.where(source == 0, V - 1, source)
    y = model(source, lengths, prefix)
    torch.testing.assert_close(model(other, lengths, prefix), y)
    longer = torch.cat([other, other[:, :2]], 1)
    torch.testing.assert_close(model(longer, lengths, prefix), y)
    assert not torch.allclose(model(other, torch.full_like(lengths, L), prefix), y)


@translators
def test_the_decoder_depends_on_the_past_and_not_on_the_future(settings, ops):
    model, source, lengths, prefix = exact_translator(settings, ops)
    future, past = prefix.clone(), prefix.clone()
    future[:, 3:] = future[:, 3:] % (V - 1) + 1
    past[:, 0] = past[:, 0] % (V - 1) + 1
    y = model(source, lengths, prefix)
    torch.testing.assert_close(model(source, lengths, future)[:, :3], y[:, :3])
    torch.testing.assert_close(model(source, lengths, prefix[:, :3]), y[:, :3])
    assert not torch.isclose(model(source, lengths, past)[:, 3:], y[:, 3:]).all(-1).any()


@torch.no_grad()
@translators
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1), (2, 1, 2)], ids=str)
def test_cached_decoding_equals_decoding_the_whole_prefix(settings, steps, ops):
    model, source, lengths, prefix = exact_translator(settings, ops)
    memory = model.encode(source, lengths)
    cache = model.cache(memory, lengths, max_length=5)
    found = [model.decode(part, cache=cache) for part in prefix.split(steps, 1)]
    torch.testing.assert_close(torch.cat(found, 1), model.decode(prefix, memory, lengths))


@torch.no_grad()
@translators
def test_reordered_hypotheses_equal_decoding_their_whole_prefixes(settings, ops):
    """A beam of 2 that is reordered within each source at every step."""
    model, source, lengths, _ = exact_translator(settings, ops)
    memory = model.encode(source, lengths)
    cache, words = model.cache(memory, lengths, max_length=4, beam=2), ids(2 * B, 1)
    for step in range(4):
        y = model.decode(words[:, -1:], cache=cache)
        whole = model.decode(words, memory.repeat_interleave(2, 0), lengths.repeat_interleave(2))
        torch.testing.assert_close(y[:, 0], whole[:, -1])
        parents = (torch.arange(B)[:, None] * 2 + torch.randint(2, (B, 2))).flatten()
        cache.reorder(parents)
        words = torch.cat([words[parents], ids(2 * B, 1, seed=step)], 1)


@translators
def test_word_order_matters_except_without_positions(settings, ops):
    """Without positions the encoder's outputs are permuted as the words are."""
    model, order = exact_translator(settings, ops)[0], [2, 1, 0, 3, 4, 5]
    permuted, y = model.encode(ids()[:, order]), model.encode(ids())
    assert torch.allclose(permuted, y[:, order], **tolerances()) == (
        settings == {"positions": "none"}
    )


def test_labels_are_smoothed_in_training_mode_only(ops):
    model = translator(ops=ops, dropout=0.0, label_smoothing=0.2).to(exact())
    inputs, targets = batch(model)
    for smoothing in (0.2, 0.0):
        y = model.train(smoothing > 0)(*inputs)
        expected = torch.nn.functional.cross_entropy(
            model.logits(y).flatten(0, 1),
            targets.flatten(),
            ignore_index=0,
            label_smoothing=smoothing,
        )
        torch.testing.assert_close(model.cross_entropy(y, targets), expected)


@pytest.mark.parametrize("positions", POSITIONS)
def test_embedded_words_are_scaled_and_dropped_once(positions, ops):
    words, given = translator(positions, ops, dropout=0.3).target_words, ids(500)
    x = words.embedding.weight[given] * E**0.5
    expected = x if words.positions is None else words.eval().positions(x)
    torch.testing.assert_close(words.eval()(given), expected)
    y = words.train()(given)
    # Four standard errors of the fraction that is dropped.
    error = 4 * (0.3 * 0.7 / y.numel()) ** 0.5
    assert (y == 0).double().mean().item() == pytest.approx(0.3, abs=error)
    torch.testing.assert_close(y[y != 0], expected[y != 0] / 0.7)


def test_embeddings_have_the_variance_of_one_over_the_width():
    """Those that are also the weight of an output, and those that are multiplied by its root."""
    models = [translator(), MODELS["words-extra-tied"](fused)]
    for _ in range(2):
        for weight in (models[0].source_words.embedding.weight, models[1].embedding.weight):
            error = 4 / (2 * weight.numel()) ** 0.5  # four standard errors
            assert weight.std().item() == pytest.approx(E**-0.5, rel=error)
        for model in models:
            model.reset_parameters()


def test_relative_biases_of_the_decoder_distinguish_only_the_past():
    model = translator("relative-bias")
    for stack, bidirectional in ((model.encoder, True), (model.decoder, False)):
        assert all(l.self_attn.positions.bidirectional == bidirectional for l in stack.layers)


@pytest.mark.parametrize("prenorm", [False, True])
def test_a_norm_ends_both_stacks_where_norms_come_before_sublayers(prenorm):
    model = translator(prenorm=prenorm)
    assert [stack.norm is not None for stack in (model.encoder, model.decoder)] == [prenorm] * 2


def test_an_encoder_with_alibi_does_not_distinguish_left_from_right(ops):
    """ALiBi's biases depend on distances alone, as Translator's docstring states."""
    for positions in POSITIONS:
        model = translator(positions, ops).to(exact()).eval()
        backwards, y = model.encode(ids().flip(1)), model.encode(ids())
        assert torch.allclose(backwards, y.flip(1), **tolerances()) == (
            positions in ("alibi", "none")
        )


def test_bad_settings_are_rejected():
    with pytest.raises(
        ValueError, match=r"Translator: positions must be sinusoidal, learned.* got 'nope'"
    ):
        translator("nope")
    with pytest.raises(
        ValueError, match="WordPredictor: pooling must be sum, mean or max, got 'min'"
    ):
        WordPredictor(V, WordPredictorSettings(**WORDS, pooling="min"))
    with pytest.raises(ValueError, match=r"WordPredictor: masking must be in \[0, 1\), got 1"):
        WordPredictor(V, WordPredictorSettings(**WORDS, masking=1))
    with pytest.raises(ValueError, match="Reversal: scale must be embedding or head, got 'none'"):
        Reversal(V, ReversalSettings(scale="none"))
    with pytest.raises(ValueError, match="ReversalSettings: layers must be at least 1, got 0"):
        Reversal(V, ReversalSettings(layers=0))


# models.torch_mha


@pytest.mark.parametrize("prenorm", [True, False], ids=["pre", "post"])
def test_torch_mha_is_the_same_model_except_for_random_masks(prenorm):
    """The same initialization and state dict; without dropout the same loss and gradients."""
    models = []
    for ops in (fused, torch_mha):
        torch.manual_seed(0)
        models.append(translator(ops=ops, prenorm=prenorm, dropout=0.0).to(exact()))
    assert isinstance(models[1].encoder.layers[0].self_attn, torch.nn.MultiheadAttention)
    ours, theirs = (m.state_dict() for m in models)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    results = []
    for model in models:
        y, loss = outputs(model)
        results.append((y, loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*results)
    with torch.no_grad():  # here torch's module has a fast path
        torch.testing.assert_close(*(outputs(model.eval()) for model in models))


def test_torch_mha_learns():
    """It learns to copy; the source report's experiment with torch's module did not learn."""
    model = translator(ops=torch_mha, embedding=24, heads=4, layers=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(150):
        words = ids(16, 4, seed=step) % 6 + 1
        prefix = torch.cat([torch.full_like(words[:, :1], V - 1), words[:, :-1]], 1)
        loss = model.cross_entropy(model(words, torch.full((16,), 4), prefix), words)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 1.0 < losses[0]  # uniform over six words: log(6) = 1.79


def test_torch_mha_rejects_positions_and_caches():
    with pytest.raises(
        ValueError,
        match=r"torch.nn.MultiheadAttention: positions and scale must be None, got ALiBi",
    ):
        translator("alibi", ops=torch_mha)
    with pytest.raises(ValueError, match=r"torch.nn.MultiheadAttention has no cache"):
        translator(ops=torch_mha).cache(torch.zeros(1, 2, E), max_length=3)
