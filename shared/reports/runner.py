"""Runs reports in BigQuery, using only query parameters and limiting the bytes each one reads.

A result's plots are series of numbers, which both the page and the console use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import BadInput, Unavailable
from shared.reports.definitions import Parameter, Report, ReportQuestion, check_fits, widen
from shared.usage.bigquery import open_client, public_reason, run_query

if TYPE_CHECKING:
    from google.cloud.bigquery import Client
    from google.cloud.bigquery.table import RowIterator
from collections import defaultdict
from collections.abc import Iterable

from shared.reports.definitions import Plot, PlotKind

MAX_BYTES = 20 * 1024**3
"""Default maximum number of bytes that a report may read."""
USD_PER_TIB = 6.25
"""Price of on-demand queries in the US, excluding the first TiB per month, which is free.

Source: https://cloud.google.com/bigquery/pricing (2023-07 and later); other regions may cost more.
"""
QUERY_LIMIT_S = 60.0
RETRY_LIMIT_S = 5.0
"""The client's default of ten minutes is too long for a person to wait."""
MAX_ROWS = 200_000
INVALID_ZONE = "Invalid time zone"
WRONG_ZONE = "tz: must be a time zone such as Europe/Berlin"

NO_CREDENTIALS = (
    "no Google credentials on this machine: run gcloud auth application-default "
    "login, set PENSTOCK_BIGQUERY_ENDPOINT to use an embedded BigQuery, or run this "
    "in the folder where penstock up is running"
)
MAX_SERIES = 8
"""Number of distinguishable colors. The smallest series are combined."""
MAX_BARS = 24
"""Maximum number of names that are readable along an axis. The smallest bars are combined."""
OTHERS = "others"
_WEEKDAYS = ("", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_UNITS = {"_usd": "US dollars", "_percent": "%", "_ms": "ms", "_s": "s"}
_NOT_ADDED = ("_percent", "_ms", "_mean", "_burn", "_max")
"""Suffixes of columns for which a sum is meaningless."""

_Cells = dict[tuple[str, str], float | None]
"""Values, keyed by series and x."""


class ReportColumn(NamedTuple):
    """A column in a result."""

    name: str
    type: str
    """BigQuery's type: STRING, INTEGER, FLOAT, DATE, TIMESTAMP ..."""


class ReportResult(NamedTuple):
    """The result of a report."""

    report: Report
    question: ReportQuestion
    columns: Sequence[ReportColumn]
    rows: Sequence[tuple[Any, ...]]
    read_bytes: int
    """Bytes that BigQuery read for the report."""

    @property
    def heads(self) -> list[str]:
        return [column.name for column in self.columns]

    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.heads, row, strict=True)) for row in self.rows]


class ReportRunner:
    """Queries one dataset. Calls block, so servers run them in threads.

    Args:
        most_bytes: maximum number of bytes that a query may read; larger queries are rejected.
        budgets_usd: tenants' monthly budgets, for reports that use them.
        most_rows: maximum number of rows in a result, which is kept in memory; larger results are
            rejected.
    """

    def __init__(
        self,
        client: Client,
        dataset: str,
        most_bytes: int = MAX_BYTES,
        budgets_usd: Mapping[str, float] | None = None,
        most_rows: int = MAX_ROWS,
    ) -> None:
        self._client = client
        self._dataset = dataset
        self._most_bytes = most_bytes
        self._budgets_usd = budgets_usd or {}
        self._most_rows = most_rows

    def run(
        self,
        report: Report,
        question: ReportQuestion,
        values: Mapping[str, float] | None = None,
        limit_s: float = QUERY_LIMIT_S,
    ) -> ReportResult:
        """Runs a report. A report on whole months includes every month the range overlaps.

        Args:
            values: the report's own parameters, keyed by name. Defaults to the values in its
                header.

        Raises:
            BadInput: the report does not support the filter or parameter, or the result is too
                long.
            Unavailable: BigQuery is unreachable or rejected the query, possibly because of its
                size.
        """
        from google.cloud.bigquery import DEFAULT_RETRY

        question = widen(report, question, datetime.now(UTC))
        with translate_errors():
            retry = DEFAULT_RETRY.with_timeout(RETRY_LIMIT_S)
            config = self._config(report, question, values)
            config.maximum_bytes_billed = self._most_bytes
            job, result = run_query(
                self._client,
                report.sql,
                config,
                limit_s,
                retry=retry,
                max_results=self._most_rows + 1,
            )
            rows = _fetch_rows(result)
            columns = [ReportColumn(field.name, field.field_type) for field in result.schema]
            read_bytes = int(job.total_bytes_processed or 0)
        if len(rows) > self._most_rows:
            raise BadInput(
                f"from: exceeds the maximum of {self._most_rows} rows; use a shorter range",
                field="from",
            )
        return ReportResult(report, question, columns, rows, read_bytes)

    def cost(
        self,
        report: Report,
        question: ReportQuestion,
        values: Mapping[str, float] | None = None,
    ) -> int:
        """Returns how many bytes the report would read, using a dry run, which is free.

        Raises:
            BadInput: the report does not support the filter or parameter.
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        question = widen(report, question, datetime.now(UTC))
        with translate_errors():
            # No limit is set, because the result determines what limit is needed.
            config = self._config(report, question, values)
            config.dry_run = True
            job = self._client.query(
                report.sql, job_config=config, retry=None, job_retry=None, timeout=QUERY_LIMIT_S
            )
            return int(job.total_bytes_processed or 0)

    def _config(
        self, report: Report, question: ReportQuestion, values: Mapping[str, float] | None
    ) -> Any:
        from google.cloud.bigquery import QueryJobConfig

        check_fits(report, question)
        return QueryJobConfig(
            default_dataset=f"{self._client.project}.{self._dataset}",
            query_parameters=[*_standard(question), *self._own(report, values or {})],
        )

    def _own(self, report: Report, values: Mapping[str, float]) -> Iterator[Any]:
        from google.cloud.bigquery import ArrayQueryParameter, ScalarQueryParameter

        settable = [
            parameter.name for parameter in report.parameters if parameter.default is not None
        ]
        if unknown := set(values) - set(settable):
            raise BadInput(
                f"set: the report {report.name} has no parameter {min(unknown)[:80]!r}",
                field="set",
            )
        budgets = dict(sorted(self._budgets_usd.items()))
        parameters = {"budget_tenants": list(budgets), "budgets_usd": list(budgets.values())}
        for parameter in report.parameters:
            if parameter.default is not None:
                value = values.get(parameter.name, parameter.default)
                yield ScalarQueryParameter(parameter.name, parameter.type, value)
            else:
                yield ArrayQueryParameter(
                    parameter.name, _item_type(parameter), parameters[parameter.name]
                )


def _standard(question: ReportQuestion) -> list[Any]:
    from google.cloud.bigquery import ArrayQueryParameter, ScalarQueryParameter

    return [
        ScalarQueryParameter("since", "TIMESTAMP", question.since),
        ScalarQueryParameter("until", "TIMESTAMP", question.until),
        ScalarQueryParameter("tz", "STRING", question.tz),
        ArrayQueryParameter("tenants", "STRING", list(question.tenants or ())),
        ArrayQueryParameter("models", "STRING", list(question.models or ())),
    ]


def _item_type(parameter: Parameter) -> str:
    return parameter.type.removeprefix("ARRAY<").removesuffix(">")


@contextmanager
def open_runner(
    project: str,
    dataset: str,
    endpoint: str,
    most_bytes: int = MAX_BYTES,
    budgets_usd: Mapping[str, float] | None = None,
) -> Iterator[ReportRunner]:
    """Yields a runner with its own client.

    If an endpoint is set, the runner queries an embedded BigQuery.

    Raises:
        Unavailable: there are no credentials.
    """
    with translate_errors():
        client = open_client(project, endpoint)
    with closing(client):
        yield ReportRunner(client, dataset, most_bytes, budgets_usd)


def _fetch_rows(result: RowIterator) -> list[tuple[Any, ...]]:
    """Returns the rows on all pages. While one page is being read, the next one is fetched."""
    pages = iter(result.pages)
    rows: list[tuple[Any, ...]] = []
    with ThreadPoolExecutor(1) as fetching:
        coming = fetching.submit(next, pages, None)
        while (page := coming.result()) is not None:
            coming = fetching.submit(next, pages, None)
            # values() would deep-copy each row, which takes a third of the total time for a long
            # result.
            rows += [row[:] for row in page]
    return rows


@contextmanager
def translate_errors() -> Iterator[None]:
    """Converts errors from Google's client to ours.

    Raises:
        BadInput: BigQuery does not recognize the time zone. Its list may be older than ours.
        Unavailable: BigQuery is unreachable or rejected the query.
    """
    # Imported only when needed, because importing Google's client takes half a second.
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from requests.exceptions import RequestException

    try:
        yield
    except (GoogleAPIError, GoogleAuthError, RequestException, TimeoutError) as error:
        # The other lines identify the job, which is not useful here.
        first = (str(error).splitlines() or [repr(error)])[0]
        if INVALID_ZONE in first:
            raise BadInput(f"BigQuery: {first}", field="tz", public=WRONG_ZONE) from error
        if isinstance(error, DefaultCredentialsError):
            first = NO_CREDENTIALS
        public = public_reason(first, "the report can't be read right now; try again")
        raise Unavailable(f"BigQuery: {first}", public=public) from error


class PlotSeries(NamedTuple):
    """One line, the bars of one color, or one row of a heat map."""

    name: str
    x: list[str]
    y: list[float | None]


class Drawing(NamedTuple):
    """A plot and the numbers it shows."""

    kind: PlotKind
    title: str
    unit: str
    stacked: bool
    series: Sequence[PlotSeries]


def drawings(result: ReportResult) -> list[Drawing]:
    """Returns a report's plots. Empty if there are no rows."""
    if not result.rows:
        return []
    return [_drawing(result, plot) for plot in result.report.plots]


def _drawing(result: ReportResult, plot: Plot) -> Drawing:
    cells = _cells(result, plot)
    is_added = len(plot.values) == 1 and not plot.values[0].endswith(_NOT_ADDED)
    if plot.kind != "heat":
        if is_added:
            cells = _fewest_colors(cells)
        if plot.by in ("tenant", "model", "error_code") and is_added:
            cells = _fewest_bars(cells)
    x_values = list(dict.fromkeys(x for _, x in cells))
    if plot.by in ("day", "hour"):
        x_values.sort(key=lambda x: (len(x), x) if plot.kind == "heat" else (0, x))
    series = [
        PlotSeries(name, x_values, [cells.get((name, x)) for x in x_values])
        for name in _names(cells, plot)
    ]
    words = ", ".join(_words(value) for value in plot.values)
    title = f"{words[0].upper()}{words[1:]} by {_words(plot.by)}"
    return Drawing(plot.kind, title, _unit(plot.values[0]), is_added, series)


def _cells(result: ReportResult, plot: Plot) -> _Cells:
    """Returns values, keyed by series and x. Values with the same x are summed."""
    cells: _Cells = {}
    for record in result.records():
        x = _label(record[plot.by])
        for value in plot.values:
            name = _words(value)
            if plot.color:
                name = _label(record[plot.color], is_weekday=plot.color == "weekday")
            number = record[value]
            if number is not None:
                cells[name, x] = (cells.get((name, x)) or 0.0) + float(number)
            else:
                cells.setdefault((name, x), None)
    return cells


def _fewest_colors(
    cells: _Cells,
) -> _Cells:
    largest = _largest(((name, value) for (name, _), value in cells.items()), MAX_SERIES)
    return _add_up(
        ((name if name in largest else OTHERS, x), value) for (name, x), value in cells.items()
    )


def _fewest_bars(cells: _Cells) -> _Cells:
    largest = _largest(((x, value) for (_, x), value in cells.items()), MAX_BARS)
    return _add_up(
        ((name, x if x in largest else OTHERS), value) for (name, x), value in cells.items()
    )


def _largest(values: Iterable[tuple[str, float | None]], limit: int) -> set[str]:
    sums: dict[str, float] = defaultdict(float)
    for name, value in values:
        sums[name] += value or 0.0
    ordered = sorted(sums, key=lambda name: -sums[name])
    return set(ordered if len(ordered) <= limit else ordered[: limit - 1])


def _add_up(
    values: Iterable[tuple[tuple[str, str], float | None]],
) -> _Cells:
    cells: _Cells = {}
    for key, value in values:
        cells[key] = (cells.get(key) or 0.0) + (value or 0.0)
    return cells


def _names(cells: _Cells, plot: Plot) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in cells))
    if plot.color == "weekday":
        return sorted(names, key=_WEEKDAYS.index)
    return names


def _label(value: Any, *, is_weekday: bool = False) -> str:
    if is_weekday:
        return _WEEKDAYS[int(value)]
    if value is None or value == "":
        return "(none)"
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _words(column: str) -> str:
    for ending in _UNITS:
        column = column.removesuffix(ending)
    return column.replace("_", " ").replace("gpu", "GPU").replace("slo", "SLO")


def _unit(column: str) -> str:
    return next((unit for ending, unit in _UNITS.items() if column.endswith(ending)), "")
