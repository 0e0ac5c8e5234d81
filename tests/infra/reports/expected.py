"""Expected reports, computed item by item in plain Python from the same rows."""

import datetime as dt
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from shared.reports.definitions import ReportQuestion
from tests.infra.reports.generated import Fields

Lines = dict[tuple[Any, ...], Fields]
"""Report lines by their identifying columns, with their other columns."""
HOUR, SHARED = dt.timedelta(hours=1), ("memory", "redis", "joined")
BAD_CODES = ("model_failed", "internal", "unavailable", None)


@dataclass(frozen=True)
class Near:
    """A percentile of these values.

    BigQuery's percentiles are approximate, so a neighboring value is also accepted.
    """

    values: tuple[float, ...]
    share: float

    def __eq__(self, other: object) -> bool:
        if other is None or not self.values:
            return other is None and not self.values
        assert isinstance(other, float)
        place = self.share * len(self.values)
        low = self.values[max(0, math.floor(place) - 2)]
        high = self.values[min(len(self.values) - 1, math.ceil(place) + 1)]
        return low - 0.06 <= other <= high + 0.06

    __hash__ = None  # type: ignore[assignment]


def near(rows: Iterable[Fields], column: str, share: float) -> Near:
    return Near(tuple(sorted(r[column] for r in rows if r.get(column) is not None)), share)


def once(rows: Iterable[Fields], question: ReportQuestion) -> list[Fields]:
    """The rows that a question covers, each once: a row without a result if there is one, otherwise
    the last attempt.
    """
    best: dict[Any, Fields] = {}
    for row in rows:
        if not question.since <= row["received_at"] < question.until:
            continue
        if question.tenants is not None and row["tenant"] not in question.tenants:
            continue
        if question.models is not None and row["model"] not in question.models:
            continue
        key = row["row_id"], row["received_at"]
        if key not in best or _order(row) > _order(best[key]):
            best[key] = row
    return list(best.values())


def _order(row: Fields) -> tuple[bool, float, Any]:
    attempt = row.get("attempt")
    return row["status"] != "succeeded", -1 if attempt is None else attempt, row["replied_at"]


def grouped(
    rows: Iterable[Fields], key: Callable[[Fields], tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[Fields]]:
    found = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def share_of(row: Fields) -> float:
    known = row.get("charged_share")
    return (1.0 if row["cost_usd"] > 0 else 0.0) if known is None else known


def device_s(row: Fields) -> Fraction:
    if row.get("inference_ms") is None:
        return Fraction(0)
    seconds = Fraction(row["inference_ms"]) / 1000 * Fraction(row["device_share"])
    return seconds / int(row["batch_size"])


def computed_s(row: Fields) -> Fraction:
    """The item's device time: 0 if it was joined to another item."""
    return Fraction(0) if row.get("cache") == "joined" else device_s(row)


def exact(rows: Iterable[Fields], column: str) -> float:
    return float(sum((Fraction(r.get(column) or 0) for r in rows), Fraction(0)))


def counts(rows: Sequence[Fields]) -> Fields:
    statuses = Counter(row["status"] for row in rows)
    return {
        "requests": len({row["request_id"] for row in rows}),
        "refused": statuses["refused"],
        "items": len(rows) - statuses["refused"],
        "succeeded": statuses["succeeded"],
        "cached": sum(row["status"] == "succeeded" and row.get("cache") in SHARED for row in rows),
        "tokens": int(exact(rows, "tokens")),
        "pixel_steps": int(exact(rows, "pixel_steps")),
        "device_s": float(sum(map(device_s, rows), Fraction(0))),
        "cost_usd": exact(rows, "cost_usd"),
    }


def text_tokens(rows: Sequence[Fields]) -> Fields:
    """Text models' tokens: read, generated and cached."""
    columns = ("input_tokens", "output_tokens", "cached_tokens")
    return {column: int(exact(rows, column)) for column in columns}


def charged(rows: Iterable[Fields], column: str) -> float:
    return float(sum(Fraction(r.get(column) or 0) * Fraction(share_of(r)) for r in rows))


def day_of(row: Fields, question: ReportQuestion) -> dt.date:
    received: dt.datetime = row["received_at"]
    return received.astimezone(ZoneInfo(question.tz)).date()


def hour_of(moment: dt.datetime) -> dt.datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def days_of(question: ReportQuestion) -> list[dt.date]:
    zone = ZoneInfo(question.tz)
    day, last = (
        question.since.astimezone(zone).date(),
        question.until - dt.timedelta(microseconds=1),
    )
    found = []
    while day <= last.astimezone(zone).date():
        found.append(day)
        day += dt.timedelta(days=1)
    return found


def usage(rows: list[Fields], question: ReportQuestion) -> Lines:
    lines: Lines = {}
    groups = grouped(once(rows, question), lambda r: (day_of(r, question), r["tenant"], r["model"]))
    for key, members in groups.items():
        known = counts(members)
        items = [row for row in members if row["status"] != "refused"]
        hits = sum(row.get("cache") in ("memory", "redis") for row in members)
        lines[key] = {name: known[name] for name in ("items", "requests", "refused", "succeeded")}
        lines[key] |= {
            "hit_percent": 100 * hits / len(items) if items else None,
            "joined": sum(row.get("cache") == "joined" for row in members),
            "queue_p50_ms": near(members, "queue_ms", 0.5),
            "queue_p95_ms": near(members, "queue_ms", 0.95),
            "inference_p50_ms": near(members, "inference_ms", 0.5),
            "inference_p95_ms": near(members, "inference_ms", 0.95),
            "total_p50_ms": near(items, "total_ms", 0.5),
            "total_p95_ms": near(items, "total_ms", 0.95),
            "tokens": known["tokens"],
            "charged_tokens": charged(members, "tokens"),
            "pixel_steps": known["pixel_steps"],
            "charged_pixel_steps": charged(members, "pixel_steps"),
            "device_s": known["device_s"],
            "cost_usd": known["cost_usd"],
        }
    return lines


def usage_keys(rows: list[Fields], question: ReportQuestion) -> Lines:
    groups = grouped(
        once(rows, question),
        lambda r: (day_of(r, question), r["tenant"], r.get("key_id"), r["model"]),
    )
    return {
        key: counts(members)
        | {
            "charged_tokens": charged(members, "tokens"),
            "charged_pixel_steps": charged(members, "pixel_steps"),
        }
        for key, members in groups.items()
    }


def usage_hours(rows: list[Fields], question: ReportQuestion) -> Lines:
    zone, lines = ZoneInfo(question.tz), {}
    groups = grouped(
        once(rows, question), lambda r: (hour_of(r["received_at"]), r["tenant"], r["model"])
    )
    for (hour, tenant, model), members in groups.items():
        local = f"{hour.astimezone(zone):%Y-%m-%d %H:%M}"
        lines[hour, local, tenant, model] = counts(members)
    return lines


def daily(rows: list[Fields], question: ReportQuestion) -> Lines:
    zone, lines = ZoneInfo(question.tz), {}
    groups = grouped(once(rows, question), lambda r: (day_of(r, question),))
    for day in days_of(question):
        members = groups.get((day,), [])
        ends = [
            dt.datetime.combine(one, dt.time(), zone).astimezone(dt.UTC)
            for one in (day, day + dt.timedelta(days=1))
        ]
        statuses = Counter(row["status"] for row in members)
        lines[(day,)] = counts(members) | {
            "hours": (ends[1] - ends[0]) // HOUR,
            "tenants": len({row["tenant"] for row in members}),
            **{name: statuses[name] for name in ("failed", "expired", "canceled")},
        }
    return lines


def invoice(rows: list[Fields], question: ReportQuestion) -> Lines:
    def key(row: Fields) -> tuple[Any, ...]:
        is_image = row["task"] == "image"
        units = 1 if is_image else row.get("tokens")
        share, price = share_of(row), row.get("list_price_usd")
        if price is None and share:
            price = row["cost_usd"] / share
        kind = row["status"]
        if kind == "succeeded":
            kind = "cached" if row["cache"] in SHARED else "computed"
        return (
            row["tenant"],
            day_of(row, question).replace(day=1),
            row["model"],
            "images" if is_image else "tokens",
            row.get("price_version"),
            1 if is_image else 1_000_000,
            None if price is None or has_many_prices(row) else round(price / units * 1e6, 9),
            kind,
            share,
        )

    lines: Lines = {}
    charged_rows = [row for row in once(rows, question) if row["status"] != "refused"]
    for where, members in grouped(charged_rows, key).items():
        per, price = where[5:7]
        quantity = len(members) if per == 1 else int(exact(members, "tokens"))
        if has_many_prices(members[0]):  # the average
            price = average_usd(members, quantity, per)
            where = (*where[:6], price, *where[7:])
        lines[where] = {
            "items": len(members),
            "quantity": quantity,
            "list_usd": None if price is None else quantity * price / per,
            "amount_usd": exact(members, "cost_usd"),
        }
        # The amount that someone reading an invoice would compute from the line is the sum of the
        # line's rows.
        assert lines[where]["amount_usd"] == (
            approximately((price or 0) * quantity / per * where[-1])
        )
    return lines


def has_many_prices(row: Fields) -> bool:
    return row.get("output_tokens") is not None or row["task"] == "image"


def average_usd(rows: list[Fields], quantity: int, per: int) -> float | None:
    """The average price of `per` units. None if no row has a price."""
    prices = list[float]()
    for row in rows:
        price, share = row.get("list_price_usd"), share_of(row)
        if price is None and share:
            price = row["cost_usd"] / share
        if price is not None:
            prices.append(price)
    places = 15 if per == 1 else 12
    return round(per * math.fsum(prices) / quantity, places) if prices else None


def approximately(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def latency(rows: list[Fields], question: ReportQuestion) -> Lines:
    phases = {
        "queue": "queue_ms",
        "batch wait": "batch_wait_ms",
        "inference": "inference_ms",
        "total": "total_ms",
        "total of hits": "total_ms",
    }
    lines: Lines = {}
    for (model,), members in grouped(once(rows, question), lambda r: (r["model"],)).items():
        for phase, column in phases.items():
            of = members
            if phase == "total":
                of = [row for row in members if row["status"] != "refused"]
            if phase == "total of hits":
                of = [row for row in members if row.get("cache") in ("memory", "redis")]
            values = [row[column] for row in of if row.get(column) is not None]
            if values:
                lines[model, phase] = {
                    "items": len(values),
                    "mean_ms": math.fsum(values) / len(values),
                    "max_ms": max(values),
                    **{
                        f"p{percent}_ms": near(of, column, percent / 100)
                        for percent in (50, 90, 95, 99)
                    },
                }
    return lines


def slo(rows: list[Fields], question: ReportQuestion) -> Lines:
    days = days_of(question)
    members = once(rows, question)
    scopes = sorted({row["model"] for row in members} - {""})
    lines: Lines = {}
    for scope in ["(all)", *scopes]:
        so_far = [0, 0, 0, 0]
        for day in days:
            of = [r for r in members if day_of(r, question) == day]
            if scope != "(all)":
                of = [row for row in of if row["model"] == scope]
                if not of:
                    continue
            numbers = [*_requests(of), *_items(of)]
            so_far = [a + b for a, b in zip(so_far, numbers, strict=True)]
            lines[day, scope] = {
                "requests": numbers[0],
                "bad_requests": numbers[1],
                **_against("availability", 0.001, numbers[:2], so_far[:2]),
                "items": numbers[2],
                "bad_items": numbers[3],
                **_against("deadlines", 0.01, numbers[2:], so_far[2:]),
            }
    return lines


def _requests(rows: Sequence[Fields]) -> tuple[int, int]:
    good = bad = 0
    for members in grouped(rows, lambda r: (r["request_id"],)).values():
        failed = [row for row in members if row["status"] in ("failed", "refused")]
        if any(row.get("error_code") in BAD_CODES for row in failed):
            bad += 1
        elif all(row["status"] == "succeeded" for row in members):
            good += 1
    return good + bad, bad


def _items(rows: Sequence[Fields]) -> tuple[int, int]:
    mine = [row for row in rows if row.get("priority", "interactive") == "interactive"]
    good = sum(row["status"] == "succeeded" for row in mine)
    bad = sum(
        row["status"] == "expired"
        or (row["status"] == "refused" and row["error_code"] == "overloaded")
        for row in mine
    )
    return good + bad, bad


def _against(name: str, budget: float, now: Sequence[int], so_far: Sequence[int]) -> Fields:
    ratio = now[1] / now[0] if now[0] else None
    return {
        f"{name}_percent": None if ratio is None else 100 * (1 - ratio),
        f"{name}_burn": None if ratio is None else ratio / budget,
        f"{name}_budget_left_percent": (
            100 * (1 - so_far[1] / so_far[0] / budget) if so_far[0] else None
        ),
    }


def errors(rows: list[Fields], question: ReportQuestion) -> Lines:
    members = once(rows, question)
    of_model = Counter(row["model"] for row in members)
    bad = [row for row in members if row["status"] != "succeeded"]
    lines: Lines = {}
    for key, of in grouped(bad, lambda r: (r["model"], r["status"], r["error_code"])).items():
        newest = max(row["received_at"] for row in of)
        lines[key] = {
            "items": len(of),
            "tenants": len({row["tenant"] for row in of}),
            "percent_of_model": 100 * len(of) / of_model[key[0]],
            "most_attempts": max(row["attempt"] or 0 for row in of),
            "latest": newest,
            "example_request_id": min(
                row["request_id"] for row in of if row["received_at"] == newest
            ),
        }
    return lines


def slowest(rows: list[Fields], question: ReportQuestion) -> Lines:
    taken = [row for row in once(rows, question) if row.get("total_ms") is not None]
    taken.sort(key=lambda row: -row["total_ms"])
    return {(row["row_id"],): {"total_ms": row["total_ms"]} for row in taken[:50]}


def batches(rows: list[Fields], question: ReportQuestion) -> Lines:
    ran = [
        row for row in once(rows, question) if row.get("started_at") and row["cache"] != "joined"
    ]
    lines: Lines = {}
    for key, of in grouped(ran, lambda r: (hour_of(r["started_at"]), r["model"])).items():
        number = sum(1 / row["batch_size"] for row in of)
        room = sum(
            row["batch_capacity"] / row["batch_size"] for row in of if row.get("batch_capacity")
        )
        padded = [row for row in of if row.get("padded_tokens") is not None]
        cold = [row["cold_start"] for row in of if row.get("cold_start") is not None]
        known = sum(bool(row.get("batch_capacity")) for row in of)
        lines[key] = {
            "workers": len({row["worker"] for row in of}),
            "items": len(of),
            "batches": number,
            "items_per_batch": len(of) / number,
            "fill_percent": 100 * known / room if room else None,
            "padding_percent": (
                100 * (1 - exact(padded, "tokens") / exact(padded, "padded_tokens"))
                if padded
                else None
            ),
            "cold_percent": 100 * sum(cold) / len(cold) if cold else None,
            "batch_wait_p95_ms": near(of, "batch_wait_ms", 0.95),
            "inference_ms_per_item": math.fsum(
                row["inference_ms"] / row["batch_size"] for row in of
            )
            / len(of),
        }
    return lines


def flows(rows: list[Fields], question: ReportQuestion) -> Lines:
    of_flows = [row for row in once(rows, question) if row.get("flow")]
    zone = ZoneInfo(question.tz)
    lines: Lines = {}
    for one in (of_flows, [row | {"step": ""} for row in of_flows]):
        groups = grouped(
            one,
            lambda r: (r["received_at"].astimezone(zone).date(), r["tenant"], r["flow"], r["step"]),
        )
        for key, of in groups.items():
            hits = sum(row.get("cache") in ("memory", "redis") for row in of)
            ends = [
                {"done_ms": max(row["total_ms"] for row in run)}
                for run in grouped(of, lambda r: (r["request_id"],)).values()
            ]
            lines[key] = {
                "runs": len({row["request_id"] for row in of}),
                "items": len(of),
                "succeeded": sum(row["status"] == "succeeded" for row in of),
                "hit_percent": 100 * hits / len(of),
                "joined": sum(row.get("cache") == "joined" for row in of),
                "inference_p50_ms": near(of, "inference_ms", 0.5),
                "inference_p95_ms": near(of, "inference_ms", 0.95),
                "done_p50_ms": near(ends, "done_ms", 0.5),
                "done_p95_ms": near(ends, "done_ms", 0.95),
                "device_s": float(sum(map(device_s, of), Fraction(0))),
                "cost_usd": exact(of, "cost_usd"),
            }
    return lines


def tenants(rows: list[Fields], question: ReportQuestion) -> Lines:
    members = once(rows, question)
    usd, seconds = exact(members, "cost_usd"), float(sum(map(device_s, members)))
    minutes = (question.until - question.since).total_seconds() / 60
    lines: Lines = {}
    for key, of in grouped(members, lambda r: (r["tenant"],)).items():
        known, statuses = counts(of), Counter(row["status"] for row in of)
        peak = max(
            Counter(row["received_at"].replace(second=0, microsecond=0) for row in of).values()
        )
        lines[key] = {name: known[name] for name in ("cost_usd", "items", "requests", "device_s")}
        lines[key] |= {
            "cost_percent": 100 * known["cost_usd"] / usd,
            "device_percent": 100 * float(sum(map(device_s, of))) / seconds,
            "error_percent": 100 * (statuses["failed"] + statuses["expired"]) / known["items"],
            "refused_percent": 100 * statuses["refused"] / known["requests"],
            "peak_items_per_min": peak,
            "peak_to_mean": peak / (len(of) / minutes),
            "models": len({row["model"] for row in of}),
            "keys": len({row["key_id"] for row in of if row.get("key_id")}),
            "last_seen": max(row["received_at"] for row in of),
        }
    return lines


def capacity(rows: list[Fields], question: ReportQuestion) -> Lines:
    zone = ZoneInfo(question.tz)
    members = grouped(once(rows, question), lambda r: (hour_of(r["received_at"]),))
    hours = defaultdict(list)
    moment = hour_of(question.since)
    while moment < question.until:
        local = moment.astimezone(zone)
        hours[local.isoweekday(), local.hour].append(members.get((moment,), []))
        moment += HOUR
    lines: Lines = {}
    for key, of in hours.items():
        gpus = [float(sum(map(computed_s, one), Fraction(0))) / 3600 for one in of]
        refused = [sum(row["status"] == "refused" for row in one) for one in of]
        items = [len(one) - no for one, no in zip(of, refused, strict=True)]
        lines[key] = {
            "hours": len(of),
            "items_mean": sum(items) / len(of),
            "items_max": max(items),
            "refused_mean": sum(refused) / len(of),
            "gpus_mean": sum(gpus) / len(of),
            "gpus_max": max(gpus),
        }
    return lines


def forecast(rows: list[Fields], question: ReportQuestion) -> Lines:
    zone, ends = ZoneInfo(question.tz), hour_of(question.until)
    members = grouped(once(rows, question), lambda r: (hour_of(r["received_at"]),))
    weeks = (ends - question.since) // HOUR // 168
    needed: list[list[tuple[float, float]]] = []  # keyed by weeks back and slot: GPUs, items
    for week in range(1, weeks + 1):
        hours = [members.get((ends + (slot - 168 * week) * HOUR,), []) for slot in range(168)]
        needed.append(
            [
                (
                    float(sum(map(computed_s, of), Fraction(0))) / 3600,
                    float(sum(row["status"] != "refused" for row in of)),
                )
                for of in hours
            ]
        )
    coming = [_predicted(needed, which) for which in (0, 1)]
    misses = [
        [abs(p - a[0]) for p, a in zip(_predicted(needed[cut:], 0), needed[cut - 1], strict=True)]
        for cut in range(1, min(4, weeks))
    ]
    total = sum(hour[0] for week in needed[: len(misses)] for hour in week)
    wape = 100 * sum(map(sum, misses)) / total
    lines: Lines = {}
    for slot in range(168):
        hour = ends + slot * HOUR
        lines[hour, f"{hour.astimezone(zone):%Y-%m-%d %H:%M}"] = {
            "weeks": weeks,
            "gpus": coming[0][slot],
            "gpus_high": coming[0][slot] + max(miss[slot] for miss in misses),
            "items": coming[1][slot],
            "week_ago_gpus": needed[0][slot][0],
            "error_percent": wape,
        }
    return lines


def _predicted(needed: Sequence[Sequence[tuple[float, float]]], which: int) -> list[float]:
    levels = [sum(hour[which] for hour in week) / 168 for week in needed]
    slopes = [
        (levels[new] - levels[old]) / (old - new)
        for new in range(len(levels))
        for old in range(new + 1, len(levels))
    ]
    medians = [median(week[slot][which] for week in needed) for slot in range(168)]
    base = sum(medians) / 168
    ahead = (len(needed) + 1) / 2
    growth = ahead * median(slopes) / base if slopes and base else 0.0
    return [max(0.0, one * (1 + growth)) for one in medians]
