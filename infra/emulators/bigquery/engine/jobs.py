"""Jobs: queries, loads and copies, from the request to their result, in memory.

`Jobs.start` gives each job a task of the server's task group. Callers who need the outcome wait on
the job. Work that blocks goes to the threads.
"""

import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import duckdb
from anyio.abc import TaskGroup

from infra.emulators.bigquery.engine.query import Result
from infra.emulators.bigquery.errors import (
    BugError,
    BusyError,
    DuplicateError,
    NotFoundError,
    ServiceError,
    StoppedError,
    as_service_error,
)
from infra.emulators.bigquery.store import Cursor
from infra.emulators.bigquery.tables.resources import TableKey
from infra.emulators.bigquery.tables.schema import Json

log = logging.getLogger(__name__)

# A job stays known, with its result, until this many have followed it or the results have this many
# rows.
_KEPT_JOBS = 1_000
_KEPT_ROWS = 2_000_000
_MOST_RUNNING = 100
# BigQuery's own limit for a query.
_LONGEST_JOB_S = 6 * 3600.0
_INTERRUPT_EVERY_S = 0.05
_CANCELED = "Job execution was cancelled: User requested cancellation"


@dataclass
class BigQueryJob:
    """One job: its request (`configuration`) and its state.

    It is PENDING until it has a thread for its rows or its change, then RUNNING, then DONE.
    """

    project: str
    job_id: str
    kind: str
    configuration: Json
    location: str = "US"
    created_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    started_ms: int = 0
    ended_ms: int = 0
    state: str = "PENDING"
    error: ServiceError | None = None
    problems: list[Json] = field(default_factory=list)
    statistics: Json = field(default_factory=dict)
    result: Result | None = None
    done: anyio.Event = field(default_factory=anyio.Event)
    stopping: anyio.Event = field(default_factory=anyio.Event)
    cursor: Cursor | None = None

    @property
    def anonymous_table(self) -> TableKey:
        """The name of the hidden table that a query's result is read by."""
        return TableKey(self.project, "_anonymous", f"anon{self.job_id}")

    def begin(self) -> None:
        """Says that the job has its thread. It is PENDING before. Again, it changes nothing.

        Raises:
            StoppedError: it was canceled while it waited.
        """
        if self.stopping.is_set():
            raise StoppedError(_CANCELED)
        if self.state == "PENDING":
            self.started_ms = time.time_ns() // 1_000_000
            self.state = "RUNNING"

    def watch(self, cursor: Cursor) -> None:
        """Remembers the session at work. Raises if the job was canceled meanwhile.

        Raises:
            StoppedError: if so.
        """
        if self.stopping.is_set():
            raise StoppedError(_CANCELED)
        self.cursor = cursor

    def cancel(self) -> None:
        """Asks the job to stop. A job that is done does not change."""
        self.stopping.set()

    def interrupt(self) -> None:
        """Interrupts the statement that the job's session is at, if any."""
        with contextlib.suppress(duckdb.ConnectionException):
            # The session may have been closed meanwhile.
            if self.cursor is not None:
                self.cursor.interrupt()

    def reference(self) -> Json:
        """Returns the JobReference."""
        return {"projectId": self.project, "jobId": self.job_id, "location": self.location}

    def status(self) -> Json:
        """Returns the JobStatus."""
        found: Json = {"state": self.state}
        if self.error is not None:
            found["errorResult"] = self.error.proto()
            found["errors"] = [*self.problems, self.error.proto()]
        elif self.problems:
            found["errors"] = self.problems
        return found

    def resource(self) -> Json:
        """Returns the Job of the API."""
        times = {
            "creationTime": self.created_ms,
            "startTime": self.started_ms,
            "endTime": self.ended_ms,
        }
        statistics = {name: str(value) for name, value in times.items() if value}
        return {
            "kind": "bigquery#job",
            "id": f"{self.project}:{self.location}.{self.job_id}",
            "etag": f"{self.job_id}-{self.state}",
            "jobReference": self.reference(),
            "configuration": {"jobType": self.kind, **self.configuration},
            "status": self.status(),
            "statistics": {**statistics, **self.statistics},
            "user_email": "nobody@localhost",
        }


Work = Callable[[BigQueryJob], Awaitable[None]]


class Jobs:
    """All jobs of a server.

    Args:
        tasks: the server's task group, which owns the jobs' tasks.
        let_go: frees the rows of a result that can no longer be requested.
    """

    def __init__(self, tasks: TaskGroup, let_go: Callable[[Result], Awaitable[None]]) -> None:
        self._tasks = tasks
        self._let_go = let_go
        self._jobs: OrderedDict[tuple[str, str], BigQueryJob] = OrderedDict()

    def get(self, project: str, job_id: str) -> BigQueryJob:
        """Returns a job.

        Raises:
            NotFoundError: where there is none, or it was so long ago that it is forgotten.
        """
        found = self._jobs.get((project, job_id))
        if found is None:
            raise NotFoundError(f"Not found: Job {project}:{job_id}")
        return found

    def of_project(self, project: str) -> list[BigQueryJob]:
        """Returns the jobs of a project, the latest first."""
        # A query on INFORMATION_SCHEMA.JOBS asks from a thread.
        found = list(self._jobs.items())
        return [job for (name, _), job in reversed(found) if name == project]

    def result_of(self, key: TableKey) -> BigQueryJob | None:
        """Returns the job whose hidden result table has this name."""
        if not key.table_id.startswith("anon"):
            return None
        job = self._jobs.get((key.project, key.table_id.removeprefix("anon")))
        return (
            job
            if job is not None and job.anonymous_table == key and job.result is not None
            else None
        )

    async def start(self, job: BigQueryJob, work: Work) -> BigQueryJob:
        """Starts a job's work in a new task.

        Args:
            job: a new job.
            work: does it, and raises ServiceError where it fails.

        Raises:
            BusyError: where too many jobs run.
            DuplicateError: where the id is taken.
        """
        key = (job.project, job.job_id)
        if key in self._jobs:
            raise DuplicateError(f"Already Exists: Job {job.project}:{job.location}.{job.job_id}")
        if sum(other.state != "DONE" for other in self._jobs.values()) >= _MOST_RUNNING:
            raise BusyError(f"Exceeded rate limits: more than {_MOST_RUNNING} jobs are running")
        self._jobs[key] = job
        await self._forget_old()
        self._tasks.start_soon(self._run, job, work)
        return job

    def forget(self, job: BigQueryJob) -> None:
        """Removes a job from what can be asked for."""
        self._jobs.pop((job.project, job.job_id), None)

    async def _forget_old(self) -> None:
        while len(self._jobs) > _KEPT_JOBS or self._kept_rows() > _KEPT_ROWS:
            key, oldest = next(iter(self._jobs.items()))
            if oldest.state != "DONE":
                return
            del self._jobs[key]
            if oldest.result is not None:
                await self._let_go(oldest.result)

    def _kept_rows(self) -> int:
        return sum(job.result.rows for job in self._jobs.values() if job.result is not None)

    async def _run(self, job: BigQueryJob, work: Work) -> None:
        scope = anyio.CancelScope()
        try:
            scope.deadline = anyio.current_time() + _limit_s(job.configuration)
            with scope:
                await _interruptible(job, work)
            if scope.cancelled_caught:
                job.error = StoppedError("Job execution was cancelled: Job timed out")
        except ServiceError as error:
            is_late = scope.cancel_called
            job.error = (
                StoppedError("Job execution was cancelled: Job timed out") if is_late else error
            )
        except Exception as error:
            # The boundary of a job: whatever it runs into, the server and the other jobs go on.
            job.error = as_service_error(error)
            if isinstance(job.error, BugError):
                log.exception("job failed", extra={"job_id": job.job_id})
        finally:
            job.state, job.ended_ms = "DONE", time.time_ns() // 1_000_000
            job.done.set()


async def _interruptible(job: BigQueryJob, work: Work) -> None:
    # A thread can't be canceled; a task beside it interrupts its session, so that DuckDB raises
    # there.
    finished = anyio.Event()
    async with anyio.create_task_group() as group:
        # Canceled while it waits for a thread. One that has a thread is interrupted there.
        working = anyio.CancelScope()
        group.start_soon(_interrupt_when_stopped, job, finished, working)
        error: ServiceError | None = StoppedError(_CANCELED)
        try:
            with working:
                error = await _outcome(job, work)
        finally:
            finished.set()
        group.cancel_scope.cancel()
    if error is not None:
        raise error


async def _outcome(job: BigQueryJob, work: Work) -> ServiceError | None:
    # Handed over as a value: a task group would wrap what is raised in it.
    try:
        await work(job)
    except ServiceError as error:
        return error
    except duckdb.Error as error:
        found = as_service_error(error)
        if isinstance(found, BugError):
            raise
        return found
    return None


async def _interrupt_when_stopped(
    job: BigQueryJob, finished: anyio.Event, working: anyio.CancelScope
) -> None:
    try:
        await job.stopping.wait()
        working.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            # Again and again: an interrupt between two statements of the session is lost.
            while not finished.is_set():
                job.interrupt()
                with anyio.move_on_after(_INTERRUPT_EVERY_S):
                    await finished.wait()


def new_job_id() -> str:
    """Returns an id for a job whose caller gave none."""
    return f"job_{secrets.token_urlsafe(18)}"


def _limit_s(configuration: Json) -> float:
    limit_ms = configuration.get("jobTimeoutMs")
    if not limit_ms:
        return _LONGEST_JOB_S
    return min(int(limit_ms) / 1_000, _LONGEST_JOB_S)
