"""accelerate on random nested models: the same results, a complete report, and a way back."""

import copy

import fusedseq
import pytest
import torch
from fusedseq.acceleration.replace import REPLACEMENTS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

E, B, L = 6, 2, 3


class First(nn.Module):
    """The first result of a module that returns several."""

    def __init__(self, inner, count=1):
        super().__init__()
        self.inner, self.count = inner, count

    def forward(self, x):
        return self.inner(*[x] * self.count)[0]


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return (x + self.inner(x)).tanh()


class Twice(nn.Module):
    """One module under two names, as tied layers."""

    def __init__(self, inner):
        super().__init__()
        self.one = self.two = inner

    def forward(self, x):
        return self.two(self.one(x))


class Doubled(nn.Linear):
    """A subclass, which must stay as it is."""

    def forward(self, x):
        return 2 * super().forward(x)


probabilities = st.sampled_from([0.0, 0.3])
layers = st.builds(
    lambda p, activation, norm_first, bias: nn.TransformerEncoderLayer(
        E, 2, 8, p, activation, norm_first=norm_first, bias=bias
    ),
    probabilities,
    st.sampled_from(["relu", "gelu", nn.SiLU()]),
    st.booleans(),
    st.booleans(),
)
lstms = st.builds(
    lambda layers, bias, p: First(nn.LSTM(E, E, layers, bias, dropout=p if layers > 1 else 0)),
    st.integers(1, 2),
    st.booleans(),
    probabilities,
)
leaves = st.one_of(
    st.builds(lambda bias: nn.Linear(E, E, bias), st.booleans()),
    st.builds(lambda: Doubled(E, E)),
    st.builds(nn.Dropout, probabilities),
    st.builds(lambda: nn.LayerNorm(E)),
    st.builds(nn.Tanh),
    st.builds(lambda p: First(nn.MultiheadAttention(E, 2, p), 3), probabilities),
    st.builds(lambda: First(nn.LSTM(E, E // 2, bidirectional=True))),
    lstms,
    layers,
)
models = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Residual, inner),
        st.builds(Twice, inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: nn.Sequential(*found)),
    ),
    max_leaves=5,
)


def run(model, x):
    y = model(x)
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    return y, torch.autograd.grad((y * weight).sum(), [x, *model.parameters()], allow_unused=True)


@pytest.mark.usefixtures("in_exact_dtype")
def test_a_random_model_keeps_its_results_and_the_report_is_complete():
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(models, st.booleans())
    def holds(model, copies):
        model = copy.deepcopy(model).to(torch.get_default_dtype()).eval()
        x = torch.randn(L, B, E, requires_grad=True)
        expected, classes = run(model, x), [type(m) for m in model.modules()]
        report = fusedseq.accelerate(model)
        torch.testing.assert_close(run(copy.deepcopy(model) if copies else model, x), expected)
        assert len({entry.name for entry in report.entries}) == len(report.entries)
        for entry in report.entries:
            module = model.get_submodule(entry.name)
            assert isinstance(module, REPLACEMENTS) == entry.replaced
            assert bool(entry.reason) != entry.replaced
        replaced = [m for m in model.modules() if isinstance(m, REPLACEMENTS)]
        assert len(replaced) == len(report.replaced)
        model.train()
        model(x).sum().backward()
        model.eval()
        report.undo()
        assert [type(m) for m in model.modules()] == classes
        torch.testing.assert_close(run(model, x), expected, rtol=0, atol=0)

    holds()
