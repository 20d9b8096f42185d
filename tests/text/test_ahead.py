"""Text cut ahead by processes: the same text whoever cuts it, and nobody left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from qknorm.text import ahead
from qknorm.text.ahead import CutEpochs
from qknorm.text.cutting import Cutter, number_words
from qknorm.text.subwords import Tokenizer

HOME = str(Path(ahead.__file__).parents[2])
SIDES = [[f"{word} casa {n} branca" for n in range(45)] for word in ("the", "libro")]

CHATTER = "import sys; sys.stderr.write('a word too much\\n' * 20_000)\n"
"""More than a pipe holds that nobody reads."""
NO_MEMORY = f"""{CHATTER}
import numpy.random

def refuse(seed):
    raise MemoryError("there is no room for a dozen numbers")

numpy.random.default_rng = refuse
"""
NO_NUMPY = "import sys; sys.modules['numpy'] = None"
MANY_LINES = "import os; os.write(2, b'first\\n\\x1b[31m  second\\tline.\\n \\n'); os._exit(4)"
TOO_LONG = "import os; os.write(2, b'Error: ' + b'x' * 10_000); os._exit(1)"

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc to look into")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE", 10)


@pytest.fixture
def make() -> Iterator[Callable[[int], CutEpochs]]:
    tokenizer = Tokenizer.train([line for side in SIDES for line in side], 60, pretokenized=False)
    rules, words, lines = number_words(tokenizer, SIDES)
    made: list[CutEpochs] = []

    def make(workers: int) -> CutEpochs:
        made.append(CutEpochs(Cutter(rules, words, 0.3), lines, seed=5, workers=workers))
        return made[-1]

    make.made = made  # type: ignore[attr-defined]
    yield make
    for each in made:
        each.close()


def content(epochs: CutEpochs, epoch: int) -> list[list[list[int]]]:
    sides = epochs.cut(epoch)
    return [[array.tolist() for array in side] for side in sides]


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def count_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def alive(process: int) -> bool:
    """Whether there is such a process that is more than a name."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_same_whoever_cuts_and_in_whatever_order(make):
    plain = make(0)
    due = {epoch: content(plain, epoch) for epoch in (0, 1, 2, 7)}
    assert len({str(each) for each in due.values()}) == 4
    assert [len(starts) for _, starts in due[0]] == [46, 46]
    for workers in (1, 3):
        epochs = make(workers)
        assert len(epochs.processes) == workers
        for epoch in (0, 1, 2, 7, 1, 0):
            assert content(epochs, epoch) == due[epoch]


def test_two_epochs_are_cut_ahead_and_no_more(make, monkeypatch):
    due = [content(make(0), epoch) for epoch in range(3)]
    epochs = make(1)
    assert content(epochs, 0) == due[0]
    wait_for(lambda: [len(done) for done in epochs._board._done.values()] == [10, 10])
    time.sleep(0.05)
    assert list(epochs._board._done) == [1, 2]

    def never(*_: object) -> None:
        raise AssertionError("the text was ready")

    monkeypatch.setattr(epochs._board._cutter, "cut", never)
    assert content(epochs, 1) == due[1]


@pytest.mark.parametrize("killed", [1, 2])
def test_processes_that_die_cost_one_warning(make, killed):
    due = [content(make(0), epoch) for epoch in range(6)]
    epochs = make(2)
    assert content(epochs, 0) == due[0]
    for process in epochs.processes[:killed]:
        os.kill(process, signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while len(epochs.processes) > 2 - killed:  # who is dead is noticed when asked for something
            for epoch in (1, 4):
                assert content(epochs, epoch) == due[epoch]
        for epoch in (3, 5):
            assert content(epochs, epoch) == due[epoch]
    assert len(caught) == 1
    assert "ended with status -9; BPE-dropout goes on" in str(caught[0].message)


@pytest.fixture
def at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has every process do something first, before it is one that cuts."""

    def at_start(script: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(script)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return at_start


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (NO_MEMORY, "status 1: MemoryError: there is no room for a dozen numbers"),
        (NO_NUMPY, "status 1: ModuleNotFoundError: import of numpy halted; None in sys.modules"),
        (MANY_LINES, "status 4: [31m  second line"),
        (TOO_LONG, f"status 1: Error: {'x' * 293}…"),
        ("import os; os._exit(5)", "status 5"),
    ],
)
def test_who_dies_says_why_in_one_sentence(make, at_start, capfd, script, told):
    due = content(make(0), 0)
    at_start(script)
    epochs = make(1)
    epochs._board.ask_for(range(1))
    wait_for(lambda: not epochs.processes)
    with pytest.warns(UserWarning, match="BPE-dropout") as caught:
        assert content(epochs, 0) == due
    (warning,) = caught
    assert str(warning.message).startswith(f"a process that cut ahead ended with {told}; BPE-dropout goes on with 0 ")
    assert "\n" not in str(warning.message)
    assert capfd.readouterr() == ("", "")


def test_one_that_talks_much_cuts_nevertheless_and_old_words_explain_no_death(make, at_start):
    due = [content(make(0), epoch) for epoch in (0, 5)]
    at_start(CHATTER)
    epochs = make(1)
    assert content(epochs, 0) == due[0]
    wait_for(lambda: [len(done) for done in epochs._board._done.values()] == [10, 10])
    os.kill(epochs.processes[0], signal.SIGKILL)
    epochs._board.ask_for(range(5, 6))
    wait_for(lambda: not epochs.processes)
    with pytest.warns(UserWarning, match="ended with status -9; BPE-dropout goes on with 0"):
        assert content(epochs, 5) == due[1]


def test_one_whose_answer_makes_no_sense_is_given_up(make, at_start):
    due = content(make(0), 0)
    at_start("print('good morning', flush=True)")
    epochs = make(1)
    epochs._board.ask_for(range(1))
    wait_for(lambda: not epochs.processes)
    with pytest.warns(UserWarning, match=r"was given up: json\.decoder\.JSONDecodeError: .*; BPE-dropout goes on"):
        assert content(epochs, 0) == due


def test_without_a_file_for_last_words_it_is_cut_ahead_all_the_same(make, monkeypatch):
    def refuse(**_: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(ahead.tempfile, "TemporaryFile", refuse)
    epochs = make(1)
    assert content(epochs, 0) == content(make(0), 0)
    os.kill(epochs.processes[0], signal.SIGKILL)
    epochs._board.ask_for(range(5, 6))
    wait_for(lambda: not epochs.processes)
    with pytest.warns(UserWarning, match="ended with status -9; BPE-dropout"):
        content(epochs, 5)


@pytest.mark.parametrize("busy", [True, False])
def test_an_ordinary_end_is_silent(busy):
    """Its pipes close, as where the parent is dead: while it waits, or while it answers."""
    tokenizer = Tokenizer.train([line for side in SIDES for line in side], 60, pretokenized=False)
    rules, words, (lines,) = number_words(tokenizer, [["a branca casa"] * 40_000])
    process = ahead.start_process()
    ahead.send(process.stdin, (np.array([0.5]), *rules, *words))
    if busy:
        ahead.send(process.stdin, (np.array([1, 2]), *lines))
        assert process.stdout.read(1)
    process.stdin.close()
    process.stdout.close()
    assert process.wait(30) == 0
    assert ahead._leave(process) == "status 0"
    assert process.stderr.closed


def test_where_no_process_can_be_started_it_is_cut_here(make, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    epochs = make(2)
    with pytest.warns(UserWarning, match="/nowhere/python"):
        assert content(epochs, 0) == content(make(0), 0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    epochs, plain = make(1), make(0)
    epochs._board.ask_for(range(1))
    wait_for(lambda: not epochs.processes)
    with pytest.warns(UserWarning, match="status 1; .* with 0 beside"):
        assert content(epochs, 0) == content(plain, 0)


def test_a_process_that_sleeps_is_not_waited_for(make, monkeypatch):
    monkeypatch.setattr(ahead, "PATIENCE", 0.1)
    due, epochs = content(make(0), 4), make(1)
    content(epochs, 0)
    os.kill(epochs.processes[0], signal.SIGSTOP)
    assert content(epochs, 4) == due


@pytest.mark.parametrize(("frozen", "executable"), [(True, sys.executable), (False, None), (False, "")])
def test_a_program_without_an_interpreter_beside_it_starts_none(make, monkeypatch, frozen, executable):
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(sys, "executable", executable)
    epochs = make(2)
    with pytest.warns(UserWarning, match=r"no Python interpreter .* with 0 beside"):
        assert content(epochs, 0) == content(make(0), 0)


def test_where_no_thread_can_be_started_no_process_stays(make, monkeypatch):
    started: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        started.append(thread._args[0].pid)  # type: ignore[attr-defined]
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        epochs = make(2)
    with pytest.warns(UserWarning, match="can't start new thread"):
        assert content(epochs, 0) == content(make(0), 0)
    assert len(started) == 1 and not alive(started[0])
    epochs.close()


def test_a_process_writes_whole_answers_even_unbuffered(make, monkeypatch):
    """A write of its own to a pipe that is full may end in the middle, once the process was stopped and goes on."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    tokenizer = Tokenizer.train([line for side in SIDES for line in side], 60, pretokenized=False)
    rules, words, (lines,) = number_words(tokenizer, [["a branca casa"] * 40_000])
    cutter, process = Cutter(rules, words, 0.5), ahead.start_process()
    ahead.send(process.stdin, (np.array([cutter.dropout]), *rules, *words))
    ahead.send(process.stdin, (np.array([1, 2]), *lines))
    found = []
    reader = threading.Thread(target=lambda: found.append(ahead.receive(process.stdout)), daemon=True)
    for _ in range(8):  # while it fills the pipe, which nobody empties yet
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGCONT)
    reader.start()
    reader.join(20)
    process.kill()
    ahead._leave(process)
    assert found and [each.tolist() for each in found[0]] == [each.tolist() for each in cutter.cut(lines, [1, 2])]


def test_no_piece_is_cut_by_the_numbers_that_put_batches_in_order(make):
    board = make(0)._board
    keys = [board._key(job) for job in board._jobs_of(3)]
    drawn = {np.random.default_rng(list(key)).random() for key in [*keys, (5, 3)]}
    assert len(drawn) == len(keys) + 1


@needs_proc
@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_left_behind(make, closed):
    make(0)
    threads, files = threading.active_count(), count_files()
    epochs = make(2)
    due, processes = content(epochs, 0), epochs.processes
    assert len(processes) == 2 and all(map(alive, processes))
    assert threading.active_count() == threads + 2
    if closed:
        epochs.close()
        epochs.close()
        assert content(epochs, 0) == due
    else:
        make.made.clear()
        del epochs
        gc.collect()
    assert not any(map(alive, processes))
    assert threading.active_count() == threads
    assert count_files() == files


@needs_proc
def test_processes_end_with_whoever_started_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HOME, prepend=os.pathsep)  # from another folder, src alone would lead nowhere
    script = (
        "import os, signal, sys; from qknorm.text import ahead; print(ahead.start_process().pid, flush=True);"
        "sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert alive(worker)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.wait() == -signal.SIGKILL
    wait_for(lambda: not alive(worker))


def test_a_process_imports_little():
    script = "import sys; import qknorm.text.ahead; print({'torch', 'tokenizers', 'pydantic'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
