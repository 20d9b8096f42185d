"""From text files to a scored translator through the real commands: a copy and a reverse task, learned."""

import json
from pathlib import Path

import pytest
from tasks import Learned, call, prepare_task, sentences, succeed

from qknorm import load


def reverse(line: str) -> str:
    return " ".join(line.upper().split()[::-1])


def bleu(report: str) -> float:
    scores = json.loads(report)["systems"][0]["scores"]
    return float(next(score["value"] for score in scores if score["metric"] == "bleu"))


@pytest.mark.slow
def test_copy_task(learned: Learned) -> None:
    assert bleu(call("score", learned.run, "--split", "test", "--device", "cpu", "--json").stdout) > 90
    assert (learned.run / "test.bb").read_text(encoding="utf-8").count("\n") == 50
    assert {path.name for path in learned.run.iterdir()} >= {
        "settings.toml", "tokenizer.json", "run.json", "metrics.jsonl", "curves.png", "checkpoints"
    }  # fmt: skip


@pytest.mark.slow
def test_reverse_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepare_task(tmp_path, reverse, pairs=3000, longest=5, merges=200)
    options = "--model.width 64 --model.feed-forward 128 --model.encoder-layers 1 --model.decoder-layers 1"
    options += " --training.batch-tokens 1024 --training.max-steps 320 --training.evaluate-every 160"
    succeed(capsys, "train", data, "--run", tmp_path / "run", "--preset", "demo", "--device", "cpu", *options.split())
    assert bleu(succeed(capsys, "score", tmp_path / "run", "--split", "test", "--device", "cpu", "--json")) > 90


@pytest.mark.slow
def test_score_of_files_and_of_the_run_agree(
    learned: Learned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = (learned.text / "test.aa").read_text(encoding="utf-8").splitlines()
    translate(learned, tmp_path, sources)
    of_files = succeed(capsys, "score", "--ref", learned.text / "test.bb", "--hyp", tmp_path / "out", "--json")
    of_run = succeed(capsys, "score", learned.run, "--split", "test", "--device", "cpu", "--json")
    scores, others = (json.loads(report)["systems"][0]["scores"] for report in (of_files, of_run))
    assert [each["value"] for each in scores] == [each["value"] for each in others]
    assert all("version:" in each["signature"] for each in scores)


@pytest.mark.slow
def test_standard_input_keeps_lines_and_order(learned: Learned) -> None:
    known = (learned.text / "test.aa").read_text(encoding="utf-8").splitlines()[:4]
    given = [known[0], "", known[1], "   ", known[2], known[3]]
    by_lines = call("translate", learned.run, "--device", "cpu", stdin="\r\n".join(given)).stdout.split("\n")
    assert by_lines[-1] == ""
    assert by_lines[:-1] == load(learned.run, device="cpu").translate(given)
    assert [line == "" for line in by_lines[:-1]] == [False, True, False, True, False, False]
    same = sum(line == source.upper() for line, source in zip(by_lines, given, strict=False) if source.strip())
    assert same >= 3


def translate(learned: Learned, folder: Path, lines: list[str], *options: str) -> list[str]:
    """What the command writes to a file for these lines."""
    from qknorm.cli import main

    source, out = folder / "in", folder / "out"
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    main(["translate", str(learned.run), "--input", str(source), "--output", str(out), "--device", "cpu", *options])
    return out.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_nbest(learned: Learned, tmp_path: Path) -> None:
    rows = [line.split("\t") for line in translate(learned, tmp_path, ["bak den", "", "fir"], "--nbest", "3")]
    assert [row[0] for row in rows] == ["1", "1", "1", "2", "3", "3", "3"]
    scores = [float(row[1]) for row in rows if row[0] == "1"]
    assert scores == sorted(scores, reverse=True)
    assert len({row[2] for row in rows if row[0] == "1"}) == 3
    assert [rows[0][2], "", rows[4][2]] == translate(learned, tmp_path, ["bak den", "", "fir"], "--beam", "4")


@pytest.mark.slow
def test_alignment_of_a_copy_is_the_diagonal(learned: Learned, tmp_path: Path) -> None:
    lines = sentences(20, seed=7, longest=4)
    on_diagonal = total = 0
    for line, source in zip(translate(learned, tmp_path, lines, "--align"), lines, strict=True):
        text, _, links = line.partition("\t")
        pairs = [tuple(map(int, link.split("-"))) for link in links.split()]
        assert all(s < len(source.split()) and t < len(text.split()) for s, t in pairs)
        on_diagonal += sum(s == t for s, t in pairs)
        total += len(pairs)
    assert total >= 40
    assert on_diagonal / total > 0.5


@pytest.mark.slow
def test_json_lines(learned: Learned, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in translate(learned, tmp_path, ["bak den", ""], "--json", "--nbest", "2")]
    assert [row["text"] for row in rows] == translate(learned, tmp_path, ["bak den", ""])
    assert [len(row["alternatives"]) for row in rows] == [2, 1]
    assert rows[0]["alternatives"][0] == {"text": rows[0]["text"], "score": rows[0]["score"]}


@pytest.mark.slow
def test_longer_than_any_in_training(learned: Learned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longest = load(learned.run, device="cpu").longest
    out = translate(learned, tmp_path, ["bak " * 3 * longest, "den"])
    assert len(out) == 2
    assert "note: line 1 is longer than any in training; translated in" in capsys.readouterr().err


@pytest.mark.slow
def test_average(learned: Learned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "mean.safetensors"
    out = call("average", learned.run, "--last", "2", "--out", weights).stdout
    assert "the mean of steps 80, 160" in out
    by_mean = translate(learned, tmp_path, ["bak den fir"], "--checkpoint", str(weights))
    assert by_mean == load(learned.run, checkpoint=weights, device="cpu").translate(["bak den fir"])
    one = tmp_path / "one.safetensors"
    succeed(capsys, "average", learned.run, "--last", "1", "--out", one)
    lines = sentences(5, seed=9)
    assert translate(learned, tmp_path, lines, "--checkpoint", str(one)) == translate(
        learned, tmp_path, lines, "--checkpoint", "last"
    )
