"""The targets of functions-framework: `dead_letter`, `webhook`, `reports`, and `functions` for all.

    functions-framework --source workers/functions/main.py --target dead_letter

In the cloud each is a separate service. On one machine one process has all, since the framework
takes one target. The first two are HTTP targets that read both CloudEvents and raw pushes
(push_message.py says why).
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from functions_framework import aio

from shared.logs import configure_logs
from shared.settings import read_settings
from shared.tracing.setup import traced
from workers.functions.dependencies import FunctionDependencies
from workers.functions.handler import FunctionResponse, Request, handle_push, probe_response
from workers.functions.push_auth import PushAuthenticator
from workers.functions.scheduled import handle_scheduled
from workers.functions.settings import FunctionSettings

settings = read_settings(FunctionSettings)
configure_logs(settings.log_level, settings.project)
authenticator = PushAuthenticator(
    settings.push_audience,
    settings.push_account,
    certs_url=settings.push_certs_url,
    checked_by=settings.push_checked_by,
)
dependencies = FunctionDependencies(settings)
# The framework does not tell a function of its end, but the interpreter does.
traces = ExitStack()
traces.enter_context(
    traced(
        "penstock-functions",
        project=settings.project,
        region=settings.region,
        broker=settings.messaging_system,
    )
)
atexit.register(traces.close)


handlers = {"dead_letter": dependencies.dead_letter, "webhook": dependencies.webhook}


@aio.http
async def dead_letter(request: Request) -> FunctionResponse:
    """Answers the caller of a job that no worker could finish."""
    return await handle_push(request, "dead_letter", authenticator, handlers["dead_letter"])


@aio.http
async def webhook(request: Request) -> FunctionResponse:
    """Delivers an event of a prediction to its webhook."""
    return await handle_push(request, "webhook", authenticator, handlers["webhook"])


@aio.http
async def reports(request: Request) -> FunctionResponse:
    """Sums up days, makes invoices and summaries, and looks for anomalies."""
    return await handle_scheduled(request, authenticator, settings)


@aio.http
async def functions(request: Request) -> FunctionResponse:
    """All of them, at `/dead_letter`, `/webhook` and `/reports`."""
    if request.method != "POST":
        return probe_response(request)
    name = request.url.path.strip("/")
    if name == "reports":
        return await handle_scheduled(request, authenticator, settings)
    if name not in handlers:
        return "there is no such function", 404
    return await handle_push(request, name, authenticator, handlers[name])
