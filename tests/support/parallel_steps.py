"""Small objectives over modules of this package, trained for two steps by one process or by two."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusedseq
import torch
import torch.distributed as dist
from fusedseq import nn
from fusedseq.acceleration.deferred_logits import DeferredLogits
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.models.reversal import Reversal, ReversalSettings
from fusedseq.models.translator import Translator, TranslatorSettings
from fusedseq.models.word_predictor import WordPredictor, WordPredictorSettings
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

B, T, E, V = 4, 5, 8, 11
STEPS, PROCESSES = 2, 2
WAYS = "DDP", "FSDP", "FSDP from the meta device"


class Objective(torch.nn.Module):
    """A module, and a scalar that its outputs are reduced to: a mean over the batch's first
    dimension, so that the mean over equal parts of a batch is that of the batch."""

    def __init__(self, module: torch.nn.Module, loss: Callable[..., Any]):
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, *inputs):
        return self.loss(self.module, *inputs)


def recurrent(module, x):
    y, state = module(x)
    states = state if isinstance(state, tuple) else (state,)
    return y.square().mean() + sum(s.sin().mean() for part in states for s in part)


def of_result(module, *inputs):
    return module(*inputs).sin().mean()


def accelerated_encoder():
    model = torch.nn.TransformerEncoderLayer(E, 2, 16, 0.0, batch_first=True)
    fusedseq.accelerate(model)
    return model


class RecurrentModel(torch.nn.Module):
    """A language model of torch's modules, which returns its logits."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, E)
        self.lstm = torch.nn.LSTM(E, E, 2, batch_first=True)
        self.decoder = torch.nn.Linear(E, V)

    def forward(self, ids):
        return self.decoder(self.lstm(self.embedding(ids))[0])


def accelerated_language_model():
    model = RecurrentModel()
    fusedseq.accelerate(model, loss=torch.nn.CrossEntropyLoss())
    return model


def loss_of_logits(module, ids):
    logits = module(ids[:, :-1])
    assert isinstance(logits, DeferredLogits) != dist.is_initialized()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def language_model(module, ids):
    dropped, raw, _ = module(ids[:, :-1].T)
    loss = module.cross_entropy(dropped, ids[:, 1:].T)
    return loss + module.regularization(dropped, raw)


class OutputLayer(torch.nn.Module):
    """A split cross-entropy with the weight that it takes as an argument."""

    def __init__(self):
        super().__init__()
        self.loss = nn.SplitCrossEntropy(E, (4, 8))
        self.output = torch.nn.Linear(E, V)

    def forward(self, x, target):
        return self.loss(x, target, self.output.weight, self.output.bias)


def lm(**settings):
    sizes = {"embedding": E, "hidden": E, "layers": 2, "alpha": 1.0, "beta": 0.5}
    return LanguageModel(V, LanguageModelSettings(**sizes, **settings))


def self_attention(module, q):
    return module(q, q, q, is_causal=True)[0].square().mean()


def translator(**settings):
    sizes = {"embedding": E, "heads": 2, "layers": 2, "feedforward": 16, "dropout": 0.0}
    return Translator(V, V, TranslatorSettings(**sizes, **settings))


def translation(module, source, lengths, target):
    return module.cross_entropy(module(source, lengths, target[:, :-1]), target[:, 1:])


def word_predictor(**settings):
    sizes = {"embedding": E, "context": T, "heads": 2, "feedforward": 16, "dropout": 0.0}
    return WordPredictor(V, WordPredictorSettings(**sizes, **settings))


def word_prediction(module, context, target):
    return module.objective(context, target)[0]


def reversal(module, given, lengths, target):
    return module.cross_entropy(module(given, lengths), target)


def x():
    return (torch.randn(B, T, E),)


def ids():
    return (torch.randint(V, (B, T)),)


def words():
    """Without the id 0, the padding, so that every process averages over as many targets."""
    return (torch.randint(1, V, (B, T)),)


def lengths():
    return (torch.tensor([T, 2, 3, T]),)


# {name: (the module, its loss, inputs, the submodules that are sharded by themselves)}
OBJECTIVES: dict[str, tuple[Any, Any, Any, tuple[str, ...]]] = {
    "LSTM": (lambda: nn.LSTM(E, 6, 2, batch_first=True), recurrent, x, ("",)),
    "MogrifierLSTM": (lambda: nn.MogrifierLSTM(E, 6, 2, batch_first=True), recurrent, x, ("",)),
    **{
        kind.__name__: (lambda kind=kind: kind(E, 6, 2, batch_first=True), recurrent, x, ("",))
        for kind in (nn.GRU, nn.RNN, nn.PeepholeLSTM, nn.LayerNormLSTM, nn.LayerNormGRU)
    },
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(E, 2, batch_first=True, positions=nn.RelativeBias(2)),
        self_attention,
        x,
        ("",),
    ),
    "MultiheadAttention with RelativeKeys": (
        lambda: nn.MultiheadAttention(E, 2, batch_first=True, positions=nn.RelativeKeys(2, E // 2)),
        self_attention,
        x,
        ("",),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(E, 2, 16, 0.0, batch_first=True),
        of_result,
        x,
        ("self_attn", ""),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(E, 2, 16, 0.0, batch_first=True),
        of_result,
        lambda: (*x(), *x()),
        ("self_attn", ""),
    ),
    "FeedForward": (lambda: nn.FeedForward(E, 16, 0.0), of_result, x, ("",)),
    "ResidualLayerNorm": (
        lambda: nn.ResidualLayerNorm(E),
        lambda module, y, residual: module(y, residual).sin().mean(),
        lambda: (*x(), *x()),
        ("",),
    ),
    "Embedding": (lambda: nn.Embedding(V, E), of_result, ids, ("",)),
    "LearnedPositions": (lambda: nn.LearnedPositions(T, E, batch_first=True), of_result, x, ("",)),
    "accelerated encoder layer": (accelerated_encoder, of_result, x, ()),
    "accelerated LSTM with its loss": (accelerated_language_model, loss_of_logits, ids, ()),
    "LanguageModel": (lm, language_model, ids, ("recurrent",)),
    "tied LanguageModel": (lambda: lm(tied=True), language_model, ids, ("recurrent",)),
    "Translator": (
        translator,
        translation,
        lambda: (*words(), *lengths(), *words()),
        ("encoder.layers.0", "decoder.layers.1"),
    ),
    "tied Translator with relative positions": (
        lambda: translator(tied=True, prenorm=False, positions="relative", max_distance=2),
        translation,
        lambda: (*words(), *lengths(), *words()),
        ("encoder", "decoder.layers.0"),
    ),
    "WordPredictor": (
        lambda: word_predictor(extra_feedforward=True),
        word_prediction,
        lambda: (*words(), torch.randint(V, (B,))),
        ("encoder.layers.0", "positions"),
    ),
    "tied WordPredictor": (
        lambda: word_predictor(tied=True, prenorm=True),
        word_prediction,
        lambda: (*words(), torch.randint(V, (B,))),
        ("encoder.layers.0",),
    ),
    "Reversal": (
        lambda: Reversal(V, ReversalSettings(E, 2, 2, 16, 0.0, mask=True)),
        reversal,
        lambda: (*ids(), *lengths(), *ids()),
        ("encoder.layers.0", "embedding"),
    ),
    "LinearCrossEntropyLoss": (
        lambda: nn.LinearCrossEntropyLoss(E, V, bias=True),
        lambda module, y, target: module(y, target),
        lambda: (*x(), torch.randint(V, (B, T))),
        (),
    ),
    "SplitCrossEntropy": (
        OutputLayer,
        lambda module, y, target: module(y, target),
        lambda: (*x(), torch.randint(V, (B, T))),
        (),
    ),
}


def objective(name, device="cpu"):
    """The same objective and the same inputs in every process, in fp64.

    device: of the model, whose parameters have no values on "meta"
    """
    create, loss, inputs, shards = OBJECTIVES[name]
    torch.manual_seed(3)
    with torch.device(device):
        model = Objective(create(), loss).double()
    torch.manual_seed(4)
    given = [t.double() if t.is_floating_point() else t for t in inputs()]
    return model, given, shards


def steps(model, given):
    """Takes the steps; returns the losses and the final parameters, by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        loss = model(*given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = {
        name.replace("module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    return torch.stack(losses), parameters


def in_one_process(name):
    model, given, _ = objective(name)
    return steps(model, given)


def load_from_first(model, name):
    """Loads the whole parameters, which the first process alone has, into a sharded model."""
    state = objective(name)[0].state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def in_two_processes(name, way):
    """way: one of WAYS; each process has its part of the batch."""
    model, given, shards = objective(name, "meta" if "meta" in way else "cpu")
    given = [t.chunk(PROCESSES)[dist.get_rank()] for t in given]
    if way == "DDP":
        model = DistributedDataParallel(model)
    else:
        for shard in shards:
            fully_shard(model.module.get_submodule(shard))
        fully_shard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    if "meta" in way:
        load_from_first(model.to_empty(device="cpu"), name)
    losses, parameters = steps(model, given)
    dist.all_reduce(losses)
    return losses / PROCESSES, parameters


def process(rank, folder):
    """Runs every objective in every way; the first process writes DIR/results.pt."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    try:
        found = {(n, way): in_two_processes(n, way) for n in OBJECTIVES for way in WAYS}
        if rank == 0:
            torch.save(found, Path(folder, "results.pt"))
    finally:
        dist.destroy_process_group()


def results():
    """{(name, way): (losses, parameters)} of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder,), PROCESSES)
        return torch.load(Path(folder, "results.pt"))
