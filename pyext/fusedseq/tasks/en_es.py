"""English to Spanish: the rows en-es/... of the documented systems."""

from functools import partial

from fusedseq.models.translator import TranslatorSettings
from fusedseq.tasks import translation
from fusedseq.tasks.training import TrainingSettings, varied
from fusedseq.tasks.translation import PairSettings, Settings, restore

__all__ = ["DEFAULT_PRESET", "PRESETS", "PRESET_OPERATORS", "Settings", "build", "restore"]

# The document gives sizes, dropout, 90 positions, 20 epochs, and prefers pre-norm. Silent about the rest, it reproduces the paper
# (Vaswani et al., 2017), whose optimiser this is: Adam, warm-up over 4,000 steps to d_model^-.5 4000^-.5 = 7e-4. Batches of
# 64 sentences, and a gradient's norm clipped at 1.
BASE = Settings(
    TranslatorSettings(),
    PairSettings(),
    TrainingSettings(
        epochs=20, optimizer="adam", lr=7e-4, beta2=0.98, eps=1e-9, lr_schedule="inverse-sqrt", warmup_steps=4000,
        clip=1.0, log_steps=10,
    ),
)  # fmt: skip
PRESETS = {
    "base": BASE,
    "postnorm": varied(BASE, model={"prenorm": False}),
    "torch-mha": BASE,
    "smoothed": varied(BASE, model={"label_smoothing": 0.1}),  # optional in the rows
}
PRESET_OPERATORS = {"torch-mha": "torch_mha"}  # the operators that a row is about
DEFAULT_PRESET = "base"

build = partial(translation.build, "en-es")
