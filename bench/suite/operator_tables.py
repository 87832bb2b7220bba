"""The table of the operators' cases on one machine, and the rates of its large products."""

from bench.peers import page as peers_page
from bench.suite import report


def operator_table(pairs, unthrottled=None, peers=None):
    """Returns the table of these (result, entry) pairs.

    unthrottled: {case name: (result, entry)} with MKL unthrottled; None: a table without that gain
    peers: {case name: (result, entry)} of other libraries, for a column if any case is among these
    """
    peers = {entry["name"]: (peers or {}).get(entry["name"]) for _, entry in pairs}
    skipped = ["rate"] if unthrottled else ["rate", "gain, MKL unthrottled"]
    shown = [i for i, column in enumerate(report.HEAD) if column not in skipped]
    lines = [[report.HEAD[i] for i in shown]]
    for result, entry in pairs:
        found = (unthrottled or {}).get(entry["name"])
        cells = report.cells(result, entry, found and found[1])
        lines.append([cells[i] for i in shown])
    if any(peers.values()):
        place = lines[0].index("gain") + 1
        gains = [peers_page.gains(found[1]) if found else "" for found in peers.values()]
        for line, cell in zip(lines, ["gain over other libraries", *gains], strict=True):
            line.insert(place, cell)
    return report.markdown_table(lines)


def gemm_rates(pairs, dtype="torch.float32"):
    """Returns {product: the best GFLOP/s of this dtype in these results}."""
    best = {}
    for result, _ in pairs:
        for name, rate in result["gemm"].get(dtype, {}).items():
            best[name] = max(rate / 1e9, best.get(name, 0.0))
    return best
