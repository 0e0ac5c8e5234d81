"""Flow runs that are canceled or run late midway, on whole stacks over both brokers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.faults.flows import CLASSES, FLOW, write_models
from tests.faults.world import APIS, World
from tests.rabbitmq import needs_rabbitmq

pytestmark = pytest.mark.slow(about_s=120)

ITEMS = 900
"""Items in the second step: 45 s with one process, so no machine finishes them in the first of
DEADLINES_S.
"""
DEADLINES_S = (8.0, 16.0, 32.0)
"""Tried in this order, because a busy machine may not reach the second step in time."""
STOPS_WITHIN_S = 10.0
"""Time limit on a busy machine.

If the run were not stopped, two workers would keep starting items for longer than this.
"""
PRICE_USD = 0.25
LIMIT_S = 90.0
QUIET_S = 4.0
"""If no more rows arrive for this long, none will."""


@pytest.fixture(scope="module", params=["pubsub", "rabbitmq"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[World]:
    if request.param == "rabbitmq":
        needs_rabbitmq()
    folder: Path = tmp_path_factory.mktemp("stopping")
    served = (",".join(CLASSES), write_models(folder / "models"))
    with World(folder, served=served, broker=request.param) as world:
        yield world


class Delivered(NamedTuple):
    """An item shown in a run's stream."""

    step: str
    item: int


def begin(world: World, **headers: str) -> dict[str, Any]:
    text = " ".join(f"w{number}" for number in range(ITEMS))
    body = {"version": FLOW, "input": {"text": text}}
    answer = httpx.post(f"{world.url(APIS[0])}/v1/predictions", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def until_over(world: World, run: dict[str, Any]) -> dict[str, Any]:
    until_s = time.monotonic() + LIMIT_S
    while True:
        shown = httpx.get(f"{world.url(APIS[1])}/v1/predictions/{run['id']}").json()
        if shown["status"] in ("succeeded", "failed", "canceled"):
            return dict(shown)
        assert time.monotonic() < until_s, shown
        time.sleep(0.1)


def events(run: dict[str, Any], *, until_step: str = "") -> list[dict[str, Any]]:
    """The outputs in a run's stream, up to the end of the stream or a step's first output."""
    outputs, kind = list[dict[str, Any]](), ""
    headers = {"accept": "text/event-stream"}
    with httpx.stream("GET", run["urls"]["stream"], headers=headers, timeout=LIMIT_S) as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: ") and kind == "output":
                outputs.append(json.loads(line.removeprefix("data: ")))
                if until_step and outputs[-1].get("step") == until_step:
                    break
    return outputs


def delivered(run: dict[str, Any]) -> set[Delivered]:
    return {
        Delivered(one["step"], one.get("item", 0))
        for one in events(run)
        if "step" in one and "output" in one
    }


def rows_of(world: World, run: dict[str, Any], least: int) -> list[dict[str, Any]]:
    """Returns a run's rows that count, once no more are arriving."""
    settings, until_s = world.settings, time.monotonic() + LIMIT_S
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    sql = (
        "SELECT step, item, status, cost_usd, started_at, finished_at "
        f"FROM `{settings.dataset}.rows_deduplicated` "
        f"WHERE received_at > TIMESTAMP '2020-01-01' AND request_id = '{run['id']}'"
    )
    rows, grown_s = list[dict[str, Any]](), time.monotonic()
    while time.monotonic() < until_s:
        known, rows = len(rows), [dict(row.items()) for row in client.query_and_wait(sql)]
        if len(rows) != known:
            grown_s = time.monotonic()
        elif len(rows) >= least and time.monotonic() - grown_s > QUIET_S:
            break
        time.sleep(0.5)
    client.close()
    return rows


def check_charges(world: World, shown: dict[str, Any]) -> list[dict[str, Any]]:
    """Checks that exactly the delivered items are charged. Returns the rows."""
    given = delivered(shown)
    rows = rows_of(world, shown, len(given))
    charged = {Delivered(row["step"], row["item"] % 1000) for row in rows if row["cost_usd"]}
    assert charged == given
    assert sum(row["cost_usd"] for row in rows) == PRICE_USD * len(given)
    assert shown["metrics"]["cost_usd"] == PRICE_USD * len(given)
    assert {row["status"] for row in rows if row["cost_usd"]} == {"succeeded"}
    assert len(rows) == len({(row["step"], row["item"]) for row in rows})
    assert 1 < len(given) < ITEMS, "the run was not stopped in the middle"
    assert {row["step"] for row in rows} == {"words", "check"}
    return rows


def seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0


def test_a_canceled_run_begins_nothing_more_and_costs_what_it_delivered(stack: World) -> None:
    run = begin(stack)
    events(run, until_step="check")
    canceled = httpx.post(f"{stack.url(APIS[1])}/v1/predictions/{run['id']}/cancel")
    canceled_s = time.time()
    assert canceled.json()["status"] == "canceled"
    shown = until_over(stack, run)
    rows = check_charges(stack, shown)
    assert shown["status"] == "canceled"
    assert max(seconds(row["started_at"]) for row in rows) < canceled_s + STOPS_WITHIN_S


def test_a_late_run_costs_what_it_delivered_in_time(stack: World) -> None:
    for deadline_s in DEADLINES_S:
        run = begin(stack, **{"cancel-after": f"{deadline_s:g}s"})
        shown = until_over(stack, run)
        assert shown["status"] == "failed"
        assert "deadline" in shown["error"]
        if len(delivered(shown)) > 1:
            break
    rows = check_charges(stack, shown)
    due_s = seconds(datetime.fromisoformat(run["created_at"])) + deadline_s
    charged_s = [seconds(row["finished_at"]) for row in rows if row["cost_usd"]]
    assert max(charged_s) < due_s + STOPS_WITHIN_S
    assert max(seconds(row["started_at"]) for row in rows) < due_s + STOPS_WITHIN_S
