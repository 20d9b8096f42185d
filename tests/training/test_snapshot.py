"""What a checkpoint holds: copies on the GPU for a training alone, on the CPU for a team."""

from types import SimpleNamespace
from typing import Any

import pytest

from qknorm.training import snapshot


@pytest.mark.parametrize(("on_gpu", "alone", "room"), [(False, True, True), (True, False, True), (True, True, False)])
def test_copies_stay_on_a_gpu_only_for_a_training_alone_that_has_room(
    on_gpu: bool, alone: bool, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def answer(*_: object, stay: bool) -> dict[str, Any]:
        asked.append(stay)
        return {}

    model = object()  # of shares, too, the module that steps call is the model itself
    spread: Any = SimpleNamespace(module=model, inner=model, weights=answer, moments=answer)
    sums: Any = SimpleNamespace(is_cuda=on_gpu, device="cuda:0", cpu=lambda: "on the CPU")
    monkeypatch.setattr(snapshot, "_has_room", lambda *_: room)
    optimizer: Any = None
    taken = snapshot.take_snapshot(spread, optimizer, sums, alone)
    assert asked == [False, False] and taken.ready is None and taken.training == {"sums": "on the CPU"}
