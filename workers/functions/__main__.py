"""`python -m workers.functions`: runs a RabbitMQ deployment's functions until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys

from aiohttp import web
from prometheus_client import generate_latest

from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.client import RabbitTransport
from shared.errors import ConfigurationError
from shared.logs import configure_logs
from shared.models.catalog_file import read_catalog
from shared.process.inspection import deny_inspection
from shared.process.loopback import exempt_loopback_from_proxies
from shared.settings import read_settings
from shared.tracing.setup import export_spans
from workers.functions.consumer import FunctionConsumer, QueueDepths, sources
from workers.functions.dependencies import FunctionDependencies
from workers.functions.settings import FunctionSettings


def main() -> int:
    """Handles messages until a signal arrives. Returns 0, or 1 if it could not start."""
    exempt_loopback_from_proxies()
    try:
        settings = read_settings(FunctionSettings)
        if not settings.broker:
            raise ConfigurationError(
                "functions only receive messages from RabbitMQ; Pub/Sub pushes them", field="broker"
            )
        configure_logs(settings.log_level, settings.project)
        deny_inspection()
        with export_spans(
            "penstock-functions",
            project=settings.project,
            region=settings.region,
            broker=settings.messaging_system,
        ):
            asyncio.run(_run(settings))
    except ConfigurationError as error:
        print(f"penstock functions: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _run(settings: FunctionSettings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    dependencies = FunctionDependencies(settings)
    handlers = {"dead_letter": dependencies.dead_letter, "webhook": dependencies.webhook}
    catalog = read_catalog(settings.models_file)
    async with (
        RabbitTransport(settings.project, settings.broker) as transport,
        RabbitAdmin(settings.project, settings.broker) as admin,
    ):
        consumer = FunctionConsumer(transport, handlers)
        depths = asyncio.create_task(QueueDepths(admin, catalog).run())
        runner = web.AppRunner(_probes(consumer), access_log=None)
        await runner.setup()
        try:
            async with consumer.running(sources(catalog)):
                await web.TCPSite(runner, settings.health_host, settings.health_port).start()
                await stopped.wait()
        finally:
            depths.cancel()
            await asyncio.wait([depths])
            await runner.cleanup()
            await dependencies.close()


def _probes(consumer: FunctionConsumer) -> web.Application:
    async def ready(request: web.Request) -> web.Response:
        return web.Response(status=200 if consumer.is_connected else 503)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), content_type="text/plain")

    app = web.Application()
    app.add_routes([web.get("/readyz", ready), web.get("/metrics", metrics)])
    return app


if __name__ == "__main__":
    sys.exit(main())
