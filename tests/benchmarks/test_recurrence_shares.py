"""The groups of a recurrence's samples, and their shares."""

import pytest

from bench.suite import recurrence_profile, recurrence_shares

ISA = "fusedseq::avx512_bf16::"
FUNCTIONS = {
    f"void {ISA}any_tile<float, ({ISA}Split)0>({ISA}TileRegisters&, int)": "products",
    f"void {ISA}any_tile<float, ({ISA}Split)1>({ISA}TileRegisters&, int)": "dW",
    f"void {ISA}gemm_transposed<float, float, float, float>(long, long, {ISA}Range)": "dW",
    f"void {ISA}pack<{ISA}bf16_pair, float>(float const*, long, long)": "packing",
    f"{ISA}RecurrentBackward<float, float, fusedseq::LstmCell<false> >::units(long)": "gates",
    f"{ISA}RecurrentForward<float, float, fusedseq::LstmCell<false> >::round(long)": "gates",
    f"{ISA}Barrier::wait_for_others(int)": "waiting",
    f"void {ISA}column_sums<float>(long, float const*)": "sums",
    "__memset_avx512_unaligned_erms": "the rest",
    "_PyEval_EvalFrameDefault": "the rest",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_group_of_a_function(function):
    assert (
        recurrence_shares.group(function, "/site-packages/fusedseq/_ops.so")
        == (FUNCTIONS[function])
    )


def test_a_thread_that_openmp_holds_waits():
    assert recurrence_shares.group("[unknown]", "/usr/lib/libgomp.so.1.0.0") == "waiting"


def test_shares_and_their_line_in_the_table():
    tile, *_, pack = list(FUNCTIONS)[:4]
    script = "\n".join(
        [
            f"     7fec734c1bc7 {tile} (/a/_ops.so)",
            f"     7fec734c1bd7 {tile} (/a/_ops.so)",
            f"     7fec734c1be7 {pack} (/a/_ops.so)",
            " ffffffff815ca36a clear_page_rep ([kernel.kallsyms])",
        ]
    )
    found = recurrence_shares.shares(script)
    assert found == {
        **dict.fromkeys(recurrence_shares.GROUPS, 0.0),
        "products": 0.5,
        "packing": 0.25,
        "the rest": 0.25,
    }
    (line,) = recurrence_shares.lines([{"name": "a", "shares": {"float32": found}}, {"name": "b"}])
    assert line == ["`a`", "float32", "50%", "0%", "25%", "0%", "0%", "0%", "25%"]


def test_without_samples_there_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        recurrence_shares.shares("")


def test_without_perf_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(recurrence_shares.shutil, "which", lambda _: None)
    message = "--perf needs the program perf"
    with pytest.raises(RuntimeError, match=message), recurrence_shares.recorded(tmp_path / "data"):
        pass


def test_the_page_has_a_second_table_where_shares_were_measured():
    row = {
        "name": "lstm-T1-B2-3-4",
        "flops": 6e9,
        "median": {"forward": 4e-3, "products": 3e-3, "forward+backward": 12e-3},
    }
    facts = {"machine": {"isa": "avx2"}, "commit": "a" * 40, "date": "2026-11-25T00:00:00"}
    assert len(recurrence_profile.section({**facts, "rows": [row]})) == 3
    row["shares"] = {"float32": dict.fromkeys(recurrence_shares.GROUPS, 0.1)}
    assert "| float32 | 10% |" in recurrence_profile.section({**facts, "rows": [row]})[3]
