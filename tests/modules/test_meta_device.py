"""A model that was made on the meta device gets the parameters of one that was made directly."""

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.models import torch_mha
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.models.reversal import Reversal, ReversalSettings
from fusedseq.models.transformer_layers import Decoder, Encoder
from fusedseq.models.translator import POSITIONS, Translator, TranslatorSettings
from fusedseq.models.word_predictor import WordPredictor, WordPredictorSettings

pytestmark = pytest.mark.cpu

MODULES = {  # {name: (a class of fusedseq.nn, its arguments, its options)}
    "LSTM": (nn.LSTM, (5, [4, 3], 2), {}),
    "LSTM with forget_bias": (nn.LSTM, (5, 4, 2), {"forget_bias": 1.0}),
    "MogrifierLSTM": (nn.MogrifierLSTM, (5, 4, 2), {"forget_bias": 0.5}),
    "MogrifierLSTM of low rank": (nn.MogrifierLSTM, (5, 4, 2), {"rank": 2}),
    "GRU": (nn.GRU, (4, 3, 2), {"bidirectional": True}),
    "RNN": (nn.RNN, (4, 3, 2), {}),
    "bidirectional Mogrifier LSTM": (nn.MogrifierLSTM, (4, 3), {"bidirectional": True}),
    "projected LSTM": (nn.LSTM, (4, 3), {"proj_size": 2}),
    "PeepholeLSTM": (nn.PeepholeLSTM, (5, 4, 2), {"forget_bias": 0.5}),
    "LayerNormGRU": (nn.LayerNormGRU, (5, [4, 3], 2), {}),
    "LayerNormLSTM": (nn.LayerNormLSTM, (5, [4, 3], 2), {}),
    "MultiheadAttention": (nn.MultiheadAttention, (8, 2), {}),
    "MultiheadAttention with kdim": (nn.MultiheadAttention, (8, 2), {"kdim": 3, "vdim": 5}),
    "FeedForward": (nn.FeedForward, (8, 6), {}),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer, (8, 2, 6), {}),
    "TransformerDecoderLayer": (nn.TransformerDecoderLayer, (8, 2, 6), {"norm_first": True}),
    "ResidualLayerNorm": (nn.ResidualLayerNorm, (8,), {}),
    "SplitCrossEntropy": (nn.SplitCrossEntropy, (4, (3, 5)), {}),
    "LinearCrossEntropyLoss": (nn.LinearCrossEntropyLoss, (4, 7), {"bias": True}),
    "Embedding": (nn.Embedding, (9, 4, 2), {}),
    "LearnedPositions": (nn.LearnedPositions, (9, 4), {}),
    "SinusoidalPositions": (nn.SinusoidalPositions, (4,), {}),
    "RelativeBias": (nn.RelativeBias, (2,), {}),
    "RelativeKeys": (nn.RelativeKeys, (3, 4), {}),
    "Rotary": (nn.Rotary, (4,), {}),
    "ALiBi": (nn.ALiBi, (3,), {}),
}
WITHOUT_TENSORS = {"Dropout", "LockedDropout", "WeightDrop", "KeyValueCache", "Operators"}


def language_model(**settings):
    sizes = {"embedding": 6, "hidden": 6, "layers": 2}
    return lambda: LanguageModel(11, LanguageModelSettings(**sizes, **settings))


def translator(ops=fused, **settings):
    s = TranslatorSettings(embedding=8, heads=2, layers=2, feedforward=6, **settings)
    return lambda: Translator(9, 7, s, ops=ops)


def word_predictor(**settings):
    s = WordPredictorSettings(embedding=8, context=4, heads=2, feedforward=6, **settings)
    return lambda: WordPredictor(9, s)


MODELS = {
    "language model": language_model(forget_bias=1.0, splits=(4,)),
    "tied language model": language_model(tied=True),
    "Mogrifier language model": language_model(rounds=3, init="truncated_normal", forget_bias=1.0),
    "RNN language model": language_model(cell="rnn", locked=False),
    "GRU language model": language_model(cell="gru"),
    **{f"translator, {positions}": translator(positions=positions) for positions in POSITIONS},
    "tied post-norm translator": translator(tied=True, prenorm=False),
    "translator of torch's attention": translator(torch_mha),
    "word predictor": word_predictor(masking=0.1, extra_feedforward=True),
    "tied word predictor": word_predictor(tied=True),
    "reversal": lambda: Reversal(9, ReversalSettings(8, 2, 1, 6)),
    "encoder": lambda: Encoder(2, 8, 2, 6),
    "decoder": lambda: Decoder(2, 8, 2, 6, prenorm=True, final_norm=True),
    "attention with its own positions": lambda: nn.MultiheadAttention(
        8, 2, positions=nn.RelativeBias(2)
    ),
    **{name: lambda kind=kind: kind[0](*kind[1], **kind[2]) for name, kind in MODULES.items()},
}


def reset(model):
    """`reset_parameters`, which a module without parameters need not have."""
    if list(model.parameters()) or hasattr(model, "reset_parameters"):
        model.reset_parameters()


def assert_same_tensors(found, wanted):
    names = dict([*wanted.named_parameters(), *wanted.named_buffers()])
    tensors = dict([*found.named_parameters(), *found.named_buffers()])
    assert [*tensors] == [*names]
    for name, t in names.items():
        assert tensors[name].device == t.device
        assert torch.equal(tensors[name], t), name


def test_every_module_with_parameters_or_tables_is_tested():
    assert {kind.__name__ for kind, _, _ in MODULES.values()} == {*nn.__all__} - WITHOUT_TENSORS


def filled(model):
    """The model off the meta device, where it holds NaN until its parameters are drawn."""
    assert {t.device.type for t in model.parameters()} <= {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(7)
    reset(model)
    return model


@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_with_the_device_meta_equals_one_made_directly(name):
    kind, arguments, options = MODULES[name]
    model = filled(kind(*arguments, **options, device="meta"))
    drawn = torch.rand(())
    torch.manual_seed(7)
    assert_same_tensors(model, kind(*arguments, **options))
    assert drawn == torch.rand(()), "the generator is left as the constructor leaves it"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_under_the_device_meta_equals_one_made_directly(name):
    with torch.device("meta"):
        model = MODELS[name]()
    model = filled(model)
    drawn = torch.rand(())
    torch.manual_seed(7)
    assert_same_tensors(model, MODELS[name]())
    assert drawn == torch.rand(()), "the generator is left as the constructor leaves it"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MogrifierLSTM])
def test_reset_keeps_the_forget_bias_of_the_constructor_unless_one_is_given(kind):
    module = kind(3, 4, forget_bias=2.0)
    for given, wanted in ((None, 2.0), (0.5, 0.5)):
        module.reset_parameters(*() if given is None else (given,))
        assert torch.equal(module.bias_ih_l0[4:8], torch.full((4,), wanted))
        assert torch.equal(module.bias_hh_l0[4:8], torch.zeros(4))


def test_a_meta_model_computes_shapes():
    with torch.device("meta"):
        model = MODELS["language model"]()
        dropped, raw, _ = model(torch.zeros(7, 3, dtype=torch.int64))
    assert dropped.shape == raw.shape == (7, 3, 6)
    assert raw.device.type == "meta"


@pytest.mark.parametrize("name", ["Rotary", "ALiBi", "RelativeBias", "RelativeKeys"])
def test_positions_are_made_on_the_default_device(name):
    """As parameters are, so that a model made under `torch.set_default_device` can be called."""
    arguments = {"Rotary": (4,), "ALiBi": (2,), "RelativeBias": (2,), "RelativeKeys": (3, 4)}
    with torch.device("meta"):
        module = nn.MultiheadAttention(8, 2, positions=getattr(nn, name)(*arguments[name]))
        x = torch.empty(3, 2, 8)
    assert module(x, x, x)[0].device.type == "meta"
    with torch.device("meta"):
        positions = nn.SinusoidalPositions(8)
    assert positions(x).device.type == "meta"


def test_lists_of_lengths_are_for_the_device_of_the_call():
    x = torch.randn(3, 2, 8)
    lstm, attention = nn.LSTM(8, 5), nn.MultiheadAttention(8, 2)
    expected = lstm(x, lengths=[3, 2])[0], attention(x, x, x, key_lengths=[3, 2])[0]
    weights = *lstm.parameters(), torch.zeros(2, 5), torch.zeros(2, 5)
    with torch.device("meta"):
        W_ih, W_hh, b_ih, b_hh, h0, c0 = weights
        y, _ = fused.lstm(x, W_ih, W_hh, b_ih + b_hh, h0, c0, lengths=[3, 2])
        found = y, attention(x, x, x, key_lengths=[3, 2])[0]
    torch.testing.assert_close(found, expected)
