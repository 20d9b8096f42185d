"""What is read is what was written, and damage is noticed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from qknorm.errors import InputError
from qknorm.training import checkpoint
from qknorm.training.checkpoint import (
    average_checkpoints,
    best_step,
    discard_after,
    list_steps,
    load_checkpoint,
    load_model_weights,
    load_newest_sound,
    mark_best,
    prune,
    save_checkpoint,
    save_weights,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def save(run: Path, *steps: int) -> None:
    for step in steps:
        model = {"weight": torch.full((4, 3), float(step)), "count": torch.tensor(step)}
        save_checkpoint(run, step, model, {"moment": torch.full((4, 3), step / 2)}, {"epoch": step // 10})


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def damage(path: Path, position: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def names_in(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert right[name].dtype == tensor.dtype and right[name].shape == tensor.shape, name
        assert torch.equal(right[name], tensor), name


# ------------------------------------------------------------------ round trips


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    state=st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists)
    ),
)
def test_any_tensors_and_any_json_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtypes: list[torch.dtype], state: dict[str, Any]
) -> None:
    run = tmp_path_factory.mktemp("run")
    tensors = {f"tensor {i}": (10 * torch.randn(shape)).abs().to(dtypes[i]) for i, shape in enumerate(shapes)}
    save_checkpoint(run, 7, tensors, {"generator": torch.get_rng_state(), **tensors}, state)
    loaded = load_checkpoint(run, "last")
    assert_same(loaded.model, tensors)
    assert_same(loaded.training, {"generator": torch.get_rng_state(), **tensors})
    assert repr(loaded.state) == repr(state)  # as text, because nan is not equal to itself
    assert (loaded.step, loaded.folder) == (7, folder_of(run, 7))


def test_tied_strided_and_learning_tensors_are_saved(tmp_path: Path) -> None:
    embedding = torch.nn.Parameter(torch.randn(5, 4))
    model = {"source": embedding, "target": embedding, "row": embedding[1], "turned": embedding.t()}
    save_checkpoint(tmp_path, 1, model, {}, {})
    loaded = load_model_weights(tmp_path, 1)
    assert_same(loaded, {name: tensor.detach() for name, tensor in model.items()})
    loaded["source"].zero_()
    assert loaded["target"].any(), "what is loaded shares no memory"


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    for run in (tmp_path / "a", tmp_path / "b"):
        save(run, 3)
    for name in ("model.safetensors", "training.safetensors", "state.json"):
        assert (folder_of(tmp_path / "a", 3) / name).read_bytes() == (folder_of(tmp_path / "b", 3) / name).read_bytes()


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in folder_of(tmp_path, 1).iterdir()} == {0o644}
    assert folder_of(tmp_path, 1).stat().st_mode & 0o777 == 0o755


def test_a_loaded_checkpoint_outlives_its_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    loaded = load_checkpoint(tmp_path, 1)
    for file in loaded.folder.iterdir():
        file.write_bytes(b"")
    assert torch.equal(loaded.model["weight"], torch.ones(4, 3))


def test_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save_checkpoint(tmp_path, 5, {"other": torch.zeros(1)}, {}, {})
    assert list(load_checkpoint(tmp_path, 5).model) == ["other"]
    assert names_in(tmp_path) == ["step-00000005"]


# ------------------------------------------------------------------ best, last, pruning


def test_steps_are_numbers_not_words(tmp_path: Path) -> None:
    save(tmp_path, 100_000_000, 99_999_999, 5)
    (tmp_path / "checkpoints" / "step-7").mkdir()
    (tmp_path / "checkpoints" / "step-000000005").mkdir()
    (tmp_path / "checkpoints" / "step-00000009").write_text("a file")
    assert list_steps(tmp_path) == [5, 99_999_999, 100_000_000]
    assert load_checkpoint(tmp_path, "last").step == 100_000_000


def test_best_is_the_one_marked_or_else_the_last_sound(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    assert best_step(tmp_path) is None
    assert load_checkpoint(tmp_path, "best").step == 30
    damage(folder_of(tmp_path, 30) / "model.safetensors")
    assert load_checkpoint(tmp_path, "best").step == 20
    assert torch.equal(load_model_weights(tmp_path, "best")["count"], torch.tensor(20))
    mark_best(tmp_path, 10)
    assert load_checkpoint(tmp_path, "best").step == 10
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {"step": 10}


def test_a_damaged_best_is_an_error_not_another_model(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    mark_best(tmp_path, 10)
    damage(folder_of(tmp_path, 10) / "model.safetensors")
    with pytest.raises(InputError, match="step-00000010 is damaged"):
        load_model_weights(tmp_path, "best")


def test_a_best_file_that_names_nothing_says_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, 10)
    best = tmp_path / "checkpoints" / "best.json"
    for content in ("", "[]", '{"step": "ten"}', "\xff"):
        best.write_text(content, encoding="latin-1")
        with pytest.raises(InputError, match=r"best\.json does not name a step"):
            load_checkpoint(tmp_path, "best")
    best.write_text('{"step": 11}')
    with pytest.raises(InputError, match="names step 11, which is not there"):
        load_checkpoint(tmp_path, "best")
    with pytest.raises(InputError, match="does not exist"):
        mark_best(tmp_path, 11)


@settings(max_examples=25)
@given(steps=st.sets(st.integers(0, 50), min_size=1, max_size=8), keep=st.integers(1, 9), data=st.data())
def test_pruning_keeps_the_best_and_the_last(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep: int, data: st.DataObject
) -> None:
    run = tmp_path_factory.mktemp("run")
    for step in steps:
        folder_of(run, step).mkdir(parents=True)
    best = data.draw(st.none() | st.sampled_from(sorted(steps)))
    if best is not None:
        mark_best(run, best)
    kept = set(sorted(steps)[-keep:]) | ({best} if best is not None else set())
    assert prune(run, keep) == sorted(steps - kept)
    assert list_steps(run) == sorted(kept)


def test_one_between_evaluations_is_kept_only_while_it_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 25)
    assert prune(tmp_path, 2, every=10) == [10]
    save(tmp_path, 30)
    assert prune(tmp_path, 2, every=10) == [25]
    assert list_steps(tmp_path) == [20, 30]


def test_going_on_from_an_earlier_step_discards_the_later_ones(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    mark_best(tmp_path, 10)
    assert discard_after(tmp_path, 20) == [30]
    assert (list_steps(tmp_path), best_step(tmp_path)) == ([10, 20], 10)
    mark_best(tmp_path, 20)
    assert discard_after(tmp_path, 10) == [20]
    assert best_step(tmp_path) is None
    assert discard_after(tmp_path / "new run", 0) == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, 0)


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "state.json"])
def test_every_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 2)
    path = folder_of(tmp_path, 2) / name
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        damage(path, position)
        found, sentences = load_newest_sound(tmp_path)
        path.write_bytes(whole)
        assert found is not None and found.step == 1
        assert len(sentences) == 1
        assert sentences[0].startswith(f"checkpoints/step-00000002 is damaged ({name}")
        assert sentences[0].endswith("going on from step 1")


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "state.json"])
def test_cut_emptied_and_missing_files_are_noticed(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = folder_of(tmp_path, 1) / name
    whole = path.read_bytes()
    for content in (b"", whole[:-9], whole + b"\0", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"step-00000001 is damaged \({name}"):
            load_checkpoint(tmp_path, "last")
    path.unlink()
    with pytest.raises(InputError, match=f"{name} is missing"):
        load_checkpoint(tmp_path, 1)
    path.mkdir()
    with pytest.raises(InputError, match=r"no checkpoint of .* can be read: checkpoints/step-00000001 is damaged"):
        load_newest_sound(tmp_path)
    assert list_steps(tmp_path) == [1]


def test_the_model_alone_loads_beside_damaged_optimiser_state(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (folder_of(tmp_path, 1) / "training.safetensors").unlink()
    assert torch.equal(load_model_weights(tmp_path, 1)["weight"], torch.ones(4, 3))


def test_a_renamed_checkpoint_does_not_pass_for_another_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder_of(tmp_path, 1).rename(folder_of(tmp_path, 9))
    with pytest.raises(InputError, match="is of step 1"):
        load_checkpoint(tmp_path, 9)


def test_another_format_is_an_error_and_never_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FORMAT", 2)
        save(tmp_path, 2)
    with pytest.raises(InputError, match=r"another version of qknorm \(format 2"):
        load_newest_sound(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert load_newest_sound(tmp_path) == (None, [])
    assert list_steps(tmp_path / "nowhere") == []
    with pytest.raises(InputError, match="holds no checkpoint; train it first"):
        load_checkpoint(tmp_path, "last")
    save(tmp_path, 1, 2)
    with pytest.raises(InputError, match="no checkpoint of step 3; it has 1, 2"):
        load_checkpoint(tmp_path, 3)


# ------------------------------------------------------------------ averaging and export


def test_the_average_of_known_numbers(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, 2.0), (3, 4.5)):
        model = {
            "single": torch.tensor([value, -value]),
            "half": torch.tensor([value], dtype=torch.bfloat16),
            "double": torch.tensor([value], dtype=torch.float64),
            "steps": torch.tensor(step),
            "mask": torch.tensor([step == 3]),
        }
        save_checkpoint(tmp_path, step, model, {}, {})
    expected = {
        "single": torch.tensor([2.5, -2.5]),
        "half": torch.tensor([2.5], dtype=torch.bfloat16),
        "double": torch.tensor([2.5], dtype=torch.float64),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True]),
    }
    assert_same(average_checkpoints(tmp_path, [2, 1, 3, 3]), expected)
    assert_same(average_checkpoints(tmp_path, [3]), load_model_weights(tmp_path, 3))


def test_small_differences_are_not_rounded_away(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, 1.0), (3, 2.0**24)):  # in float32, 2²⁴ + 1 is 2²⁴
        save_checkpoint(tmp_path, step, {"w": torch.tensor([value])}, {}, {})
    assert average_checkpoints(tmp_path, [1, 2, 3])["w"].item() == (2**24 + 2) / 3


@settings(max_examples=25)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=5))
def test_an_average_lies_between_its_parts(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    run = tmp_path_factory.mktemp("run")
    for step, value in enumerate(values):
        save_checkpoint(run, step, {"w": torch.tensor([value])}, {}, {})
    mean = average_checkpoints(run, range(len(values)))["w"].item()
    assert min(values) <= mean <= max(values)


def test_models_that_differ_are_not_averaged(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"a": torch.zeros(2), "b": torch.zeros(1)}, {}, {})
    save_checkpoint(tmp_path, 2, {"a": torch.zeros(2)}, {}, {})
    save_checkpoint(tmp_path, 3, {"a": torch.zeros(2, 1)}, {}, {})
    with pytest.raises(InputError, match="step 1 has a tensor b, step 2 has none"):
        average_checkpoints(tmp_path, [1, 2])
    with pytest.raises(InputError, match=r"a is \[2, 1\] at step 3 and \[2\] at step 2"):
        average_checkpoints(tmp_path, [2, 3])
    with pytest.raises(InputError, match="at least one step"):
        average_checkpoints(tmp_path, [])


def test_exported_weights_carry_their_metadata_and_are_the_same_every_time(tmp_path: Path) -> None:
    tensors = {"ñ": torch.randn(3, 2), "tied": torch.zeros(7, dtype=torch.uint8)}
    tensors["again"] = tensors["tied"]
    metadata = {letter: f"“{letter}”\n" for letter in "qknorm galego"}
    paths = [tmp_path / f"{i}.safetensors" for i in range(5)]
    for path in paths:
        save_weights(path, tensors, metadata)
    assert len({path.read_bytes() for path in paths}) == 1
    assert_same(load_file(paths[0]), tensors)
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == metadata
    save_weights(paths[0], tensors, {})
    assert_same(load_file(paths[0]), tensors)
