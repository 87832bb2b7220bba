"""Every experiment of the five source reports, with the values that they report."""

from itertools import product

from fusedseq.tasks.experiments.experiment import Experiment

# The source reports.
WORDS, PTB, REVERSE, EN_ES, EN_FR = (
    "word_vectors",
    "penn_treebank_lm",
    "sequence_reversal",
    "english_spanish",
    "english_french",
)


def _words(
    name: str,
    table: str,
    loss: float,
    percent: float,
    hours: int,
    minutes: int,
    millions: float,
    *,
    news: float | None = None,
    remark: str | None = None,
) -> Experiment:
    """An experiment of the tables of word_vectors.

    loss, percent: loss and accuracy (in per cent) on held-out text of the training domain
    hours, minutes: the training time    millions: of parameters
    news: the accuracy of the report's submission in the other domain, in per cent
    """
    metrics = {
        "test loss": loss,
        "test accuracy": percent / 100,
        "seconds": 60.0 * (60 * hours + minutes),
        "parameters": millions * 1e6,
    }
    metrics |= {} if news is None else {"news_test accuracy": news / 100}
    return Experiment(f"words/{name}", f"{WORDS}, {table}", metrics, remark)


WORDS_EXPERIMENTS = (
    _words("base", "table 2", 4.13, 34.9, 3, 40, 51.7),
    _words("feedforward", "table 2", 4.06, 35.5, 4, 5, 52),
    _words(
        "layers-1",
        "table 3",
        4.03,
        35.8,
        4,
        3,
        52,
        remark="printed with the same values as two layers",
    ),
    _words("layers-2", "table 3", 4.03, 35.8, 4, 3, 52),
    _words("layers-3", "table 3", 3.98, 36.2, 4, 30, 53),
    _words("layers-4", "tables 3 and 8", 3.93, 37.0, 4, 56, 53, news=35.1),
    _words("layers-5", "table 3", 3.95, 36.9, 5, 23, 54),
    _words("layers-6", "table 3", 3.94, 37.1, 5, 52, 54),
    _words("layers-7", "table 3", 3.95, 36.9, 6, 18, 55),
    _words("heads-4", "table 4", 3.92, 37.2, 5, 12, 53),
    _words("heads-4-5", "table 4", 3.91, 37.3, 5, 42, 54),
    _words("heads-8", "table 5", 3.89, 37.4, 5, 58, 54),
    _words("prenorm-4", "table 7", 3.80, 38.5, 5, 26, 53),
    _words("prenorm-6", "table 7", 3.74, 39.0, 6, 33, 55),
    _words("prenorm-8", "table 7", 3.72, 39.4, 7, 40, 55.5),
    _words("prenorm-10", "table 7", 3.69, 39.5, 8, 46, 54),
    Experiment("words/tied", f"{WORDS}, section 6", remark="a higher loss at the same budget"),
    _words("adapt", "table 8", 3.89, 37.1, 5, 3, 53, news=35.9),
    *(
        Experiment(
            f"words/adapt-{name}",
            f"{WORDS}, section 7",
            remark=f"proposed as future work, not tried: {what}",
        )
        for name, what in (
            ("after", "labels after each epoch"),
            ("keep", "earlier labels are retained"),
            ("freeze", "train on news with layers frozen"),
            ("finetune", "train on news at a reduced lr"),
        )
    ),
    _words("final", "table 9", 3.68, 40.0, 12, 0, 58, news=38.0),
    _words("dim-128", "table 10", 4.23, 34.4, 0, 59, 26),
    _words("dim-256", "table 10", 4.14, 35.3, 1, 29, 54),
    _words("dim-512", "table 10", 5.73, 19.6, 2, 37, 110),
    _words("ff-256", "table 11", 4.16, 34.8, 1, 25, 53),
    _words("ff-512", "table 11", 4.14, 35.3, 1, 29, 54),
    _words("ff-1024", "table 11", 4.13, 35.2, 1, 40, 55),
    _words("ff-2048", "table 11", 4.47, 31.6, 2, 0, 57),
    Experiment(
        "words/ensemble",
        f"{WORDS}, section 9",
        {"news_test vote_accuracy": 0.3845},
        run="ensemble words",
        remark="a majority vote of six simple models with about 37 % each, on 30 % of the "
        "submission's contexts",
    ),
    Experiment(
        "words/pretrained",
        f"{WORDS}, section 11.1",
        remark="proposed; --set data.vectors=FILE, a word2vec file",
    ),
    Experiment("words/masked", f"{WORDS}, section 11.2", remark="proposed"),
)


def _ptb(
    name: str, perplexity: float, source: str = f"{PTB}, table 2", remark: str | None = None
) -> Experiment:
    return Experiment(f"ptb/{name}", source, {"test perplexity": perplexity}, remark)


PTB_EXPERIMENTS = (
    Experiment("ptb/rnn", "the task statement", remark="a test perplexity below 140"),
    _ptb("lstm", 132.29),
    _ptb("dropout", 105.15),
    _ptb("tied", 94.61),
    _ptb("residual", 99.13),
    _ptb("asgd", 99.83),
    _ptb("weightdrop", 86.86),
    _ptb("embdrop", 86.57),
    _ptb("locked", 79.66),
    _ptb("awd", 77.98),
    _ptb("mogrifier-awd", 76.24),
    _ptb("mogrifier-awd-1150", 73.06, remark="74 epochs"),
    _ptb("mogrifier-awd-150", 70.35, remark="about 130 epochs"),
    _ptb("mogrifier-fast", 70.35, remark="the report's best; the preset is ours"),
    _ptb("mogrifier-fast-second", 70.35, remark="the report's best; the preset is ours"),
    _ptb("mogrifier-fast-third", 70.35, remark="the report's best; the preset is ours"),
    _ptb("mogrifier-wide", 70.35, remark="the report's best; the preset is ours"),
    _ptb(
        "awd-merity",
        57.3,
        "paper: Merity et al. (2018)",
        remark="with the paper's finetuning, which is not reproduced",
    ),
    _ptb("mogrifier-melis", 50.1, "paper: Melis et al. (2020)"),
)
REVERSE_EXPERIMENTS = (
    Experiment(
        "reverse/base",
        REVERSE,
        {
            "test loss": 0.7026675939559937,
            "test token_accuracy": 0.676280,
            "test sequence_accuracy": 0.069814,
        },
    ),
    Experiment(
        "reverse/tuned",
        REVERSE,
        {
            "test loss": 0.00011462868860689923,
            "test token_accuracy": 1.0,
            "test sequence_accuracy": 1.0,
        },
    ),
    Experiment(
        "reverse/tune",
        REVERSE,
        remark="30 trials find 8 layers of size 1024, 2 heads, feed-forward 4096, dropout .3, no "
        "mask; with 4 layers over 99 % of the tokens are correct",
        run="tune reverse",
    ),
)
EN_ES_EXPERIMENTS = (
    Experiment(
        "en-es/base",
        f"{EN_ES}, benchmarks",
        {"seconds per epoch": 720.0},
        remark="on an RTX 4070; sample translations",
    ),
    Experiment("en-es/postnorm", f"{EN_ES}, modifications", remark="worse than pre-norm"),
    Experiment(
        "en-es/torch-mha",
        f"{EN_ES}, reproducing the paper",
        remark="failed to translate, at a similar loss",
    ),
    *(
        Experiment(
            f"en-es/{name}",
            f"{EN_ES}, example translations",
            remark=f"“{wanted}” for “{sentence}”",
            run=f"eval en-es runs/en-es/base-0 --splits test --beam {beam} --samples 2",
        )
        for name, beam, sentence, wanted in (
            (
                "greedy",
                1,
                "Don't be afraid to try new things.",
                "No tenga miedo de experimentar cosas nuevas .",
            ),
            (
                "beam",
                4,
                "Don't be afraid to try new things.",
                "No tenga miedo de probar cosas nuevas .",
            ),
        )
    ),
)
# {(layers, heads, embedding, dropout): (training loss, validation loss, BLEU on the test set)}
TABLE_1 = {
    (2, 5, 100, 0.1): (3.518, 3.949, 0.111),
    (2, 5, 100, 0.3): (4.140, 4.241, 0.075),
    (2, 5, 300, 0.1): (2.270, 3.462, 0.103),
    (2, 5, 300, 0.3): (3.079, 3.628, 0.141),
    (2, 10, 100, 0.1): (3.556, 3.968, 0.110),
    (2, 10, 100, 0.3): (4.145, 4.236, 0.079),
    (2, 10, 300, 0.1): (2.275, 3.560, 0.144),
    (2, 10, 300, 0.3): (3.091, 3.675, 0.127),
    (3, 5, 100, 0.1): (3.412, 3.942, 0.116),
    (3, 5, 100, 0.3): (4.008, 4.148, 0.089),
    (3, 5, 300, 0.1): (2.127, 3.389, 0.134),
    (3, 5, 300, 0.3): (2.919, 3.478, 0.161),
    (3, 10, 100, 0.1): (3.419, 3.906, 0.116),
    (3, 10, 100, 0.3): (4.020, 4.132, 0.087),
    (3, 10, 300, 0.1): (2.115, 3.496, 0.161),
    (3, 10, 300, 0.3): (2.921, 3.529, 0.148),
}


def _en_fr(name: str, configuration: tuple[int, int, int, float]) -> Experiment:
    train, valid, bleu = TABLE_1[configuration]
    metrics = {"train loss": train, "valid loss": valid, "test bleu": bleu}
    return Experiment(f"en-fr/{name}", f"{EN_FR}, table 1", metrics)


EN_FR_EXPERIMENTS = (
    _en_fr("base", (3, 5, 300, 0.3)),
    *(
        Experiment(f"en-fr/pe-{name}")
        for name in ("sinusoidal", "learned", "relative", "rope", "alibi", "none")
    ),
    Experiment(
        "en-fr/grid",
        f"{EN_FR}, table 1",
        remark="the 16 configurations below; 3 layers, 5 heads, 300, dropout .3 is the best",
        run="grid en-fr",
    ),
    *(
        _en_fr("grid-" + "-".join(map(str, c)), c)
        for c in product((2, 3), (5, 10), (100, 300), (0.1, 0.3))
    ),
)
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        *WORDS_EXPERIMENTS,
        *PTB_EXPERIMENTS,
        *REVERSE_EXPERIMENTS,
        *EN_ES_EXPERIMENTS,
        *EN_FR_EXPERIMENTS,
    )
}
# Presets that are not an experiment of a source report.
EXTRAS = ("en-es/smoothed", "en-fr/pe-relative-bias")


def experiments(task: str | None = None) -> list[Experiment]:
    """The experiments of a task; None for all."""
    return [experiment for experiment in EXPERIMENTS.values() if task in (None, experiment.task)]
