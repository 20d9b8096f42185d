"""A training whose text is cut beside it: as a user's script runs it, and by as many as there are cores for."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qknorm
from qknorm.config import Prepare, Training
from qknorm.errors import InputError
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData
from qknorm.training import translation
from qknorm.training.translation import CORES, PairBatches, choose_workers

SCRIPT = """
import os, sys
from qknorm import train
from qknorm.config import Decoding, Model, Schedule, Train, Training
from qknorm.text.ahead import CutEpochs
from qknorm.training import translation

print("begins", flush=True)
started, cut = set(), CutEpochs.cut

def noted(self, epoch):
    found = cut(self, epoch)
    started.update(self.processes)
    if epoch == 3:
        print("epoch 3", flush=True)
    return found

CutEpochs.cut = noted
translation.choose_workers = lambda device: 2
outcome = train(
    sys.argv[1],
    sys.argv[2],
    Train(
        model=Model(width=16, feed_forward=16, encoder_layers=1, decoder_layers=1, heads=2),
        training=Training(batch_tokens=64, evaluate_every=10**6, bpe_dropout=0.2, max_steps=10**6),
        decoding=Decoding(beam=1, extra_length=1),
    ),
    device="cpu",
    quiet=True,
)
left = []
for process in started:
    try:
        os.kill(process, 0)
        left.append(process)
    except ProcessLookupError:
        pass
print(outcome.interrupted, len(started), left)
"""


def prepare_pairs(folder: Path) -> Path:
    lines = [f"w{i % 5} w{i % 7} w{i % 3}\tW{i % 5} W{i % 7} W{i % 3}\n" for i in range(105)]
    (folder / "pairs.tsv").write_text("".join(lines))
    prepare(Prepare(source="aa", target="bb", train=(folder / "pairs.tsv",)), folder / "data")
    return folder / "data"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no groups of processes")
def test_a_script_without_a_guard_cuts_ahead_and_ctrl_c_leaves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = str(Path(qknorm.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", home, prepend=os.pathsep)  # from another folder, src alone would lead nowhere
    prepare_pairs(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py", "data", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline() for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said, complaints = process.communicate(timeout=60)
    assert (begun, said) == (["begins\n", "epoch 3\n"], "True 2 []\n"), complaints
    assert "Traceback" not in complaints and "BPE-dropout" not in complaints


@pytest.mark.parametrize(
    ("cores", "team", "workers"), [(1, 1, 0), (2, 1, 1), (3, 1, 2), (64, 1, 2), (8, 8, 0), (8, 4, 1), (8, 2, 2)]
)
def test_one_core_stays_for_every_training(
    monkeypatch: pytest.MonkeyPatch, cores: int, team: int, workers: int
) -> None:
    monkeypatch.delenv(CORES, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which says nothing of how many trainings there are
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(team))
    monkeypatch.setattr(translation.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert choose_workers(torch.device("cuda")) == workers
    assert choose_workers(torch.device("cpu")) == 0
    monkeypatch.setattr(translation.os, "sched_getaffinity", lambda process: set(range(128)), raising=False)
    monkeypatch.setenv(CORES, str(cores))
    assert choose_workers(torch.device("cuda")) == workers


@pytest.mark.parametrize("told", ["", "0", "-1", "two"])
def test_a_share_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv(CORES, told)
    with pytest.raises(InputError, match=f"QKNORM_CORES is '{told}' in the environment; give the number of cores"):
        choose_workers(torch.device("cuda"))


def test_what_is_cut_does_not_depend_on_the_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    data, found = PreparedData.load(prepare_pairs(tmp_path)), []
    for cores in (1, 2, 16):
        monkeypatch.setenv(CORES, str(cores))
        batches = PairBatches(data, Training(batch_tokens=64, bpe_dropout=0.3), torch.device("cuda"))
        planned = batches._planned
        assert planned._cut is not None and len(planned._cut.processes) == min(2, cores - 1)
        read = []
        for epoch in range(3):
            batches.start_epoch(epoch)
            read.append([planned.arrays(planned.batches[number]).source.tolist() for number in planned.order])
        batches.close()
        found.append(read)
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]
