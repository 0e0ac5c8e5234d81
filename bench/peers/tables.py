"""Medians, ratios, and tables of the measurements, for the terminal, the results, and the docs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.peers.loads import Load
from bench.peers.roster import Contender, Group
from bench.peers.rounds import Findings, Measured
from bench.report import Figure

BEGIN = "<!-- peers: begin, written by `make bench-peers` -->"
END = "<!-- peers: end -->"
ENOUGH = 0.99
"""A rate is compared only if at least this fraction of the requests got a response."""
Rows = list[list[str]]
RATE, CPU, MODEL_CPU = "rate", "CPU per request", "CPU per request, model"
METRICS: dict[str, tuple[str, Callable[[Measured], float]]] = {
    RATE: ("/s", lambda one: one.rate),
    "p50": ("ms", lambda one: one.round_trip_ms["p50"]),
    "p95": ("ms", lambda one: one.round_trip_ms["p95"]),
    "p99": ("ms", lambda one: one.round_trip_ms["p99"]),
    CPU: ("ms", lambda one: sum(one.cpu_ms.values())),
    MODEL_CPU: ("ms", lambda one: max(one.cpu_ms.values(), default=0.0)),
}
"""Units and values by name. CPU time covers all of a contender's processes per completed request.
The busiest program is the one that runs the model.
"""


class Medians:
    """The median of each metric over the rounds, by contender and load."""

    def __init__(
        self, contenders: Sequence[Contender], loads: Sequence[Load], findings: Findings
    ) -> None:
        self.contenders = contenders
        self.loads = [load.name for load in loads]
        self.started = findings.started
        self._measured: dict[tuple[str, str], list[Measured]] = {}
        for measured in findings.measured:
            self._measured.setdefault((measured.contender, measured.load), []).append(measured)

    def rounds(self, key: str, load: str) -> list[Measured]:
        """Returns one contender's rounds under one load. Empty if it was not measured."""
        return self._measured.get((key, load), [])

    def of(self, key: str, load: str, metric: str) -> float | None:
        """Returns the median of one of METRICS. None if there is no value."""
        rounds = [measured for measured in self.rounds(key, load) if measured.round_trip_ms]
        _, read = METRICS[metric]
        return statistics.median(read(measured) for measured in rounds) if rounds else None

    def failed(self, key: str, load: str) -> int:
        return sum(sum(measured.failures.values()) for measured in self.rounds(key, load))

    def cosines(self, key: str) -> tuple[float, float] | None:
        """Returns the mean and minimum cosine similarity of all sampled vectors to the reference.

        None if there are no vectors.
        """
        rounds = [
            measured
            for load in self.loads
            for measured in self.rounds(key, load)
            if measured.vectors
        ]
        if not rounds:
            return None
        total = sum(measured.vectors * measured.cosine_mean for measured in rounds)
        mean = total / sum(measured.vectors for measured in rounds)
        return mean, min(measured.cosine_min for measured in rounds)

    def best(self, load: str, among: Iterable[str]) -> str | None:
        """Returns the fastest contender in `among` that serves nearly all requests.

        None if none does.
        """
        rates = {}
        for key in among:
            sent = sum(measured.sent for measured in self.rounds(key, load))
            rate = self.of(key, load, RATE)
            if rate is not None and self.failed(key, load) <= (1 - ENOUGH) * sent:
                rates[key] = rate
        return max(rates, key=rates.__getitem__, default=None)

    def keys(self, group: Group) -> list[str]:
        return [contender.key for contender in self.contenders if contender.group == group]


def figures(medians: Medians) -> list[Figure]:
    """Returns all medians, the ratios of ours to the best peer's, and these ratios' limits."""
    rows = []
    for contender in medians.contenders:
        for load in medians.loads:
            if medians.of(contender.key, load, RATE) is None:
                continue
            label = f"{contender.key}, {load}"
            for metric, (unit, _) in METRICS.items():
                median = medians.of(contender.key, load, metric) or 0.0
                rows.append(Figure(f"{label}, {metric}", median, unit))
            failed = medians.failed(contender.key, load)
            rows.append(Figure(f"{label}, without a vector", failed, ""))
    for load in medians.loads:
        best = medians.best(load, medians.keys("peer"))
        for key in medians.keys("ours"):
            for other, limit in (
                (best, _must(key, load)),
                ("mosec-fp32", 0.0),
                ("mosec-bf16", 0.0),
            ):
                value = _ratio(medians, key, other, load)
                if value is not None:
                    bound = (">=", limit) if limit else ()
                    rows.append(Figure(f"{key} over {other}, {load}", value, "x", *bound))
    return rows


def _must(key: str, load: str) -> float:
    """Returns the target against documented peers at 32 or 128 in flight, for distinct texts."""
    if load not in ("32 in flight", "128 in flight"):
        return 0.0
    return {"penstock": 3.0, "penstock-int8": 4.0}.get(key, 0.0)


def rate_rows(medians: Medians) -> Rows:
    """Returns requests per second, p50, and p99, with a row per contender and a column per load."""
    rows = [["requests/s (p50, p99 ms)", *medians.loads]]
    for contender in medians.contenders:
        row = (_cell(medians, contender.key, load) for load in medians.loads)
        rows.append([contender.name, *row])
    return rows


def _cell(medians: Medians, key: str, load: str) -> str:
    rate = medians.of(key, load, RATE)
    if rate is None:
        return "no answer" if medians.rounds(key, load) else "-"
    p50, p99 = (medians.of(key, load, name) or 0.0 for name in ("p50", "p99"))
    failed = medians.failed(key, load)
    sent = sum(measured.sent for measured in medians.rounds(key, load))
    return f"{rate:,.0f} ({p50:,.0f}, {p99:,.0f})" + f" {failed / sent:.0%} failed" * bool(failed)


def ratio_rows(medians: Medians) -> Rows:
    """Returns a row per load: the best documented peer, and our ratios to it and to tuned ones."""
    ours = [contender for contender in medians.contenders if contender.group == "ours"]
    others = [
        ("best peer", None),
        ("Mosec tuned, fp32", "mosec-fp32"),
        ("Mosec tuned, bf16", "mosec-bf16"),
    ]
    others = [(name, key) for name, key in others if key is None or key in medians.keys("tuned")]
    names = {contender.key: contender.name for contender in medians.contenders}
    rows = [
        [
            "load",
            "best peer, /s",
            *(f"{contender.name} / {name}" for contender in ours for name, _ in others),
        ]
    ]
    for load in medians.loads:
        best = medians.best(load, medians.keys("peer"))
        leader = f"{names[best]}, {medians.of(best, load, RATE):,.0f}" if best else "-"
        values = [
            _ratio(medians, contender.key, key or best, load)
            for contender in ours
            for _, key in others
        ]
        rows.append([load, leader, *("-" if value is None else f"{value:.2f}" for value in values)])
    return rows


def _ratio(medians: Medians, key: str, other: str | None, load: str) -> float | None:
    """Returns the rounds' median quotient, because disturbances in a round affect both values."""
    if other is None:
        return None
    rates = [
        {
            measured.round: measured.rate
            for measured in medians.rounds(name, load)
            if measured.round_trip_ms
        }
        for name in (key, other)
    ]
    ours, theirs = rates
    quotients = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    return statistics.median(quotients) if quotients else None


def cost_rows(medians: Medians) -> Rows:
    """Returns a row per contender: startup, memory, CPU near 32 in flight, and reference cosine."""
    load = "32 in flight" if "32 in flight" in medians.loads else medians.loads[0]
    rows = [
        [
            "",
            "ready after s",
            "memory MB",
            f"CPU ms per request, {load}",
            "of these the model's program",
            "cosine mean, min",
            "failed",
            "set up",
        ]
    ]
    for contender in medians.contenders:
        started = medians.started[contender.key]
        if started.missing and not started.ready_s:
            rows.append([contender.name, *["-"] * 6, f"left out: {_shorten(started.missing)}"])
            continue
        cosines = medians.cosines(contender.key)
        rows.append(
            [
                contender.name,
                f"{started.ready_s:.1f}",
                f"{started.memory_bytes / 1e6:,.0f}",
                _number(medians.of(contender.key, load, CPU)),
                _number(medians.of(contender.key, load, MODEL_CPU)),
                f"{cosines[0]:.5f}, {cosines[1]:.5f}" if cosines else "-",
                str(sum(medians.failed(contender.key, name) for name in medians.loads)),
                f"{contender.note}; {_shorten(started.missing)}"
                if started.missing
                else contender.note,
            ]
        )
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _shorten(reason: str) -> str:
    return reason.splitlines()[0].split("; the end of")[0][:160].replace("|", "/")


def headline(where: dict[str, Any], rounds: int) -> str:
    machine = (
        f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['date'][:10]}"
    )
    return f"{machine}; medians of {rounds} round{'s' * (rounds != 1)}, interleaved."


def markdown(summary: str, tables: Sequence[Rows]) -> str:
    lines = [summary, ""]
    for rows in tables:
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
        lines.insert(len(lines) - len(rows), "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def write_between_markers(path: Path, section: str) -> None:
    """Replaces the text between a page's markers with `section`; appends it if there are none."""
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in page or END not in page:
        page = f"{page.rstrip()}\n\n{BEGIN}\n{END}\n".lstrip()
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{section.strip()}\n{END}{after}", encoding="utf-8")
