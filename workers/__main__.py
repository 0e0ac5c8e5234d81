"""`python -m workers`: a worker that serves one or more models.

Opens the worker's parts in order and runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import uvloop

from shared.broker.transport import Publisher, Transport
from shared.brokers import transport_of
from shared.canary.store import CanaryStore
from shared.errors import ConfigurationError, PenstockError
from shared.flows.engine import FlowEngine
from shared.logs import configure_logs
from shared.models.catalog import Catalog, Flow, Model, Revision
from shared.models.catalog_file import read_catalog
from shared.money import slo
from shared.process.gc_tuning import settle_heap
from shared.process.inspection import deny_inspection
from shared.process.loopback import exempt_loopback_from_proxies
from shared.settings import WorkerSettings, read_settings
from shared.stores.cache import ResultCache
from shared.stores.flow_runs import FlowRuns
from shared.stores.objects import ObjectStore
from shared.stores.previews import PreviewStore
from shared.stores.records import Records
from shared.stores.records_redis import RecordsRedis
from shared.stores.token_streams import TokenStreams
from shared.stores.withdrawals import LiveWithdrawals, WithdrawalStore
from shared.tracing.setup import export_spans
from shared.usage.senders import TABLE, sender_of
from shared.usage.worker_hour import TABLE as HOURS
from shared.usage.worker_start import TABLE as STARTS
from shared.usage.writer import RowWriter
from workers.autotune.candidates import choose_shared_layout, choose_unmeasured_layout
from workers.autotune.choice import Layout
from workers.autotune.client import choose_backend
from workers.autotune.hardware import detect_machine
from workers.health import health_server
from workers.identity import WorkerInfo
from workers.jobs.canary_comparison import RevisionComparison
from workers.jobs.canary_share import CanaryShare
from workers.jobs.consumer import JobConsumer
from workers.jobs.step_completion import StepCompletion
from workers.metrics import ProcessTimes, UtilizationReports
from workers.models.processors import gpu_type_of
from workers.models.source import read_ahead, resolve
from workers.runtime.pool import HostedModel, ModelPool, early_template
from workers.runtime.resident_models import free_host_bytes
from workers.runtime.template import EarlyTemplate
from workers.start_report import StartReport, process_started_at_s, read_pod_times
from workers.tasks import WORKER_TASKS, preparer_for
from workers.worker import Worker

MAX_NAMES_CHARS = 200
"""Maximum total length of the model names in a folder's name."""

log = logging.getLogger(__name__)


def main() -> int:
    exempt_loopback_from_proxies()
    try:
        settings = read_settings(WorkerSettings)
        configure_logs(settings.log_level, settings.project)
        catalog = read_catalog(settings.models_file)
        requested = [catalog.find_deployed(name) for name in settings.model_names]
        models = [catalog.find_deployed(model.deployed_name) for model in requested]
        if flows := [model.name for model in models if isinstance(model, Flow)]:
            raise ConfigurationError(
                f"PENSTOCK_MODEL: {flows[0]} is a flow; its steps run on its models' workers",
                field="model",
            )
        if any(model.definition.has_interface for model in models):
            deny_inspection()  # custom classes run as the same user
        uvloop.run(
            serve(settings, list({model.name: model for model in models}.values()), catalog)
        )  # an alias can repeat a model
    except ConfigurationError as error:
        print(f"penstock worker: {error.message}", file=sys.stderr)
        return 2
    except PenstockError as error:
        log.error("worker stopped", extra={"code": error.code, "reason": error.message})
        return 1
    return 0


async def serve(settings: WorkerSettings, models: Sequence[Model], catalog: Catalog) -> None:
    """Warms up the models and serves them. Returns after SIGTERM, once drained."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    times = ProcessTimes()
    running: list[Worker] = []
    async with AsyncExitStack() as stack:
        stack.enter_context(
            export_spans(
                "penstock-worker",
                project=settings.project,
                region=settings.region,
                broker=settings.messaging_system,
                instance=name,
            )
        )
        stack.enter_context(
            health_server(
                settings.health_host,
                settings.health_port,
                loop,
                lambda: any(w.is_ready for w in running),
            )
        )
        flows = (
            flow
            for flow in catalog.flows
            if {model.name for model in models} & {step.deployed_name for step in flow.step_models}
        )
        slo.show(model.public_name for model in (*models, *flows))
        # Opened first, so that a start that fails is reported too.
        starts = await stack.enter_async_context(_writer(settings, models, "starts", STARTS))
        start = stack.enter_context(_start_report(settings, models, name, starts, times))
        # Final unless a backend is measured.
        layout = _choose_layout(settings, models, _choose_first_layout(settings, models))
        if (early := early_template(models, layout.threads)) is not None:
            await stack.enter_async_context(early)
        prepared = [await _prepare(settings, model, start) for model in models]
        hosted = [model for model, _ in prepared]
        if (of_first := prepared[0][1]) is not None:
            layout = _choose_layout(settings, models, of_first)
        worker = await _open(stack, settings, hosted, layout, times, start, catalog, early)
        running.append(worker)
        settle_heap()
        facts = {"models": [model.name for model in models], "worker": name}
        log.info("worker ready", extra={**facts, **start.note_ready()})
        await worker.run(stop)


def _start_report(
    settings: WorkerSettings,
    models: Sequence[Model],
    name: str,
    sink: RowWriter,
    times: ProcessTimes,
) -> StartReport:
    info = WorkerInfo(name, settings.region, "", spot=settings.spot)
    started_at_s = process_started_at_s()
    pod = read_pod_times(started_at_s, settings.spool_dir / "pod-started")
    return StartReport(info, models, sink, started_at_s, pod, times.now_s)


def _choose_layout(settings: WorkerSettings, models: Sequence[Model], of_first: Layout) -> Layout:
    """Returns a worker's process and thread counts.

    Args:
        of_first: the layout that would be chosen if the first model ran by itself.
    """
    layout = of_first
    if len(models) > 1 and not settings.threads:
        layout = choose_shared_layout(layout, detect_machine())
    if wanted := [model.processes for model in models if model.processes]:
        layout = Layout(min(wanted), layout.threads)
    return layout


def _choose_first_layout(settings: WorkerSettings, models: Sequence[Model]) -> Layout:
    """Returns the process count and thread count (0: default) for the first model by itself."""
    machine = detect_machine()
    is_wide = (
        len(models) == 1
        and models[0].definition.shares_weights
        and not machine.computes_on_gpu(settings.device)
    )
    return choose_unmeasured_layout(settings.processes, settings.threads, machine, is_wide=is_wide)


async def _prepare(
    settings: WorkerSettings, model: Model, start: StartReport
) -> tuple[HostedModel, Layout | None]:
    """Returns the model with its backend, and the layout that was measured with it, if any."""
    with start.measure("weights"):
        folder = await asyncio.to_thread(
            resolve,
            model.source,
            model.revision,
            settings.models_dir,
            weights_dir=settings.weights_dir,
            open_gguf=WORKER_TASKS[model.task].open_gguf(model),
        )
        await asyncio.to_thread(WORKER_TASKS[model.task].provide, model, folder)
        if settings.weights_dir is not None and folder.is_relative_to(settings.weights_dir):
            await asyncio.to_thread(read_ahead, folder, free_host_bytes())
    if not WORKER_TASKS[model.task].measures_backends(model):
        return HostedModel(model, folder), None
    with start.measure("backend"):
        choice = await choose_backend(model, folder, settings)
    served = model.model_copy(update={"batch": choice.batch(model)})
    return HostedModel(served, folder, choice.backend), choice.layout


class _Stores(NamedTuple):
    """The stores a worker reads and writes, not including rows."""

    cache: ResultCache
    redis: RecordsRedis
    transport: Transport
    objects: ObjectStore
    withdrawals: LiveWithdrawals


async def _open_stores(stack: AsyncExitStack, settings: WorkerSettings) -> _Stores:
    enter = stack.enter_async_context
    return _Stores(
        await enter(ResultCache(settings.redis_url, settings.memory_cache_bytes)),
        await enter(RecordsRedis(settings.records_redis_url)),
        await enter(transport_of(settings)),
        ObjectStore(settings.objects_url),
        await enter(LiveWithdrawals(WithdrawalStore(settings.records_redis_url))),
    )


async def _open(
    stack: AsyncExitStack,
    settings: WorkerSettings,
    hosted: Sequence[HostedModel],
    layout: Layout,
    times: ProcessTimes,
    start: StartReport,
    catalog: Catalog,
    early: EarlyTemplate | None,
) -> Worker:
    """Opens every part.

    Row writers are opened first, because an earlier process may have left rows behind, and are
    closed last.
    """
    models = [model.entry for model in hosted]
    rows = await stack.enter_async_context(_writer(settings, models, "worker", TABLE))
    hours = await stack.enter_async_context(_writer(settings, models, "hours", HOURS))
    reports = await stack.enter_async_context(UtilizationReports(times, hours, models, start.info))
    with start.measure("load"):
        pool = await stack.enter_async_context(_pool(settings, hosted, layout, early))
    start.note_compiled(pool.warmup_s)
    cache, redis, transport, objects, withdrawals = await _open_stores(stack, settings)
    parts = await _canary_parts(stack, settings, hosted, transport, objects)
    device = pool.device_name
    records, tokens, previews = Records(redis), TokenStreams(redis), PreviewStore(redis)
    flows = FlowEngine(catalog, records, FlowRuns(redis), transport, cache, withdrawals.purges)
    facts = dataclasses.replace(start.info, device=device, gpu_type=gpu_type_of(device))
    reports.info = start.info = facts
    consumers = [
        JobConsumer(
            model,
            preparer_for(model, folder),
            cache,
            records,
            tokens,
            previews,
            objects,
            StepCompletion(
                model,
                transport,
                cache,
                records,
                tokens,
                objects,
                rows,
                facts,
                flows,
                parts.get(model.name),
            ),
            in_steps=WORKER_TASKS[model.task].computes_steps(model, folder),
            withdrawals=withdrawals,
        )
        for model, folder, _ in hosted
    ]
    return Worker(
        consumers,
        transport,
        records,
        pool,
        ack_deadline_s=settings.ack_deadline_s,
        max_outstanding_bytes=settings.max_outstanding_bytes,
        drain_s=settings.drain_s,
        times=times,
        start=start,
    )


def _pool(
    settings: WorkerSettings,
    hosted: Sequence[HostedModel],
    layout: Layout,
    early: EarlyTemplate | None,
) -> ModelPool:
    return ModelPool(
        hosted,
        device=settings.device,
        processes=layout.processes,
        threads=layout.threads,
        memory_fraction=settings.memory_fraction,
        memory_budget_bytes=settings.memory_budget_bytes,
        start_timeout_s=settings.startup_s or sum(model.entry.startup_s for model in hosted),
        early=early,
    )


def _writer(settings: WorkerSettings, models: Sequence[Model], kind: str, table: str) -> RowWriter:
    """Returns a writer with a folder for this kind of row and for workers with these models."""
    return RowWriter(
        sender_of(settings, table),
        spool_dir=settings.spool_dir / _spool_name(kind, models),
        spool_max_bytes=settings.spool_max_bytes,
    )


def _spool_name(kind: str, models: Sequence[Model]) -> str:
    """Returns a folder's name. A digest replaces model names if there are too many."""
    names = "-".join(model.name for model in models)
    if len(names) > MAX_NAMES_CHARS:
        names = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
    return f"{kind}-{names}"


async def _canary_parts(
    stack: AsyncExitStack,
    settings: WorkerSettings,
    hosted: Sequence[HostedModel],
    publisher: Publisher,
    objects: ObjectStore,
) -> dict[str, CanaryShare]:
    """Returns the parts that compare revisions, by name, for models that need a comparison."""
    canaries = {
        model.entry.name: model.entry
        if isinstance(model.entry, Revision)
        else model.entry.as_canary()
        for model in hosted
        if model.entry.canary is not None
    }
    if not canaries:
        return {}
    canary_store = await stack.enter_async_context(CanaryStore(settings.records_redis_url))
    parts = {}
    for model, folder, _ in hosted:
        if (canary := canaries.get(model.name)) is not None:
            is_close = WORKER_TASKS[model.task].comparer(model, folder)
            comparison = is_close and RevisionComparison(model, publisher, objects, is_close)
            parts[model.name] = CanaryShare(model, canary, canary_store, publisher, comparison)
    return parts


if __name__ == "__main__":
    sys.exit(main())
