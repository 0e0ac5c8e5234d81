"""A job (query, load, or copy): its state, work, and outcome, run as a server task.

Blocking work runs in threads.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import duckdb

from bigquery_emulator.engine.query import Result
from bigquery_emulator.errors import (
    BugError,
    ServiceError,
    StoppedError,
    as_service_error,
)
from bigquery_emulator.store import Cursor
from bigquery_emulator.tables.resources import TableKey
from bigquery_emulator.tables.schema import Json

log = logging.getLogger(__name__)

# BigQuery's time limit for a query.
_LONGEST_JOB_S = 6 * 3600.0
_CANCELED = "Job execution was cancelled: User requested cancellation"


@dataclass
class BigQueryJob:
    """A job: its request (`configuration`) and its state.

    It is PENDING until a thread is available for its query or change, then RUNNING, then DONE.
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
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancels the job's work."""

    @property
    def anonymous_table(self) -> TableKey:
        """Name of the hidden table through which a query's result is read."""
        return TableKey(self.project, "_anonymous", f"anon{self.job_id}")

    def begin(self) -> None:
        """Marks the job as RUNNING once it has a thread. Later calls have no effect.

        Raises:
            StoppedError: the job was canceled while waiting.
        """
        if self.stopping.is_set():
            raise StoppedError(_CANCELED)
        if self.state == "PENDING":
            self.started_ms = time.time_ns() // 1_000_000
            self.state = "RUNNING"

    def watch(self, cursor: Cursor) -> None:
        """Records the session that is working on the job.

        Raises:
            StoppedError: the job has been canceled.
        """
        if self.stopping.is_set():
            raise StoppedError(_CANCELED)
        self.cursor = cursor

    def cancel(self) -> None:
        """Asks the job to stop. Does nothing if the job has finished."""
        self.stopping.set()
        self.scope.cancel()

    def interrupt(self) -> None:
        """Interrupts the statement that the job's session is running, if any."""
        with contextlib.suppress(duckdb.ConnectionException):
            # The session may have been closed in the meantime.
            if self.cursor is not None:
                self.cursor.interrupt()

    def reference(self) -> Json:
        return {"projectId": self.project, "jobId": self.job_id, "location": self.location}

    def status(self) -> Json:
        status: Json = {"state": self.state}
        if self.error is not None:
            status["errorResult"] = self.error.proto()
            status["errors"] = [*self.problems, self.error.proto()]
        elif self.problems:
            status["errors"] = self.problems
        return status

    def resource(self) -> Json:
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


async def run(job: BigQueryJob, work: Work) -> None:
    """Does a job's work, and finishes the job regardless of the outcome.

    Args:
        work: the function that does the work; it raises ServiceError on failure.
    """
    job.scope.deadline = anyio.current_time() + _limit_s(job.configuration)
    try:
        with job.scope:
            await work(job)
        if job.scope.cancelled_caught:
            job.error = StoppedError(_CANCELED)
    except Exception as error:
        # A job's errors must not affect the server or other jobs.
        job.error = as_service_error(error)
        if isinstance(job.error, BugError):
            log.exception("job failed", extra={"job_id": job.job_id})
    finally:
        is_late = job.scope.cancel_called and not job.stopping.is_set()
        if is_late and job.error is not None:
            job.error = StoppedError("Job execution was cancelled: Job timed out")
        job.state, job.ended_ms = "DONE", time.time_ns() // 1_000_000
        job.done.set()


def new_job_id() -> str:
    """Returns an ID for a job whose caller did not provide one."""
    return f"job_{secrets.token_urlsafe(18)}"


def _limit_s(configuration: Json) -> float:
    limit_ms = configuration.get("jobTimeoutMs")
    if not limit_ms:
        return _LONGEST_JOB_S
    return min(int(limit_ms) / 1_000, _LONGEST_JOB_S)
