"""Exports an LSTM language model for inference: one file for every batch and every length.

1. torch.export writes a program, in which each operator of this package is one node.
2. With --compile, AOTInductor compiles it to a package that runs without the model's Python. This
   needs a C++ compiler and takes some seconds.
Where such a file is loaded, `import fusedseq.fused` registers the operators.
"""

import sys
import tempfile
from pathlib import Path

import torch
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from torch.export import Dim


class NextWords(torch.nn.Module):
    """ids (T, B) -> the log-probabilities of the word after each, (T, B, V)."""

    def __init__(self):
        super().__init__()
        settings = LanguageModelSettings(embedding=32, hidden=32, layers=2, tied=True)
        self.model = LanguageModel(1000, settings)

    def forward(self, ids):
        y, _, _ = self.model(ids)
        return self.model.logits(y).log_softmax(-1)


torch.manual_seed(0)
model = NextWords().eval()
T, B = Dim("T", min=2, max=256), Dim("B", min=2, max=64)
example = torch.randint(1000, (16, 4))
other = torch.randint(1000, (23, 7))  # of another length and batch than the example
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    program = torch.export.export(model, (example,), dynamic_shapes=({0: T, 1: B},))
    path = Path(folder, "program.pt2")
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    operators = {str(node.target) for node in program.graph.nodes if "fusedseq" in str(node.target)}
    print(f"{path.name}: {path.stat().st_size // 1024} KB, with {', '.join(sorted(operators))}")
    torch.testing.assert_close(loaded(other), model(other))
    if "--compile" in sys.argv:
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder, "package.pt2"))
        )
        compiled = torch._inductor.aoti_load_package(package)
        torch.testing.assert_close(compiled(other), model(other))
        print("the compiled package computes the same")
print(f"the same log-probabilities for ids of shape {tuple(other.shape)}")
