"""Opens the inference pipeline, for the API and for the batch runner."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from api.dispatch.admission import Admission
from api.dispatch.canary_comparison import ImageComparer
from api.dispatch.canary_routing import CanaryRouter
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.job_sender import JobSender
from api.dispatch.model_window import PublishWindow, WindowExchange
from api.dispatch.reply_inbox import ReplyInbox
from shared.broker.transport import Admin, Transport
from shared.canary.store import CanaryStore
from shared.flows.engine import FlowEngine
from shared.models.catalog import Catalog
from shared.settings import ApiSettings
from shared.stores.cache import ResultCache
from shared.stores.flow_runs import FlowRuns
from shared.stores.objects import ObjectStore
from shared.stores.prediction_store import PredictionStore
from shared.stores.records import Records
from shared.stores.records_redis import RecordsRedis
from shared.stores.withdrawals import LiveWithdrawals, WithdrawalStore
from shared.usage.row import RowSink


@dataclass(frozen=True, slots=True)
class OpenParts:
    """The opened parts."""

    redis: RecordsRedis
    records: Records
    prediction_store: PredictionStore
    flow_runs: FlowRuns
    broker: Transport
    inbox: ReplyInbox
    rows: RowSink
    admission: Admission
    sender: JobSender
    dispatcher: Dispatcher
    canaries: CanaryRouter
    flows: FlowEngine


async def open_pipeline(
    stack: AsyncExitStack,
    settings: ApiSettings,
    catalog: Catalog,
    objects: ObjectStore,
    transport: AbstractAsyncContextManager[Transport],
    admin: AbstractAsyncContextManager[Admin],
    rows: AbstractAsyncContextManager[RowSink],
    instance: str,
    images: ImageComparer,
) -> OpenParts:
    """Opens everything in dependency order. `stack` closes the parts in reverse order.

    Args:
        transport: connection to the broker, not yet open.
        admin: creates an inbox if no pool provides one. Not yet open.
        rows: receives the rows written by this process. Not yet open.
        instance: process ID.
        images: compares a canary's images with the other revision.

    Raises:
        Unavailable: the broker is unreachable, or no inbox is free.
    """
    enter = stack.enter_async_context
    cache = await enter(ResultCache(settings.redis_url, settings.memory_cache_bytes))
    redis = await enter(RecordsRedis(settings.records_redis_url))
    records = Records(redis)
    prediction_store = PredictionStore(redis, max_bytes=settings.predictions_max_bytes)
    flow_runs = FlowRuns(redis, max_bytes=settings.predictions_max_bytes)
    broker = await enter(transport)
    inbox = await enter(ReplyInbox(settings, broker, await enter(admin), instance))
    # Closed right after the dispatcher: rows must be on disk before the process is killed, whereas
    # an inbox that is not removed in time just expires.
    row_sink = await enter(rows)
    admission = Admission(settings.max_in_flight, (*catalog.deployed, *catalog.flows))
    window = await _open_window(stack, settings, catalog, admission, broker, instance)
    withdrawals = await enter(LiveWithdrawals(WithdrawalStore(settings.records_redis_url)))
    canary_store = CanaryStore(settings.records_redis_url)
    canaries = await enter(CanaryRouter(catalog, canary_store, withdrawals=withdrawals))
    flows = FlowEngine(catalog, records, flow_runs, broker, purges=withdrawals.purges)
    sender = JobSender(
        inbox,
        broker,
        objects,
        records,
        window,
        flows,
        row_sink,
        api_instance=instance,
        region=settings.region,
    )
    dispatcher = await enter(
        Dispatcher(
            sender,
            cache,
            records,
            admission,
            row_sink,
            canaries,
            objects,
            images,
            api_instance=instance,
            region=settings.region,
        )
    )
    return OpenParts(
        redis,
        records,
        prediction_store,
        flow_runs,
        broker,
        inbox,
        row_sink,
        admission,
        sender,
        dispatcher,
        canaries,
        flows,
    )


async def _open_window(
    stack: AsyncExitStack,
    settings: ApiSettings,
    catalog: Catalog,
    admission: Admission,
    broker: Transport,
    instance: str,
) -> PublishWindow:
    window = PublishWindow(
        catalog.deployed, admission.rate_of, settings.broker_wait_s, broker.round_trip
    )
    await stack.enter_async_context(WindowExchange(window, settings.records_redis_url, instance))
    return window
