"""`fusedseq eval ptb RUN --temperature auto --dynamic sgd`: perplexity at another temperature, or of a model that follows the
text."""

from fusedseq.tasks.dynamic_evaluation import DynamicEvaluation, evaluate
from fusedseq.tasks.softmax_temperature import HIGHEST, LOWEST, best_temperature

TASKS = ("ptb",)
OPTIONS = ("temperature", "dynamic", "lr", "decay", "segment", "columns")


def add_arguments(group):
    add = group.add_argument
    add("--temperature", type=temperature, metavar="T", help="of the softmax: a number, or auto, which is searched from "
        f"{LOWEST} to {HIGHEST} on the validation split")  # fmt: skip
    add("--dynamic", choices=("sgd", "rms"), help="dynamic evaluation: after each segment of text the model learns from it, by "
        "plain steps or by steps scaled by its gradients on the training text (Krause et al., 2018)")  # fmt: skip
    add("--lr", type=float, help="of --dynamic, which needs it: find it on the validation split")
    add("--decay", type=float, help="of --dynamic, back to the trained weights (default: 0)")
    add("--segment", type=int, metavar="WORDS", help=f"of --dynamic (default: {DynamicEvaluation.segment})")
    add("--columns", type=int, help=f"that --dynamic reads the text in (default: {DynamicEvaluation.batch})")


def temperature(text):
    return text if text == "auto" else float(text)


def figures(task, splits, args):
    t = 1.0 if args.temperature is None else args.temperature
    dynamic = dynamic_evaluation(args)
    if t == "auto":
        t = best_temperature(lambda t: task.evaluate("valid", t)["loss"])
    if not t > 0:
        raise ValueError(f"--temperature must be above 0, got {t}")
    results: dict = {split: {} for split in splits}
    for split in splits:
        if args.temperature is not None:
            found = task.evaluate(split, t)
            results[split] |= {
                "temperature": t,
                "tempered_loss": found["loss"],
                "tempered_perplexity": found["perplexity"],
            }
        if dynamic:
            found = evaluate(task, split, dynamic, t)
            results[split] |= {"dynamic_loss": found["loss"], "dynamic_perplexity": found["perplexity"]}
    return results


def dynamic_evaluation(args):
    """The DynamicEvaluation that is asked for, or None."""
    given = {"lr": args.lr, "decay": args.decay, "segment": args.segment, "batch": args.columns}
    given = {name: value for name, value in given.items() if value is not None}
    if args.dynamic is None and given:
        raise ValueError(f"--{next(iter(given)).replace('batch', 'columns')} is of --dynamic, which is not given")
    if args.dynamic is not None and "lr" not in given:
        raise ValueError("--dynamic needs --lr, its learning rate")
    return None if args.dynamic is None else DynamicEvaluation(rms=args.dynamic == "rms", **given)
