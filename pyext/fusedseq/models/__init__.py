"""Whole networks, one readable file each. Each takes its operators as the argument `ops`."""

from fusedseq.models import convert
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.models.reversal import Reversal, ReversalSettings
from fusedseq.models.transformer_layers import Decoder, Encoder
from fusedseq.models.translator import Translator, TranslatorSettings
from fusedseq.models.word_predictor import WordPredictor, WordPredictorSettings

__all__ = [
    "Decoder",
    "Encoder",
    "LanguageModel",
    "LanguageModelSettings",
    "Reversal",
    "ReversalSettings",
    "Translator",
    "TranslatorSettings",
    "WordPredictor",
    "WordPredictorSettings",
    "convert",
]
