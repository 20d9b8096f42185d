"""Freed memory is used again, which shows in the pages that the system has to find; in a process of its own."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from qknorm.training.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def pages_found():
    for _ in range(3):
        torch.ones(4_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(4_000_000)
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(pages_found())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_memory_once_found_is_used_again():
    found = {
        how: int(subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True).stdout)
        for how in ("keep", "as it is")
    }
    assert found["keep"] < found["as it is"] / 2


def test_elsewhere_nothing_is_done(monkeypatch):
    from qknorm.training import memory

    asked = []
    monkeypatch.setattr(memory.ctypes, "CDLL", asked.append)
    for platform_name, libraries in (("darwin", []), ("linux", [None])):
        monkeypatch.setattr(memory.sys, "platform", platform_name)
        memory.keep_freed_memory()
        assert asked == libraries
