"""torch.export, AOTInductor and ONNX compute what eager mode computes, for other sizes too."""

import subprocess
from pathlib import Path

import pytest
import torch
from fusedseq import _load, nn, reference
from torch.utils import cpp_extension
from torch.utils._pytree import tree_leaves

from tests.support.exported_models import MODELS

pytestmark = pytest.mark.cpu
EXAMPLES = Path(__file__).parents[2] / "examples"


def exported(name, dynamic=True):
    create, inputs, dimensions = MODELS[name]
    model = create().eval()
    with torch.no_grad():
        program = torch.export.export(
            model, inputs(7, 3), dynamic_shapes=dimensions if dynamic else None
        )
    return model, inputs, program


SIZES = ((7, 3), (11, 2), (5, 4))  # steps and sequences


def assert_equal_for_other_sizes(model, function, inputs):
    """One program for every length and batch. The kernels are eager's; what a compiler fuses around
    them rounds differently, hence torch's default tolerances."""
    with torch.no_grad():
        for t, b in SIZES:
            given = inputs(t, b)
            wanted, found = tree_leaves(model(*given)), tree_leaves(function(*given))
            torch.testing.assert_close(list(found), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_program_keeps_the_operators_and_takes_every_size(name):
    model, inputs, program = exported(name)
    targets = {str(node.target) for node in program.graph.nodes}
    operator = "attention" if "coder" in name else "lstm_inference"
    assert f"fusedseq.{operator}.default" in targets
    assert_equal_for_other_sizes(model, program.module(), inputs)


@pytest.mark.slow  # inductor compiles C++
@pytest.mark.parametrize("name", MODELS)
def test_a_package_of_aotinductor_takes_every_size(name, tmp_path):
    model, inputs, program = exported(name)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    assert_equal_for_other_sizes(model, torch._inductor.aoti_load_package(path), inputs)


@pytest.fixture(scope="module")
def run_package(tmp_path_factory):
    """The program of examples/run_package.cpp, compiled with the headers of this torch."""
    program = tmp_path_factory.mktemp("cpp") / "run_package"
    folders = cpp_extension.library_paths()
    command = ["g++", "-std=c++20", str(EXAMPLES / "run_package.cpp"), "-o", str(program)]
    command += [f"-I{folder}" for folder in cpp_extension.include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [option for folder in folders for option in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    return program


@pytest.mark.slow  # g++ and inductor compile C++
@pytest.mark.parametrize("name", MODELS)
def test_a_program_in_cpp_runs_a_package(name, tmp_path, run_package):
    model, inputs, program = exported(name)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )

    def in_cpp(*given):
        torch.save(list(given), tmp_path / "inputs.pt")
        files = [package, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
        process = subprocess.run(
            [run_package, _load.LIBRARY, *files], capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        found = torch.load(tmp_path / "outputs.pt")
        assert process.stdout.count("\n") == len(found)
        return found

    assert_equal_for_other_sizes(model, in_cpp, inputs)


@pytest.mark.slow  # g++ and inductor compile C++
def test_a_program_in_cpp_needs_the_operators(tmp_path, run_package):
    process = subprocess.run(
        [run_package, tmp_path / "missing.so", "package", "inputs", "outputs"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert "missing.so" in process.stderr


@pytest.mark.parametrize("name", MODELS)
def test_onnx_by_decomposition_computes_the_same(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    from fusedseq.integrations import onnx

    create, inputs, _ = MODELS[name]
    model, given = create().eval(), inputs(7, 3)
    path = tmp_path / "model.onnx"
    onnx.export(model, given, str(path))
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    places = [place.name for place in session.get_inputs()]
    found = session.run(None, {n: t.numpy() for n, t in zip(places, given, strict=True)})
    with torch.no_grad():
        wanted = tree_leaves(model(*given))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b)


def test_onnx_refuses_a_module_in_training_mode():
    from fusedseq.integrations import onnx

    create, inputs, _ = MODELS["lstm"]
    with pytest.raises(ValueError, match="must be in eval mode, got one in training mode"):
        onnx.export(create(), inputs(7, 3))


RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LayerNormLSTM, nn.MogrifierLSTM)
ANY = torch.export.Dim.DYNAMIC


@pytest.mark.parametrize("make", RECURRENT)
def test_both_directions_are_exported_with_lengths_and_starts(make):
    def given(T, B):
        return torch.randn(T, B, 8), {
            "lengths": torch.arange(1, B + 1).clamp(max=T),
            "starts": torch.rand(T, B) < 0.3,
        }

    module = make(8, 6, bidirectional=True).eval()
    x, order = given(*SIZES[0])
    sizes = {"x": {0: ANY, 1: ANY}, "lengths": {0: ANY}, "starts": {0: ANY, 1: ANY}}
    program = torch.export.export(module, (x,), order, dynamic_shapes=sizes)
    for T, B in SIZES:
        x, order = given(T, B)
        found, wanted = (tree_leaves(f(x, **order)) for f in (program.module(), module))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("make", RECURRENT)
def test_sequences_without_padding_are_exported(make):
    def given(T, B):
        lengths = torch.arange(1, B + 1).clamp(max=T)
        return torch.randn(int(lengths.sum()), 8), torch.cat(
            [lengths.new_zeros(1), lengths]
        ).cumsum(0)

    module = make(8, 6).eval()
    x, cu_seqlens = given(*SIZES[0])
    options = {"cu_seqlens": cu_seqlens, "max_seqlen": 20}
    sizes = {"x": {0: ANY}, "cu_seqlens": {0: ANY}, "max_seqlen": None}
    program = torch.export.export(module, (x,), options, dynamic_shapes=sizes)
    for T, B in SIZES:
        x, options["cu_seqlens"] = given(T, B)
        found, wanted = (tree_leaves(f(x, **options)) for f in (program.module(), module))
        torch.testing.assert_close(found, wanted)


class Probabilities(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=True)


@pytest.mark.parametrize("options", [{}, {"ops": reference}], ids=["fused", "reference"])
def test_dropped_probabilities_are_exported(options):
    module = Probabilities(6, 2, 0.3, **options).train()
    program = torch.export.export(
        module, (torch.randn(*SIZES[0], 6),), dynamic_shapes=({0: ANY, 1: ANY},)
    )
    for L, B in SIZES:
        x, found = torch.randn(L, B, 6), []
        for function in (program.module(), module):
            torch.manual_seed(1)
            found.append(function(x))
        torch.testing.assert_close(*found)
