"""nn.LinearCrossEntropyLoss: an output layer with its loss, beside torch's modules."""

import fusedseq
import pytest
import torch
from fusedseq import fused, nn
from fusedseq.acceleration import gains
from torch.nn import functional as F

E, V = 6, 11
since_torch_2_13 = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch has the module since 2.13"
)


def inputs():
    torch.manual_seed(0)
    target = torch.randint(V, (3, 4))
    target[0, 1] = -100
    return torch.randn(3, 4, E), target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_loss_of_a_linear_layer(bias, reduction, ops):
    x, target = inputs()
    weight = torch.rand(V)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    module = nn.LinearCrossEntropyLoss(E, V, bias=bias, weight=weight, **options, ops=ops)
    expected = F.cross_entropy(module.linear(x).flatten(0, 1), target.flatten(), weight, **options)
    loss = module(x, target)
    assert loss.shape == (target.shape if reduction == "none" else ())
    torch.testing.assert_close(loss.flatten(), expected.flatten())


@since_torch_2_13
@pytest.mark.parametrize("bias", [False, True])
def test_it_loads_the_state_dict_of_torchs_module(bias):
    x, target = inputs()
    theirs = torch.nn.LinearCrossEntropyLoss(E, V, bias=bias, weight=torch.rand(V))
    ours = nn.LinearCrossEntropyLoss(E, V, bias=bias, weight=torch.zeros(V))
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(
        ours(x, target), theirs(x.flatten(0, 1), target.flatten()), check_dtype=False
    )
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_a_tied_weight_has_one_gradient(ops):
    x, target = inputs()
    embedding = nn.Embedding(V, E)
    module = nn.LinearCrossEntropyLoss(E, V, ops=ops)
    module.linear.weight = embedding.weight
    module(embedding(target.clamp_min(0)) + x, target).backward()
    assert embedding.weight.grad is module.linear.weight.grad
    assert len({*torch.nn.ModuleList([embedding, module]).parameters()}) == 1


def test_options_are_those_of_the_operator():
    x, target = inputs()
    plain = nn.LinearCrossEntropyLoss(E, V)
    for option, value in (("z_loss", 0.1), ("temperature", 2.0), ("ignore_index", 3)):
        module = nn.LinearCrossEntropyLoss(E, V, **{option: value})
        module.load_state_dict(plain.state_dict())
        given = target.clamp_min(0)
        expected = fused.linear_cross_entropy(x, plain.linear.weight, given, **{option: value})
        assert torch.equal(module(x, given), expected), option
        assert expected != plain(x, given), option


def test_wrong_class_weights_are_refused():
    with pytest.raises(ValueError, match=r"weight must be \(num_classes,\) = \(11,\), got \(3,\)"):
        nn.LinearCrossEntropyLoss(E, V, weight=torch.ones(3))


@since_torch_2_13
@pytest.mark.parametrize("shape", [(), (5,), (4, 5)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_accelerate_replaces_torchs_module(reduction, shape, monkeypatch):
    """(4, 5) are four rows of losses of five dimensions, which are torch's own."""
    torch.manual_seed(0)
    options = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": 3}
    rows, more = shape[:1], shape[1:]
    theirs = torch.nn.LinearCrossEntropyLoss(
        E, V, out_features=more, bias=True, weight=torch.rand(V), **options
    )
    x, target = torch.randn(*rows, E), torch.randint(V, shape)
    expected = theirs(x, target)
    expected.sum().backward()
    gradient = theirs.linear.weight.grad.clone()
    calls = []
    operator = fused.linear_cross_entropy
    count = lambda *args, **kwargs: calls.append(args) or operator(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(fused, "linear_cross_entropy", count)
    report = fusedseq.accelerate(theirs)
    theirs.zero_grad()
    loss = theirs(x, target)
    loss.sum().backward()
    assert len(calls) == (0 if more else 1)
    torch.testing.assert_close(loss, expected, check_dtype=False)
    torch.testing.assert_close(theirs.linear.weight.grad, gradient)
    report.undo()
    theirs(x, target)
    assert len(calls) == (0 if more else 1)


@since_torch_2_13
def test_probabilities_as_targets_stay_torchs():
    theirs = torch.nn.LinearCrossEntropyLoss(E, V)
    x, target = torch.randn(5, E), torch.rand(5, V).softmax(1)
    expected = theirs(x, target)
    fusedseq.accelerate(theirs)
    assert torch.equal(theirs(x, target), expected)


@since_torch_2_13
@pytest.mark.parametrize("kind", ["", " in chunks"])
def test_the_report_has_the_gain_over_what_torch_computed(kind):
    options = torch.nn.LinearCrossEntropyOptions() if kind else None  # None keeps all logits
    theirs = torch.nn.LinearCrossEntropyLoss(E, V, options=options)
    entry, *_ = fusedseq.accelerate(theirs, dry_run=True).entries
    assert entry.gain == gains.of(f"LinearCrossEntropyLoss{kind}") != "unknown"
