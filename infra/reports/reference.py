"""`python -m infra.reports.reference`: writes the reports and their columns into docs/reports.md.

To be run after a change of a report's head. A test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shared.reports.definitions import Report, reports

DOCUMENT = Path("docs/reports.md")
BEGIN = "<!-- reports: begin, written by `python -m infra.reports.reference` -->\n"
END = "<!-- reports: end -->\n"


def with_reference(document: str) -> str:
    """The document with the part between its marks as the heads of the reports say."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = "\n".join("\n".join(_section(report)) for report in reports().values())
    return f"{before}{BEGIN}\n{parts}\n{END}{after}"


def _section(report: Report) -> Iterator[str]:
    yield f"### {report.name}\n"
    yield f"{report.title} For {report.owner}; {_audience(report)}.\n"
    if report.parameters:
        for one in report.parameters:
            default = "" if one.default is None else f", {one.default:g} if not set"
            yield f"- `@{one.name}` ({one.type}): {one.about}{default}"
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
