"""torch.export, AOTInductor and ONNX compute what eager mode computes, for other sizes too."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.support.exported_models import MODELS

pytestmark = pytest.mark.cpu


def exported(name, dynamic=True):
    create, inputs, dimensions = MODELS[name]
    model = create().eval()
    with torch.no_grad():
        program = torch.export.export(
            model, inputs(7, 3), dynamic_shapes=dimensions if dynamic else None
        )
    return model, inputs, program


def assert_equal_for_other_sizes(model, function, inputs):
    """One program for every length and batch. The kernels are eager's; what a compiler fuses around
    them rounds differently, hence torch's default tolerances."""
    with torch.no_grad():
        for t, b in ((7, 3), (11, 2), (5, 4)):
            given = inputs(t, b)
            wanted, found = tree_leaves(model(*given)), tree_leaves(function(*given))
            torch.testing.assert_close(list(found), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_program_keeps_the_operators_and_takes_every_size(name):
    model, inputs, program = exported(name)
    targets = {str(node.target) for node in program.graph.nodes}
    wanted = "fusedseq.attention.default" if name == "encoder" else "fusedseq.lstm.default"
    assert wanted in targets
    assert_equal_for_other_sizes(model, program.module(), inputs)


@pytest.mark.slow  # inductor compiles C++
@pytest.mark.parametrize("name", MODELS)
def test_a_package_of_aotinductor_takes_every_size(name, tmp_path):
    model, inputs, program = exported(name)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    assert_equal_for_other_sizes(model, torch._inductor.aoti_load_package(path), inputs)


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
