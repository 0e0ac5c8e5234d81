"""`python -m infra.reports.reference`: writes reports, views, and columns into the reference docs.

The document is docs/reference/reports.md. Run this after changing a report's header. A test
compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path

from infra.bigquery import view_columns, view_title
from shared.reports.definitions import Report, reports

DOCUMENT = Path("docs/reference/reports.md")
BEGIN = "<!-- reports: begin, written by `python -m infra.reports.reference` -->\n"
END = "<!-- reports: end -->\n"
VIEWS = ("usage_hourly", "latency_hourly", "costs_daily", "worker_hours_hourly")
"""Views for dashboards."""
VIEWS_BEGIN = "<!-- views: begin, written by `python -m infra.reports.reference` -->\n"
VIEWS_END = "<!-- views: end -->\n"
SHARED_BEGIN = "<!-- columns: begin, written by `python -m infra.reports.reference` -->\n"
SHARED_END = "<!-- columns: end -->\n"


def with_reference(document: str) -> str:
    parts = "\n".join("\n".join(_section(report)) for report in reports().values())
    views = "\n".join("\n".join(_view(name)) for name in VIEWS)
    document = _replace_part(document, BEGIN, parts, END)
    document = _replace_part(document, VIEWS_BEGIN, views, VIEWS_END)
    columns = "\n".join(_list_columns(dict(sorted(_find_shared_columns().items()))))
    return _replace_part(document, SHARED_BEGIN, f"{columns}\n", SHARED_END)


def _replace_part(document: str, begin: str, part: str, end: str) -> str:
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{part}\n{end}{after}"


def _view(name: str) -> Iterator[str]:
    yield f"#### {name}\n"
    yield f"{view_title(name)}\n"
    yield from _columns(view_columns(name))


def _section(report: Report) -> Iterator[str]:
    yield f"### {report.name}\n"
    yield f"{report.title} For {report.owner}{_audience(report)}.\n"
    if report.parameters:
        yield "Parameters:\n"
        for parameter in report.parameters:
            default = "" if parameter.default is None else f", {parameter.default:g} by default"
            yield f"- `@{parameter.name}` ({parameter.type}): {parameter.about}{default}"
        yield ""
    yield from _columns(report.columns)
    if report.notes:
        yield f"{report.notes}\n"


def _columns(columns: Mapping[str, str]) -> Iterator[str]:
    """Yields the names of shared columns and a list of the other columns."""
    others = dict(columns.items() - _find_shared_columns().items())
    shared = [f"`{name}`" for name in columns if name not in others]
    if shared:
        yield f"[Shared columns](#shared-columns): {', '.join(shared)}.\n"
    elif others:
        yield "Columns:\n"
    if others:
        yield from _list_columns({name: columns[name] for name in columns if name in others})
        yield ""


def _list_columns(columns: Mapping[str, str]) -> Iterator[str]:
    for name, about in columns.items():
        yield f"- `{name}`: {about}"


@cache
def _find_shared_columns() -> dict[str, str]:
    """Returns columns that several reports and views describe in the same way.

    If a column has several such descriptions, the most frequent one is used.
    """
    sections = (*(report.columns for report in reports().values()), *map(view_columns, VIEWS))
    counts = Counter(chain.from_iterable(columns.items() for columns in sections))
    shared: dict[str, str] = {}
    for (name, about), count in counts.most_common():
        if count > 1:
            shared.setdefault(name, about)
    return shared


def _audience(report: Report) -> str:
    return " and tenants" if report.audience == "tenants" else ""


if __name__ == "__main__":
    DOCUMENT.write_text(with_reference(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
