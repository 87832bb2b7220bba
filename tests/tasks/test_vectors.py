"""Word vectors: export of a trained model, nearest words, initialization from a file."""

import pytest
import torch
from fusedseq import cli
from fusedseq.data import word2vec
from fusedseq.data.vocabulary import Vocabulary
from fusedseq.data.word2vec import read_word2vec, write_word2vec
from fusedseq.tasks import words
from fusedseq.tasks.adaptation.word_vectors import load_vectors, nearest
from fusedseq.tasks.catalog import operators
from fusedseq.tasks.training import load_checkpoint, override

SETS = [
    w
    for change in ("embedding=16", "heads=2", "feedforward=16", "batch=200", "lr=.01")
    for w in ("--set", change)
]


def train(out, *more, preset="base"):
    return cli.main(
        [
            "train",
            "words",
            "--data",
            "synthetic",
            "--preset",
            preset,
            "--steps",
            "2",
            "--skip-test",
            "--out",
            str(out),
            *SETS,
            *more,
        ]
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    assert train(out) == 0
    return out


@pytest.mark.parametrize("name", ["vectors.txt", "vectors.bin.gz"])
def test_exported_vectors_are_the_embedding_and_initialise_another_model(
    run, tmp_path, capsys, name
):
    file = tmp_path / name
    assert cli.main(["vectors", str(run), "--out", str(file)]) == 0
    state = load_checkpoint(run / "best.safetensors")
    vocabulary, weight = (
        Vocabulary(state["description"]["vocabulary"]),
        state["model"]["embedding.weight"],
    )
    assert torch.equal(read_word2vec(file, vocabulary)[0], weight)
    assert f"written: {len(vocabulary)} vectors of 16 numbers in {file}" in capsys.readouterr().out
    assert (
        train(
            tmp_path / "next",
            "--set",
            f"data.vectors={file}",
            "--set",
            "steps=0",
            preset="pretrained",
        )
        == 0
    )
    assert (
        f"{len(vocabulary)} of {len(vocabulary)} words start with a vector"
        in capsys.readouterr().out
    )


def built(*changes):
    torch.manual_seed(0)
    settings = override(words.PRESETS["base"], ["embedding=16", *changes])
    return words.build(settings, "synthetic", ops=operators("fused"), seed=0)


def test_words_without_a_vector_keep_their_direction_with_the_files_scale(tmp_path):
    file = tmp_path / "small.txt"
    write_word2vec(file, ["dog", "unheard-of", "the"], 0.1 * torch.randn(3, 16))
    plain, initialized = built(), built(f"data.vectors={file}")
    vocabulary = plain.data.vocabulary
    vectors, found = read_word2vec(file, vocabulary)
    assert found.sum() == 2
    ours, theirs = (task.model.embedding.weight.detach() for task in (initialized, plain))
    assert torch.equal(ours[found], vectors[found])
    torch.testing.assert_close(
        torch.cosine_similarity(ours[~found], theirs[~found]), torch.ones(len(ours) - 2)
    )
    assert ours[~found].square().mean().item() == pytest.approx(
        vectors[found].square().mean().item(), rel=0.05
    )
    others = {
        name
        for name, p in initialized.model.named_parameters()
        if not torch.equal(p, plain.model.get_parameter(name))
    }
    assert others == {"embedding.weight"}


def test_a_started_run_does_not_need_the_file(tmp_path):
    file = tmp_path / "small.txt"
    write_word2vec(file, ["dog"], torch.ones(1, 16))
    assert train(tmp_path / "run", "--set", f"data.vectors={file}", preset="pretrained") == 0
    file.unlink()
    assert train(tmp_path / "run", "--resume", preset="pretrained") == 0
    assert cli.main(["eval", "words", str(tmp_path / "run"), "--data", "synthetic"]) == 0


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            None,
            "data.vectors must be a file of word vectors in word2vec format: --set data.vectors=",
        ),
        ("the 1 2 3\n", "must have vectors of model.embedding = 16 numbers, got 3"),
        ("house\n", "a vector for none of the"),
        ("", "data.vectors must be a file of word vectors, got {path}: No such file"),
    ],
)
def test_an_unusable_file_is_an_error(tmp_path, capsys, file, message):
    path = tmp_path / "vectors.txt"
    if file:
        path.write_text(file)
    more = [] if file is None else ["--set", f"data.vectors={path}"]
    assert train(tmp_path / "run", *more, preset="pretrained") == 2
    assert message.format(path=path) in capsys.readouterr().err


def test_nearest_words_have_the_largest_cosine(run, capsys):
    vocabulary = Vocabulary(["a", "b", "c", "d"])
    weight = torch.tensor([[1.0, 0.0], [5.0, 1.0], [-1.0, 0.0], [1.0, 1.0]])
    found = nearest("a", vocabulary, weight, top=9)
    assert [word for word, _ in found] == ["b", "d", "c"]
    assert [cosine for _, cosine in found] == pytest.approx([5 / 26**0.5, 0.5**0.5, -1.0])
    assert cli.main(["vectors", str(run), "--near", "dog", "the", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["dog", "the"]
    assert all(len(line.split(", ")) == 3 for line in lines)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "nothing to do: give --out FILE, --near WORD, or both"),
        (("--near", "zebra"), "--near: 'zebra' is not among the"),
        (("--out", "/no/folder/x.bin"), "--out: /no/folder/x.bin: No such file or directory"),
        (("--near", "dog", "--top", "0"), "--top must be at least 1, got 0"),
    ],
)
def test_invalid_options_are_errors(run, capsys, more, message):
    assert cli.main(["vectors", str(run), *more]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_export_leaves_the_file_that_was_there(run, tmp_path, monkeypatch):
    file = tmp_path / "vectors.txt.gz"
    file.write_text("before")

    def entry(word, vector):
        raise KeyboardInterrupt

    monkeypatch.setattr(word2vec, "_text_entry", entry)
    assert cli.main(["vectors", str(run), "--out", str(file)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == "before"


def test_an_unknown_word_is_a_warning_where_something_is_left_to_do(run, capsys, tmp_path):
    assert cli.main(["vectors", str(run), "--near", "zebra", "dog"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("dog: ")
    assert printed.err.startswith("fusedseq vectors: --near: 'zebra' is not among the ")
    file = tmp_path / "v.txt"
    assert cli.main(["vectors", str(run), "--near", "zebra", "--out", str(file)]) == 0
    assert "'zebra' is not among the" in capsys.readouterr().err
    assert file.exists()


def test_a_translator_has_no_single_embedding(tmp_path, capsys):
    sets = [
        w
        for change in ("embedding=8", "heads=2", "layers=1", "feedforward=8")
        for w in ("--set", change)
    ]
    assert (
        cli.main(
            [
                "train",
                "en-fr",
                "--data",
                "synthetic",
                "--steps",
                "1",
                "--skip-test",
                "--out",
                str(tmp_path),
                *sets,
            ]
        )
        == 0
    )
    assert cli.main(["vectors", str(tmp_path), "--near", "dog"]) == 2
    assert (
        "must hold a model with one embedding of words, got one of en-fr" in capsys.readouterr().err
    )


def test_vectors_of_ptb_are_exported_too(tmp_path):
    sets = [w for change in ("embedding=8", "hidden=8", "layers=1") for w in ("--set", change)]
    assert (
        cli.main(
            [
                "train",
                "ptb",
                "--data",
                "synthetic",
                "--steps",
                "1",
                "--skip-test",
                "--out",
                str(tmp_path),
                *sets,
            ]
        )
        == 0
    )
    assert cli.main(["vectors", str(tmp_path), "--out", str(tmp_path / "v.txt")]) == 0
    weight = torch.randn(3, 8)
    assert load_vectors(weight, tmp_path / "v.txt", Vocabulary(["the", "dog", "nonesuch"])) == 2


def test_a_file_whose_name_is_a_number_is_text():
    settings = override(words.PRESETS["pretrained"], ["data.vectors=7"])
    assert settings.data.vectors == "7"
    assert override(settings, ["data.vectors=none"]).data.vectors is None
