"""Does jobs as tasks of a Ray cluster: each with its share of a GPU, begun again where its worker dies.

Where workers see the grid's folder, they work in it, and a task that is begun again goes on from its last checkpoint.
Where they do not, data go to them through Ray's object store and what they made comes back the same way.
"""

import json
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qknorm import files
from qknorm.errors import InputError
from qknorm.studies.grid.claims import Claim, find_holder, take, wait_until_free
from qknorm.studies.grid.jobs import (
    DEVICE_TIME,
    FAILURE,
    GIVEN_OUT,
    JOB,
    RESULT,
    RUN,
    TRANSLATIONS,
    Ending,
    Job,
    begin_count,
    end_count,
    is_free,
    look,
    read_failure,
    read_result,
    unfinished,
    write_failure,
)
from qknorm.studies.grid.local import LOOK_SECONDS, OnChange
from qknorm.studies.grid.work import do_given_out

RETRIES = 3
"""How often a task is begun again whose worker, or whose machine, died."""
ANSWER_SECONDS = 10.0
MARK = ".shared"
BROUGHT_BACK = (RESULT, FAILURE, TRANSLATIONS, f"{RUN}/")

Work = Callable[[Path, str | None], Ending]
Contents = Mapping[str, bytes]


def run_on_ray(
    jobs: Sequence[Job],
    root: Path,
    address: str,
    on_change: OnChange,
    *,
    parallel: int = 1,
    device: str | None = None,
    work: Work = do_given_out,
) -> None:
    """Does every job that is not done on the cluster at an address ("auto": the one of this machine).

    `parallel` tasks share a GPU; with device cpu, each has a core. `work` does one job, in a worker.
    """
    ray = _import_ray()
    connected = not ray.is_initialized()
    if connected:
        _connect(ray, address)
    try:
        _run(ray, jobs, root, on_change, parallel, device, work)
    finally:
        if connected:
            ray.shutdown()


def _run(
    ray: Any, jobs: Sequence[Job], root: Path, on_change: OnChange, parallel: int, device: str | None, work: Work
) -> None:
    if device != "cpu" and not ray.cluster_resources().get("GPU"):
        raise InputError("the Ray cluster has no GPU, so that no run would ever begin; give --device cpu")
    share = {"num_gpus": 0 if device == "cpu" else 1 / parallel, "num_cpus": 1}
    task = ray.remote(max_retries=RETRIES, max_calls=1, **share)(_do_there)  # a worker each: its GPU memory goes too
    mark = _mark(root)
    waiting = unfinished(jobs)
    running: dict[Any, tuple[Job, Claim]] = {}
    data: dict[Path, Any] = {}
    try:
        while waiting or running:
            waiting = [job for job in waiting if read_result(job.folder) is None]
            for job, claim in _give_out(waiting):
                if job.data not in data:
                    data[job.data] = ray.put(_contents(job.data))
                plan = (job.folder / JOB).read_bytes()
                # in a list, since Ray fetches what stands alone before a task begins, wanted or not
                there = str(job.folder.resolve()), plan, mark, [data[job.data]]
                task_of_job = task.remote(*there, device, work)
                running[task_of_job] = job, claim
            done, _ = ray.wait(list(running), timeout=LOOK_SECONDS) if running else ([], [])
            for reference in done:
                job, claim = running.pop(reference)
                with claim:
                    _collect(ray, reference, job)
                    _book(job, share["num_gpus"])
            if waiting and not running:
                time.sleep(LOOK_SECONDS)
            on_change([look(job) for job in jobs])
    finally:
        for _, claim in running.values():
            claim.release()


def _give_out(waiting: list[Job]) -> Iterator[tuple[Job, Claim]]:
    """Takes the free ones off the list, each with a claim that keeps others on this machine from it."""
    for job in list(waiting):
        claim = take(job.folder / GIVEN_OUT) if is_free(job) else None
        if claim is None:
            continue
        if find_holder(job.folder) is not None:  # someone was quicker, and looks at our claim as we at theirs
            claim.release()
            continue
        waiting.remove(job)
        job.write()
        if job.run.is_dir():  # the seconds of its result will be of the whole, and part of that was not here
            (job.folder / DEVICE_TIME).unlink(missing_ok=True)
        begin_count(job.folder)
        (job.folder / FAILURE).unlink(missing_ok=True)
        yield job, claim


def _do_there(
    folder: str, plan: bytes, mark: tuple[str, str], data: Sequence[Any], device: str | None, work: Work
) -> tuple[Ending, Contents]:
    """In a worker: the ending, and, if the grid's folder is not seen from there, the files that were made."""
    here = Path(folder)
    if _sees(mark) and Path(json.loads(plan)["data"]).is_dir():
        return _as_soon_as_free(here, device, work), {}
    own = Path(tempfile.gettempdir()) / "qknorm-grid" / mark[1]
    here, copy = own / here.name, own / "data" / data[0].hex()
    if not copy.is_dir():
        with files.atomic_folder(copy) as partial:
            _write_contents(_import_ray().get(data[0]), partial)
    files.write_json(here / JOB, {**json.loads(plan), "data": str(copy)})
    ending = _as_soon_as_free(here, device, work)
    contents = {name: content for name, content in _contents(here).items() if name.startswith(BROUGHT_BACK)}
    if RESULT in contents:  # else a checkpoint to go on from may lie here
        shutil.rmtree(here)
    return ending, contents


def _as_soon_as_free(folder: Path, device: str | None, work: Work) -> Ending:
    """A task that is begun again may meet the claim of the one that died, or another who is at the job."""
    while (ending := work(folder, device)) == "taken":
        wait_until_free(folder)
    return ending


def _collect(ray: Any, reference: Any, job: Job) -> None:
    """Takes in what a task made, or why there is nothing."""
    try:
        ending, contents = ray.get(reference)
    except ray.exceptions.RayError as error:
        if read_result(job.folder) is None:
            told = (str(error).strip() or type(error).__name__).splitlines()[-1]
            said = read_failure(job.folder)  # by a worker that lost its claim, and ended for that
            last_words = f"; its worker said: {said}" if said else ""
            write_failure(job.folder, f"its task failed on the cluster, {RETRIES} retries included: {told}{last_words}")
        return
    last = {name: contents[name] for name in (RESULT, FAILURE) if name in contents}
    _write_contents({name: content for name, content in contents.items() if name not in last}, job.folder)
    _write_contents(last, job.folder)  # a result makes the job done, so that all else is there before
    if ending == "interrupted":
        write_failure(job.folder, "its task was interrupted on the cluster; the same command goes on with it")


def _book(job: Job, of_gpu: float) -> None:
    """Writes down what a job took of a GPU: its share of one, which nobody else had, for as long as it trained."""
    result = read_result(job.folder)
    if result is not None and of_gpu:
        end_count(job.folder, of_gpu * result.seconds)


def _mark(root: Path) -> tuple[str, str]:
    """A file that only those can read who see the grid's folder: its path and content."""
    path = (root / MARK).resolve()
    if not path.is_file():  # others may be at work there already, whose workers know the first one
        files.write_text(path, uuid.uuid4().hex)
    return str(path), path.read_text(encoding="utf-8")


def _sees(mark: tuple[str, str]) -> bool:
    try:
        return Path(mark[0]).read_text(encoding="utf-8") == mark[1]
    except OSError:
        return False


def _contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _write_contents(contents: Contents, folder: Path) -> None:
    for name, content in contents.items():
        with files.atomic_path(folder / name) as partial:
            partial.write_bytes(content)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError('--ray needs Ray, which is not installed: pip install "qknorm[ray]"') from None
    return ray


def _connect(ray: Any, address: str) -> None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        if port.isdecimal():  # Ray itself waits a quarter of an hour for who does not answer
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"--ray {address}: no cluster answers there ({told}); start one with ray start --head"
        ) from None
