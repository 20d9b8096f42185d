"""Every kind of bad input: one sentence, a status that is not 0, and nothing under a final name that is not whole."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tasks import WORDS, Tiny, call, command, environment, refuse, remains, sentences, succeed, upper, write_pairs

from qknorm.training import loop, run_folder
from qknorm.training.leftovers import alone_in

SIDES = ("--source", "aa", "--target", "bb")


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[str, str]:
    """Files of sixty good pairs."""
    return write_pairs(tmp_path / "text", "train", sentences(60), upper)


def refuse_to_prepare(capsys: pytest.CaptureFixture[str], folder: Path, *train: object) -> str:
    """The sentence, after checking that nothing was written."""
    out = folder / "out"
    out.mkdir()
    told = refuse(capsys, "prepare", out / "data", *SIDES, "--train", *train)
    assert remains(out) == []
    return told


# ------------------------------------------------------------------ text


def test_different_line_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [f"{' '.join(WORDS[i % 7 : i % 7 + 1 + i * i % 11])} {i}" for i in range(300)]
    source, target = write_pairs(tmp_path / "text", "train", lines, upper)
    del (kept := Path(target).read_text().splitlines())[200]
    Path(target).write_text("\n".join(kept) + "\n")
    told = refuse_to_prepare(capsys, tmp_path, source, target)
    assert f"{source} has 300 lines but {target} has 299" in told
    assert "part near line" in told
    assert abs(int(told.split("part near line ")[1].split()[0]) - 201) < 20


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1)])
def test_empty_files(
    empty: tuple[int, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: tuple[str, str]
) -> None:
    for side in empty:
        Path(pairs[side]).write_bytes(b"")
    told = refuse_to_prepare(capsys, tmp_path, *pairs)
    assert "empty" in told
    assert pairs[empty[0]] in told


def test_invalid_utf8(capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: tuple[str, str]) -> None:
    Path(pairs[1]).write_bytes(b"good\nba\xffd\n")
    assert f"{pairs[1]}, line 2: not UTF-8 at byte 7 of the file (0xff)" in refuse_to_prepare(capsys, tmp_path, *pairs)


def test_nul_byte(capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: tuple[str, str]) -> None:
    Path(pairs[0]).write_bytes(b"good\nb\0d\n")
    assert f"{pairs[0]}, line 2: holds a NUL byte" in refuse_to_prepare(capsys, tmp_path, *pairs)


def test_windows_files_are_read_like_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: tuple[str, str]
) -> None:
    """CRLF, a byte-order mark, and U+2028 inside a line, which ends no line."""
    text = [Path(name).read_text(encoding="utf-8").replace("bak", "bak\u2028") for name in pairs]
    folder = tmp_path / "windows"
    folder.mkdir()
    for name, content in zip(("w.aa", "w.bb"), text, strict=True):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode())
    succeed(capsys, "prepare", tmp_path / "plain", *SIDES, "--train", *pairs)
    succeed(capsys, "prepare", tmp_path / "data", *SIDES, "--train", folder / "w.aa", folder / "w.bb")
    manifests = [json.loads((tmp_path / name / "prepared.json").read_text()) for name in ("plain", "data")]
    assert manifests[0]["cleaning"]["read"] == manifests[1]["cleaning"]["read"] == 60
    assert "\r" not in (tmp_path / "data" / "train.aa").read_bytes().decode()
    assert "\ufeff" not in (tmp_path / "data" / "train.aa").read_bytes().decode()


def test_sides_in_the_wrong_order(capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: tuple[str, str]) -> None:
    assert "wrong order" in refuse_to_prepare(capsys, tmp_path, pairs[1], pairs[0])


def test_lines_in_the_wrong_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = write_pairs(
        tmp_path / "text", "train", [f"{line} {i % 977}" for i, line in enumerate(sentences(2000, longest=20))], upper
    )
    lines = Path(target).read_text().splitlines()
    random.Random(0).shuffle(lines)
    Path(target).write_text("\n".join(lines) + "\n")
    assert "not in the same order" in refuse_to_prepare(capsys, tmp_path, source, target)


def test_a_line_of_a_million_characters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: tuple[str, str]
) -> None:
    for name in pairs:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write("x" * 1_000_000 + "\n")
    out = succeed(capsys, "prepare", tmp_path / "data", *SIDES, "--train", *pairs)
    assert "dropped 1" in out
    assert max(map(len, (tmp_path / "data" / "train.aa").read_text().splitlines())) < 100


def test_entity_bomb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("lxml")
    entities = "".join(f'<!ENTITY b{i} "{f"&b{i - 1};" * 10}">' for i in range(1, 10))
    bomb = tmp_path / "bomb.tmx"
    bomb.write_text(
        f'<?xml version="1.0"?><!DOCTYPE tmx [<!ENTITY b0 "boom">{entities}]><tmx version="1.4"><body><tu>'
        '<tuv xml:lang="aa"><seg>&b9;</seg></tuv><tuv xml:lang="bb"><seg>x</seg></tuv></tu></body></tmx>'
    )
    assert str(bomb) in refuse_to_prepare(capsys, tmp_path, bomb)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--train", "absent.aa", "absent.bb"], "absent.aa does not exist"),
        ([], "give the training text"),
        (["--train", "x", "--dev-pairs", "-1"], "dev_pairs"),
        (["--train", "x", "--cleaning.max-ratio", "0.5"], "max_ratio"),
    ],
)
def test_mistakes_in_the_words_of_prepare(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert part in refuse(capsys, "prepare", tmp_path / "data", *SIDES, *words)
    assert remains(tmp_path) == []


def test_prepared_folder_exists(capsys: pytest.CaptureFixture[str], tiny: Tiny, pairs: tuple[str, str]) -> None:
    told = refuse(capsys, "prepare", tiny.data, *SIDES, "--train", *pairs)
    assert str(tiny.data) in told
    assert "add --overwrite" in told


# ------------------------------------------------------------------ trainings


def test_mistakes_in_the_words_of_train(capsys: pytest.CaptureFixture[str], tiny: Tiny, tmp_path: Path) -> None:
    run = tmp_path / "run"
    toml = tmp_path / "my.toml"
    toml.write_text("[model]\nhaeds = 4\n")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    expected = [
        (["--preset", "low-resorce"], "there is no preset low-resorce; did you mean low-resource?"),
        (["--config", toml], "there is no setting model.haeds; did you mean model.heads?"),
        (["--config", broken], "broken.toml is no TOML"),
        (["--config", tmp_path / "absent.toml"], "absent.toml"),
        (["--model.heads", "5"], "model.width 256 is no multiple of model.heads 5"),
        (["--device", "banana"], "--device banana is no device"),
        (["--training.batch-tokens", "1000000", "--training.accumulate", "99"], "fewer than the 99 of one step"),
    ]
    for words, part in expected:
        device = [] if "--device" in words else ["--device", "cpu"]
        assert part in refuse(capsys, "train", tiny.data, "--run", run, *device, *words)
        shutil.rmtree(run, ignore_errors=True)
    told = refuse(capsys, "train", toml, "--run", run, "--device", "cpu", "--model.heads", "5")  # any text will do
    assert "settings of the language model: model.width 128 is no multiple of model.heads 5" in told
    if not torch.cuda.is_available():
        assert "PyTorch sees no GPU" in refuse(capsys, "train", tiny.data, "--run", run, "--device", "cuda")
    assert not run.exists()


def test_train_without_data_or_dev(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "does not exist; name a folder" in refuse(capsys, "train", tmp_path / "absent", "--run", run)
    few = write_pairs(tmp_path / "text", "few", sentences(5), upper)
    assert "too few" in succeed_with_notes(capsys, "prepare", tmp_path / "data", *SIDES, "--train", *few)
    told = succeed(capsys, "prepare", tmp_path / "data", *SIDES, "--train", *few, "--overwrite")
    assert "Training needs a dev set; prepare again with --dev dev.aa dev.bb" in told and "Next:" not in told
    one = write_pairs(tmp_path / "text", "one", sentences(1), upper)
    assert "1 training pair read" in succeed(capsys, "prepare", tmp_path / "one", *SIDES, "--train", *one)
    assert "has no dev set" in refuse(capsys, "train", tmp_path / "data", "--run", run)
    assert not run.exists()


def succeed_with_notes(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    from qknorm.cli import main

    main([str(word) for word in words])
    return capsys.readouterr().err


def test_a_run_folder_in_use(capsys: pytest.CaptureFixture[str], tiny: Tiny, tmp_path: Path) -> None:
    for run, more in ((tmp_path / "new", ()), (tiny.run, ("--resume",))):
        with alone_in(run):
            told = refuse(capsys, "train", tiny.data, "--run", run, *more)
        assert told == f"qknorm: another training is at work in {run}; wait for it, stop it, or name another --run"
    assert not (tmp_path / "new").exists()


def test_run_folder_exists(capsys: pytest.CaptureFixture[str], tiny: Tiny, tmp_path: Path) -> None:
    before = remains(tiny.run)
    told = refuse(capsys, "train", tiny.data, "--run", tiny.run, "--device", "cpu")
    assert told == f"qknorm: {tiny.run} exists already; add --resume to go on with it"
    assert remains(tiny.run) == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1").write_text("do not touch")
    assert "exists already; name another" in refuse(capsys, "train", tiny.data, "--run", tmp_path / "thesis")
    assert remains(tmp_path / "thesis") == ["chapter-1"]


def test_resume_mistakes(capsys: pytest.CaptureFixture[str], tiny: Tiny, tmp_path: Path) -> None:
    told = refuse(capsys, "train", tiny.data, "--run", tmp_path / "absent", "--resume")
    assert "absent is no run folder" in told
    other = write_pairs(tmp_path / "text", "train", sentences(60, seed=5), upper)
    succeed(capsys, "prepare", tmp_path / "other", *SIDES, "--train", *other)
    told = refuse(capsys, "train", tmp_path / "other", "--run", tiny.run, "--resume", "--device", "cpu")
    assert f"trained on other data than {tmp_path / 'other'}" in told
    words = ("train", tiny.data, "--run", tiny.run, "--config", tiny.config, "--resume", "--device", "cpu")
    told = refuse(capsys, *words, "--training.max-steps", "50")
    assert f"training.max_steps would be another; leave them out, or set max_steps in {tiny.run}" in told
    told = refuse(capsys, "train", tiny.data, "--run", tiny.run, "--resume", "--training.seed", "7")
    assert "by those given training.seed would be another" in told, "not what the default preset has otherwise"
    told = refuse(capsys, "train", tiny.data, "--run", tiny.run, "--resume", "--model.heads", "8")
    assert "by those given model.heads would be another; leave them out, or begin a new run" in told
    assert "reached training.max_steps (20)" in succeed(capsys, *words)
    by_other_words = ("--run", tmp_path / "absent", f"--run_folder={tiny.run}", "--preset", "low-resource")
    told = succeed(capsys, "train", tiny.data, *by_other_words, "--resume", "--device", "cpu")
    assert "reached training.max_steps (20)" in told


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.run, tmp_path / "copied"))


def test_run_folder_of_another_version(capsys: pytest.CaptureFixture[str], tiny: Tiny, copied: Path) -> None:
    about = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**about, "format_version": 99}))
    for words in (["translate", copied], ["train", tiny.data, "--run", copied, "--resume"], ["average", copied]):
        assert "written by another version of qknorm (run format 99" in refuse(capsys, *words)


def test_vocabulary_that_does_not_match(capsys: pytest.CaptureFixture[str], tmp_path: Path, copied: Path) -> None:
    other = write_pairs(tmp_path / "text", "train", sentences(60, seed=5), lambda line: line + " ñandú")
    succeed(capsys, "prepare", tmp_path / "other", *SIDES, "--train", *other)
    shutil.copy(tmp_path / "other" / "tokenizer.json", copied / "tokenizer.json")
    told = refuse(capsys, "translate", copied, "--device", "cpu")
    assert "tokenizer.json has" in told
    assert "restore the tokenizer" in told


def test_a_vocabulary_that_is_gone(capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    told = refuse(capsys, "translate", copied, "--device", "cpu")
    prepared = json.loads((copied / "run.json").read_text(encoding="utf-8"))["data"]
    assert Path(prepared).name == "data" and told.endswith(f"; copy it from the prepared folder {prepared}")


def test_weights_of_another_model(capsys: pytest.CaptureFixture[str], tiny: Tiny, copied: Path) -> None:
    settings = (copied / "settings.toml").read_text()
    (copied / "settings.toml").write_text(settings.replace("width = 16", "width = 32"))
    assert "the weights do not fit the settings" in refuse(capsys, "translate", copied, "--device", "cpu")
    told = refuse(capsys, "train", tiny.data, "--run", copied, "--resume", "--device", "cpu")
    assert "undo what was changed in its settings" in told


# ------------------------------------------------------------------ translating, scoring, averaging


def test_translate_mistakes(capsys: pytest.CaptureFixture[str], tiny: Tiny, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"ok\n\xff\n")
    out = tmp_path / "out"
    expected = [
        ([tmp_path / "absent"], "absent is no run folder"),
        ([tiny.run, "--input", tmp_path / "none"], "none does not exist"),
        ([tiny.run, "--input", bad], "line 2: not UTF-8"),
        ([tiny.run, "--checkpoint", "7"], "holds no checkpoint of step 7"),
        ([tiny.run, "--checkpoint", "some.safetensors"], "some.safetensors does not exist"),
        ([tiny.run, "--checkpoint", str(bad)], "is damaged or no safetensors file"),
        ([tiny.run, "--nbest", "0"], "--nbest is at least 1, not 0"),
        ([tiny.run, "--beam", "-2"], "--beam is at least 1, not -2"),
        ([tiny.run, "--length-penalty", "nan"], "--length-penalty is at least 0, not nan"),
        ([tiny.run, "--device", "tpu"], "--device tpu is no device"),
    ]
    for words, part in expected:
        assert part in refuse(capsys, "translate", *words, "--output", out)
    assert "is the file that is read" in refuse(capsys, "translate", tiny.run, "--input", bad, "--output", bad)
    assert bad.read_bytes() == b"ok\n\xff\n" and remains(tmp_path) == ["bad"]
    assert "is a folder; name a file" in refuse(capsys, "inspect", tiny.run, "--html", tmp_path)


@pytest.mark.slow
def test_standard_input_empty_or_bad(tiny: Tiny) -> None:
    assert call("translate", tiny.run, "--device", "cpu", stdin="").stdout == ""
    done = call("translate", tiny.run, "--device", "cpu", stdin=b"bak\n\xe9\n", status=2)
    assert done.stderr.startswith("qknorm: standard input, line 2: not UTF-8 at byte 4")
    assert done.stderr.count("\n") == 1


def test_score_and_average_mistakes(capsys: pytest.CaptureFixture[str], tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "ref").write_text("a b\nc d\n")
    (tmp_path / "hyp").write_text("a b\n")
    expected = [
        (["score"], "give --ref and --hyp"),
        (["score", tiny.run, "--ref", tmp_path / "ref"], "not both"),
        (["score", "--ref", tmp_path / "ref", "--hyp", tmp_path / "hyp"], "hyp"),
        (["score", "--ref", tmp_path / "ref", "--hyp", tmp_path / "none"], "none does not exist"),
        (["score", tiny.run, "--split", "tset", "--device", "cpu"], "has no split tset"),
        (["average", tiny.run, "--last", "9"], "keeps 3 checkpoints, not 9"),
        (["average", tiny.run, "--last", "1", "--best", "1"], "not both"),
        (["average", tiny.run, "--last", "0"], "--last"),
        (["average", tmp_path], "is no run folder"),
        (["corpora", "download", "ted-gl-em"], "ted-gl-en"),
    ]
    for words, part in expected:
        assert part in refuse(capsys, *words)


# ------------------------------------------------------------------ the machine


def with_small_files(largest: int, *words: object) -> "subprocess.CompletedProcess[str]":
    """The command where no file may pass a size, which is how a full disk feels to it."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    return subprocess.run(
        command(*words), env=environment(), capture_output=True, text=True, check=False, preexec_fn=limit
    )


def assert_one_sentence(done: "subprocess.CompletedProcess[str]", part: str) -> None:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert done.stderr.startswith("qknorm: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr


@pytest.mark.slow
def test_full_disk(tiny: Tiny, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "text", "train", sentences(400), upper)
    (tmp_path / "out").mkdir()
    done = with_small_files(4_000, "prepare", tmp_path / "out" / "data", *SIDES, "--train", *pairs)
    assert_one_sentence(done, "data cannot be written (File too large)")
    assert remains(tmp_path / "out") == []

    words = ("--config", tiny.config, "--device", "cpu")
    run = tmp_path / "run"
    assert_one_sentence(
        with_small_files(20_000, "train", tiny.data, "--run", run, *words), "cannot write the checkpoint"
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == []
    call("train", tiny.data, "--run", run, "--resume", "--device", "cpu")  # bytes repeat in a process of its own alone
    last = "checkpoints/step-00000020/model.safetensors"
    assert (run / last).read_bytes() == (tiny.run / last).read_bytes()


def test_read_only_folder(capsys: pytest.CaptureFixture[str], tiny: Tiny, pairs: tuple[str, str]) -> None:
    """/proc takes no folders even from root, whom permissions do not stop."""
    if not Path("/proc/version").exists():
        pytest.skip("needs a folder that nobody can write to, such as /proc")
    nowhere = Path("/proc/nowhere")
    assert str(nowhere) in refuse(capsys, "prepare", nowhere, *SIDES, "--train", *pairs)
    assert str(nowhere) in refuse(capsys, "train", tiny.data, "--run", nowhere, "--device", "cpu")
    source = pairs[0]
    words = ("translate", tiny.run, "--input", source, "--device", "cpu")
    assert "nowhere" in refuse(capsys, *words, "--output", nowhere / "x", status=1)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: tuple[str, str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    told = refuse(capsys, "prepare", closed / "data", *SIDES, "--train", *pairs)
    assert "cannot be written (Permission denied)" in told


def test_no_gpu_memory(
    capsys: pytest.CaptureFixture[str], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(loop.Trainer, "_take_step", fail)
    words = ("train", tiny.data, "--run", tmp_path / "run", "--config", tiny.config, "--device", "cpu")
    told = refuse(capsys, *words, status=1)
    assert "the GPU has no memory left; lower --training.batch-tokens" in told
    monkeypatch.setattr(run_folder.Translator, "to", fail)
    assert "lower --beam" in refuse(capsys, "translate", tiny.run, "--device", "cpu", status=1)
    monkeypatch.undo()
    succeed(capsys, *words)  # the same words again: nothing stands in the way
