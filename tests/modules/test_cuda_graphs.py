"""Training steps are captured in CUDA graphs, whose replays compute what a call computes.

Graphs are tested only on a GPU: `pytest --device cuda`, which `make gpu` runs. The last test takes
the same steps without graphs, also on a CPU.
"""

import fusedseq
import pytest
import torch
from fusedseq import nn

E, T, B, V = 64, 9, 4, 50
CLASSES = torch.arange(T * B).view(T, B) % V  # targets, which a graph reads like any constant


class OutputLayer(torch.nn.Module):
    """The loss of an output layer over x (T, B, E), with splits or without them."""

    def __init__(self, splits):
        super().__init__()
        self.dropout = nn.LockedDropout(0.3)
        self.loss, self.output = nn.SplitCrossEntropy(E, splits), torch.nn.Linear(E, V)
        self.register_buffer("target", CLASSES.clone())

    def forward(self, x):
        return self.loss(self.dropout(x), self.target, self.output.weight, self.output.bias)


class Attention(nn.MultiheadAttention):
    """Causal self-attention."""

    def forward(self, x):
        return super().forward(x, x, x, is_causal=True)


class DecoderLayer(nn.TransformerDecoderLayer):
    """A decoder layer that attends to another order of its own input."""

    def forward(self, x):
        return super().forward(x, x.flip(0))


class Words(torch.nn.Module):
    """x (T, B, E) plus the vectors of T * B words."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, E, padding_idx=0, dropout=0.3)
        self.register_buffer("ids", CLASSES.clone())

    def forward(self, x):
        return x + self.embedding(self.ids)


class DroppedWeight(torch.nn.Module):
    """A product with a weight whose elements are dropped."""

    def __init__(self, variational):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(E, E) / 8)
        self.drop = nn.WeightDrop(0.3, variational)

    def forward(self, x):
        return x @ self.drop(self.weight).T


class Norm(nn.ResidualLayerNorm):
    """The norm of the sum of a residual and of x with dropout."""

    def forward(self, x):
        return super().forward(x, x.sin())


class RecurrentModel(torch.nn.Module):
    """The loss of a language model of torch's modules over word vectors x (T, B, E)."""

    def __init__(self):
        super().__init__()
        self.lstm, self.decoder = torch.nn.LSTM(E, E, 2, dropout=0.3), torch.nn.Linear(E, V)
        self.register_buffer("target", CLASSES.flatten())

    def forward(self, x):
        logits = self.decoder(self.lstm(x)[0])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.target)


def accelerated(model, loss=None):
    """A model of torch's modules after `fusedseq.accelerate`."""
    assert fusedseq.accelerate(model, loss=loss).replaced
    return model


MODULES = {  # each has something random in training mode
    "LSTM": lambda: nn.LSTM(E, E, 2, dropout=0.3, weight_drop=0.3),
    "MogrifierLSTM": lambda: nn.MogrifierLSTM(E, E, 2, dropout=0.3, weight_drop=0.3),
    "GRU by cuDNN": lambda: nn.GRU(E, E, 2, dropout=0.3),
    "GRU by the loop": lambda: nn.GRU(E, E, 2, dropout=0.3, zoneout_h=0.3, weight_drop=0.3),
    "RNN by cuDNN": lambda: nn.RNN(E, E, 2, dropout=0.3),
    "RNN by the loop": lambda: nn.RNN(E, E, 2, dropout=0.3, zoneout_h=0.3, weight_drop=0.3),
    "PeepholeLSTM": lambda: nn.PeepholeLSTM(E, E, 2, dropout=0.3, weight_drop=0.3),
    "LayerNormLSTM": lambda: nn.LayerNormLSTM(E, E, 2, dropout=0.3, weight_drop=0.3),
    "LayerNormGRU": lambda: nn.LayerNormGRU(E, E, 2, dropout=0.3, weight_drop=0.3),
    "MultiheadAttention": lambda: Attention(E, 2, 0.3),
    "FeedForward": lambda: nn.FeedForward(E, 2 * E, 0.3),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(E, 2, 2 * E, 0.3),
    "TransformerDecoderLayer": lambda: DecoderLayer(E, 2, 2 * E, 0.3),
    "Embedding": Words,
    "WeightDrop": lambda: DroppedWeight(variational=False),
    "variational WeightDrop": lambda: DroppedWeight(variational=True),
    "ResidualLayerNorm": lambda: Norm(E, 0.3),
    "accelerated LSTM": lambda: accelerated(torch.nn.LSTM(E, E, 2, dropout=0.3)),
    "accelerated TransformerEncoderLayer": lambda: accelerated(
        torch.nn.TransformerEncoderLayer(E, 2, 2 * E, 0.3)
    ),
    "accelerated language model": lambda: accelerated(
        RecurrentModel(), torch.nn.CrossEntropyLoss()
    ),
    "cross-entropy": lambda: OutputLayer(()),
    "SplitCrossEntropy": lambda: OutputLayer((20, 40)),
}


def step(module, x):
    """The output, and the gradients of x and of the parameters that have one."""
    result = module(x)
    y = result[0] if isinstance(result, tuple) else result
    inputs = [x, *module.parameters()]
    return [y, *torch.autograd.grad(y.sin().sum(), inputs, materialize_grads=True)]


def captured(module, x):
    """A function of x that replays a graph of `step`."""
    static = x.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compilers and the comparison at the first use are done after these
            step(module, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(module, static)

    def replay(x):
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        return [t.detach().clone() for t in results]

    return replay


@pytest.fixture(params=MODULES)
def module(request, on_device, device):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU: pytest --device cuda")
    return MODULES[request.param]().to(device)


def inputs():
    return torch.randn(T, B, E)


def test_a_replay_computes_what_a_call_computes(module):
    """For inputs other than those of the capture."""
    replay = captured(module.eval(), inputs())
    for x in (inputs(), inputs()):
        torch.testing.assert_close(replay(x), step(module, x.clone().requires_grad_()))


def test_every_replay_has_masks_of_its_own(module):
    """The graph draws the seeds of random masks from torch's generator, at each replay."""
    x = inputs()
    replay = captured(module, x)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([replay(x)[0], replay(x)[0]])
    torch.testing.assert_close(runs[0], runs[1])
    assert not torch.allclose(runs[0][0], runs[0][1])
    assert not torch.allclose(runs[0][0], runs[2][0])


@pytest.mark.parametrize("name", MODULES)
def test_a_seed_decides_the_masks_of_a_step(name, on_device, device):
    """Without a graph: each of the modules has what the tests above look for."""
    module, x = MODULES[name]().to(device), inputs().requires_grad_()
    assert len(step(module, x)) == 2 + len([*module.parameters()])
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([step(module, x)[0], step(module, x)[0]])
    torch.testing.assert_close(runs[0], runs[1])
    assert not torch.allclose(runs[0][0], runs[0][1])
    assert not torch.allclose(runs[0][0], runs[2][0])
    in_eval_mode = [step(module.eval(), x)[0] for _ in range(2)]
    torch.testing.assert_close(*in_eval_mode)
