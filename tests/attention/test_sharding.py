"""Adopted models under FSDP, 1 and 2, on two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qknorm.training.parallel import OLDEST_WITH_FSDP


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < OLDEST_WITH_FSDP, reason="before this PyTorch FSDP adds up wrongly on the CPU")
def test_shares_of_an_adopted_model_learn_what_the_whole_does() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    work = Path(__file__).with_name("sharding_work.py")
    done = subprocess.run(
        [*torchrun, str(work)], capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert done.stdout.count("equal") == 2
