"""A day's summary for email, as HTML without links or scripts and as plain text."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any
from zoneinfo import ZoneInfo

from shared.money.amounts import dollars
from shared.reports.day_tables import Anomaly, BillingDay

MAX_LINES = 10
"""Maximum number of tenants, models, and anomalies in a summary. The tables list all of them."""
_FIGURES = ("cost_usd", "week_ago_usd", "month_usd", "requests", "items", "errors")
_HEADS = ("Charged", "Week before", "Month so far", "Requests", "Items", "Errors")

_ALL = (*_FIGURES, "refused", "late_rows", "device_s")

_H2 = "font-size:16px;margin:20px 0 6px"
_CELL = "padding:4px 8px;border-bottom:1px solid #ddd;"


@dataclass(frozen=True)
class Summary:
    """A day's summary."""

    day: BillingDay
    totals: Mapping[str, float]
    """Totals from statements/summary.sql for all tenants."""
    tenants: Sequence[tuple[str, Mapping[str, float]]]
    models: Sequence[tuple[str, Mapping[str, float]]]
    anomalies: Sequence[Anomaly]

    @property
    def subject(self) -> str:
        """One line for the email subject and the log."""
        count = len(self.anomalies)
        finding = f"{count} unusual {_plural('figure', count)}" if count else "nothing unusual"
        return (
            f"Penstock {self.day.day}: {dollars(self.totals['cost_usd'])},"
            f" {self.totals['requests']:,.0f} requests, {finding}"
        )


def summary_of(
    day: BillingDay, records: Iterable[Mapping[str, Any]], anomalies: Sequence[Anomaly]
) -> Summary:
    lines = list(records)
    ((_, totals),) = _add_up(lines, lambda line: "") or [("", dict.fromkeys(_ALL, 0.0))]
    return Summary(
        day,
        totals,
        _largest(_add_up(lines, lambda line: line["tenant"] or "(no key)")),
        _largest(_add_up(lines, lambda line: line["model"] or "(none)")),
        anomalies,
    )


def _add_up(
    lines: Iterable[Mapping[str, Any]], name_of: Callable[[Mapping[str, Any]], str]
) -> list[tuple[str, Mapping[str, float]]]:
    totals: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_ALL, 0.0))
    for line in lines:
        for figure in _ALL:
            totals[name_of(line)][figure] += line[figure] or 0
    return sorted(
        totals.items(), key=lambda total: (-total[1]["cost_usd"], -total[1]["requests"], total[0])
    )


def _largest(
    lines: list[tuple[str, Mapping[str, float]]],
) -> list[tuple[str, Mapping[str, float]]]:
    if len(lines) <= MAX_LINES:
        return lines
    rest = lines[MAX_LINES:]
    others = {figure: sum(line[figure] for _, line in rest) for figure in _ALL}
    return [*lines[:MAX_LINES], (f"{len(rest)} others", others)]


def as_text(summary: Summary) -> str:
    """Returns the summary as plain text, for email clients and terminals without HTML."""
    parts = [summary.subject, "", *_notes(summary), ""]
    for title, lines in (("Tenants", summary.tenants), ("Models", summary.models)):
        width = max((len(_plain(name)) for name, _ in lines), default=0)
        width = max(width, len(title), len("All"))
        parts.append(f"{title:<{width}}" + "".join(f"{head:>14}" for head in _HEADS))
        parts += [
            f"{_plain(name):<{width}}" + "".join(f"{cell:>14}" for cell in _cells(line))
            for name, line in (*lines, ("All", summary.totals))
        ]
        parts.append("")
    parts.append("Outside the usual range for their hour:" if summary.anomalies else "")
    parts += [f"- {_plain(line)}" for line in _anomalies(summary)]
    return "\n".join(parts).rstrip() + "\n"


def as_html(summary: Summary) -> str:
    """Returns the summary as HTML for email.

    Styles are inline, because email clients drop all other styles.
    """
    subject = html.escape(summary.subject)
    notes = "".join(
        f'<p style="margin:0 0 8px">{html.escape(note)}</p>' for note in _notes(summary)
    )
    tables = "".join(
        _table(title, lines, summary.totals)
        for title, lines in (("Tenants", summary.tenants), ("Models", summary.models))
    )
    unusual = "".join(f"<li>{html.escape(line)}</li>" for line in _anomalies(summary))
    if unusual:
        unusual = f'<h2 style="{_H2}">Outside the usual band of their hour</h2><ul>{unusual}</ul>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{subject}</title></head>"
        '<body style="margin:0;padding:16px;background:#fff;color:#1a1a1a;'
        'font:15px/1.5 system-ui,sans-serif"><main style="max-width:720px;margin:0 auto">'
        f'<h1 style="font-size:20px;margin:0 0 12px">{subject}</h1>'
        f"{notes}{unusual}{tables}</main></body></html>\n"
    )


def _table(
    title: str, lines: Sequence[tuple[str, Mapping[str, float]]], totals: Mapping[str, float]
) -> str:
    heads = "".join(
        f'<th scope="col" style="{_CELL}text-align:right">{head}</th>' for head in _HEADS
    )
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL}text-align:left">{html.escape(name)}</th>'
        + "".join(f'<td style="{_CELL}text-align:right">{cell}</td>' for cell in _cells(line))
        + "</tr>"
        for name, line in (*lines, ("All", totals))
    )
    return (
        f'<h2 style="{_H2}">{title}</h2><div style="overflow-x:auto">'
        '<table style="border-collapse:collapse;font-size:14px;width:100%">'
        f'<thead><tr><td style="{_CELL}"></td>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _notes(summary: Summary) -> list[str]:
    totals = summary.totals
    notes = [f"Days are in the time zone {summary.day.tz}."]
    if totals["refused"]:
        count = totals["refused"]
        notes.append(f"Refused: {count:,.0f} {_plural('request', count)}.")
    if totals["late_rows"]:
        count = totals["late_rows"]
        notes.append(f"Answered after the day had ended: {count:,.0f} {_plural('item', count)}.")
    return notes


def _anomalies(summary: Summary) -> list[str]:
    zone = ZoneInfo(summary.day.tz)
    lines = []
    for anomaly in summary.anomalies[:MAX_LINES]:
        is_cost = anomaly.measure == "cost_usd"
        show = dollars if is_cost else "{:,.0f}".format
        label = f"{show(anomaly.value)} charged" if is_cost else f"{show(anomaly.value)} errors"
        who = "all tenants" if anomaly.scope == "all" else anomaly.tenant
        lines.append(
            f"{anomaly.hour.astimezone(zone):%H:%M} {who}: {label}, usually {show(anomaly.low)} to"
            f" {show(anomaly.high)}"
        )
    if more := len(summary.anomalies) - MAX_LINES:
        lines += [f"{more} more in the table anomalies"] if more > 0 else []
    return lines


def _cells(line: Mapping[str, float]) -> list[str]:
    return [_cell(name, line[name]) for name in _FIGURES]


def _cell(name: str, value: float) -> str:
    if name == "week_ago_usd" and not value:  # or the day was never aggregated
        return "-"
    return dollars(value) if name.endswith("_usd") else f"{value:,.0f}"


def _plural(noun: str, count: float) -> str:
    return noun if count == 1 else f"{noun}s"


def _plain(text: str) -> str:
    """Returns a name as a single line of text. Callers choose names."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def keys_of(day: date) -> tuple[str, str]:
    """Returns the object store keys for a day's HTML and text."""
    return f"summaries/{day}.html", f"summaries/{day}.txt"
