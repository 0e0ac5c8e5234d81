"""A noisy tenant and five quiet ones: what the quiet ones notice, and what the noisy one loses.

The noisy one has CONNECTIONS connections with a request of TEXTS long texts on each. A quiet one
sends a text of the usual mix per second. Three drives: the quiet ones alone, all, the noisy alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from bench.load.generator import LoadOrder, LoadReport, drive, embedding_bodies
from bench.load.texts import Texts
from bench.pipeline import MODEL, Pipeline
from bench.report import Figure
from tests.keys import bearer, keys_url, stored

CONNECTIONS, TEXTS, BODIES = 20, 32, 40
QUIET, RATE_PER_S = 5, 1.0
LEAD_S = 5.0
"""Seconds by which the noisy tenant begins earlier. Its first answers are not counted."""
LIMIT_S = 60.0
UNCACHED = {"cache-control": "no-store"}
TENANTS = ["noisy", *(f"quiet-{number}" for number in range(QUIET))]


@dataclass(frozen=True)
class Drive:
    """The answers of one drive of `seconds`: those of the quiet tenants, and of the noisy one."""

    quiet: list[float]
    """Round trips in ms."""
    refused: int
    """Requests of quiet tenants without an answer."""
    noisy_texts_per_s: float
    batch_ms: float
    """Duration of the batches with the noisy tenant's texts, p50."""


def measure(pipeline: Pipeline, seconds: float) -> tuple[list[Figure], dict[str, Drive]]:
    """The figures of three drives of `seconds` each, and the drives by name."""
    with tempfile.TemporaryDirectory() as folder:
        keys = keys_url(Path(folder), keys=[stored(tenant, tenant) for tenant in TENANTS])
        with pipeline.another_api(keys_url=keys) as api:
            drive_all = partial(_drive, pipeline.texts, api.port, seconds)
            drives = {
                "quiet alone": drive_all(has_noisy=False, has_quiet=True),
                "all": drive_all(has_noisy=True, has_quiet=True),
                "noisy alone": drive_all(has_noisy=True, has_quiet=False),
            }
    return list(_figures(drives)), drives


def _drive(texts: Texts, port: int, seconds: float, *, has_noisy: bool, has_quiet: bool) -> Drive:
    orders = [_noisy(texts, port, seconds)] if has_noisy else []
    orders += _quiet(texts, port, seconds) if has_quiet else []
    with ThreadPoolExecutor(len(orders)) as pool:
        reports = list(pool.map(drive, orders))
    noisy, quiet = (reports[:1], reports[1:]) if has_noisy else ([], reports)
    answered = [
        one
        for report in noisy
        for one in report.exchanges
        if one.status == 200 and LEAD_S < one.ended_s <= LEAD_S + seconds
    ]
    return Drive(
        [one for report in quiet for one in _counted(report)],
        sum(report.sent - len(report.round_trip_ms) for report in quiet),
        len(answered) * TEXTS / seconds,
        float(np.median([one.inference_ms for one in answered])) if answered else 0.0,
    )


def _counted(report: LoadReport) -> list[float]:
    return [
        one.round_trip_ms for one in report.exchanges if one.status == 200 and one.ended_s > LEAD_S
    ]


def _noisy(texts: Texts, port: int, seconds: float) -> LoadOrder:
    pages = [texts.pages(TEXTS) for _ in range(BODIES)]
    bodies = [{"model": MODEL, "input": page, "encoding_format": "base64"} for page in pages]
    return _order(
        port,
        "noisy",
        [msgspec.json.encode(body).decode() for body in bodies],
        in_flight=CONNECTIONS,
        send_s=LEAD_S + seconds,
    )


def _quiet(texts: Texts, port: int, seconds: float) -> list[LoadOrder]:
    return [
        _order(
            port,
            tenant,
            embedding_bodies(MODEL, texts.mixed(50)),
            in_flight=100,
            send_s=LEAD_S + seconds,
            rate_per_s=RATE_PER_S,
            seed=number,
        )
        for number, tenant in enumerate(TENANTS[1:])
    ]


def _order(port: int, tenant: str, bodies: Sequence[str], **options: float) -> LoadOrder:
    return LoadOrder(
        port,
        list(bodies),
        headers=UNCACHED | bearer(tenant),
        is_cycled=True,
        limit_s=LIMIT_S,
        waits_after_429=True,
        **options,  # type: ignore[arg-type]
    )


def _figures(drives: dict[str, Drive]) -> list[Figure]:
    alone, both, noisy = drives["quiet alone"], drives["all"], drives["noisy alone"]
    p99_alone, p99_both = np.percentile(alone.quiet, 99), np.percentile(both.quiet, 99)
    # A quiet tenant's text is worth a fifth of a page, so this is more than their share.
    left = noisy.noisy_texts_per_s - QUIET * RATE_PER_S
    return [
        Figure("quiet alone, p50", float(np.median(alone.quiet)), "ms"),
        Figure("quiet alone, p99", float(p99_alone), "ms"),
        Figure("beside a noisy one, p50", float(np.median(both.quiet)), "ms"),
        Figure(
            "beside a noisy one, p99",
            float(p99_both),
            "ms",
            "<=",
            float(2 * p99_alone + noisy.batch_ms),
        ),
        Figure("beside a noisy one, not answered", both.refused, "", "<=", 0),
        Figure("one batch of the noisy one, p50", noisy.batch_ms, "ms"),
        Figure("noisy alone", noisy.noisy_texts_per_s, "texts/s"),
        Figure("noisy beside the quiet ones", both.noisy_texts_per_s, "texts/s"),
        Figure(
            "the same, of what the quiet ones leave",
            100 * both.noisy_texts_per_s / left,
            "%",
            ">=",
            95.0,
        ),
    ]
