"""functions-framework entry points: `dead_letter`, `webhook`, `reports`, or all as `functions`.

    functions-framework --source workers/functions/main.py --target dead_letter

In the cloud, each runs as a separate service. On a single machine, one process serves all of them,
because the framework accepts only one target. The first two are HTTP targets that read both
CloudEvents and raw pushes (handler.py explains why).

`reports` handles a Cloud Scheduler call: it aggregates past days, or checks the current day's hours
for anomalies. The body is JSON: `{}` for the most recent days, `{"from": "2026-10-01", "to":
"2026-10-31"}` for a backfill, or `{"only": "anomalies"}` for the hours that have ended. Cloud
Scheduler retries any call that doesn't get a 2xx response.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import msgspec
from functions_framework import aio
from prometheus_client import Counter

from shared.errors import MALFORMED, BadInput, PenstockError, UndecodableMessage
from shared.logs import configure_logs
from shared.process.inspection import deny_inspection
from shared.process.loopback import exempt_loopback_from_proxies
from shared.reports.day_tables import days_asked
from shared.reports.scheduled import RUN_LIMIT_S, RunResult, open_reports
from shared.settings import ReportSettings, read_settings
from shared.tracing.setup import export_spans
from workers.functions.dependencies import FunctionDependencies
from workers.functions.handler import (
    REFUSED,
    FunctionResponse,
    Request,
    handle_push,
    probe_response,
    read_body,
)
from workers.functions.push_auth import PushAuthenticator, PushRefused
from workers.functions.settings import FunctionSettings

MAX_BODY_BYTES = 4096
GRACE_S = 30.0
"""How far past its time limit a run may go to finish its current step."""

RUNS = Counter(
    "penstock_reports_runs_total",
    "Scheduled runs, by kind (daily, anomalies) and outcome (done, refused, failed)",
    ["run", "outcome"],
)
for _run in ("daily", "anomalies"):
    for _outcome in ("done", "refused", "failed"):
        RUNS.labels(_run, _outcome)

log = logging.getLogger(__name__)

settings = read_settings(FunctionSettings)

authenticator = PushAuthenticator(
    settings.push_audience,
    settings.push_account,
    certs_url=settings.push_certs_url,
    checked_by=settings.push_checked_by,
)
dependencies = FunctionDependencies(settings)
# The framework doesn't notify a function when it exits, but the interpreter does.
traces = ExitStack()

handlers = {"dead_letter": dependencies.dead_letter, "webhook": dependencies.webhook}


async def handle_scheduled(
    request: Request, authenticator: PushAuthenticator, settings: ReportSettings
) -> FunctionResponse:
    """Handles one call. Returns the response's text and status."""
    if request.method != "POST":
        return probe_response(request)
    run = "daily"
    try:
        await authenticator.check(request.headers.get("authorization", ""))
        options = _read_options(await read_body(request, MAX_BODY_BYTES))
        if "only" in options:
            run = "anomalies"
        async with asyncio.timeout(RUN_LIMIT_S + GRACE_S):
            result = await _run_reports(options, settings)
    except PushRefused as error:
        REFUSED.labels("reports").inc()
        log.warning("call refused", extra={"function": "reports", "reason": error.message})
        return error.message, 401
    except (BadInput, UndecodableMessage) as error:
        RUNS.labels(run, "refused").inc()
        log.error("run refused", extra={"run": run, "reason": error.message})
        return error.message, 400
    except (PenstockError, TimeoutError) as error:
        RUNS.labels(run, "failed").inc()
        log.error("run failed", extra={"run": run, "reason": str(error) or "out of time"})
        return str(error) or "out of time", 503
    RUNS.labels(run, "done").inc()
    return msgspec.json.encode(_summary_of(result)).decode(), 200


def _read_options(body: bytes) -> dict[str, Any]:
    try:
        options = msgspec.json.decode(body or b"{}")
    except MALFORMED as error:
        raise BadInput(f"the body is not valid JSON: {error}", field="body") from error
    if not isinstance(options, dict):
        raise BadInput("the body is not a JSON object", field="body")
    if "only" in options and options != {"only": "anomalies"}:
        raise BadInput("only: must be anomalies, with no other fields", field="only")
    return options


async def _run_reports(parameters: dict[str, Any], settings: ReportSettings) -> RunResult:
    with open_reports(settings) as reports:
        if "only" in parameters:
            return await reports.judge_hours(settings.billing_tz)
        return await reports.run(days_asked(parameters, settings.billing_tz, datetime.now(UTC)))


def _summary_of(result: RunResult) -> dict[str, Any]:
    return {
        "days": [str(day.day) for day in result.days],
        "new_anomalies": result.anomalies,
        "subject": None if result.summary is None else result.summary.subject,
        "objects": len(result.objects),
    }


exempt_loopback_from_proxies()
configure_logs(settings.log_level, settings.project)
deny_inspection()
traces.enter_context(
    export_spans(
        "penstock-functions",
        project=settings.project,
        region=settings.region,
        broker=settings.messaging_system,
    )
)
atexit.register(traces.close)


@aio.http
async def dead_letter(request: Request) -> FunctionResponse:
    """Replies to the caller of a job that no worker could finish."""
    return await handle_push(request, "dead_letter", authenticator, handlers["dead_letter"])


@aio.http
async def webhook(request: Request) -> FunctionResponse:
    """Delivers a prediction event to its webhook."""
    return await handle_push(request, "webhook", authenticator, handlers["webhook"])


@aio.http
async def reports(request: Request) -> FunctionResponse:
    """Aggregates days, creates invoices and summaries, and checks for anomalies."""
    return await handle_scheduled(request, authenticator, settings)


@aio.http
async def functions(request: Request) -> FunctionResponse:
    """Serves all three, at `/dead_letter`, `/webhook`, and `/reports`."""
    if request.method != "POST":
        return probe_response(request)
    name = request.url.path.strip("/")
    if name == "reports":
        return await handle_scheduled(request, authenticator, settings)
    if name not in handlers:
        return "the function does not exist", 404
    return await handle_push(request, name, authenticator, handlers[name])
