"""The loop: why it stops, what it repeats, how signals reach it, what a team shares."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from qknorm.config import Decoding, Dropout, Model, Prepare, Schedule, Train, Training
from qknorm.errors import InputError
from qknorm.text.batching import TrainingBatches
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData
from qknorm.training import interruption, loop, translation
from qknorm.training.checkpoint import best_step, list_steps, load_checkpoint, save_checkpoint
from qknorm.training.fit import train
from qknorm.training.interruption import Interruption
from qknorm.training.loop import Outcome, Trainer, TrainingDiverged
from qknorm.training.parallel import Team, choose_device, join_team
from qknorm.training.record import Recorder
from qknorm.training.run_folder import allowed_types
from qknorm.training.step import TrainingStep
from qknorm.training.writer import Writer

MODEL = Model(width=16, feed_forward=16, encoder_layers=1, decoder_layers=1, heads=2, dropout=Dropout.everywhere(0.1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lines = [(f"w{i % 5} w{i % 7} w{i % 3}", f"W{i % 5} W{i % 7} W{i % 3}") for i in range(105)]
    (folder / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in lines))
    prepare(Prepare(source="aa", target="bb", train=(folder / "pairs.tsv",)), folder / "data")
    return folder / "data"


def settings(**training: Any) -> Train:
    given = {"batch_tokens": 64, "max_steps": 6, "evaluate_every": 2, "log_every": 2, **training}
    given.setdefault("schedule", Schedule(kind="inverse-sqrt", warmup=2, peak=1e-3))
    return Train(model=MODEL, training=Training(**given), decoding=Decoding(beam=1, extra_length=1))


def fit(data: Path, run: Path, resume: bool = False, **training: Any) -> Outcome:
    outcome = train(data, run, None if resume else settings(**training), resume=resume, device="cpu", quiet=True)
    assert outcome is not None
    return outcome


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def test_the_same_seed_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(data, tmp_path / name, seed=seed)
    weights = [
        (tmp_path / name / "checkpoints/step-00000006/model.safetensors").read_bytes() for name in ("a", "b", "c")
    ]
    assert weights[0] == weights[1] != weights[2]
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_beside_the_training_the_best_and_the_end_are_saved_and_others_now_and_then(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(data, tmp_path / "plain", max_steps=12, keep=9)
    monkeypatch.setattr(Trainer, "_saves_beside", True)  # as on a GPU
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_SAVES", 1e9)
    outcome = fit(data, tmp_path / "run", max_steps=12, keep=9)
    best = {row["step"] for row in rows(tmp_path / "run") if row.get("best")}
    assert set(list_steps(tmp_path / "run")) == best | {12} < set(list_steps(tmp_path / "plain"))
    assert best_step(tmp_path / "run") == outcome.best_step
    assert rows(tmp_path / "run") == rows(tmp_path / "plain")


def test_the_end_is_evaluated_and_saved_once(data: Path, tmp_path: Path) -> None:
    outcome = fit(data, tmp_path / "run", max_steps=5, keep=2)
    assert (outcome.step, outcome.interrupted) == (5, False)
    assert outcome.reason == "reached training.max_steps (5)"
    assert [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "evaluation"] == [2, 4, 5]
    assert set(list_steps(tmp_path / "run")) == {4, 5} | {outcome.best_step}
    assert best_step(tmp_path / "run") == outcome.best_step


@pytest.mark.parametrize(
    ("training", "reason", "step"),
    [
        ({"max_evaluations": 2}, "reached training.max_evaluations (2)", 4),
        ({"max_minutes": 1e-9}, "reached training.max_minutes (1e-09)", 0),
        ({"stop_after": 1, "max_steps": 50}, "dev BLEU has not risen for 1 evaluations", None),
        (
            {"schedule": Schedule(kind="plateau", warmup=1, peak=1e-6, floor=1e-5)},
            "the learning rate fell under its floor (1e-05)",
            1,
        ),
    ],
)
def test_reasons_to_stop(data: Path, tmp_path: Path, training: dict[str, Any], reason: str, step: int | None) -> None:
    outcome = fit(data, tmp_path / "run", **training)
    assert outcome.reason == reason
    assert step is None or outcome.step == step


def interrupt_at(step: int, patch: pytest.MonkeyPatch) -> None:
    take_step = Trainer._take_step

    def interrupted(self: Trainer) -> None:
        take_step(self)
        if self.place.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Trainer, "_take_step", interrupted)


def model_bytes(run: Path, step: int) -> bytes:
    return (run / f"checkpoints/step-{step:08d}/model.safetensors").read_bytes()


@pytest.mark.parametrize(("workers", "early"), [(0, 0), (2, 0), (2, 1)])
def test_resuming_at_or_before_the_end_of_an_epoch_cut_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, early: int
) -> None:
    """With BPE-dropout the epochs differ in their number of batches; who cuts them ahead makes no difference."""
    given, prepared = {"batch_tokens": 256, "bpe_dropout": 0.5, "seed": 0}, PreparedData.load(data)
    batches = TrainingBatches(
        prepared.split("train"), prepared.tokenizer, ("aa", "bb"), given["batch_tokens"], given["seed"], 0.5
    )
    sizes = [len(batches.order)]
    while sizes[-1] == sizes[0] or len(sizes) == 1:
        batches.start_epoch(len(sizes))
        sizes.append(len(batches.order))
    stop = sum(sizes[:-1]) + min(sizes[0], sizes[-1])
    given |= {"max_steps": stop + 2, "evaluate_every": stop + 2}
    fit(data, tmp_path / "straight", **given)
    monkeypatch.setattr(translation, "choose_workers", lambda device: workers)
    with monkeypatch.context() as patch:
        interrupt_at(stop - early, patch)
        assert fit(data, tmp_path / "run", **given).interrupted
    fit(data, tmp_path / "run", resume=True)
    assert model_bytes(tmp_path / "run", stop + 2) == model_bytes(tmp_path / "straight", stop + 2)
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")


def test_an_interrupted_run_ends_with_the_checkpoints_of_one_never_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(data, tmp_path / "straight", keep=2)
    with monkeypatch.context() as patch:
        interrupt_at(5, patch)
        assert fit(data, tmp_path / "run", keep=2).step == 5
    assert 5 in list_steps(tmp_path / "run")
    fit(data, tmp_path / "run", resume=True)
    assert list_steps(tmp_path / "run") == list_steps(tmp_path / "straight")


@pytest.mark.parametrize(("stop", "batches"), [(4, 1), (7, 0)])
def test_a_signal_within_an_evaluation_stops_it_and_who_goes_on_repeats_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, batches: int
) -> None:
    """Before its first batch of sentences or after it, in the midst of a training or at its last step."""
    given = {"max_steps": 7, "keep": 2}
    fit(data, tmp_path / "straight", **given)
    run, measure, shown = tmp_path / "run", Trainer._measure, Recorder.show_progress

    def press(self: Trainer) -> Any:
        if self.place.step == stop and not batches:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self)

    def press_later(self: Recorder, stage: str, done: int, total: int | None) -> None:
        shown(self, stage, done, total)
        if len([row for row in rows(run) if row["kind"] == "evaluation"]) == stop // 2 - (stop < 7):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_measure", press)
        if batches:
            patch.setattr(Recorder, "show_progress", press_later)
        outcome = fit(data, run, **given)
    assert outcome.interrupted and outcome.reason == "stopped by SIGTERM" and outcome.step == stop
    assert list_steps(run)[-1] == stop
    assert stop not in [row["step"] for row in rows(run) if row["kind"] == "evaluation"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_measure", lambda self: None)
        with pytest.raises(TrainingDiverged, match=f"step {stop}: the loss is not finite"):
            fit(data, run, resume=True)
    assert not fit(data, run, resume=True).interrupted
    assert rows(run) == rows(tmp_path / "straight")
    assert list_steps(run) == list_steps(tmp_path / "straight")
    assert best_step(run) == best_step(tmp_path / "straight")
    for step in list_steps(run):
        for path in (run / f"checkpoints/step-{step:08d}").iterdir():
            assert path.read_bytes() == (tmp_path / "straight" / path.relative_to(run)).read_bytes()


def test_the_first_signal_is_told_of_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(3, monkeypatch)
    fit(data, tmp_path / "run")
    told = "SIGTERM: the training saves and leaves; a second signal leaves at once, without saving\n"
    assert capfd.readouterr().err == told


def test_an_infinite_gradient_changes_no_weight(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = TrainingStep._update

    def spoil(self: TrainingStep) -> None:
        if self.sums[3] == 1:
            next(self.model.parameters()).grad.fill_(torch.inf)
        update(self)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "_update", spoil)
        with pytest.raises(TrainingDiverged, match=r"step 2: .* the last good weights are those of step 2 in"):
            fit(data, run, log_every=50)
    fit(data, tmp_path / "one", max_steps=1)
    weights, before = load_checkpoint(run, 2).model, load_checkpoint(tmp_path / "one", 1).model
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert fit(data, run, resume=True).step == 6


def test_a_bad_step_that_no_log_has_seen_is_not_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where steps are not waited for."""
    fit(data, tmp_path / "straight", log_every=50)
    take_step, run = Trainer._take_step, tmp_path / "run"

    def unnoticed(self: Trainer) -> None:
        take_step(self)
        if self.place.step == 4:
            self.stepper.sums[0], self.stepper.sums[4] = torch.nan, 1

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", unnoticed)
        with pytest.raises(TrainingDiverged, match=r"step 4: .* the last good weights are those of step 2 in"):
            fit(data, run, log_every=50)
    assert list_steps(run) == [2]
    fit(data, run, resume=True)
    assert model_bytes(run, 6) == model_bytes(tmp_path / "straight", 6)


def test_spoilt_sums_of_a_checkpoint_stop_no_resume(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(data, run, max_steps=3)
    found = load_checkpoint(run, 2)
    (run / "checkpoints/step-00000003").rename(tmp_path / "away")
    spoilt = found.training | {"sums": torch.tensor([torch.nan, torch.nan, 9.0, 1.0, 1.0])}
    save_checkpoint(run, 2, found.model, spoilt, found.state)
    assert fit(data, run, resume=True).step == 3


def test_a_new_run_needs_settings(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'needs settings, such as qknorm\.preset\("low-resource"\)'):
        train(data, tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


def test_signs_of_life_change_nothing_that_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(data, tmp_path / "silent", log_every=3)
    shown: list[int] = []
    translated: list[tuple[str, int, int | None]] = []
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_SIGNS", 0.0)
    monkeypatch.setattr(Recorder, "show_step", lambda _, step, *more: shown.append(step))
    monkeypatch.setattr(Recorder, "show_progress", lambda _, *told: translated.append(told))
    fit(data, tmp_path / "lively", log_every=3)
    assert shown == [1, 2, 4, 5]
    assert len(translated) == 3 and translated[0][0] == "translate" and translated[0][1] == translated[0][2]
    assert rows(tmp_path / "lively") == rows(tmp_path / "silent")
    assert model_bytes(tmp_path / "lively", 6) == model_bytes(tmp_path / "silent", 6)


def test_one_too_few_batches_are_told(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gives \d+ batches, fewer than the 99 of one step"):
        fit(data, tmp_path / "run", accumulate=99)


def test_an_epoch_of_fewer_batches_than_a_step_takes_some_twice(data: Path, tmp_path: Path) -> None:
    """Epochs that BPE-dropout cuts anew differ in their number of batches; the first has enough."""
    prepared = PreparedData.load(data)
    batches = TrainingBatches(prepared.split("train"), prepared.tokenizer, ("aa", "bb"), 256, 0, 0.5)
    sizes = [len(batches.order)]
    for epoch in range(1, 40):
        batches.start_epoch(epoch)
        sizes.append(len(batches.order))
    fewer = next(epoch for epoch, size in enumerate(sizes) if size < sizes[0])
    outcome = fit(
        data, tmp_path / "run", batch_tokens=256, bpe_dropout=0.5, seed=0, accumulate=sizes[0], max_steps=fewer + 1
    )
    assert outcome.step == fewer + 1


def test_a_target_that_bpe_dropout_alone_yields_may_be_produced(data: Path) -> None:
    prepared = PreparedData.load(data)
    plain, dropped = (allowed_types(settings(bpe_dropout=share), prepared) for share in (0.0, 0.5))
    assert plain is not None and dropped is not None and (dropped & ~plain).any() and not (plain & ~dropped).any()
    batches = TrainingBatches(prepared.split("train"), prepared.tokenizer, ("aa", "bb"), 256, 0, 0.5)
    targets = torch.cat([torch.from_numpy(batches.arrays(batch).target_out).flatten() for batch in batches.batches])
    assert dropped[targets[targets != 0]].all() and not plain[targets[targets != 0]].all()


def test_a_best_mark_that_was_not_written_is_made_up_for(data: Path, tmp_path: Path) -> None:
    """As by a kill between writing a checkpoint and marking it."""
    run = tmp_path / "run"
    best = fit(data, run).best_step
    (run / "checkpoints/best.json").unlink()
    fit(data, run, resume=True)
    assert best_step(run) == best


def test_starting_again_forgets_what_died_before_its_first_checkpoint(data: Path, tmp_path: Path) -> None:
    fit(data, tmp_path / "straight")
    run = tmp_path / "run"
    fit(data, run)
    for step in list_steps(run):
        (run / f"checkpoints/step-{step:08d}").rename(tmp_path / f"away-{step}")
    (run / "checkpoints/best.json").unlink()
    fit(data, run)
    assert rows(run) == rows(tmp_path / "straight")


def test_other_settings_than_the_runs_are_refused(data: Path, tmp_path: Path) -> None:
    fit(data, tmp_path / "run")
    other = settings(schedule=Schedule(kind="inverse-sqrt", warmup=2, peak=2e-3))
    with pytest.raises(InputError, match=r"training\.schedule\.peak would be another"):
        train(data, tmp_path / "run", other, resume=True, device="cpu", quiet=True)


def test_moments_are_named_by_their_parameters(data: Path, tmp_path: Path) -> None:
    fit(data, tmp_path / "run", max_steps=2)
    found = load_checkpoint(tmp_path / "run", 2)
    name = "decoder.0.cross_attention.norm.scale"
    assert found.training[f"moment.{name}.exp_avg"].shape == found.model[name].shape == (1,)
    assert float(found.training[f"moment.{name}.step"]) == 2


# ------------------------------------------------------------------ signals and teams


def test_a_second_signal_at_once_is_the_same_wish_and_later_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with Interruption() as caught:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert caught.name == "SIGINT"
        monkeypatch.setattr(interruption, "AT_ONCE", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_beside_the_main_thread_signals_are_left_alone() -> None:
    names: list[str | None] = []

    def enter() -> None:
        with Interruption() as caught:
            names.append(caught.name)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert names == [None]


def test_a_team_of_one_agrees_with_itself() -> None:
    team = Team(0, 1, torch.device("cpu"))
    sums = torch.ones(3)
    team.pool(sums)
    assert sums.tolist() == [1, 1, 1]
    assert team.agree(True) and not team.agree(False)
    with pytest.raises(InputError, match="no room"):
        team.lead(lambda: (_ for _ in ()).throw(InputError("no room")))


def test_devices_by_name() -> None:
    assert join_team("cpu").device == choose_device("cpu") == torch.device("cpu")
    for name in ("tpu", "cuda:one", "cpu:x"):
        with pytest.raises(InputError, match="is no device"):
            choose_device(name)


def test_what_a_writer_says_at_the_end_is_told_to_the_whole_team(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def fail(_: Writer) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(Writer, "wait", fail)
    monkeypatch.setattr(Team, "share", lambda _, value: told.append(value) or value)
    monkeypatch.setattr(Trainer, "_save", lambda _: None)
    with pytest.raises(InputError, match="the disk is full"):
        fit(data, tmp_path / "run")
    assert told[-1] == "the disk is full"


def test_a_training_that_an_error_ends_leaves_nobody_writing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[Writer] = []

    def write_then_fail(trainer: Trainer) -> None:
        writers.append(trainer._writer)
        trainer._writer.submit(lambda: time.sleep(0.3), wait=False)
        raise OSError("out of luck")

    monkeypatch.setattr(Trainer, "_evaluate", write_then_fail)
    with pytest.raises(OSError, match="out of luck"):
        fit(data, tmp_path / "run")
    assert writers and not writers[0].busy


def test_a_training_makes_its_gpu_the_current_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = [None]

    @contextmanager
    def within(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def stop(*_: Any) -> None:
        raise InputError(f"on {current[-1]}")

    second = torch.device("cuda", 1)
    monkeypatch.setattr("qknorm.training.fit.join_team", lambda _: Team(0, 1, second))
    monkeypatch.setattr("qknorm.training.fit._open_run", stop)
    monkeypatch.setattr(torch.cuda, "device", within)
    with pytest.raises(InputError, match="on cuda:1"):
        train(data, tmp_path / "run", settings(), quiet=True)
    assert current == [None]


def test_a_model_that_is_large_for_a_cpu_is_told_of(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, told in ((10**7, False), (100, True)):
        monkeypatch.setattr("qknorm.training.fit.MOST_FOR_A_CPU", most)
        train(data, tmp_path / f"run-{most}", settings(max_steps=2), device="cpu")
        assert ("hours to days" in " ".join(capsys.readouterr().out.split())) is told


def test_a_training_that_ends_within_its_warm_up_is_told_of(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for warmup, told in ((2, True), (1, False)):
        train(data, tmp_path / f"run-{warmup}", settings(max_steps=2, schedule=Schedule(warmup=warmup)), device="cpu")
        assert ("(2) ends within the warm-up (2 steps)" in " ".join(capsys.readouterr().out.split())) is told
