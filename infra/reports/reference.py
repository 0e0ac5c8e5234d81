"""`python -m infra.reports.reference`: writes reports, views, and columns into the reference docs.

The document is docs/reference/reports.md. Run this after changing a report's header. A test
compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infra.bigquery import view_columns, view_title
from shared.reports.definitions import Report, reports

DOCUMENT = Path("docs/reference/reports.md")
BEGIN = "<!-- reports: begin, written by `python -m infra.reports.reference` -->\n"
END = "<!-- reports: end -->\n"
VIEWS = ("usage_hourly", "latency_hourly", "costs_daily", "worker_hours_hourly", "rows")
"""Views for dashboards, and the row view for a tenant's analysts."""
VIEWS_BEGIN = "<!-- views: begin, written by `python -m infra.reports.reference` -->\n"
VIEWS_END = "<!-- views: end -->\n"


def with_reference(document: str) -> str:
    parts = "\n".join("\n".join(_section(report)) for report in reports().values())
    views = "\n".join("\n".join(_view(name)) for name in VIEWS)
    document = _replace_part(document, BEGIN, parts, END)
    return _replace_part(document, VIEWS_BEGIN, views, VIEWS_END)


def _replace_part(document: str, begin: str, part: str, end: str) -> str:
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{part}\n{end}{after}"


def _view(name: str) -> Iterator[str]:
    yield f"#### {name}\n"
    yield f"{view_title(name)}\n"
    yield "| column | |"
    yield "|---|---|"
    for column, about in view_columns(name).items():
        yield f"| `{column}` | {about} |"
    yield ""


def _section(report: Report) -> Iterator[str]:
    yield f"### {report.name}\n"
    yield f"{report.title} For {report.owner}; {_audience(report)}.\n"
    if report.parameters:
        for parameter in report.parameters:
            default = "" if parameter.default is None else f", {parameter.default:g} by default"
            yield f"- `@{parameter.name}` ({parameter.type}): {parameter.about}{default}"
        yield ""
    yield "| column | |"
    yield "|---|---|"
    for name, about in report.columns.items():
        yield f"| `{name}` | {about} |"
    yield ""
    if report.notes:
        yield f"{report.notes}\n"


def _audience(report: Report) -> str:
    return "a tenant sees its own" if report.audience == "tenants" else "operators only"


if __name__ == "__main__":
    DOCUMENT.write_text(with_reference(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
