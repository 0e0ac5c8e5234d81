"""A benchmark's results: named metrics, some with limits, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from infra import text_table
from infra.python_build import is_optimized
from workers.models.processors import detect_cpu

RESULTS = Path(__file__).parent / "results"


class Figure(msgspec.Struct, omit_defaults=True):
    """One measured value.

    With `limit`, the value must be at most (`<=`) or at least (`>=`) that limit.
    """

    name: str
    value: float
    unit: str
    bound: Literal["", "<=", ">="] = ""
    limit: float = 0.0

    @property
    def is_met(self) -> bool:
        """True if the limit is met, or no limit is set."""
        if not self.bound:
            return True
        return self.value <= self.limit if self.bound == "<=" else self.value >= self.limit


def expect_none(name: str, count: float) -> Figure:
    """Returns a metric for a count that must be 0."""
    return Figure(name, count, "", "<=", 0)


class Outcome(msgspec.Struct):
    """One benchmark's result: its metrics, and details that explain them."""

    figures: list[Figure]
    details: dict[str, Any] = {}
    failure: str = ""
    """Something that happened but must never happen. The command then exits with 1, even without
    `--check`.
    """


def machine() -> dict[str, Any]:
    return {
        "cpu": detect_cpu().name.strip() or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version() + ("" if is_optimized() else ", not optimized"),
        "torch": version("torch"),
        "commit": _git("rev-parse", "HEAD"),
        "is_clean": not _git("status", "--porcelain", "--untracked-files=no"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git(*words: str) -> str:
    try:
        return subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def keep(name: str, outcome: Outcome, where: dict[str, Any], began_s: float) -> Path:
    """Writes bench/results/<name>.json atomically. Returns its path."""
    RESULTS.mkdir(exist_ok=True)
    document = {
        "name": name,
        "machine": where,
        "seconds": round(time.time() - began_s, 1),
    } | msgspec.to_builtins(outcome)
    path = RESULTS / f"{name}.json"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    unfinished.replace(path)
    return path


def table(outcomes: dict[str, Outcome]) -> str:
    rows = [
        (name, *_cells(figure)) for name, outcome in outcomes.items() for figure in outcome.figures
    ]
    return text_table.table(("benchmark", "figure", "value", "unit", "must", ""), rows)


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    must = f"{figure.bound} {figure.limit:g}" if figure.bound else ""
    verdict = ("met" if figure.is_met else "MISSED") if figure.bound else ""
    return figure.name, _short(figure.value), figure.unit, must, verdict


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.2f}"
