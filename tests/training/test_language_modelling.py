"""Language models by the loop: windows, the held-out loss, going on exactly, learning a pattern."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qknorm.config import LanguageModel as ModelSettings
from qknorm.config import LanguageModelDropout, LanguageModelTraining, Schedule, Train, TrainLanguageModel
from qknorm.decoding.generate import TextGenerator
from qknorm.errors import InputError
from qknorm.models.language_model import LanguageModel
from qknorm.training.checkpoint import best_step, list_steps, load_checkpoint
from qknorm.training.fit import train
from qknorm.training.language_modelling import Windows, held_out_loss, next_token_loss
from qknorm.training.language_run import load_generator, read_language_run
from qknorm.training.loading import load
from qknorm.training.loop import Outcome, Trainer, TrainingDiverged
from qknorm.training.run_folder import read_run
from qknorm.training.step import TrainingStep

CPU = torch.device("cpu")
MODEL = ModelSettings(
    width=16, feed_forward=32, layers=1, heads=2, context=8, dropout=LanguageModelDropout.everywhere(0.1)
)


def settings(**training: Any) -> TrainLanguageModel:
    given = {"batch": 4, "max_steps": 10, "evaluate_every": 3, "log_every": 2, "keep": 2, **training}
    given.setdefault("schedule", Schedule(kind="cosine", peak=1e-2, warmup=2, floor=1e-3))
    return TrainLanguageModel(model=MODEL, training=LanguageModelTraining(**given))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {i * i % 97} of ñ" for i in range(30)), encoding="utf-8")
    return path


def fit(text: Path, run: Path, resume: bool = False, **training: Any) -> Outcome:
    outcome = train(text, run, None if resume else settings(**training), resume=resume, device="cpu", quiet=True)
    assert outcome is not None
    return outcome


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def bytes_of(run: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / f"checkpoints/step-{step:08d}").iterdir()}


# ------------------------------------------------------------------ windows and losses


@pytest.mark.parametrize("types", [50, 60_000])
def test_windows_are_pieces_of_the_text_and_what_comes_after(types):
    ids = np.random.default_rng(0).permutation(types)[:50].astype(np.min_scalar_type(types))
    windows = Windows(ids, 7, 5, 3, CPU)
    seen = set()
    for epoch in range(60):
        windows.start_epoch(epoch)
        for position in range(len(windows)):
            inputs, targets = windows.tensors(position)
            assert inputs.shape == targets.shape == (5, 7) and windows.tokens(position) == 35
            for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
                start = ids.tolist().index(row[0])
                assert ids[start : start + 7].tolist() == row
                assert ids[start + 1 : start + 8].tolist() == wanted
                seen.add(start)
    assert seen == set(range(43))


def test_windows_depend_on_seed_epoch_and_position_alone():
    ids = np.arange(200, dtype=np.uint8)
    one, other, differing = (Windows(ids, 8, 4, seed, CPU) for seed in (1, 1, 2))
    for epoch, position in ((0, 0), (3, 1), (0, 1)):
        for windows in (one, other, differing):
            windows.start_epoch(epoch)
        assert torch.equal(one.tensors(position)[0], other.tensors(position)[0])
        assert not torch.equal(one.tensors(position)[0], differing.tensors(position)[0])
    starts = [one.tensors(position)[0].flatten().tolist() for position in range(4)]
    one.start_epoch(1)
    assert one.tensors(0)[0].flatten().tolist() not in starts


def test_an_epoch_holds_the_text_once_and_a_step_at_least():
    ids = np.zeros(1_000, dtype=np.uint8)
    assert len(Windows(ids, 10, 5, 0, CPU)) == 20
    assert len(Windows(ids, 10, 500, 0, CPU)) == 1
    assert len(Windows(ids, 10, 500, 0, CPU, group=6)) == 6
    with pytest.raises(ValueError, match="hold no window"):
        Windows(ids[:10], 10, 1, 0, CPU)


@pytest.mark.parametrize("length", [2, 5, 9, 17, 18, 40])
def test_the_held_out_loss_counts_every_character_but_the_first_once(length):
    torch.manual_seed(0)
    model = LanguageModel(7, MODEL).train()
    ids = np.random.default_rng(length).integers(0, 7, length)
    expected = []
    model.eval()
    for place in range(1, length):
        start = (place - 1) // 8 * 8
        with torch.no_grad():
            scores = model(torch.tensor([ids[start:place].tolist()]))[0, -1].double()
        expected.append(float(scores.logsumexp(0) - scores[ids[place]]))
    model.train()
    state, told = torch.get_rng_state(), []
    found = held_out_loss(model, ids, lambda *given: told.append(given))
    assert found == pytest.approx(np.mean(expected), rel=1e-5)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert told[-1] == ("evaluate", length - 1, length - 1)


def test_the_loss_is_cross_entropy_summed():
    logits, targets = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[0, 1, 2], [3, 4, 0]])
    losses = next_token_loss(logits, targets)
    expected = -torch.log_softmax(logits, dim=-1).gather(2, targets.unsqueeze(2)).sum()
    assert float(losses.plain) == pytest.approx(float(expected), rel=1e-6)
    assert float(losses.smoothed) == float(losses.plain) and int(losses.tokens) == 6


def test_weight_decay_spares_what_is_no_matrix():
    model = LanguageModel(7, MODEL.model_copy(update={"biases": True}))
    decayed, spared = TrainingStep(
        model, model, settings().training, CPU, objective=(next_token_loss, ())
    ).optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all(each.dim() == 2 for each in decayed["params"])
    assert all(each.dim() < 2 for each in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


# ------------------------------------------------------------------ by the loop


def test_a_stopped_training_that_goes_on_ends_as_one_never_stopped(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(text, tmp_path / "straight")
    take_step = Trainer._take_step

    def interrupted(self: Trainer) -> None:
        take_step(self)
        if self.place.step in (5, 8):
            os.kill(os.getpid(), signal.SIGTERM)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", interrupted)
        assert fit(text, run).step == 5
        assert fit(text, run, resume=True).step == 8
    fit(text, run, resume=True)
    assert bytes_of(run, 10) == bytes_of(tmp_path / "straight", 10)
    assert rows(run) == rows(tmp_path / "straight")
    assert list_steps(run) == list_steps(tmp_path / "straight")


def test_the_best_is_the_lowest_dev_loss(text: Path, tmp_path: Path) -> None:
    outcome = fit(text, tmp_path / "run", seed=1)
    evaluations = [row for row in rows(tmp_path / "run") if row["kind"] == "evaluation"]
    losses = {row["step"]: row["dev_loss"] for row in evaluations}
    assert [row["step"] for row in evaluations] == [3, 6, 9, 10]
    best = min(losses, key=lambda step: losses[step])
    assert (outcome.best_step, outcome.best_score) == (best, losses[best])
    assert best_step(tmp_path / "run") == best
    for row in evaluations:
        assert row["dev_bits"] == pytest.approx(row["dev_loss"] / math.log(2))
        assert row["dev_perplexity"] == pytest.approx(math.exp(row["dev_loss"]))
        assert list(row["scales"]) == ["decoder.0.self"]
    assert (tmp_path / "run/curves.png").stat().st_size > 1_000


def test_a_rising_loss_stops_and_a_plateau_lowers_the_rate(text: Path, tmp_path: Path) -> None:
    wild = Schedule(kind="plateau", peak=0.5, warmup=1, decay=0.5, patience=1, floor=1e-9)
    outcome = fit(text, tmp_path / "run", schedule=wild, max_steps=80, evaluate_every=1, stop_after=8)
    assert outcome.reason == "dev loss has not fallen for 8 evaluations"
    evaluated = [row for row in rows(tmp_path / "run") if row["kind"] == "evaluation"]
    for past, before, row in zip(evaluated, evaluated[1:], evaluated[2:], strict=False):
        expected = 0.5 if before["dev_loss"] > past["dev_loss"] else 1.0
        assert row["learning_rate"] == pytest.approx(before["learning_rate"] * expected)


def test_a_repeated_pattern_is_learned_and_written(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abacadae\n" * 60)
    model = MODEL.model_copy(update={"dropout": LanguageModelDropout.everywhere(0.0), "positions": "rotary"})
    training = settings(max_steps=150, evaluate_every=150, batch=8).training
    given = TrainLanguageModel(model=model, training=training)
    outcome = train(tmp_path / "text.txt", tmp_path / "run", given, device="cpu", quiet=True)
    assert outcome is not None
    # the first of each window of 8 has one character to go by: after "a" four may come
    assert outcome.best_score < math.log(4) / 8 + 0.05
    generator = load(tmp_path / "run", device="cpu")
    assert isinstance(generator, TextGenerator)
    assert generator.generate("abacada", length=29, temperature=0) == ("abacadae\n" * 4)


def test_the_run_folder_is_whole(text: Path, tmp_path: Path) -> None:
    fit(text, tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    own, about = read_language_run(moved)
    assert own == settings()
    assert about.vocabulary == len(set(text.read_text(encoding="utf-8")))
    written = {which: load_generator(moved, checkpoint=which, device="cpu").generate("l") for which in ("last", "best")}
    assert all(len(each) == 501 for each in written.values())
    half = load(moved, device="cpu", precision="bfloat16").generate("l", length=5)
    assert len(half) == 6
    with pytest.raises(InputError, match="precision float16 is not known"):
        load_generator(moved, precision="float16")
    assert any(name.startswith("moment.decoder.0.attention") for name in load_checkpoint(moved, 10).training)


def test_a_run_is_not_taken_for_another_kind(text: Path, tmp_path: Path) -> None:
    fit(text, tmp_path / "run")
    with pytest.raises(InputError, match=r"run is a language model and does not translate; .* qknorm generate"):
        read_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"text\.txt is a text file and trains a language model; .* character-lm"):
        train(text, tmp_path / "other", Train(), device="cpu", quiet=True)
    assert not (tmp_path / "other").exists()
    with pytest.raises(InputError, match=r'needs settings, such as qknorm\.preset\("character-lm"\)'):
        train(text, tmp_path / "other", device="cpu", quiet=True)


def test_other_text_or_settings_do_not_resume(text: Path, tmp_path: Path) -> None:
    fit(text, tmp_path / "run")
    changed = tmp_path / "changed.txt"
    changed.write_text(text.read_text(encoding="utf-8") + "!", encoding="utf-8")
    with pytest.raises(InputError, match=r"other data than .*changed\.txt holds now; name the text file"):
        fit(changed, tmp_path / "run", resume=True)
    with pytest.raises(InputError, match=r"training\.batch would be another"):
        train(text, tmp_path / "run", settings(batch=5), resume=True, device="cpu", quiet=True)


@pytest.mark.parametrize(
    ("content", "training", "complaint"),
    [
        ("abcabca", {}, r"leaves 6 characters to train on, too few for a window of 8 .* lower model\.context"),
        ("abcd" * 4, {"held_out": 0.01}, r"leaves 0 characters to evaluate on; raise training\.held_out"),
    ],
)
def test_too_little_text_is_told(content: str, training: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(content)
    with pytest.raises(InputError, match=complaint):
        fit(tmp_path / "short.txt", tmp_path / "run", **training)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_names_the_first_bad_part(text: Path, tmp_path: Path) -> None:
    absurd = Schedule(kind="cosine", peak=1e37, warmup=0)
    with pytest.raises(TrainingDiverged, match=r"the loss is not finite; .*decoder\.0|the loss is not finite; .*words"):
        fit(text, tmp_path / "run", schedule=absurd)
