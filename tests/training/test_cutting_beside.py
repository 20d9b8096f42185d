"""A training whose text is cut beside it, as a user's script runs it: without a guard, ended by Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qknorm.config import Prepare
from qknorm.text.prepare import prepare

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


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no groups of processes")
def test_a_script_without_a_guard_cuts_ahead_and_ctrl_c_leaves_nobody(tmp_path: Path) -> None:
    lines = [f"w{i % 5} w{i % 7} w{i % 3}\tW{i % 5} W{i % 7} W{i % 3}\n" for i in range(105)]
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    prepare(Prepare(source="aa", target="bb", train=(tmp_path / "pairs.tsv",)), tmp_path / "data")
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
