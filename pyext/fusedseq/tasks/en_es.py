"""Translation from English to Spanish: the experiments en-es/..."""

from functools import partial

from fusedseq.models.translator import TranslatorSettings
from fusedseq.tasks.training import TrainingSettings, varied
from fusedseq.tasks.translation import task
from fusedseq.tasks.translation.task import PairSettings, Settings, restore

__all__ = ["DEFAULT_PRESET", "PRESETS", "PRESET_OPERATORS", "Settings", "build", "restore"]

# The source report english_spanish specifies sizes, dropout, 90 positions, 20 epochs, and prefers
# pre-norm. It reproduces the paper (Vaswani et al., 2017), whose optimizer is used for what the
# report does not specify: Adam, warm-up over 4,000 steps to d_model^-.5 4000^-.5 = 7e-4. Batches of
# 64 sentences and clipping the norm of the gradient at 1 are our choice.
BASE = Settings(
    TranslatorSettings(),
    PairSettings(),
    TrainingSettings(
        epochs=20,
        optimizer="adam",
        lr=7e-4,
        beta2=0.98,
        eps=1e-9,
        lr_schedule="inverse-sqrt",
        warmup_steps=4000,
        clip=1.0,
        log_steps=10,
    ),
)
PRESETS = {
    "base": BASE,
    "postnorm": varied(BASE, model={"prenorm": False}),
    "torch-mha": BASE,
    "smoothed": varied(BASE, model={"label_smoothing": 0.1}),  # not an experiment of the report
}
PRESET_OPERATORS = {"torch-mha": "torch_mha"}
DEFAULT_PRESET = "base"

build = partial(task.build, "en-es")
