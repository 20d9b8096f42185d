"""Which runs the figures are drawn from."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from qknorm.studies.paper import figures


def planned(system: str, seed: int, pair: str = "gl-en", experiment: str = "2") -> SimpleNamespace:
    folder = Path(f"{pair}-{system}-{seed}")
    return SimpleNamespace(
        experiment=SimpleNamespace(name=experiment),
        pair=pair,
        seed=seed,
        system=SimpleNamespace(name=system),
        job=SimpleNamespace(folder=folder, run=folder / "run"),
    )


@pytest.mark.parametrize(
    ("finished", "with_weights", "seed"),
    [
        ("baseline-0 qknorm-0 baseline-1 qknorm-1", "baseline-0 qknorm-0 baseline-1 qknorm-1", 0),
        ("baseline-0 qknorm-0 baseline-1 qknorm-1", "baseline-0 baseline-1 qknorm-1", 1),  # only results came home
        ("baseline-0 qknorm-1", "baseline-0 qknorm-0 baseline-1 qknorm-1", None),
        ("baseline-0 qknorm-0", "", None),
    ],
)
def test_both_systems_of_one_seed_with_their_weights(monkeypatch, finished, with_weights, seed):
    def named(names):
        return {f"gl-en-{each}" for each in names.split()}

    scored, failed = SimpleNamespace(scores={"bleu": 20.0}), SimpleNamespace(scores={})
    monkeypatch.setattr(figures, "read_result", lambda folder: scored if folder.name in named(finished) else failed)
    monkeypatch.setattr(figures, "list_steps", lambda run: [100] if run.parent.name in named(with_weights) else [])
    plan = SimpleNamespace(
        planned=[
            *(planned(system, seed) for seed in (1, 0) for system in ("qknorm", "baseline")),
            planned("baseline", 0, pair="de-en"),
            planned("qknorm", 0, experiment="6"),
        ]
    )
    found = figures._runs_to_look_at(plan, "gl-en")
    if seed is None:
        assert found == {}
    else:
        assert [(name, each.seed, each.pair) for name, each in found.items()] == [
            ("baseline", seed, "gl-en"),
            ("qknorm", seed, "gl-en"),
        ]
        assert found["qknorm"].experiment.name == "2"
