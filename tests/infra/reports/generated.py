"""Rows for a generated month: duplicate, late and old rows, tenants without keys, and a day without
any rows.

It covers five weeks around the days when the clocks change in Berlin (October 25) and New York
(November 1).
"""

import datetime as dt
import random
from typing import Any

Fields = dict[str, Any]
FIRST = dt.datetime(2026, 10, 5, tzinfo=dt.UTC)
AFTER = FIRST + dt.timedelta(days=35)
GAP = dt.datetime(2026, 10, 20, 18, tzinfo=dt.UTC), dt.datetime(2026, 10, 22, 12, tzinfo=dt.UTC)
"""Nothing is received during this gap, so October 21 is empty in all time zones."""
PRICE_CHANGE = dt.datetime(2026, 10, 16, tzinfo=dt.UTC)
NEW_COLUMNS_FROM = dt.datetime(2026, 10, 9, tzinfo=dt.UTC)
"""Earlier rows come from a release that did not have the newer columns."""
TENANTS = ("acme", "globex", "initech", "umbrella")
CACHED_SHARE = 0.25
WRITTEN = 3
"""Ratio of a generated token's cost to a prompt token's."""
MODELS: dict[str, Fields] = {
    "mini": {"task": "embedding", "prices": (0.01, 0.013), "gpu_type": "l4", "capacity": 64},
    "draw": {"task": "image", "prices": (0.02, 0.025), "gpu_type": "a100", "capacity": 8},
    "write": {"task": "text", "prices": (0.05, 0.06), "gpu_type": "l4", "capacity": 16},
}


def rows(seed: int = 18, requests: int = 1500) -> list[Fields]:
    """The rows as written: some are duplicates, and some are followed by a row about a failed
    delivery.
    """
    drawn = random.Random(seed)
    found: list[Fields] = []
    for number in range(requests):
        received = FIRST + dt.timedelta(seconds=drawn.randrange(35 * 86_400), microseconds=number)
        if drawn.random() < 0.6:  # daytime is busier
            received = received.replace(hour=8 + received.hour // 3)
        gap = (
            dt.datetime(2026, 10, 20, 18, tzinfo=dt.UTC),
            dt.datetime(2026, 10, 22, 12, tzinfo=dt.UTC),
        )
        if gap[0] <= received < gap[1]:
            continue
        found += _of_a_flow(number, _request(drawn, f"r{number:05}", received))
    doubled = [
        one if drawn.random() < 0.5 else _undelivered(one) for one in found if drawn.random() < 0.1
    ]
    found += doubled
    drawn.shuffle(found)
    return found


def _of_a_flow(number: int, rows: list[Fields]) -> list[Fields]:
    """A request's rows, marked as a flow run if the request's number is a multiple of seven."""
    if number % 7 or rows[0]["status"] == "refused":
        return rows
    flow = ("read", "draw-and-check")[number % 2]
    return [one | {"flow": flow, "step": "rest" if one["item"] else "first"} for one in rows]


def _undelivered(one: Fields) -> Fields:
    """The API's row for an item that its caller did not get, before or after the worker's row."""
    said = {"attempt": None, "status": "canceled", "error_code": "canceled", "cost_usd": 0.0}
    return one | said | ({"charged_share": 0.0} if "charged_share" in one else {})


def _request(drawn: random.Random, request_id: str, received: dt.datetime) -> list[Fields]:
    tenant = drawn.choices(TENANTS, (6, 3, 2, 1))[0]
    model = drawn.choices(list(MODELS), (4, 1, 0 if received < NEW_COLUMNS_FROM else 1))[0]
    known: Fields = {
        "request_id": request_id,
        "tenant": tenant,
        "model": model,
        "received_at": received,
        "attempt": drawn.choice((1, 1, 1, 2)),
        "key_id": drawn.choice((None, f"{tenant}-1", f"{tenant}-2")),
    }
    if drawn.random() < 0.05:
        code = drawn.choice(("overloaded", "insufficient_quota", "invalid_input"))
        refused = known | {
            "row_id": f"{request_id}:refused",
            "item": 0,
            "status": "refused",
            "error_code": code,
            "cost_usd": 0.0,
            "charged_share": 0.0,
            "replied_at": received + dt.timedelta(milliseconds=1),
            "total_ms": 1.0,
        }
        return [refused | ({"model": ""} if code == "invalid_input" else {})]
    return [_item(drawn, known, item) for item in range(drawn.choice((1, 1, 1, 2, 5)))]


def _item(drawn: random.Random, known: Fields, item: int) -> Fields:
    received, model = known["received_at"], MODELS[known["model"]]
    is_old = received < NEW_COLUMNS_FROM
    status = drawn.choices(("succeeded", "failed", "expired", "canceled"), (30, 1, 1, 1))[0]
    cache = drawn.choice(("miss", "miss", "none", "redis", "memory", "joined"))
    is_shared = cache in ("redis", "memory", "joined")
    priority = drawn.choice(("interactive", "interactive", "batch"))
    share = 0.0
    if status == "succeeded":
        share = (CACHED_SHARE if is_shared else 1.0) * (0.5 if priority == "batch" else 1.0)
    if is_old and status == "succeeded" and not is_shared:
        share = 1.0
    units = drawn.randrange(1, 10**6)
    price, paid = model["prices"][received >= PRICE_CHANGE], units
    written = _written(drawn, status, units) if model["task"] == "text" else {}
    paid += (WRITTEN - 1) * written.get("output_tokens", 0)
    if written and status in ("expired", "canceled"):  # after its reader had received these tokens
        share = 1.0
    total_ms = drawn.uniform(1, 900) if drawn.random() < 0.97 else drawn.uniform(4e6, 9e7)
    fields = known | {
        "row_id": f"{known['request_id']}:{item}",
        "item": item,
        "status": status,
        "task": model["task"],
        "cache": cache,
        "region": drawn.choice(("europe-west4", "us-central1")),
        "pixel_steps" if model["task"] == "image" else "tokens": units,
        "cost_usd": share * (paid * price / 1e6),
        "charged_share": share,
        "total_ms": total_ms,
        "replied_at": received + dt.timedelta(milliseconds=total_ms),
    }
    fields |= written
    if status == "failed":
        fields["error_code"] = drawn.choice(("model_failed", "invalid_input", "unavailable"))
    if status == "expired":
        fields["error_code"] = "deadline_exceeded"
    if status == "canceled":
        fields["error_code"] = "canceled"
    if not is_shared or cache == "joined":  # a joined item has another item's batch
        fields |= _computed(drawn, model, received, units)
    if cache == "joined":
        fields["padded_tokens"] = None
    if is_old:
        return _without_newer_columns(drawn, fields)
    fields |= {
        "price_version": "2" if received >= PRICE_CHANGE else "1",
        "list_price_usd": paid * price / 1e6,
        "priority": priority,
        "plan": "team",
    }
    return fields


def _written(drawn: random.Random, status: str, units: int) -> Fields:
    """The tokens that a generation read and generated.

    Empty if the generation ended before it produced any.
    """
    if status != "succeeded" and drawn.random() < 0.5:
        return {}
    output = drawn.randrange(1, units + 1)
    read = units - output
    # Not random, so that all other values stay the same.
    return {"output_tokens": output, "input_tokens": read, "cached_tokens": read // 3}


def _computed(drawn: random.Random, model: Fields, received: dt.datetime, units: int) -> Fields:
    published = received + dt.timedelta(milliseconds=1)
    queue_ms, wait_ms = drawn.uniform(0, 50), drawn.uniform(0, 20)
    skewed_ms = -40 if drawn.random() < 0.01 else 0
    pulled = published + dt.timedelta(milliseconds=queue_ms + skewed_ms - (60 if skewed_ms else 0))
    started = pulled + dt.timedelta(milliseconds=wait_ms)
    inference_ms, size = drawn.uniform(5, 500), drawn.randrange(1, model["capacity"])
    return {
        "published_at": published,
        "pulled_at": pulled,
        "started_at": started,
        "finished_at": started + dt.timedelta(milliseconds=inference_ms),
        "queue_ms": queue_ms,
        "batch_wait_ms": wait_ms,
        "inference_ms": inference_ms,
        "batch_size": size,
        "device_share": drawn.choice((0.25, 1.0)),
        "device": "cuda",
        "worker": f"w{drawn.randrange(4)}",
        "gpu_type": model["gpu_type"],
        "spot": drawn.choice((True, False, None)),
        "cold_start": drawn.random() < 0.05,
        "batch_capacity": model["capacity"],
        "padded_tokens": units + drawn.randrange(50) if model["task"] != "image" else None,
    }


def _without_newer_columns(drawn: random.Random, fields: Fields) -> Fields:
    newer = {"gpu_type", "spot", "cold_start", "batch_capacity", "padded_tokens", "key_id"}
    kept = {name: value for name, value in fields.items() if name not in newer}
    if fields["charged_share"] in (0.0, 1.0) and drawn.random() < 0.5:
        del kept["charged_share"]
    return kept
