"""The thread of the models: who shares a batch, whose turn it is, and what is dropped."""

import asyncio
import threading

import pytest
from servers import PATIENCE, BrokenEngine, HeldEngine

from qknorm.serving.batching import BATCH_CHARACTERS, Batcher, Job, ModelFailure, Options
from qknorm.serving.gate import Full, Gate


async def collect(job: Job) -> list[str]:
    return [translation.text async for translation in job]


def with_batcher(engine, scenario, most: int = 4):
    """Runs a scenario (batcher) in a loop, with a batcher that is stopped at the end."""

    async def run():
        batcher = Batcher({"a": engine, "b": engine}, most=most, wait=0.0)
        batcher.start()
        try:
            return await asyncio.wait_for(scenario(batcher), PATIENCE)
        finally:
            await asyncio.to_thread(batcher.stop)

    return asyncio.run(run())


async def occupy(batcher: Batcher, engine: HeldEngine) -> Job:
    """Has the thread busy with a batch of its own, so that all that follows waits."""
    job = batcher.submit(Job(Options("a"), ["first"]))
    assert await asyncio.to_thread(engine.began.wait, PATIENCE)
    return job


def test_sentences_that_wait_share_batches_in_turn():
    engine = HeldEngine()

    async def scenario(batcher):
        first = await occupy(batcher, engine)
        long = batcher.submit(Job(Options("a"), ["l1", "l2", "l3", "l4", "l5"]))
        short = batcher.submit(Job(Options("a"), ["s1"]))
        other = batcher.submit(Job(Options("b"), ["o1"]))
        assert batcher.waiting == 7
        engine.go.set()
        return [await collect(job) for job in (first, long, short, other)]

    found = with_batcher(engine, scenario)
    assert found == [["FIRST"], ["L1", "L2", "L3", "L4", "L5"], ["S1"], ["O1"]]
    # one of each in turn; another pair cannot share, but comes before what is left of the long one
    assert engine.batches == [["first"], ["l1", "s1", "l2", "l3"], ["o1"], ["l4", "l5"]]


def test_options_that_differ_do_not_share_a_batch():
    engine = HeldEngine()

    async def scenario(batcher):
        await occupy(batcher, engine)
        jobs = [batcher.submit(Job(Options("a", beam=beam), [f"beam {beam}"])) for beam in (1, 2, 1)]
        engine.go.set()
        return [await collect(job) for job in jobs]

    assert with_batcher(engine, scenario) == [["BEAM 1"], ["BEAM 2"], ["BEAM 1"]]
    assert engine.batches[1:] == [["beam 1", "beam 1"], ["beam 2"]]


def test_a_batch_is_full_with_enough_characters():
    engine = HeldEngine()
    endless = "x" * BATCH_CHARACTERS

    async def scenario(batcher):
        await occupy(batcher, engine)
        job = batcher.submit(Job(Options("a"), [endless, "a", "b"]))
        engine.go.set()
        return await collect(job)

    assert with_batcher(engine, scenario)[1:] == ["A", "B"]
    assert engine.batches[1:] == [[endless], ["a", "b"]]


def test_what_is_cancelled_is_not_translated():
    engine = HeldEngine()

    async def scenario(batcher):
        await occupy(batcher, engine)
        unwanted = batcher.submit(Job(Options("a"), ["unwanted"]))
        wanted = batcher.submit(Job(Options("a"), ["wanted"]))
        batcher.cancel(unwanted)
        engine.go.set()
        return await collect(wanted)

    assert with_batcher(engine, scenario) == ["WANTED"]
    assert engine.batches == [["first"], ["wanted"]]


def test_a_failure_is_told_to_everyone_in_the_batch_and_the_thread_goes_on():
    async def scenario(batcher):
        for _ in range(2):
            with pytest.raises(ModelFailure) as failure:
                await collect(batcher.submit(Job(Options("a"), ["x"])))
            assert "secret" not in str(failure.value)
        with pytest.raises(ModelFailure):
            await batcher.call(lambda: 1 / 0)
        return await batcher.call(lambda: threading.current_thread().name)

    assert with_batcher(BrokenEngine(), scenario) == "models"


def test_a_stop_finishes_what_was_submitted():
    engine = HeldEngine()

    async def scenario(batcher):
        first = await occupy(batcher, engine)
        second = batcher.submit(Job(Options("a"), ["second"]))
        stopping = asyncio.get_running_loop().run_in_executor(None, batcher.stop)
        while batcher.alive:
            await asyncio.sleep(0)
        engine.go.set()
        await stopping
        return await collect(first), await collect(second)

    assert with_batcher(engine, scenario) == (["FIRST"], ["SECOND"])


def test_nothing_to_translate_is_done_at_once():
    async def scenario(batcher):
        return await collect(batcher.submit(Job(Options("a"), [])))

    assert with_batcher(HeldEngine(), scenario) == []


def test_a_gate_lets_in_has_wait_and_turns_away():
    async def scenario():
        gate = Gate(most=1, waiting=1)
        entered = await gate.enter()
        waiter = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        assert (gate.inside, gate.waiting) == (1, 1)
        with pytest.raises(Full) as full:
            await gate.enter()
        assert 1 <= full.value.seconds <= 60
        gate.leave(entered)
        gate.leave(await waiter)
        assert (gate.inside, gate.waiting) == (0, 0)
        impatient = await gate.enter()
        leaver = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        assert gate.waiting == 0
        gate.leave(impatient)
        gate.leave(await gate.enter())

    asyncio.run(scenario())
