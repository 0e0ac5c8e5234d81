"""The reports in docs/reference/reports.md that the key may see, for the console and scripts.

A key sees its own tenant's rows. A key with the `admin` scope sees every tenant's rows and all
reports.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, cast

import msgspec
from starlette.responses import Response

from api.errors import NotFound
from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.openapi import Described, array_parameter, binary, query_parameter, success
from api.http.router import Router
from api.usage.service import ReportService
from shared.errors import BadInput
from shared.reports.budgets import read_budgets
from shared.reports.definitions import ROWS_KEPT_DAYS, Report, ask, reports
from shared.reports.parquet import report_parquet
from shared.reports.runner import ReportResult, drawings
from shared.settings import ApiSettings

Cell = str | int | float | bool | None
"""A table cell. Days and times are strings in ISO 8601 format."""

NO_STORE = {"cache-control": "no-store"}
PARQUET_TYPE = "application/vnd.apache.parquet"
_MOMENT: Described = {"type": "string", "examples": ["2026-11-01", "2026-11-01T12:00:00Z"]}
_QUESTION = [
    query_parameter("from", "A date in the time zone, or a time. Inclusive.", _MOMENT),
    query_parameter("to", "A date in the time zone, or a time. Exclusive. Default: now.", _MOMENT),
    query_parameter("tz", "Time zone of the dates.", {"type": "string", "default": "UTC"}),
    array_parameter("tenant", "Only these tenants. Only for keys with the `admin` scope."),
    array_parameter("model", "Only these models."),
    query_parameter(
        "format",
        "`parquet`: only the rows, as a Parquet file with the types of their columns.",
        {"type": "string", "enum": ["json", "parquet"], "default": "json"},
    ),
]


class ReportEntry(msgspec.Struct, kw_only=True):
    """A report this key may read."""

    object: Literal["report.entry"] = "report.entry"
    name: str
    title: str
    owner: Literal["finance", "product", "operations"]
    audience: Literal["tenants", "operators"]
    """`operators`: only for keys with the `admin` scope."""
    days: Annotated[int, msgspec.Meta(ge=1)]
    """Start of the default range, as the number of days before now."""
    filters: list[Literal["tenant", "model"]]
    """Supported filters."""


class ReportsReply(msgspec.Struct, kw_only=True):
    """The reports this key may read."""

    object: Literal["list"] = "list"
    data: list[ReportEntry]


class ReportColumnReply(msgspec.Struct, kw_only=True):
    """A report column."""

    name: str
    type: str
    about: str
    has_total: bool
    """True if the column's sum is meaningful."""


class ReportSeries(msgspec.Struct, kw_only=True):
    """One line of a plot, the bars of one color, or one row of a heat map."""

    name: str
    x: list[str]
    y: list[float | None]


class ReportPlot(msgspec.Struct, kw_only=True):
    """A report's plot."""

    kind: Literal["bars", "lines", "heat"]
    title: str
    unit: str
    stacked: bool
    series: list[ReportSeries]


class ReportReply(msgspec.Struct, kw_only=True):
    """A report's result."""

    object: Literal["report"] = "report"
    name: str
    title: str
    owner: str
    notes: str
    since: str
    """The start, in ISO 8601 format."""
    until: str
    """The end (exclusive), in ISO 8601 format."""
    tz: str
    columns: list[ReportColumnReply]
    rows: list[list[Cell]]
    plots: list[ReportPlot]


router = Router(scope="usage", prefix="/v1/reports", tags=["usage"])
_RESULT = success(
    "The result. `Content-Disposition`: only with a file.", ReportReply, "Content-Disposition"
)
_RESULT["content"] |= binary("", PARQUET_TYPE)["content"]


@router.get("", summary="List reports", reply=ReportsReply)
async def list_reports(call: Call) -> Response:
    """Lists the reports your key may read."""
    data = [_entry(report) for report in reports().values() if _may_read(call, report)]
    return encode_json(ReportsReply(data=data), headers=NO_STORE)


@router.get(
    "/{name}",
    summary="Get a report",
    query=_QUESTION,
    answers={200: _RESULT},
    errors=(400, 429),
)
async def get_report(
    call: Call, settings: ApiSettings, service: ReportService, name: str
) -> Response:
    """Returns a report on your tenant's rows for a time range."""
    report = reports().get(name)
    if report is None or not _may_read(call, report):
        raise NotFound(f"report {name[:80]!r} does not exist", field="name")
    params = call.http.query_params
    format_ = params.get("format", "json")
    if format_ not in ("json", "parquet"):
        raise BadInput(f"format: must be json or parquet, got {format_[:80]!r}", field="format")
    question = ask(
        params.get("from", ""),
        params.get("to", ""),
        params.get("tz", "UTC"),
        tenants=tenants_for(call, params.getlist("tenant")),
        models=tuple(params.getlist("model")) or None,
        days=report.days,
        max_days=ROWS_KEPT_DAYS,
    )
    budgets_usd = await _budgets(call, report, settings)
    result = await service.run(report, question, call.tenant, budgets_usd)
    if format_ == "json":
        return encode_json(_reply(result), headers=NO_STORE)
    file = await asyncio.to_thread(report_parquet, result)
    headers = NO_STORE | {"content-disposition": f'attachment; filename="{name}.parquet"'}
    return Response(file, headers=headers, media_type=PARQUET_TYPE)


def _is_admin(call: Call) -> bool:
    scopes = call.caller.scopes
    return scopes is not None and "admin" in scopes


def _may_read(call: Call, report: Report) -> bool:
    return report.audience == "tenants" or _is_admin(call)


def tenants_for(call: Call, tenants: list[str]) -> tuple[str, ...] | None:
    """Returns the tenants whose rows should be read. None means all tenants.

    Raises:
        BadInput: the key may not read the rows of a requested tenant.
    """
    if _is_admin(call):
        return tuple(tenants) or None
    if set(tenants) - {call.tenant}:
        raise BadInput(
            f"tenant: must be {call.tenant}, because this API key may only see its own tenant",
            field="tenant",
        )
    return (call.tenant,)


async def _budgets(call: Call, report: Report, settings: ApiSettings) -> dict[str, float]:
    if not any(parameter.default is None for parameter in report.parameters):
        return {}
    if _is_admin(call):
        return await read_budgets(settings.keys_url)
    own = call.caller.plan.budget_usd_per_month
    return {} if own is None else {call.tenant: own}


def _entry(report: Report) -> ReportEntry:
    filters = {"tenant": "tenants", "model": "models"}
    return ReportEntry(
        name=report.name,
        title=report.title,
        owner=report.owner,
        audience=report.audience,
        days=report.days,
        filters=cast(Any, [field for field, name in filters.items() if name not in report.without]),
    )


def _reply(result: ReportResult) -> ReportReply:
    report, question = result.report, result.question
    return ReportReply(
        name=report.name,
        title=report.title,
        owner=report.owner,
        notes=report.notes,
        since=question.since.isoformat(),
        until=question.until.isoformat(),
        tz=question.tz,
        columns=[
            ReportColumnReply(
                name=column.name,
                type=column.type,
                about=report.columns[column.name],
                has_total=column.name in report.totals,
            )
            for column in result.columns
        ],
        rows=[[_cell(value) for value in row] for row in result.rows],
        plots=[
            ReportPlot(
                kind=plot.kind,
                title=plot.title,
                unit=plot.unit,
                stacked=plot.stacked,
                series=[ReportSeries(name=of.name, x=of.x, y=of.y) for of in plot.series],
            )
            for plot in drawings(result)
        ],
    )


def _cell(value: Any) -> Cell:
    return value.isoformat() if hasattr(value, "isoformat") else cast(Cell, value)
