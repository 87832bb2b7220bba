"""The tables of the times beside other libraries, for the terminal and docs/benchmarks."""

from bench.peers import installed
from bench.suite import measurements, metrics, report

METHOD = """## Other libraries

The same calls in other libraries that pip installs, in fp32 with {threads} threads each, in one
process and in interleaved rounds; a library's turn begins when the threads of the others sleep.
`fusedseq bench --peers` measures them again.
"""
LIBRARIES = {
    "jax": "- **JAX**: everything that is timed is one function under `jax.jit`, a recurrence a "
    "`lax.scan`, that of the LSTM after one product of all inputs, attention `jax.nn."
    "dot_product_attention` on tensors in JAX's own layout. Flags of XLA: {XLA_FLAGS}. {compiled}",
    "onnxruntime": "- **ONNX Runtime**: inference alone, with the operators LSTM and Attention of "
    "ONNX (CPUExecutionProvider).",
    "ctranslate2": "- **CTranslate2**: the model of en-fr/base with its sizes and vocabularies, "
    "after {steps} training steps on generated text, and the same weights converted, as "
    "`{compute_type}`; lines of words in batches of 32, ranked by log-probability. Only lines that "
    "both translate into the same words are timed.",
}
AGREEMENT = """Before a case is timed, every result and gradient of JAX and ONNX Runtime is compared
with ours; {largest}. A ratio below 1 is a loss.
"""


def title(provider):
    return installed.title(provider)


def providers(rows):
    """Returns the providers of these rows: fused, then torch, then the peers."""
    known = ["fused", "torch", *installed.PEERS]
    return [name for name in known if any(name in row["median"] for row in rows)]


def gains(row):
    """Returns how many times as fast as each peer `fused` is, as text."""
    return ", ".join(
        f"{metrics.gain(row, name):.2f}× {title(name)}"
        for name in installed.PEERS
        if name in row["median"]
    )


def times(row):
    """Returns a row's times and gains as one line."""
    shown = ", ".join(
        f"{title(name)} {report.three_digits(t * 1e3)} ms" for name, t in row["median"].items()
    )
    return f"{shown}; {gains(row)}; {len(row['rounds']['fused'])} rounds"


def tables(rows):
    """Returns the tables of operators and of translations in Markdown, where there are any."""
    operators = [row for row in rows if row["op"] != "translate"]
    translations = [row for row in rows if row["op"] == "translate"]
    return [
        make(some)
        for make, some in ((operator_table, operators), (translation_table, translations))
        if some
    ]


def operator_table(rows):
    names = providers(rows)
    others = names[1:]
    head = ["case", "mode", *(f"{title(name)} ms" for name in names)]
    lines = [[*head, *(f"over {title(name)}" for name in others)]]
    for row in rows:
        ms = [
            report.three_digits(row["median"][n] * 1e3) if n in row["median"] else "" for n in names
        ]
        ratios = [f"{metrics.gain(row, n):.2f}×" if n in row["median"] else "" for n in others]
        lines.append([label(row), row["mode"], *ms, *ratios])
    return report.markdown_table(lines)


def translation_table(rows):
    names = providers(rows)
    others = names[1:]
    head = ["case", "equal translations", "lines", "tokens"]
    head += [f"{title(name)}, tokens/s" for name in names]
    lines = [[*head, *(f"over {title(name)}" for name in others)]]
    for row in rows:
        rates = [f"{row['tokens'] / row['median'][name]:,.0f}" for name in names]
        ratios = [f"{metrics.gain(row, name):.2f}×" for name in others]
        counts = [f"{row['equal']:.0%}", f"{row['lines']}", f"{row['tokens']:,}"]
        lines.append([label(row), *counts, *rates, *ratios])
    return report.markdown_table(lines)


def label(row):
    return row["name"].removesuffix("-forward") + " *" * metrics.disturbed(row)


def section(pairs):
    """Returns the parts of the page for one machine. pairs: [(result, row of it)]"""
    rows = [row for _, row in pairs]
    results = {result["date"]: result for result, _ in pairs}
    threads = ", ".join(dict.fromkeys(str(r["machine"]["threads"]) for r in results.values()))
    described = [
        text.format(
            **result["peers"][peer], steps=result["train steps"], compiled=compilation(rows)
        )
        for peer, text in LIBRARIES.items()
        if (result := newest(results, peer))
    ]
    return [
        METHOD.format(threads=threads),
        "\n".join(described),
        agreement(rows),
        *tables(rows),
        versions(results),
    ]


def newest(results, peer):
    """Returns the newest of the results that have a peer, or None."""
    having = [result for _, result in sorted(results.items()) if peer in result["peers"]]
    return having[-1] if having else None


def compilation(rows):
    """Says how long XLA compiled, which the times exclude."""
    seconds = [row["compile seconds"]["jax"] for row in rows if row.get("compile seconds")]
    if not seconds:
        return ""
    least, most = (report.three_digits(s) for s in (min(seconds), max(seconds)))
    return f"Compilation, which is not part of a time, took {least} to {most} s for a case."


def agreement(rows):
    """Says how far the results of the peers differ from ours; "" without operators."""
    differences = [d for row in rows for d in row.get("difference", {}).values()]
    if not differences:
        return ""
    largest = f"the largest difference is {max(differences):.1g} of a tensor's largest element"
    return AGREEMENT.format(largest=largest)


def versions(results):
    """Says with what and when these results were measured."""
    parts = []
    for _, result in sorted(results.items()):
        packages = [p for peer in result["peers"] for p in installed.PEERS[peer][1]]
        names = ", ".join(f"{p} {result['versions'][p]}" for p in ["torch", *packages])
        commit = measurements.commit(result)
        processor = measurements.processor(result["machine"])
        parts.append(f"{processor}, {names}, commit {commit}, {result['date'][:10]}.")
    return " ".join(parts)
