"""A worker for tests: the real one, with your model on a thread and an in-memory broker.

    async with running_worker(InMemoryBroker(), ENTRY, preparer=..., model=...) as worker:
        [outcome] = await worker.compute(TextInput("a cat"))

Everything between the message and the model is the same as in production: admission, priorities,
fair queues, batches limited by the entry's budget, halving of failed batches, continuous batching,
replies, rows, and acks. Three things differ. The model runs on a thread instead of in a process, so
it can't be killed. Without `redis_url`, nothing is recorded, so there are no predictions, streams,
or cancellation. Rows are kept in a list.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import direct_id, jobs_topic_id, make_inbox, make_jobs
from shared.errors import PenstockError, error_for_code
from shared.flows.engine import FlowEngine
from shared.messages import Envelope, Item, ItemError, Job, JobBody, Reply, decode_reply, encode_job
from shared.models.catalog import Catalog, Model
from shared.models.tasks import Input, Result
from shared.stores.cache import ResultCache
from shared.stores.flow_runs import FlowRuns
from shared.stores.objects import ObjectStore
from shared.stores.previews import PreviewStore
from shared.stores.records import Records
from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import NO_REDIS
from shared.stores.token_streams import TokenStreams
from shared.usage.row import Row
from shared.usage.row_list import RowList
from workers.identity import WorkerInfo
from workers.jobs.consumer import JobConsumer
from workers.jobs.step_completion import StepCompletion
from workers.models.base import LoadedModel, Preparer, SteppedModel
from workers.models.client import Launch, MakeRoom
from workers.models.step_shares import StepRoom
from workers.runtime.client import ModelClient
from workers.runtime.pool import ProcessPool
from workers.runtime.pooled_process import PooledProcess
from workers.runtime.resident_models import ResidentModels
from workers.runtime.server import ModelServer
from workers.tasks import model_for, preparer_for
from workers.worker import Worker

COMPUTE_LIMIT_S, CLOSE_LIMIT_S = 30.0, 10.0
_INBOX = "testing"


@dataclass
class WorkerUnderTest:
    """A running worker as seen by its callers.

    `rows`: the rows that the worker would send to BigQuery.
    """

    broker: InMemoryBroker
    entry: Model
    rows: list[Row]
    _replies: dict[str, asyncio.Future[Reply]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def compute(
        self, *inputs: Input, tenant: str = "default", limit_s: float = COMPUTE_LIMIT_S
    ) -> list[Result | PenstockError]:
        """Sends one job with these inputs. Returns the outcome of each input, in order.

        Args:
            inputs: inputs for the model's task, up to its maximum batch size.

        Raises:
            TimeoutError: no reply arrived by the deadline.
            UndecodableMessage: the worker could not read the job.
        """
        request_id, now_s = f"req_{next(self._numbers)}", time.time()
        envelope = Envelope(
            request_id=request_id,
            part=0,
            model=self.entry.name,
            tenant=tenant,
            inbox=direct_id(_INBOX),
            deadline_s=now_s + limit_s,
            received_at_s=now_s,
            published_at_s=now_s,
        )
        items = [Item(index, value) for index, value in enumerate(inputs)]
        data, attributes = encode_job(Job(envelope, JobBody(items)))
        self._replies[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.broker.publish(jobs_topic_id(self.entry.name), data, attributes)
            async with asyncio.timeout(limit_s):
                body = (await self._replies[request_id]).body
        finally:
            del self._replies[request_id]
        if body.error is not None:
            raise error_for_code(body.error.code, body.error.message)
        return [_outcome(outcome.result, outcome.error) for outcome in body.outcomes]

    async def receive_replies(self) -> None:
        """Passes each reply to its waiter. Runs until canceled."""
        async with self.broker.subscribe(direct_id(_INBOX), max_messages=100) as replies:
            async for message in replies:
                replies.ack(message)
                reply = decode_reply(message.data, message.attributes)
                waiter = self._replies.get(reply.request_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(reply)


@asynccontextmanager
async def running_worker(
    broker: InMemoryBroker,
    entry: Model,
    *,
    folder: Path | None = None,
    preparer: Preparer | None = None,
    model: Callable[[], LoadedModel] | None = None,
    redis_url: str = NO_REDIS,
    objects_url: str = "memory://",
    catalog: Catalog | None = None,
) -> AsyncIterator[WorkerUnderTest]:
    """Runs a worker with one model until the context exits.

    Creates the topics that the worker needs.

    Args:
        broker: shared with everything that sends jobs to the worker.
        entry: the model's catalog entry, with its task, name, and batch budget.
        folder: the model's files. Required if `preparer` or `model` is omitted.
        preparer: prepares the inputs. Defaults to the task's preparer.
        model: creates the model, which is not loaded yet. Defaults to the task's model, on the CPU.
        redis_url: Redis for records, token streams, and results. Defaults to no Redis.
        objects_url: where large results are stored. An API needs the same value to find these
            results.
        catalog: models available to later flow steps. Defaults to just this model.

    Raises:
        ConfigurationError: the model rejects its folder or its entry.
        ModelFailed: the model could not be loaded.
        ValueError: neither a folder nor both `preparer` and `model` were given.
    """
    if folder is None and (preparer is None or model is None):
        raise ValueError("without a folder, both preparer and model are required")
    # Not the working directory, because the sizes of all files in the folder are added up, and the
    # working directory may be large.
    files = folder or Path(os.devnull)
    preparer = preparer or preparer_for(entry, files)
    thread = _ModelThread(entry, model or (lambda: model_for(entry, files, "cpu")), files)
    await make_jobs(broker, entry.name)
    await make_inbox(broker, _INBOX, 1)
    rows, stop = RowList(), asyncio.Event()
    pool = ProcessPool([PooledProcess([Launch(thread.start_client)])])
    async with (
        ResultCache(redis_url, memory_bytes=1 << 20) as cache,
        RecordsRedis(redis_url) as redis,
        pool,
    ):
        info = WorkerInfo("testing", "", pool.device_name)
        objects = ObjectStore(objects_url)
        records, tokens = Records(redis), TokenStreams(redis)
        flows = FlowEngine(catalog or Catalog((entry,)), records, FlowRuns(redis), broker, cache)
        completion = StepCompletion(
            entry, broker, cache, records, tokens, objects, rows, info, flows
        )
        consumer = JobConsumer(
            entry,
            preparer,
            cache,
            records,
            tokens,
            PreviewStore(redis),
            objects,
            completion,
            in_steps=thread.in_steps,
        )
        worker = Worker([consumer], broker, records, pool, drain_s=CLOSE_LIMIT_S)
        under_test = WorkerUnderTest(broker, entry, rows.rows)
        async with _running(worker, stop), asyncio.TaskGroup() as group:
            receiving = group.create_task(under_test.receive_replies())
            yield under_test
            receiving.cancel()


@asynccontextmanager
async def _running(worker: Worker, stop: asyncio.Event) -> AsyncIterator[None]:
    """Runs the worker, and lets it finish its remaining jobs at the end."""
    task = asyncio.create_task(worker.run(stop))
    try:
        yield
    finally:
        stop.set()
        await task


class _ModelThread:
    """Stands in for workers.runtime.child_process.ChildProcess, but runs on a thread.

    The thread exits when the worker closes the connection, or when it is killed between batches.
    """

    pid = 0
    returncode: int | None = None

    def __init__(self, entry: Model, make: Callable[[], LoadedModel], folder: Path) -> None:
        first = make()
        self.in_steps = isinstance(first, SteppedModel)
        self.stdout: asyncio.StreamReader | None = None
        self._entry = entry
        self._made = itertools.chain([first], iter(make, None))
        self._folder = folder
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None

    async def start_client(self, make_room: MakeRoom) -> ModelClient:
        return await ModelClient.start(self.start, COMPUTE_LIMIT_S)

    async def start(self, theirs: socket.socket) -> _ModelThread:
        """Serves the model on this end of the socket."""
        self._connection = theirs.dup()
        self._connection.setblocking(True)
        self.stdout = asyncio.StreamReader()
        serving = (asyncio.get_running_loop(), self.stdout, self._connection)
        self._thread = threading.Thread(target=self._serve, args=serving, name="model", daemon=True)
        self._thread.start()
        return self

    def kill(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> int | None:
        """Waits for the thread to exit. Returns 0."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_LIMIT_S)
        return 0

    def _serve(
        self,
        loop: asyncio.AbstractEventLoop,
        output: asyncio.StreamReader,
        connection: socket.socket,
    ) -> None:
        """Runs the server. The text that a process would print when it dies becomes this output."""
        models = ResidentModels([lambda: next(self._made)], [self._folder])
        printed = b""
        try:
            with connection:
                ModelServer(connection, models, [StepRoom(self._entry)]).run()
        except Exception:
            printed = traceback.format_exc().encode()
        with suppress(RuntimeError):  # the loop is closed, so nothing will read the result
            loop.call_soon_threadsafe(output.feed_data, printed)
            loop.call_soon_threadsafe(output.feed_eof)


def _outcome(result: Result | None, error: ItemError | None) -> Result | PenstockError:
    if result is not None:
        return result
    assert error is not None, "an outcome has neither a result nor an error; this is a bug"
    return error_for_code(error.code, error.message, error.field)
