"""The grid on a real Ray cluster of this machine, whose two workers are processes of their own."""

import io
import socket
import sys
import time
import uuid
from types import SimpleNamespace

import pytest
from paper_cases import finish, prepare_copy, tiny

from qknorm.errors import InputError
from qknorm.studies.grid import on_ray
from qknorm.studies.grid.claims import take
from qknorm.studies.grid.jobs import (
    GIVEN_OUT,
    TRANSLATIONS,
    Job,
    begin_count,
    end_count,
    is_free,
    look,
    read_device_seconds,
    read_result,
    read_translations,
    write_failure,
)
from qknorm.studies.grid.on_ray import run_on_ray

RESOURCES = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}
PATIENCE = 60
NOTICES_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1_000,
    "health_check_failure_threshold": 10,
}
"""Else the head takes longer to believe that a killed worker is dead."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"))


@pytest.fixture
def cluster(monkeypatch):
    """A head that does no work and two workers; skips where Ray is missing or cannot start."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    utils = pytest.importorskip("ray.cluster_utils", reason="this Ray has no cluster for tests")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    started = None
    try:
        started = utils.Cluster(
            initialize_head=True, head_node_args={**RESOURCES, "num_cpus": 0, "_system_config": NOTICES_SOON}
        )
        workers = [started.add_node(**RESOURCES) for _ in range(2)]
        ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        if started is not None:
            started.shutdown()
        pytest.skip(f"Ray cannot start here: {error}")
    yield started, workers
    ray.shutdown()
    started.shutdown()


def plan(data, root, count):
    return [Job.plan(f"job {seed}", data, tiny(**{"training.seed": seed}), root) for seed in range(count)]


@pytest.mark.ray
def test_a_worker_that_dies_in_a_run_costs_no_run(cluster, data, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "LOOK_SECONDS", 0.1)
    (victim, *others), shared = plan(data, tmp_path / "runs", 2), tmp_path
    started, workers = cluster
    victim_folder = victim.folder.name

    def work(folder, device):
        """The first time the victim trains, it waits at its first checkpoint for its worker to be killed."""
        import ray

        from qknorm.studies.grid.work import do
        from qknorm.training import checkpoint

        saved, save = shared / "saved", checkpoint.save_checkpoint

        def save_and_wait(*arguments):
            save(*arguments)
            saved.write_text(ray.get_runtime_context().get_node_id(), encoding="utf-8")
            time.sleep(10 * PATIENCE)

        if folder.name == victim_folder:
            (shared / "found").write_text(str(checkpoint.list_steps(folder / "run")), encoding="utf-8")
            checkpoint.save_checkpoint = save if saved.exists() else save_and_wait
        return do(folder, device, given_out=True)

    def kill_its_node(views):
        saved = shared / "saved"
        alive = [node for node in workers if node in started.worker_nodes]
        if saved.exists() and len(alive) == 2:
            node = next((each for each in alive if each.node_id == saved.read_text(encoding="utf-8")), None)
            if node is not None:
                started.remove_node(node, allow_graceful=False)

    run_on_ray([victim, *others], tmp_path / "runs", "auto", kill_its_node, device="cpu", work=work)
    assert len(started.worker_nodes) == 1
    assert [look(job).state for job in (victim, *others)] == ["finished", "finished"]
    assert read_translations(victim.folder / TRANSLATIONS, 10, victim.folder)
    assert (shared / "found").read_text(encoding="utf-8") == "[4]", "it went on from the checkpoint of the dead worker"

    # the same again, to workers that do not see the folder: everything travels through the object store
    monkeypatch.setattr(on_ray, "_mark", lambda root: (str(tmp_path / "nowhere"), uuid.uuid4().hex))
    (far,) = plan(data, tmp_path / "far", 1)
    run_on_ray([far], tmp_path / "far", "auto", lambda views: None, device="cpu")
    assert read_result(far.folder).scores == read_result(victim.folder).scores
    assert (far.folder / TRANSLATIONS).read_bytes() == (victim.folder / TRANSLATIONS).read_bytes()
    assert (far.run / "checkpoints").is_dir()


@pytest.mark.parametrize(("of_gpu", "counted"), [(1 / 3, 20.0), (0, None)])
@pytest.mark.parametrize("begun_elsewhere", [False, True])
def test_a_task_took_its_share_of_a_gpu_for_as_long_as_it_trained(data, tmp_path, of_gpu, counted, begun_elsewhere):
    (job,) = plan(data, tmp_path, 1)
    if begun_elsewhere:
        begin_count(job.folder)
        job.run.mkdir()
        end_count(job.folder, 7.0)
    ((_, claim),) = on_ray._give_out([job])
    with claim:
        on_ray._book(job, of_gpu)
        assert read_device_seconds(job.folder) is None, "it has no result yet"
        finish(job, data, wrong=0, seconds=60.0, of_device=None)
        on_ray._book(job, of_gpu)
    assert read_device_seconds(job.folder) == (None if begun_elsewhere else counted)


@pytest.mark.parametrize("said", ["", "its claim was gone"])
def test_a_task_that_failed_keeps_what_its_worker_said(data, tmp_path, said):
    class RayError(Exception):
        pass

    def get(reference):
        raise RayError("The worker died.")

    (job,) = plan(data, tmp_path, 1)
    job.write()
    if said:
        write_failure(job.folder, said)
    on_ray._collect(SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=RayError)), None, job)
    last_words = f"; its worker said: {said}" if said else ""
    assert look(job).note == f"its task failed on the cluster, 3 retries included: The worker died.{last_words}"


def test_without_ray_there_is_a_way_to_get_it(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r'pip install "qknorm\[ray\]"'):
        run_on_ray(plan(data, tmp_path, 1), tmp_path, "auto", lambda views: None)


def test_an_address_of_ipv6_is_asked_as_it_is(monkeypatch):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        return io.BytesIO()

    monkeypatch.setattr(on_ray.socket, "create_connection", connect)
    for address in ("[::1]:6379", "ray://[::1]:6379", "auto", "local"):
        on_ray._connect(SimpleNamespace(init=lambda **_: None), address)
    assert asked == [("::1", 6379)] * 2


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "127.0.0.1:99999{}"])
def test_an_address_where_nobody_answers_is_told_of_at_once(address):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # free again in a moment
    started = []
    with pytest.raises(
        InputError, match=r"^--ray .*: no cluster answers there \(.+\); start one with ray start --head$"
    ):
        on_ray._connect(SimpleNamespace(init=lambda **_: started.append(1)), address.format(port))
    assert not started


def test_what_another_is_at_is_not_given_out(data, tmp_path):
    first, second, third = plan(data, tmp_path, 3)
    waiting = [first, second, third]
    with take(first.folder), take(second.folder / GIVEN_OUT):
        given = list(on_ray._give_out(waiting))
    assert [job for job, _ in given] == [third] and waiting == [first, second]
    assert not is_free(third) and (third.folder / "job.json").is_file()
    given[0][1].release()
    assert is_free(third)
