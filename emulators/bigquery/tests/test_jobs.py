"""How many jobs a server runs and keeps in memory, and jobs that fail unexpectedly."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import duckdb
import pytest

from bigquery_emulator.engine.job import BigQueryJob
from bigquery_emulator.engine.jobs import Jobs
from bigquery_emulator.engine.query import Result
from bigquery_emulator.errors import BusyError, NotFoundError

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(freed: list[Result]) -> AsyncIterator[Jobs]:
    async def let_go(result: Result) -> None:
        freed.append(result)

    async with anyio.create_task_group() as tasks:
        yield Jobs(tasks, let_go)
        tasks.cancel_scope.cancel()


def job(number: int) -> BigQueryJob:
    return BigQueryJob("p", f"job{number}", "QUERY", {"query": {}})


async def test_the_oldest_jobs_are_forgotten_with_their_rows() -> None:
    async def work(job: BigQueryJob) -> None:
        job.result = Result((), 0, job.job_id)

    freed: list[Result] = []
    async with running(freed) as jobs:
        for number in range(1_002):
            with anyio.fail_after(5):
                await jobs.start(job(number), work).done.wait()
        assert [result.physical for result in freed] == ["job0", "job1"]
        with pytest.raises(NotFoundError, match="Not found: Job p:job1"):
            jobs.get("p", "job1")
        assert jobs.get("p", "job2").state == "DONE"
        assert [job.job_id for job in jobs.of_project("p")][:2] == ["job1001", "job1000"]


async def test_large_results_are_forgotten_sooner() -> None:
    async def work(job: BigQueryJob) -> None:
        job.result = Result((), 1_500_000, job.job_id)

    freed: list[Result] = []
    async with running(freed) as jobs:
        for number in range(3):
            with anyio.fail_after(5):
                await jobs.start(job(number), work).done.wait()
        assert [result.physical for result in freed] == ["job0"]


async def test_too_many_jobs_at_once_are_refused() -> None:
    async def work(job: BigQueryJob) -> None:
        await job.stopping.wait()

    async with running([]) as jobs:
        for number in range(100):
            jobs.start(job(number), work)
        with pytest.raises(BusyError):
            jobs.start(job(100), work)
        first = jobs.get("p", "job0")
        first.cancel()
        with anyio.fail_after(5):
            await first.done.wait()
        jobs.start(job(100), work)


async def test_a_job_that_breaks_says_so_and_harms_no_other() -> None:
    async def broken(job: BigQueryJob) -> None:
        raise KeyError("oops")

    async def work(job: BigQueryJob) -> None:
        job.statistics["ok"] = True

    async with running([]) as jobs:
        for number, what in enumerate((broken, work)):
            with anyio.fail_after(5):
                await jobs.start(job(number), what).done.wait()
        assert jobs.get("p", "job0").status()["errorResult"]["reason"] == "bug"
        assert jobs.get("p", "job1").status() == {"state": "DONE"}


async def test_a_commit_that_finds_the_disk_full_is_worth_a_retry() -> None:
    message = (
        'Failed to commit: Could not write file "bigquery.duckdb.wal": No space left on device'
    )

    async def work(job: BigQueryJob) -> None:
        raise duckdb.TransactionException(f"TransactionContext Error: {message}")

    async with running([]) as jobs:
        with anyio.fail_after(5):
            await jobs.start(job(0), work).done.wait()
        assert jobs.get("p", "job0").status()["errorResult"]["reason"] == "backendError"


async def test_a_job_that_is_deleted_takes_its_rows_with_it() -> None:
    is_running, goes_on = anyio.Event(), anyio.Event()

    async def work(job: BigQueryJob) -> None:
        job.result = Result((), 1, job.job_id)

    async def slow_work(job: BigQueryJob) -> None:
        await work(job)
        is_running.set()
        await goes_on.wait()

    freed: list[Result] = []
    with anyio.fail_after(5):
        async with running(freed) as jobs:
            done, late = jobs.start(job(0), work), jobs.start(job(1), slow_work)
            await done.done.wait()
            await is_running.wait()
            jobs.forget(done)
            jobs.forget(late)
            goes_on.set()
            await late.done.wait()
            while len(freed) < 2:
                await anyio.lowlevel.checkpoint()
            assert {result.physical for result in freed} == {"job0", "job1"}
