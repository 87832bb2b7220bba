"""`fusedseq ensemble words`: trains the members of an ensemble, or what is left to do of them, and evaluates it."""

import json
from pathlib import Path

from fusedseq.tasks.catalog import preset_operators, task_module
from fusedseq.tasks.ensemble import AVERAGE, VOTE, ensemble, figures, lines
from fusedseq.tasks.run import Recipe, carry_out
from fusedseq.tasks.start import trained_before
from fusedseq.tasks.train import add_common_arguments, usable_device
from fusedseq.tasks.training import override


def add_arguments(parser):
    add_common_arguments(parser)
    parser.add_argument("--members", metavar="PRESET,PRESET,...", help="(default: the six of the document's kind)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments",
                        help="override a setting of all members (repeatable)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the first member; each has the next (default: 0)")
    parser.add_argument("--epochs", type=int, help="train each member so many passes over the data")
    parser.add_argument("--steps", type=int, help="train each member so many steps in all")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="a directory with one for each member (default: runs/words/ensemble-SEED)",
    )
    parser.add_argument("--splits", default="valid,test,news_valid,news_test", help="(default: %(default)s)")


def run(args):
    module = task_module(args.task)
    if not hasattr(module, "ENSEMBLE"):
        raise ValueError(f"ensembles are of words, not of {args.task}")
    out = args.out or Path("runs") / args.task / f"ensemble-{args.seed}"
    recipes = [recipe(args, module, preset, args.seed + i)
               for i, preset in enumerate(args.members.split(",") if args.members else module.ENSEMBLE)]  # fmt: skip
    folders = [out / f"{i + 1}-{r.preset}" for i, r in enumerate(recipes)]
    members = [carry_out(r, folder) for r, folder in zip(recipes, folders, strict=True)]
    if None in members:
        raise ValueError(f"another process is training {folders[members.index(None)]}: try again when it has ended")
    found = ensemble(folders, args.data, ops=args.ops or "fused", device=usable_device(args.device))
    results = figures(found, args.splits.split(","))
    print("\n".join(lines(folders, results)))
    (out / "result.json").write_text(json.dumps(result(args, members, results), indent=1) + "\n")


def recipe(args, module, preset, seed):
    """The Recipe of a member."""
    if preset not in module.PRESETS:
        raise ValueError(f"{args.task}: unknown preset {preset!r}; known are {', '.join(module.PRESETS)}")
    limits = [
        f"training.{name}={getattr(args, name)}" for name in ("epochs", "steps") if getattr(args, name) is not None
    ]
    settings = override(module.PRESETS[preset], [*args.assignments, *limits])
    ops = args.ops or preset_operators(module, preset)
    start = trained_before(None, module, f"{args.task}/{preset}", seed)
    return Recipe(args.task, preset, settings, seed, ops, args.data, usable_device(args.device), start)


def result(args, members, results):
    """The content of result.json: the first member's, with the figures of all."""
    own = ("members", "set", "seed", "epochs", "steps")
    given = vars(args) | {"set": None}
    words = [f"--{name} {given[name]}" for name in own if given[name]] + [f"--set {text}" for text in args.assignments]
    splits = {split: part[AVERAGE] | {"vote_accuracy": part[VOTE]["accuracy"]} for split, part in results.items()}
    return members[0] | {
        "preset": "ensemble", "command": " ".join(["fusedseq ensemble words", *words]), **splits,
        **{name: sum(member[name] for member in members) for name in ("seconds", "parameters")},
        "members": [{"command": member["command"], **{split: part["members"][i] for split, part in results.items()}}
                    for i, member in enumerate(members)],
    }  # fmt: skip
