"""accelerate(model, loss=...): the loss without logits, and ordinary logits for everything else."""

import copy

import fusedseq
import pytest
import torch
from fusedseq.acceleration import torch_modules, transformer_layers
from fusedseq.acceleration.deferred_logits import DeferredLogits
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("in_exact_dtype")
E, V, B, L = 6, 11, 3, 4


class Model(nn.Module):
    def __init__(self, tied=False, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(V, E)
        self.hidden = nn.Linear(E, E)
        self.decoder = nn.Linear(E, V, bias=bias)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(self.hidden(self.embedding(ids)).tanh())


def targets(ignored=-100):
    y = torch.randint(V, (B, L))
    y[0, 0] = y[2, 1] = ignored
    return y


def step(model, loss_of):
    """Returns the loss and all gradients of a training step."""
    ids = torch.arange(B * L).view(B, L) % V
    loss = loss_of(model(ids))
    return loss, torch.autograd.grad(loss.sum(), [*model.parameters()])


def accelerated(model):
    other = copy.deepcopy(model)
    report = fusedseq.accelerate(other, loss=nn.CrossEntropyLoss(), output="decoder")
    assert [e.name for e in report.replaced] == ["embedding", "hidden", "decoder"]
    return other


def losses(**options):
    """The ways in which training code hands logits and targets to a loss, and whether the loss
    does without the logits."""
    y, criterion = targets(options.get("ignore_index", -100)), nn.CrossEntropyLoss(**options)
    none = options.get("reduction") == "none"
    whole = y[:, 0].clamp(min=0)
    return {
        "view": (lambda z: criterion(z.view(-1, V), y.view(-1)), True),
        "flatten": (lambda z: criterion(z.flatten(0, 1), y.flatten()), True),
        "shift": (
            lambda z: criterion(z[:, :-1].contiguous().view(-1, V), y[:, 1:].reshape(-1)),
            True,
        ),
        "ellipsis": (lambda z: criterion(z[..., -1, :], whole), True),
        "transposed": (lambda z: criterion(z.transpose(1, 2), y), False),
        "scaled": (lambda z: criterion(z.view(-1, V) / 2, y.view(-1)), False),
        "soft": (lambda z: F.cross_entropy(z.view(-1, V), torch.full((B * L, V), 1 / V)), False),
        "one row": (lambda z: criterion(z[0, 1], y[0, 1]) * (1 if none else 2), False),
    }


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 3},
    "smoothing": {"label_smoothing": 0.1},
    "weight": {"weight": torch.linspace(0.1, 2, V), "label_smoothing": 0.2},
}


@pytest.mark.parametrize("form", losses())
@pytest.mark.parametrize("option", OPTIONS)
def test_loss_and_gradients_are_the_same(option, form):
    model = Model()
    options = dict(OPTIONS[option])
    if "weight" in options:
        options["weight"] = options["weight"].to(model.decoder.weight)
    loss_of, is_fused = losses(**options)[form]
    expected, other, seen = step(model, loss_of), accelerated(model), []
    found = step(other, lambda z: seen.append(z) or loss_of(z))
    torch.testing.assert_close(found, expected)
    assert seen[0].is_deferred is is_fused


def test_class_weights_that_require_a_gradient_are_refused_as_by_torch():
    """Neither torch's loss nor the operator differentiates them."""
    weight = torch.ones(V, requires_grad=True)
    for model in (Model(), accelerated(Model())):
        with pytest.raises(RuntimeError, match=r"not differentiable .* argument 'weight'"):
            step(model, lambda z: F.cross_entropy(z.view(-1, V), targets().view(-1), weight))


@pytest.mark.parametrize("bias", [False, True])
def test_tied_weights_get_the_sum_of_both_gradients(bias):
    model, y = Model(tied=True, bias=bias), targets().view(-1)

    def loss_of(z):
        return F.cross_entropy(z.view(-1, V), y)

    torch.testing.assert_close(step(accelerated(model), loss_of), step(model, loss_of))


class Cosines(torch.autograd.Function):
    """Code that gets the logits without `__torch_function__`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


def changed_in_place(z):
    z.view(-1)[::2].mul_(2)
    return F.cross_entropy(z.view(-1, V), targets_of_zero())


def targets_of_zero():
    return torch.zeros(B * L, dtype=torch.int64)


def loss_after_accuracy(z):
    with torch.no_grad():
        z.argmax(-1)
    return F.cross_entropy(z.view(-1, V), targets_of_zero())


def loss_after_inference(z):
    with torch.inference_mode():
        z.max()
    return F.cross_entropy(z.view(-1, V), targets_of_zero())


def with_a_hook(z):
    z.register_hook(lambda g: 3 * g)
    return F.cross_entropy(z.view(-1, V), targets_of_zero())


UNFORESEEN = {
    "arithmetic": lambda z: (1 + z.exp()).log().sum(),
    "concatenated": lambda z: torch.cat([z, z]).sin().sum(),
    "unbound": lambda z: torch.stack([*z]).sin().sum(),
    "function": Cosines.apply,
    "in place": changed_in_place,
    "no_grad before": loss_after_accuracy,
    "inference_mode before": loss_after_inference,
    "hook": with_a_hook,
    "two losses": lambda z: F.cross_entropy(z.view(-1, V), targets_of_zero()) + z.square().mean(),
    "checkpoint": lambda z: checkpoint(
        lambda x: F.cross_entropy(x.view(-1, V) * 2, targets_of_zero()), z, use_reentrant=False
    ),
    "compiled": lambda z: torch.compile(F.cross_entropy, backend="aot_eager")(
        z.view(-1, V), targets_of_zero()
    ),
    "masked": lambda z: z[torch.arange(B * L).view(B, L) % 2 == 0].square().sum(),
    "column": lambda z: z[..., 2].square().sum() + z[0, 1, 2] * z[0, 1, ..., 3],
    "split rows": lambda z: z.view(B, -1).square().sum() + z.view(-1, 2 * V).sin().sum(),
}


@pytest.mark.parametrize("use", UNFORESEEN)
def test_any_other_use_gets_ordinary_logits(use):
    model = Model()
    expected = step(model, UNFORESEEN[use])
    torch.testing.assert_close(step(accelerated(model), UNFORESEEN[use]), expected)


def test_the_values_of_the_logits_are_those_of_the_layer():
    model = Model()
    ids = torch.arange(V)
    logits = accelerated(model)(ids)
    assert isinstance(logits, DeferredLogits)
    assert (logits.shape, logits.dtype, len(logits)) == ((V, V), model.decoder.weight.dtype, V)
    assert logits.requires_grad
    assert logits.is_deferred
    torch.testing.assert_close(logits.tolist(), model(ids).tolist())
    assert not logits.is_deferred


def test_only_training_steps_defer():
    model = accelerated(Model())
    ids = torch.arange(V)
    with torch.no_grad():
        assert type(model(ids)) is torch.Tensor
    model.decoder.register_forward_hook(lambda *_: None)
    assert type(model(ids)) is torch.Tensor
    model = accelerated(Model()).eval()
    assert type(model(ids)) is torch.Tensor
    compiled = torch.compile(accelerated(Model()), fullgraph=True, backend="aot_eager")
    assert type(compiled(ids)) is torch.Tensor


@pytest.mark.parametrize("changed", ["weight", "hidden"])
def test_a_change_in_place_before_the_loss_is_an_error(changed):
    decoder = nn.Sequential(nn.Linear(E, V))
    fusedseq.accelerate(decoder, loss=nn.CrossEntropyLoss())
    x = torch.randn(B, E)
    logits = decoder(x)
    with torch.no_grad():
        (decoder[0].weight if changed == "weight" else x).add_(1)
    with pytest.raises(RuntimeError, match="must stay unchanged until its loss is computed"):
        F.cross_entropy(logits, torch.zeros(B, dtype=torch.int64))


def test_logits_that_are_read_after_the_step_say_when_to_read_them():
    decoder = nn.Sequential(nn.Linear(E, V))
    fusedseq.accelerate(decoder, loss=nn.CrossEntropyLoss())
    logits = decoder(torch.randn(B, E))
    F.cross_entropy(logits, torch.zeros(B, dtype=torch.int64)).backward()
    torch.optim.SGD(decoder.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="must be read before its parameters change"):
        logits.argmax(-1)


def test_logits_changed_in_place_do_not_reach_code_that_would_miss_it():
    logits = accelerated(Model())(torch.arange(V))
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="must not be changed in place"):
        Cosines.apply(logits).backward()


def test_autocast_gives_the_loss_in_fp32_and_the_logits_in_its_dtype():
    model, y = accelerated(Model()).to(torch.float32), targets().view(-1)
    ids = torch.arange(B * L) % V
    exact = F.cross_entropy(model(ids), y)
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(ids)
        loss = F.cross_entropy(logits, y)
    assert (logits.dtype, loss.dtype, logits.is_deferred) == (torch.bfloat16, torch.float32, True)
    # Each of the E products of a logit has two factors with an error of 2^-9, and logits are O(1).
    torch.testing.assert_close(loss, exact, rtol=0, atol=4 * E * 2**-9)
    assert F.cross_entropy(logits, y).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("widen", "is_fused"),
    [
        (lambda z: z.float().view(-1, V), True),
        (lambda z: z.to(torch.float32)[:, :-1].reshape(-1, V), True),
        (lambda z: z.view(-1, V).to(dtype=torch.float32), True),
        (lambda z: z.to(torch.float64).view(-1, V), False),
        (lambda z: z.to("cpu", torch.float32).view(-1, V), False),
    ],
    ids=["float", "to", "to dtype", "fp64", "device"],
)
def test_logits_in_16_bits_that_are_converted_to_fp32_are_deferred(widen, is_fused):
    """As transformers converts them before its loss."""
    model = Model().to(torch.bfloat16)
    ids = torch.arange(B * L).view(B, L) % V

    def step_of(model):
        logits = model(ids)
        wide = widen(logits)
        y = targets().view(-1)[: len(wide)].clamp(min=0).to(wide.device)
        loss = F.cross_entropy(wide, y)
        found = torch.autograd.grad(loss, [*model.parameters()])
        return logits, loss, found

    torch.manual_seed(3)
    _, expected, gradients = step_of(model)
    torch.manual_seed(3)
    logits, loss, found = step_of(accelerated(model))
    assert logits.is_deferred is is_fused
    assert loss.dtype == expected.dtype
    # Logits are O(1) and rounded to bf16 before torch's loss, as are all gradients.
    torch.testing.assert_close(loss, expected, rtol=0, atol=2**-7)
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-5, atol=2**-7)


def test_logits_that_are_to_have_a_gradient_are_computed_by_retain_grad():
    model, y = Model(), targets()
    ids = torch.arange(B * L).view(B, L) % V
    found = []
    for m in (model, accelerated(model)):
        logits = m(ids)
        logits.retain_grad()
        loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
        found += torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found[1], found[0])


def test_inference_mode_reads_logits_that_were_made_before_it():
    model, y = Model(), targets().clamp(min=0)
    ids = torch.arange(B * L).view(B, L) % V
    expected = F.cross_entropy(model(ids).view(-1, V), y.view(-1))
    logits = accelerated(model)(ids)
    with torch.inference_mode():
        torch.testing.assert_close(F.cross_entropy(logits.view(-1, V), y.view(-1)), expected)
        assert logits.is_deferred
        torch.testing.assert_close(logits[0].argmax(-1), model(ids)[0].argmax(-1))


def test_the_last_linear_layer_is_the_output_and_undo_restores_it():
    model = Model()
    report = fusedseq.accelerate(model, loss=nn.CrossEntropyLoss())
    assert isinstance(model(torch.arange(V)), DeferredLogits)
    report.undo()
    assert type(model.decoder) is nn.Linear
    fusedseq.accelerate(model)
    assert not isinstance(model(torch.arange(V)), DeferredLogits)
    fusedseq.accelerate(model, loss=nn.CrossEntropyLoss())
    assert isinstance(model(torch.arange(V)), DeferredLogits)


def test_a_layer_whose_linear_was_taken_for_the_output_is_still_fused():
    layer = nn.TransformerEncoderLayer(E, 2, 8)
    fusedseq.accelerate(layer, loss=nn.CrossEntropyLoss())
    assert type(layer.linear2) is torch_modules.OutputLinear
    assert transformer_layers.is_plain(layer)
    assert type(layer(torch.randn(L, B, E))) is torch.Tensor


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": nn.MSELoss()}, TypeError, "loss must be a torch.nn.CrossEntropyLoss, got MSE"),
        ({"dry_run": "no"}, TypeError, "dry_run must be True or False, got 'no'"),
        ({"output": "decoder"}, ValueError, "output must be None without a loss, got 'decoder'"),
        (
            {"loss": nn.CrossEntropyLoss(), "output": "embedding"},
            ValueError,
            r"output must be the name of a torch.nn.Linear .*got 'embedding'",
        ),
    ],
)
def test_wrong_arguments_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        fusedseq.accelerate(Model(), **options)


@pytest.mark.parametrize("setup", ["register_hook", "retain_grad"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_the_logits_runs_or_is_refused(setup, when):
    model = accelerated(Model())
    logits, seen = model(torch.arange(B * L).view(B, L) % V).flatten(0, 1), []
    arguments = (seen.append,) if setup == "register_hook" else ()
    target = torch.randint(V, (B * L,))
    if when == "before":
        getattr(logits, setup)(*arguments)
        F.cross_entropy(logits, target).backward()
        assert (seen or [logits.grad])[0].shape == logits.shape
    else:
        F.cross_entropy(logits, target)
        with pytest.raises(RuntimeError, match=rf"^accelerate: a hook .*, got {setup}"):
            getattr(logits, setup)(*arguments)


@pytest.mark.parametrize("read", [False, True])
def test_what_is_made_of_logits_without_gradient_has_none(read):
    """Where it is read later, in the loss too. The logits themselves keep theirs."""
    model, y = Model(), targets().clamp(min=0)
    ids = torch.arange(B * L).view(B, L) % V
    expected = F.cross_entropy(model(ids).view(-1, V), y.view(-1))
    logits = accelerated(model)(ids)
    with torch.no_grad():
        flat, first = logits.view(-1, V), logits[0]
    assert not flat.requires_grad
    assert not first.requires_grad
    assert not first[1:].requires_grad
    if read:
        assert not (first**2).requires_grad
    assert logits.is_deferred is not read
    loss = F.cross_entropy(flat, y.view(-1))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    assert F.cross_entropy(logits.view(-1, V), y.view(-1)).requires_grad


def test_the_output_layer_stays_the_same_in_a_second_call():
    model = Model()
    for options in ({}, {"output": "decoder"}):
        fusedseq.accelerate(model, loss=nn.CrossEntropyLoss(), **options)
        assert type(model.decoder) is torch_modules.OutputLinear
        assert isinstance(model(torch.arange(V)), DeferredLogits)
