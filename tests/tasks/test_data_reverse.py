"""Generated sequences and their reversals."""

import pytest
import torch
from fusedseq import reference
from fusedseq.data import PAD, SPLITS, reverse
from fusedseq.data.reverse import ReversalBatches
from fusedseq.models.reversal import ReversalSettings
from fusedseq.tasks import reverse as reversal_task


@pytest.fixture(scope="module")
def loaded():
    return reverse.load()


def test_the_splits_have_the_sizes_of_the_source_report(loaded):
    assert [len(getattr(loaded, split).source) for split in SPLITS] == [998, 499, 3495]


def test_a_target_is_the_source_reversed_before_the_padding(loaded):
    for split in SPLITS:
        part = getattr(loaded, split)
        assert part.source.dtype == part.target.dtype == part.lengths.dtype == torch.int64
        for source, target, n in zip(*part, strict=True):
            assert torch.equal(source[:n].flip(0), target[:n])
            assert source[:n].min() >= 1
            assert source.max() <= 9
            assert (source[n:] == PAD).all()
            assert (target[n:] == PAD).all()


@pytest.mark.parametrize("train_padding", [True, False])
def test_the_items_of_a_batch_are_those_of_which_its_objective_is_the_mean(train_padding):
    """So that two accumulated batches have the gradient of one."""
    settings = reversal_task.Settings(ReversalSettings(train_padding=train_padding))
    task = reversal_task.build(settings, None, ops=reference, seed=0)
    counted = sum(batch.items for batch in task.batches("valid", "any order"))
    assert counted == task.evaluate("valid")["numbers"]


def test_sequences_are_distinct(loaded):
    rows = [tuple(row) for split in SPLITS for row in getattr(loaded, split).source.tolist()]
    assert len(rows) == len({*rows}) == 4992


def test_the_same_seed_gives_the_same_data(loaded):
    assert (
        reverse.load("synthetic").fingerprint()
        == loaded.fingerprint()
        != reverse.load(seed=1).fingerprint()
    )


def test_without_a_limit_all_drawn_sequences_are_used():
    everything = reverse.load(
        sizes={1: 50, 2: 2}, max_length=3, numbers=4, limit=None, shares=(0.4, 0.2)
    )
    rows = [row for split in SPLITS for row in getattr(everything, split).source.tolist()]
    assert {tuple(row) for row in rows if row[1] == PAD} == {(n, 0, 0) for n in range(1, 5)}
    assert len(rows) in (5, 6)


def test_every_sequence_is_in_one_batch(loaded):
    for key in (None, "0/0"):
        batches = ReversalBatches(loaded.valid, 8, key)
        assert len([*batches]) == len(batches) == 63
        rows = torch.cat([batch.source for batch in batches])
        assert torch.equal(rows, loaded.valid.source) == (key is None)
        assert sorted(rows.tolist()) == sorted(loaded.valid.source.tolist())
        assert sum(batch.items for batch in batches) == 499 * 5
    orders = [ReversalBatches(loaded.valid, 8, key).order for key in ("0/0", "0/0", "0/1")]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "/tmp"}, "leave --data out or give 'synthetic', got /tmp"),
        ({"max_length": 4}, r"lengths in sizes must be in 1 .. 4, got \[1, 2, 3, 4, 5\]"),
        ({"limit": 5}, "every split must have a sequence, got 5"),
    ],
)
def test_arguments_out_of_range_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        reverse.load(**arguments)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        ReversalBatches(reverse.load().valid, 0)
