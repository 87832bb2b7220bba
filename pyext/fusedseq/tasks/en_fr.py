"""Translation from English to French: the experiments en-fr/..."""

from functools import partial
from itertools import product

from fusedseq.models.translator import POSITIONS, TranslatorSettings
from fusedseq.tasks.training import TrainingSettings, varied
from fusedseq.tasks.translation import task
from fusedseq.tasks.translation.task import PairSettings, Settings, restore

__all__ = ["DEFAULT_PRESET", "GRID", "PRESETS", "Settings", "build", "restore"]

# The source report english_french specifies layers, heads, width, dropout, Adam and 10 epochs. For
# what it does not specify, the feed-forward is 2,048 wide and the norms come after the sublayers,
# both as in the paper it follows (Vaswani et al., 2017); lr 5e-4 after a warm-up of 1,000 steps,
# batches of 32, and sentences of at most 100 ids are our choice.
BASE = Settings(
    TranslatorSettings(
        embedding=300, heads=5, layers=3, dropout=0.3, prenorm=False, max_length=100
    ),
    PairSettings(batch=32, max_length=100),
    TrainingSettings(
        epochs=10, optimizer="adam", lr=5e-4, warmup_steps=1000, clip=1.0, log_steps=10
    ),
)
# The 16 configurations of the report's table 1, in its order.
GRID = {
    f"grid-{layers}-{heads}-{embedding}-{dropout}": varied(
        BASE, model={"layers": layers, "heads": heads, "embedding": embedding, "dropout": dropout}
    )
    for layers, heads, embedding, dropout in product((2, 3), (5, 10), (100, 300), (0.1, 0.3))
}
PRESETS = {
    "base": BASE,
    **{f"pe-{positions}": varied(BASE, model={"positions": positions}) for positions in POSITIONS},
    **GRID,
}
DEFAULT_PRESET = "base"

build = partial(task.build, "en-fr")
