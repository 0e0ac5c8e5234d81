"""Renders a result as a self-contained page: figures, and plots over time."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.io import to_html
from plotly.subplots import make_subplots

from penstock_planning.simulation.result import HOUR_S, SimulationResult
from penstock_planning.simulation.show import rows_of_gpus, rows_of_models
from shared.errors import ConfigurationError

BUCKETS = 240
"""Intervals in plots of percentiles and rates over time."""
ROW_PX = 230
TITLES = (
    "Replicas",
    "GPUs",
    "Requests a second",
    "Seconds until the answer",
    "Seconds until the batch begins, p95",
    "Dollars of GPU nodes an hour",
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1em; }
.tables { align-items: start; display: flex; flex-wrap: wrap; gap: 1em 3em; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #ddd; padding: .15em .8em .15em 0; text-align: left; }
td { font-variant-numeric: tabular-nums; text-align: right; }
"""

Column = NDArray[np.float64]


def write_page(result: SimulationResult, path: Path) -> None:
    """Writes the page. The page contains a copy of plotly.js, about 5 MB.

    Raises:
        ConfigurationError: the file can't be written.
    """
    try:
        path.write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}", field="html") from error


def page(result: SimulationResult) -> str:
    title = html.escape(result.scenario.about or "Simulation")
    tables = "".join(_table(rows) for rows in (rows_of_models(result), rows_of_gpus(result)))
    charts = to_html(
        _figure(result),
        include_plotlyjs=True,
        full_html=False,
        config={"displaylogo": False, "responsive": True},
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<div class="tables">{tables}</div>{charts}</body></html>\n'
    )


def _table(rows: Sequence[Sequence[object]]) -> str:
    lines = []
    for head, *values in rows:
        cells = "".join(f"<td>{html.escape(_format_value(value))}</td>" for value in values)
        lines.append(f"<tr><th>{html.escape(str(head))}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _format_value(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,g}" if isinstance(value, float) else str(value)


def _figure(result: SimulationResult) -> Any:
    figure = make_subplots(
        rows=len(TITLES),
        cols=1,
        shared_xaxes=True,
        subplot_titles=TITLES,
        vertical_spacing=0.035,
    )
    for row, lines in enumerate(
        (
            _replicas(result),
            _gpus(result),
            _rates(result),
            _answers(result),
            _waits(result),
            _dollars(result),
        ),
        start=1,
    ):
        for name, hours, values in lines:
            figure.add_trace(
                go.Scatter(x=hours, y=values, name=name, mode="lines", line={"width": 1.3}),
                row=row,
                col=1,
            )
    figure.update_layout(
        height=ROW_PX * len(TITLES),
        margin={"l": 45, "r": 10, "t": 40, "b": 40},
        legend={"orientation": "h", "y": -0.04},
        hovermode="x unified",
        template="plotly_white",
    )
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(title_text="hours", row=len(TITLES), col=1)
    return figure


Lines = list[tuple[str, list[float], list[float]]]


def _replicas(result: SimulationResult) -> Lines:
    lines: Lines = []
    for model in result.scenario.models:
        for field in ("replicas", "ready", "busy"):
            at_s: dict[float, float] = {}
            for sample in result.recorder.samples:
                if sample.model == model:
                    at_s[sample.at_s] = at_s.get(sample.at_s, 0) + getattr(sample, field)
            name = "wanted" if field == "replicas" else field
            lines.append((f"{model}: {name}", *_hours(at_s)))
    return lines


def _gpus(result: SimulationResult) -> Lines:
    paid: dict[float, float] = {}
    busy: dict[float, float] = {}
    for sample in result.recorder.gpu_samples:
        paid[sample.at_s] = paid.get(sample.at_s, 0) + sample.nodes
        busy[sample.at_s] = busy.get(sample.at_s, 0) + sample.busy
    return [("GPUs paid", *_hours(paid)), ("GPUs busy", *_hours(busy))]


def _rates(result: SimulationResult) -> Lines:
    lines: Lines = []
    edges = _edges(result)
    for model, record in result.recorder.models.items():
        for name, times in (("answered", record.arrived_s), ("refused or late", record.ended_s)):
            counts = np.histogram(np.asarray(times), edges)[0] / np.diff(edges)
            lines.append((f"{model}: {name}", _middles(edges), counts.tolist()))
    return lines


def _answers(result: SimulationResult) -> Lines:
    lines: Lines = []
    for model, record in result.recorder.models.items():
        values = _percentiles(result, record.arrived_s, record.answer_s, (50, 95, 99))
        for which, line in zip((50, 95, 99), values, strict=True):
            lines.append((f"{model}: answer p{which}", _middles(_edges(result)), line))
    return lines


def _waits(result: SimulationResult) -> Lines:
    return [
        (
            f"{model}: wait p95",
            _middles(_edges(result)),
            _percentiles(result, record.arrived_s, record.queue_s, (95,))[0],
        )
        for model, record in result.recorder.models.items()
    ]


def _dollars(result: SimulationResult) -> Lines:
    prices = {(fleet.gpu_class, fleet.region): fleet.dollars_per_h for fleet in result.fleets}
    at_s: dict[float, float] = {}
    for sample in result.recorder.gpu_samples:
        price = prices[sample.gpu_class, sample.region]
        at_s[sample.at_s] = at_s.get(sample.at_s, 0.0) + sample.nodes * (price or 0.0)
    return [("dollars an hour", *_hours(at_s))]


def _hours(at_s: dict[float, float]) -> tuple[list[float], list[float]]:
    return [second / HOUR_S for second in at_s], list(at_s.values())


def _edges(result: SimulationResult) -> Column:
    return np.linspace(0.0, result.scenario.duration_s, BUCKETS + 1)


def _middles(edges: Column) -> list[float]:
    return [float(middle) for middle in (edges[1:] + edges[:-1]) / 2 / HOUR_S]


def _percentiles(
    result: SimulationResult, times: Any, values: Any, which: tuple[int, ...]
) -> list[list[float]]:
    """Returns one line per percentile across the buckets. An empty bucket has no value."""
    at_s, all_values = np.asarray(times), np.asarray(values)
    order = np.argsort(at_s, kind="stable")
    cuts = np.searchsorted(at_s[order], _edges(result)[1:-1])
    columns: list[list[float]] = [[] for _ in which]
    for part in np.split(all_values[order], cuts):
        computed = np.percentile(part, which) if len(part) else [float("nan")] * len(which)
        for line, value in zip(columns, computed, strict=True):
            line.append(float(value))
    return columns
