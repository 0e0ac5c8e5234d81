"""All of a server's jobs, kept in memory from when they start until they are forgotten.

`Jobs.start` runs each job in the server's task group. Callers that need the outcome wait for the
job.
"""

from collections import OrderedDict
from collections.abc import Callable, Coroutine

from anyio.abc import TaskGroup

from bigquery_emulator.engine.job import BigQueryJob, Work, run
from bigquery_emulator.engine.query import Result
from bigquery_emulator.errors import BusyError, DuplicateError, NotFoundError
from bigquery_emulator.tables.resources import TableKey

# A job and its result are remembered until this many jobs have followed it or the stored results
# exceed this many rows.
_KEPT_JOBS = 1_000
_KEPT_ROWS = 2_000_000
_MOST_RUNNING = 100


class Jobs:
    """All of a server's jobs.

    Args:
        tasks: the server's task group, which owns the jobs' tasks.
        let_go: frees a result's rows once no one can request them anymore.
    """

    def __init__(
        self, tasks: TaskGroup, let_go: Callable[[Result], Coroutine[None, None, None]]
    ) -> None:
        self._tasks = tasks
        self._let_go = let_go
        self._jobs: OrderedDict[tuple[str, str], BigQueryJob] = OrderedDict()
        self._running = 0
        self._kept_rows = 0
        """Number of rows in the results of finished jobs."""

    def get(self, project: str, job_id: str) -> BigQueryJob:
        """Returns a job.

        Raises:
            NotFoundError: the job does not exist, or has been forgotten.
        """
        job = self._jobs.get((project, job_id))
        if job is None:
            raise NotFoundError(f"Not found: Job {project}:{job_id}")
        return job

    def of_project(self, project: str) -> list[BigQueryJob]:
        """Returns a project's jobs, latest first."""
        # A query on INFORMATION_SCHEMA.JOBS calls this from another thread.
        all_jobs = list(self._jobs.items())
        return [job for (name, _), job in reversed(all_jobs) if name == project]

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

    def start(self, job: BigQueryJob, work: Work) -> BigQueryJob:
        """Starts a job in a new task.

        Args:
            work: the function that does the work; it raises ServiceError on failure.

        Raises:
            BusyError: too many jobs are running.
            DuplicateError: the ID is already taken.
        """
        key = (job.project, job.job_id)
        if key in self._jobs:
            raise DuplicateError(f"Already Exists: Job {job.project}:{job.location}.{job.job_id}")
        if self._running >= _MOST_RUNNING:
            raise BusyError(f"Exceeded rate limits: more than {_MOST_RUNNING} jobs are running")
        self._jobs[key] = job
        self._running += 1
        self._forget_old()
        self._tasks.start_soon(self._run, job, work)
        return job

    def forget(self, job: BigQueryJob) -> None:
        """Forgets a job and its result's rows."""
        if self._jobs.pop((job.project, job.job_id), None) is not None and job.state == "DONE":
            self._free(job)

    def _forget_old(self) -> None:
        while len(self._jobs) > _KEPT_JOBS or self._kept_rows > _KEPT_ROWS:
            oldest = next(iter(self._jobs.values()))
            if oldest.state != "DONE":
                return
            self.forget(oldest)

    async def _run(self, job: BigQueryJob, work: Work) -> None:
        await run(job, work)
        self._running -= 1
        if job.result is not None:
            self._kept_rows += job.result.rows
        if self._jobs.get((job.project, job.job_id)) is not job:
            self._free(job)  # forgotten in the meantime

    def _free(self, job: BigQueryJob) -> None:
        if job.result is not None:
            self._kept_rows -= job.result.rows
            self._tasks.start_soon(self._let_go, job.result)
