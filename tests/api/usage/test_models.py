"""Rows for several models, keys and days, compared with sums of fractions and with the report."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from infra.reports.runs import run_report
from shared.messages import Envelope, ItemOutcome, Receipt
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.entry import Price
from shared.usage.row import Row, row_of
from shared.usage.writer import fields_of
from tests.api.usage.world import DAY_S, World
from tests.workers.worker_harness import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
SHIPPED = read_catalog(Path("models.yaml"))
DAYS = 3
MODELS = [
    entry.model_copy(update={"name": name, "price": price})
    for name, entry, price in (
        ("mini", MODEL, Price(per_million_tokens_usd=0.013, cached_share=0.3)),
        ("maxi", MODEL, Price(per_million_tokens_usd=0.7)),
        (
            "painter",
            SHIPPED.default("image"),
            Price(per_million_pixel_steps_usd=0.02, cached_share=0.1),
        ),
    )
]
Group: TypeAlias = tuple[int, str, str]
"""Day, model and key."""


class Sums:
    """Exact delivered work, charged work, and dollars."""

    def __init__(self) -> None:
        self.work = self.charged = self.usd = Fraction()

    def add(self, model: Model, work: int, cache: str) -> None:
        price, unit = model.price, model.definition.unit
        share = Fraction(1) if cache == "miss" else Fraction(str(price.cached_share))
        per_million = Fraction(str(getattr(price, f"per_million_{unit}_usd")))
        self.work += work
        self.charged += work * share
        self.usd += work * share * per_million / 10**6


def drawn_rows(day_s: int) -> tuple[list[Row], dict[Group, Sums]]:
    """Rows up to and including the day `day_s`, and their sums."""
    drawn, rows, sums = random.Random(11), [], defaultdict[Group, Sums](Sums)
    for number in range(3000):
        model, key = drawn.choice(MODELS), drawn.choice(["k1", "k2"])
        day, cache = drawn.randrange(DAYS), drawn.choice(["miss", "redis", "joined"])
        status = drawn.choices(["succeeded", "failed", "expired", "canceled"], [9, 1, 1, 1])[0]
        work = drawn.randrange(1, 10**6)
        envelope = Envelope(
            request_id=f"r{number}",
            part=0,
            model=model.name,
            tenant="acme",
            key_id=key,
            deadline_s=day_s,
            received_at_s=day_s - (DAYS - 1 - day) * DAY_S + 1,
            published_at_s=0.0,
        )
        receipt = Receipt(cache)
        setattr(receipt, model.definition.unit, work)
        rows.append(row_of(envelope, ItemOutcome(0, status, receipt), model))
        if status == "succeeded":
            sums[day, model.name, key].add(model, work, cache)
    return rows, sums


async def test_models_of_all_units_are_told_apart(world: World) -> None:
    day_s = int(time.time()) // DAY_S * DAY_S
    rows, sums = drawn_rows(day_s)
    fields, place = [fields_of(row) for row in rows], f"{world.settings.dataset}.rows"
    for part in (fields, fields[::4]):
        assert not world.client.insert_rows_json(place, part, row_ids=[None] * len(part))
    expected = {
        group: [float(one.work), float(one.charged), float(one.usd)] for group, one in sums.items()
    }
    found = await _read(world, day_s - (DAYS - 1) * DAY_S)
    assert found.keys() == expected.keys()
    for group, figures in expected.items():
        assert found[group] == pytest.approx(figures, rel=1e-12)
    heads, lines = await asyncio.to_thread(run_report, world.settings, "usage", DAYS + 1)
    report = [dict(zip(heads, line, strict=True)) for line in lines]
    for model in MODELS:
        usd = sum(figures[2] for (_, name, _), figures in expected.items() if name == model.name)
        reported = sum(line["cost_usd"] for line in report if line["model"] == model.name)
        assert reported == pytest.approx(usd, rel=1e-12)


async def _read(world: World, start_s: int) -> dict[Group, list[float]]:
    """Each group's delivered work, charged work and dollars, as the API reports them."""
    query: dict[str, Any] = {"start_time": start_s, "limit": DAYS}
    found: dict[Group, list[float]] = {}
    by_model = query | {"group_by[]": ["model", "api_key_id"]}
    for what, delivered, charged in (
        ("embeddings", "input_tokens", "charged_tokens"),
        ("images", "pixel_steps", "charged_pixel_steps"),
    ):
        for day, one in await _results(world, f"usage/{what}", by_model):
            found[day, one["model"], one["api_key_id"]] = [one[delivered], one[charged]]
    by_item = query | {"group_by[]": ["line_item", "api_key_id"]}
    for day, one in await _results(world, "costs", by_item):
        found[day, one["line_item"], one["api_key_id"]].append(one["amount"]["value"])
    return found


async def _results(
    world: World, path: str, query: dict[str, Any]
) -> list[tuple[int, dict[str, Any]]]:
    page = (await world.get(f"/v1/organization/{path}", **query)).json()
    return [(day, one) for day, bucket in enumerate(page["data"]) for one in bucket["results"]]
