"""The pages generated from benchmark results: up to date, with MKL as installed and unthrottled."""

import json
import re
from xml.etree import ElementTree

import pytest
from fusedseq.acceleration import awd_lstm, gains, hugging_face, replace

from bench.suite import (
    accelerated_gains,
    benchmark_page,
    front_cases,
    machine_page,
    measurements,
    pages,
    report,
    speedup_figure,
    unthrottled_targets,
)
from bench.suite.case_list import CASES
from bench.suite.missed_targets import missed_presets
from bench.suite.speedup_figure import Speedup
from bench.training import compare

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def both_modes(tmp_path):
    """A copy of the committed results with other results of MKL unthrottled: slower baselines."""
    for path in measurements.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        if result.get("mkl") == "unthrottled":
            continue
        (tmp_path / path.name).write_text(path.read_text())
        on_cpu = "machine" in result and not result["machine"]["gpu"]
        if not on_cpu or "agree" in path.stem or "step profile" in result:
            continue
        result["mkl"] = "unthrottled"
        if isinstance(result["rows"], list):
            for entry in result["rows"]:
                entry["median"] = {
                    name: t * (1 if name == "fused" else 0.5) for name, t in entry["median"].items()
                }
        else:
            for entry in result["rows"].values():
                entry["ratio"] = {name: ratio / 2 for name, ratio in entry["ratio"].items()}
        (tmp_path / f"{path.stem}-mkl-unthrottled.json").write_text(json.dumps(result))
    return tmp_path


def page(folder):
    """The page of the first machine with results in a folder."""
    return machine_page.markdown(measurements.load(folder)[0])


def test_the_committed_pages_are_up_to_date():
    """If this fails: python -m bench.suite.pages"""
    for path, content in pages.files(measurements.RESULTS, pages.ROOT).items():
        assert path.read_text() == content, path


def test_the_front_cases_exist():
    assert {*front_cases.OPERATORS} <= {case.name for case in CASES}
    assert {*front_cases.TRAINING} <= {*compare.PRESETS["speed"]}
    labels = {*front_cases.OPERATORS, *front_cases.TRAINING, *front_cases.BF16}
    assert {*front_cases.README} <= labels
    names = {case.removesuffix("-bfloat16") for case in front_cases.BF16}
    assert names <= {case.name for case in CASES}
    assert 8 <= len(front_cases.OPERATORS) + len(front_cases.TRAINING) <= 12


def test_a_page_has_no_path_of_a_machine():
    for path in (pages.ROOT / "docs").glob("benchmarks*/**/*.md"):
        text = re.sub(r"\(\.\./(assets/|\w+\.md)", "", path.read_text())
        assert not re.search(r"/(home|work|tmp|root)/|\.\./", text)


def test_every_machine_has_a_page_that_the_site_and_the_first_page_lead_to():
    names = {machine_page.file_name(machine) for machine in measurements.load()}
    assert {path.name for path in (pages.ROOT / "docs/benchmarks").iterdir()} == names
    for source in ("mkdocs.yml", "docs/benchmarks.md"):
        text = (pages.ROOT / source).read_text()
        assert all(f"benchmarks/{name}" in text for name in names)


def test_the_newest_measurement_of_a_case_counts(tmp_path):
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    result = json.loads(source.read_text())
    name = result["rows"][0]["name"]
    for date, milliseconds in (("2031-01-01", 3), ("2030-01-01", 5)):
        result["date"], result["rows"][0]["median"]["fused"] = date, milliseconds / 1e3
        (tmp_path / f"{date}.json").write_text(json.dumps(result))
    (machine,) = measurements.load(tmp_path)
    assert machine.cases["as-installed"][name][1]["median"]["fused"] == 0.003


def test_bf16_has_a_table_of_its_own(tmp_path):
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    (tmp_path / source.name).write_text(source.read_text())
    assert "## bf16" not in page(tmp_path)
    result = json.loads(source.read_text())
    entry = result["rows"][0]
    entry |= {"name": f"{entry['name']}-bfloat16", "dtype": "bfloat16"}
    result |= {"rows": [entry], "gemm": {"torch.bfloat16": {"torch.mm": 8e11, "own GEMM": 9e11}}}
    (tmp_path / "bf16.json").write_text(json.dumps(result))
    text = page(tmp_path)
    table = text[text.index("## bf16") :]
    assert f"| {entry['name']} |" in table
    assert "in GFLOP/s: torch.mm 800 and own GEMM 900" in table


def test_bf16_stands_beside_our_own_fp32(tmp_path):
    """Only cases with both, whose targets are of the ratio of the two times of `fused`."""
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    result = json.loads(source.read_text())
    known = result["rows"][0] | {"bars": [], "others busy": 0.0}
    rates = {"torch.mm": 4e11}
    result["gemm"] = {"torch.float32": rates, "torch.bfloat16": rates}

    def entry(op, case, dtype, seconds):
        name = f"{op}-{case}" + "-bfloat16" * (dtype == "bfloat16")
        median = {"fused": seconds, "eager": 9.0}
        return known | {"op": op, "name": name, "dtype": dtype, "median": median}

    def table(date, *entries):
        (tmp_path / "bf16.json").write_text(json.dumps(result | {"date": date, "rows": entries}))
        text = page(tmp_path)
        return text[text.index("## bf16") :].partition("How many times as fast the fused")[2]

    exact = [
        entry("mogrifier_lstm", "T1", "float32", 0.016),
        entry("attention", "L1-forward", "float32", 0.004),
        entry("norm", "1x1", "float32", 0.002),
    ]
    first, later = "2031-01-01", "2031-01-02"
    in_bf16 = [
        entry("mogrifier_lstm", "T1", "bfloat16", 0.01),
        entry("attention", "L1-forward", "bfloat16", 0.005),
        entry("norm", "1x1", "bfloat16", 0.001),
        entry("attention", "L2", "bfloat16", 0.005),
    ]
    shown = table(first, *exact, *in_bf16)
    assert "| mogrifier_lstm-T1-bfloat16 | 10 | 16 | 1.60× | ≥ 1.55×: met |" in shown
    assert "| attention-L1-forward-bfloat16 | 5 | 4 | 0.80× | ≥ 1×: MISSED |" in shown
    assert "| norm-1x1-bfloat16 | 1 | 2 | 2.00× |  |" in shown
    assert "attention-L2" not in shown
    (tmp_path / "fp32.json").write_text(json.dumps(result | {"date": first, "rows": exact}))
    in_bf16[0]["others busy"] = 0.5
    assert "| mogrifier_lstm-T1-bfloat16 * | 10 | 16 | 1.60×, two runs |" in table(later, *in_bf16)
    assert not table(later, in_bf16[-1])


@pytest.fixture
def peers_result():
    """A result of `bench.peers` that nothing has measured."""
    newest = json.loads(max(measurements.RESULTS.glob("*-cpu.json")).read_text())

    def row(name, op, mode, **seconds):
        times = {"rounds": {n: [t] for n, t in seconds.items()}, "median": seconds}
        kind = {"name": name, "op": op, "mode": mode, "dtype": "float32", "others busy": 0.0}
        return kind | times

    checked = {"difference": {"jax": 2e-6}, "compile seconds": {"jax": 0.25}}
    translated = {"lines": 120, "tokens": 3000, "equal": 0.9375}
    both = {"fused": 0.01, "torch": 0.02, "jax": 0.005}
    name = "lstm-T70-B20-650-650"
    rows = [
        row(name, "lstm", "forward+backward", **both) | checked,
        row(f"{name}-forward", "lstm", "forward", fused=0.01, onnxruntime=0.03)
        | checked
        | {"others busy": 0.5, "compile seconds": {}, "difference": {"onnxruntime": 3e-6}},
        row("translate-en-fr/base-greedy", "translate", "greedy", fused=0.5, ctranslate2=1.0)
        | translated,
    ]
    packages = {"jax": "1", "jaxlib": "2", "onnx": "3", "onnxruntime": "4", "ctranslate2": "5"}
    return newest | {
        "date": "2031-01-01T00:00:00+00:00",
        "versions": newest["versions"] | packages,
        "peers": {
            "jax": {"XLA_FLAGS": "--some_flag", "threads": 2},
            "onnxruntime": {"providers": "CPUExecutionProvider", "threads": 2},
            "ctranslate2": {"compute_type": "float32", "inter_threads": 1, "intra_threads": 2},
        },
        "train steps": 400,
        "rows": rows,
    }


def test_other_libraries_are_shown(tmp_path, peers_result):
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    (tmp_path / source.name).write_text(source.read_text())
    before = page(tmp_path)
    assert "Other libraries" not in before
    assert "other libraries" not in before
    (tmp_path / "peers.json").write_text(json.dumps(peers_result))
    (machine,) = measurements.load(tmp_path)
    assert "peers" not in machine.result  # its heading is that of the operators
    text = machine_page.markdown(machine)
    section = text[text.index("## Other libraries") :]
    line = "| lstm-T70-B20-650-650 | forward+backward | 10 | 20 | 5 |  | 2.00× | 0.50× |  |"
    assert line in section
    assert "| lstm-T70-B20-650-650 * | forward | 10 |  |  | 30 |  |  | 3.00× |" in section
    assert "| translate-en-fr/base-greedy | 94% | 120 | 3,000 | 6,000 | 3,000 | 2.00× |" in section
    assert "Flags of XLA: --some_flag." in section
    assert "took 0.25 to 0.25 s" in section
    assert "the largest difference is 3e-06 of" in section
    assert "400 training steps" in section
    assert "jax 1, jaxlib 2, onnxruntime 4, onnx 3, ctranslate2 5, commit" in section
    # In the table of the recurrences the gain stands beside those over torch.
    table = text[text.index("## Recurrences") : text.index("## Dropouts")]
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")] for line in table.splitlines() if line[:1] == "|"
    )
    column = head.index("gain over other libraries")
    gains = {line[1]: line[column] for line in lines if line[2] == "forward+backward"}
    assert gains["lstm-T70-B20-650-650"] == "0.50× JAX"
    assert not any(gain for name, gain in gains.items() if name != "lstm-T70-B20-650-650")
    other_tables = text[text.index("## Dropouts") : text.index("## Other libraries")]
    assert "other libraries" not in other_tables


def test_a_result_of_other_libraries_is_printed(tmp_path, peers_result, capsys):
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(peers_result))
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| lstm-T70-B20-650-650 | forward+backward | 10 | 20 | 5 |" in printed
    assert "ctranslate2 5" in printed


def test_results_of_other_libraries_alone_are_shown(tmp_path, peers_result):
    (tmp_path / "peers.json").write_text(json.dumps(peers_result))
    assert "## Other libraries" in page(tmp_path)


@pytest.mark.parametrize("peer", ["jax", "ctranslate2"])
def test_one_library_alone_is_shown(tmp_path, peers_result, peer):
    peers_result["peers"] = {peer: peers_result["peers"][peer]}
    peers_result["rows"] = [row for row in peers_result["rows"] if peer in row["median"]]
    (tmp_path / "peers.json").write_text(json.dumps(peers_result))
    text = page(tmp_path)
    section = text[text.index("## Other libraries") :]
    assert [name in section for name in ("**JAX**", "**ONNX", "**CTranslate2**")] == [
        peer == "jax",
        False,
        peer == "ctranslate2",
    ]
    assert ("largest difference" in section) == (peer == "jax")


def test_both_modes_of_mkl_are_shown(both_modes):
    machines = measurements.load(both_modes)
    (bar,) = (s for s in pages.front_speedups(machines[0]) if s.label.endswith("batch 20"))
    assert bar.unthrottled == pytest.approx(bar.value / 2)
    text = machine_page.markdown(machines[0])
    assert "## With MKL unthrottled" in text
    assert "No result of this is committed yet" not in text
    gain = bar.value / 2
    assert f"| {gain:.2f}× eager | {bar.value:.2f}× |" in text
    assert f"| {gain:.2f}× ({bar.value:.2f}×) |" in pages.readme_numbers(machines)
    assert f"| {gain:.2f}× ({bar.value:.2f}×) |" in benchmark_page.markdown(machines)
    assert "MKL's AVX2 limit lifted" in pages.pictures(machines[0])["speedup-light.svg"]


def test_a_run_with_a_second_process_has_both_modes(tmp_path):
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    result = json.loads(source.read_text())
    entry = result["rows"][0]
    entry["median"]["eager, MKL unthrottled"] = entry["median"]["fused"] * 1.25
    rates = {"torch.float32": {"torch.mm": 3e11}}
    result |= {"rows": [entry], "gemm, MKL unthrottled": rates}
    (tmp_path / source.name).write_text(json.dumps(result))
    (machine,) = measurements.load(tmp_path)
    text = machine_page.markdown(machine)
    assert "| 1.25× eager |" in text
    assert "Then `torch.mm` reaches 300 GFLOP/s" in text


@pytest.mark.parametrize(("times", "shown"), [(2.0, False), (0.5, True)])
def test_a_missed_target_is_shown_with_the_gain_at_the_limit(tmp_path, times, shown):
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    result = json.loads(source.read_text())
    entry = next(e for e in result["rows"] if e["name"] == "mogrifier_lstm-T35-B20-650-r5")
    entry |= {"bars": [["eager", 3.0], ["roof", 2.0]], "flops": 1e9, "roof": None}
    entry["median"] = {"fused": 0.01, "eager": 0.03 * times, "torch": 0.09}
    # 100 of at most 400 GFLOP/s
    result |= {"rows": [entry], "gemm": {"torch.float32": {"torch.mm": 2e11, "own GEMM": 4e11}}}
    (tmp_path / source.name).write_text(json.dumps(result))
    text = page(tmp_path)
    assert ("## Targets that are missed" in text) == shown
    line = f"| {entry['name']} | as installed | 1.50× eager | 3× | 6.00× |"
    assert (line in text) == shown


def test_a_target_over_unthrottled_baselines(tmp_path):
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    result = json.loads(source.read_text()) | {"mkl": "unthrottled"}
    result["rows"] = [e for e in result["rows"] if e["name"] == "mogrifier_lstm-T35-B20-650-r5"]
    for gain, verdict in ((2.5, "MISSED"), (2.7, "met")):
        result["rows"][0]["median"] = {"fused": 0.01, "eager": 0.01 * gain}
        (tmp_path / source.name).write_text(json.dumps(result))
        text = page(tmp_path)
        assert f"| {gain:.2f}× eager |  | ≥ 2.6×: {verdict} |" in text
        assert (f"| unthrottled | {gain:.2f}× eager | 2.6× |" in text) == (verdict == "MISSED")


def test_every_unthrottled_target_is_of_a_case():
    names = {case.name for case in CASES}
    assert {*unthrottled_targets.CASES} <= names
    assert {*unthrottled_targets.OPERATORS} <= {case.op for case in CASES}
    assert {*unthrottled_targets.PRESETS} <= {*compare.PRESETS["speed"]}


def gains_of(tmp_path, results):
    """The gains of a machine whose results are {(MKL mode, case): {provider: seconds}}."""
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    result = json.loads(source.read_text())
    (known,) = (e for e in result["rows"] if e["name"] == "linear-1400-400-10000")
    for mkl_mode in {mode for mode, _ in results}:
        rows = [
            known
            | {"name": name, "median": {"fused": 0.01, **seconds}, "bars": []}
            | {"mode": "forward" if name.endswith("-forward") else "forward+backward"}
            for (mode, name), seconds in results.items()
            if mode == mkl_mode
        ]
        content = json.dumps(result | {"rows": rows, "mkl": mkl_mode})
        (tmp_path / f"{mkl_mode}.json").write_text(content)
    return accelerated_gains.of(measurements.load(tmp_path))


def test_gains_of_accelerate(tmp_path, monkeypatch):
    seconds = {
        "linear-1-2-3": {"eager": 0.02},
        "linear-4-5-6": {"eager": 0.035},
        "linear-4-5-6-forward": {"eager": 0.9},
        "lstm-T1-B1-1-1": {"eager": 0.005, "torch": 0.01},
        "bidirectional_lstm-T1-B1-1-1": {"eager": 0.04, "torch": 0.04},
        "accelerate-bert-1": {"torch": 0.0126},
    }
    found = gains_of(tmp_path, {("as-installed", name): s for name, s in seconds.items()})
    both = {"bidirectional LSTM": [4.0, 4.0]}
    assert found == {"LSTM": [1.0, 1.0], "BERT layer": [1.26, 1.26], "Linear": [2.0, 3.5]} | both
    monkeypatch.setattr(gains, "measured", lambda: found)
    shown = [gains.of(kind) for kind in ("LSTM", "Linear", "GRU", "BertOutput", "GPT2MLP")]
    whole = "1.26x of a whole BERT layer"
    assert shown == ["1.00x", "2.00x to 3.50x", "unknown", whole, "unknown"]


def test_gains_over_unthrottled_baselines_come_before_those_as_installed(tmp_path):
    seconds = {
        ("as-installed", "linear-1-2-3"): {"eager": 0.021},
        ("unthrottled", "linear-1-2-3"): {"eager": 0.0089},
        ("as-installed", "linear-4-5-6"): {"eager": 0.012},
    }
    assert gains_of(tmp_path, seconds) == {"Linear": [0.89, 1.2]}


def test_gains_are_those_of_all_machines(tmp_path):
    gains_of(tmp_path, {("as-installed", "linear-1-2-3"): {"eager": 0.02}})
    other = json.loads((tmp_path / "as-installed.json").read_text())
    other["machine"]["cpu"] = "another"
    other["rows"][0]["median"]["eager"] = 0.011
    (tmp_path / "other.json").write_text(json.dumps(other))
    machines = measurements.load(tmp_path)
    assert len(machines) == 2
    assert accelerated_gains.of(machines) == {"Linear": [1.1, 2.0]}


def test_every_gain_of_accelerate_has_a_case_and_a_kind():
    names = [case.name for case in CASES]
    for kind in accelerated_gains.CASES:
        assert any(accelerated_gains.stands_for(name, kind) for name in names), kind
    assert {*gains.MEASURED_WITHIN.values()} <= {*accelerated_gains.CASES}
    replaced = {kind.__name__ for kind in replace.KINDS} | {*awd_lstm.KINDS}
    replaced |= {name for _, name in hugging_face.KINDS}
    assert {kind for kind in gains.MEASURED_WITHIN if "attention of" not in kind} <= replaced
    unknown = replaced - {*gains.MEASURED_WITHIN} - {*accelerated_gains.CASES}
    assert unknown == {"Embedding"}


def test_files_of_make_gpu_are_ignored(tmp_path):
    source = max(measurements.RESULTS.glob("*-cpu.json"))
    (tmp_path / source.name).write_text(source.read_text())
    (tmp_path / "h200-make-gpu.json").write_text(json.dumps({"rehearsal": False, "rows": []}))
    (tmp_path / "h200-make-gpu-tests.json").write_text(json.dumps({"collected": 1, "passed": 1}))
    assert len(measurements.load(tmp_path)) == 1


def test_a_machine_with_unthrottled_results_alone_is_shown(both_modes):
    for path in both_modes.glob("*.json"):
        if "unthrottled" not in path.stem:
            path.unlink()
    text = page(both_modes)
    assert "## With MKL unthrottled" in text


def test_one_mode_of_mkl_is_enough(tmp_path):
    for path in measurements.RESULTS.glob("*.json"):
        if "unthrottled" not in path.stem:
            (tmp_path / path.name).write_text(path.read_text())
    machines = measurements.load(tmp_path)
    assert "## With MKL unthrottled" not in machine_page.markdown(machines[0])
    assert "(" not in pages.readme_numbers(machines).partition("---")[2]
    assert "limit lifted" not in pages.pictures(machines[0])["speedup-dark.svg"]


def test_the_machine_of_the_targets_is_the_first_one():
    machines = measurements.load()
    assert machines[0].slug == measurements.FRONT
    assert len(machines) > 1


def test_readme_has_a_column_for_each_machine_with_its_cases():
    machines = measurements.load()
    head, _, *lines = pages.readme_numbers(machines).splitlines()
    shown = [machine for machine in machines if pages.has_readme_cases(machine)]
    assert [machine_page.name(machine) in head for machine in shown] == [True] * len(shown)
    for case, line in zip(front_cases.README, lines, strict=True):
        for machine, cell in zip(shown, line.split("|")[2:-1], strict=True):
            entry = (machine.cases["as-installed"] | machine.bf16).get(case)
            if entry:
                assert f"{measurements.speedup(entry[1])[0]:.2f}×" in cell


def test_readme_has_the_least_and_the_largest_gain_over_all_sizes_and_machines():
    def entry(fused, torch):
        return {"median": {"fused": fused, "torch": torch}}

    slow, fast = measurements.Measurements("slow"), measurements.Measurements("fast")
    slow.cases["as-installed"] = {
        "lstm-T1-B2-3-4": ({}, entry(2, 1)),
        "lstm-T1-B2-3-4-forward": ({}, entry(9, 1)),
        "lstm-T1-B2-3-4-starts": ({}, entry(9, 1)),
    }
    slow.bf16 = {"lstm-T1-B2-3-4-bfloat16": ({}, entry(1, 1.25))}
    fast.cases["as-installed"] = {"lstm-T5-B20-30-40": ({}, entry(1, 3))}
    fast.cases["unthrottled"] = {"lstm-T5-B20-30-40": ({}, entry(1, 9))}
    assert pages.readme_ranges([slow, fast]).splitlines()[2:] == [
        "| A plain LSTM | 2 | 0.50× | 3.00× |",
        "| A plain LSTM, forward alone | 1 | 0.11× | 0.11× |",
        "| In bf16 a plain LSTM | 1 | 1.25× | 1.25× |",
    ]


def test_a_training_step_below_its_target_is_among_the_missed_ones():
    entry = {"ratio": {"fused / baselines": 1.2, "fused / compiled": 5.0}}
    pairs = {"en-es/base": ({}, entry)}
    for mode in ("as-installed", "unthrottled"):
        assert missed_presets("now", pairs, mode, {}) == [
            ["en-es/base", "now", "1.20× baselines", "1.5×", "", "", ""]
        ]
    entry["ratio"]["fused / baselines"] = 1.5
    assert missed_presets("now", pairs, "unthrottled", {}) == []
    entry["ratio"] = {"fused:bf16 / fused": 1.3, "fused:bf16 / baselines:bf16": 1.6}
    assert missed_presets("bf16", pairs, "as-installed", {}) == [
        ["en-es/base", "bf16", "1.30× fused", "1.35×", "", "", ""]
    ]


def test_readme_gets_its_numbers_between_the_marks(tmp_path):
    begin, end = pages.README_MARKS
    assert pages.with_numbers("a\n", "numbers") == "a\n"
    once = pages.with_numbers(f"a\n{begin}{end}\nb", "| 1 |")
    assert once == f"a\n{begin}\n| 1 |\n\n{end}\nb"
    assert pages.with_numbers(once, "| 2 |") == once.replace("1", "2")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_sorted_and_within_its_frame(theme):
    speedups = [
        Speedup("second & third", 3.0, "PyTorch"),
        Speedup("slower", 0.8, "torch", "training", 0.4),
        Speedup("first", 12.0, "PyTorch", unthrottled=6.0),
    ]
    svg = speedup_figure.draw("title", speedups, ["caption"], theme)
    root = ElementTree.fromstring(svg)
    width = float(root.attrib["width"])
    labels = [t.text for t in root.iter(f"{SVG}text") if t.attrib.get("text-anchor") == "end"]
    assert labels == ["first", "second & third", "slower"]
    bars = [r for r in root.iter(f"{SVG}rect") if r.attrib["height"] == str(speedup_figure.BAR)]
    assert len(bars) == 3
    for bar in bars:
        x = float(bar.attrib["x"])
        assert speedup_figure.LEAST_LEFT <= x <= x + float(bar.attrib["width"]) < width
    assert svg.count("12.0×") == 1
