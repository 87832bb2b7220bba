"""The figures of a result's row, derived from its raw medians: nothing here is measured."""

BASELINES = ("eager", "torch")  # what a gain is over where no bar names something else
MEMORY = "memory of "  # what a bar on a provider's memory begins with
BUSY = 0.1  # cores: with others using more, a row counts as disturbed


def gain(row, against):
    """How many times as fast as provider `against` the fused operator is; None where that was left out."""
    median = row["median"]
    return median[against] / median["fused"] if against in median else None


def baseline(row):
    """The provider that the gain is quoted over: the bar's, else the faster one of BASELINES."""
    named = [against for against, _ in row["bars"] if against != "roof" and not against.startswith(MEMORY)]
    present = [name for name in BASELINES if name in row["median"]]
    return named[0] if named else min(present, key=row["median"].get)


def rate(row):
    """(the fused operator's rate, its unit): GFLOP/s, or GB/s of the least traffic the operator can have."""
    if row["roof"]:
        return row["bytes"] / row["median"]["fused"] / 1e9, "GB/s"
    return row["flops"] / row["median"]["fused"] / 1e9, "GFLOP/s"


def roofs(document, row):
    """{name: the rate of that roof, in `rate`'s unit}; the first is the one that bars mean."""
    if row["roof"]:
        rounds = sorted(row["roof"]["rounds"])
        return {row["roof"]["name"]: row["roof"]["bytes"] / rounds[len(rounds) // 2] / 1e9}
    return {name: flops / 1e9 for name, flops in document["gemm"][f"torch.{row['dtype']}"].items()}


def parts_of_roof(document, row):
    """{roof: the part of it that the fused operator reaches}."""
    return {name: rate(row)[0] / roof for name, roof in roofs(document, row).items()}


def part_of_memory(row, against):
    """The part of a provider's peak memory that the fused operator takes; None where either is unknown."""
    ours, theirs = row["memory"].get("fused"), row["memory"].get(against)
    return ours / theirs if ours is not None and theirs else None


def verdicts(document, row):
    """[(the bar in words, met)]; met is None where what it compares with was left out."""
    found = []
    for against, figure in row["bars"]:
        if against == "roof":
            name, value = next(iter(parts_of_roof(document, row).items()))
            found.append((f"≥ {figure:.0%} of {name}", value >= figure))
        elif against.startswith(MEMORY):
            value = part_of_memory(row, against.removeprefix(MEMORY))
            found.append((f"≤ {figure:.0%} of {against}", None if value is None else value <= figure))
        else:
            value = gain(row, against)
            found.append((f"≥ {figure:g}× {against}", None if value is None else value >= figure))
    return found


def disturbed(row):
    return (row["others busy"] or 0.0) > BUSY


def slower(old, new, threshold):
    """What got slower: [(name, old seconds, new seconds, ratio)] of rows in both, and the rows only one of them has."""
    before, after = ({row["name"]: row["median"]["fused"] for row in document["rows"]} for document in (old, new))
    both = [(name, before[name], after[name], after[name] / before[name]) for name in before if name in after]
    return [line for line in both if line[3] > 1 + threshold], sorted(set(before) ^ set(after))
