"""Flows end to end: an API and workers over an in-memory broker and a real Redis."""

import asyncio
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import REGISTRY

from shared.broker.transport import WEBHOOKS_TOPIC_ID, SubscriptionSettings, jobs_topic_id
from shared.tenants.plan import Limits, Plan
from shared.usage.row import Row
from tests.flows.models import CHECK, JOIN, NO_WORDS, SPLIT
from tests.flows.world import World, world
from tests.keys import bearer, keys_url, stored
from tests.limits import REDIS_LIMIT_S, WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio

WORDS = {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}}
CHECKED = {"id": "check", "model": CHECK.name, "for_each": "$words", "input": {"word": "$item"}}
JOINED = {"id": "joined", "model": JOIN.name, "input": {"words": "$check.word"}}
SPELL = {
    "name": "spell",
    "input": {"text": "string"},
    "steps": [WORDS, CHECKED, JOINED],
    "output": {"text": "$joined", "sizes": "$check.size", "words": "$words"},
}


def charged_usd(rows: Iterable[Row]) -> float:
    return sum(row.cost_usd or 0.0 for row in rows)


async def test_three_steps_give_the_output(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        run = await flows.run("spell", {"text": "a cat on a mat"})
        rows = await flows.until_rows(7)
    assert run["status"] == "succeeded", run
    assert run["output"] == {
        "text": "A CAT ON A MAT",
        "sizes": [1, 3, 2, 1, 3],
        "words": ["a", "cat", "on", "a", "mat"],
    }
    assert {(row.flow, row.step, row.model) for row in rows} == {
        ("spell", "words", SPLIT.name),
        ("spell", "check", CHECK.name),
        ("spell", "joined", JOIN.name),
    }
    assert len({row.row_id for row in rows}) == len(rows) == 7
    # Identical words are checked only once.
    assert flows.compute.count(CHECK.name) == 4
    assert run["metrics"]["cost_usd"] == charged_usd(rows) == 1.5
    assert [step["items"] for step in run["metrics"]["steps"]] == [1, 5, 1]


@pytest.mark.parametrize("kind", ["any", ["any"]])
async def test_input_of_type_any_is_taken(redis_url: str, kind: Any) -> None:
    """A run's record stores the plan, whose types are then read back from JSON Schema."""
    step = {"id": "words", "model": SPLIT.name, "input": {"text": "a cat"}}
    flow = {"name": "keep", "input": {"note": kind}, "steps": [step], "output": "$input.note"}
    note: list[Any] = [1, {"a": None}, "b"]
    async with world(redis_url, flow) as flows:
        run = await flows.run("keep", {"note": note})
    assert run["status"] == "succeeded", run
    assert run["output"] == note


async def test_hits_of_a_step_need_no_message(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        await flows.run("spell", {"text": "a cat"})
        computed = flows.compute.count(CHECK.name)
        again = await flows.run("spell", {"text": "a cat"})
        rows = await flows.until_rows(8)
    assert flows.compute.count(CHECK.name) == computed
    of_again = [row for row in rows if row.request_id == again["id"]]
    hits = [row for row in of_again if row.step in ("check", "joined")]
    assert [row.cache in ("memory", "redis") for row in hits] == [True] * 3
    assert [row.pulled_at_s for row in hits] == [None] * 3
    assert again["output"]["text"] == "A CAT"
    assert again["metrics"]["cost_usd"] == charged_usd(of_again) == 0.25


async def test_items_are_skipped_retried_and_replaced(redis_url: str) -> None:
    flow = {
        "name": "careful",
        "input": {"text": "string", "only": {"type": "string", "default": "all"}},
        "steps": [
            WORDS,
            CHECKED | {"retries": 2, "default": {"word": "?", "flagged": True, "size": 0}},
            JOINED
            | {"for_each": "$check", "when": "$item.flagged == false"}
            | {"input": {"words": ["$item.word"]}},
            {"id": "none", "model": JOIN.name, "when": '$input.only == "none"'}
            | {"input": {"words": "$words"}},
            {"id": "after", "model": JOIN.name, "input": {"words": ["$none"]}},
        ],
        "output": {"joined": "$joined", "none": "$none", "after": "$after", "price": "$$1"},
    }
    async with world(redis_url, flow) as flows:
        flows.compute.fails = {"cat": 2, "mat": 3}
        run = await flows.run("careful", {"text": "a xen cat mat"})
        rows = await flows.until_rows(7)
    assert run["status"] == "succeeded", run
    assert run["output"] == {
        "joined": ["A", None, "CAT", None],
        "none": None,
        "after": None,
        "price": "$1",
    }
    assert sorted((row.step or "", row.status) for row in rows) == [
        *[("check", "failed")],
        *[("check", "succeeded")] * 3,
        *[("joined", "succeeded")] * 2,
        ("words", "succeeded"),
    ]
    assert run["metrics"]["cost_usd"] == charged_usd(rows) == 1.5


async def test_failed_item_ends_the_run_and_is_named(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        flows.compute.fails = {"cat": 9}
        run = await flows.run("spell", {"text": "a cat"})
        rows = await flows.until_rows(3)
    assert run["status"] == "failed"
    assert run["error"] == "step 'check', item 1: cat can't be read"
    assert run["metrics"]["cost_usd"] == charged_usd(rows)
    assert flows.compute.count(JOIN.name) == 0


@pytest.mark.parametrize(
    ("given", "error"),
    [
        # Uses the caller's name for the field, not the step model's name.
        ("$input.sentence", "sentence: it has no word"),
        # The previous step returned it.
        ("$first", "step 'words': text: it has no word"),
    ],
)
async def test_input_that_a_step_refuses_has_the_callers_name(
    redis_url: str, given: str, error: str
) -> None:
    first = {"id": "first", "model": JOIN.name, "input": {"words": ["$input.sentence"]}}
    flow = {
        "name": "renamed",
        "input": {"sentence": "string"},
        "steps": [first, WORDS | {"input": {"text": given}}],
        "output": "$words",
    }
    async with world(redis_url, flow) as flows:
        run = await flows.run("renamed", {"sentence": NO_WORDS})
    assert (run["status"], run["error"]) == ("failed", error)


async def started(flows: World, text: str, headers: dict[str, str] | None = None) -> str:
    body = {"version": "spell", "input": {"text": text}}
    answer = await flows.http.post("/v1/predictions", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def test_cancel_in_the_middle_starts_nothing_more(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        flows.compute.gates["slow"] = threading.Event()
        run_id = await started(flows, "a slow mat")
        await flows.until_began("slow")
        canceled = (await flows.http.post(f"/v1/predictions/{run_id}/cancel")).json()
        flows.compute.gates["slow"].set()
        rows = await flows.until_rows(4)
        shown = (await flows.http.get(f"/v1/predictions/{run_id}")).json()
    assert canceled["status"] == shown["status"] == "canceled"
    assert flows.compute.count(JOIN.name) == 0
    by_step = {(row.step, row.status) for row in rows}
    assert ("words", "succeeded") in by_step
    assert ("check", "canceled") in by_step
    assert shown["metrics"]["cost_usd"] == canceled["metrics"]["cost_usd"] == charged_usd(rows)


async def test_a_late_run_that_many_read_at_once_is_counted_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, labels = "penstock_api_predictions_total", {"model": "spell", "event": "expired"}
    async with world(redis_url, SPELL, idle={CHECK.name}) as flows:
        await flows.broker.ensure_topic(jobs_topic_id(CHECK.name))
        run_id = await started(flows, "a cat")
        before = REGISTRY.get_sample_value(name, labels) or 0
        monkeypatch.setattr("api.predictions.service.GRACE_S", -86_400.0)
        path = f"/v1/predictions/{run_id}"
        read = await asyncio.gather(*(flows.http.get(path) for _ in range(8)))
        after = REGISTRY.get_sample_value(name, labels)
    assert {response.json()["status"] for response in read} == {"failed"}
    assert after == before + 1


@pytest.mark.slow(about_s=6)  # its deadline passes
async def test_deadline_in_the_middle_charges_what_was_delivered(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        flows.compute.gates["slow"] = threading.Event()
        run_id = await started(flows, "a slow", {"cancel-after": "5s"})
        await flows.until_began("slow")
        shown = await flows.until_over(run_id)
        flows.compute.gates["slow"].set()
        rows = await flows.until_rows(3)
    assert shown["status"] == "failed"
    assert shown["error"].startswith("step 'check', item 1: the deadline of 5 s passed")
    assert {(row.step, row.status) for row in rows} >= {
        ("words", "succeeded"),
        ("check", "expired"),
    }
    assert flows.compute.count(JOIN.name) == 0
    assert shown["metrics"]["cost_usd"] == charged_usd(rows) > 0


async def events_of(flows: World, run_id: str, last_id: str = "") -> list[tuple[str, str, Any]]:
    """Each event's id, kind and data."""
    headers = {"last-event-id": last_id} if last_id else {}
    answer = await flows.http.get(f"/v1/predictions/{run_id}/stream", headers=headers)
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" not in fields:
            continue  # a comment that keeps a slow stream alive
        kind = fields["event"]
        data = json.loads(fields["data"]) if kind in ("output", "done") else fields["data"]
        events.append((fields["id"], kind, data))
    return events


async def test_stream_has_each_item_and_goes_on_behind_any(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        run_id = await started(flows, "a cat on a mat")
        events = await events_of(flows, run_id)
        outputs = [one for one in events if one[1] == "output"]
        for number, (event_id, *_) in enumerate(outputs):
            rest = await events_of(flows, run_id, event_id)
            assert [one for one in rest if one[1] == "output"] == outputs[number + 1 :]
    assert [(data.get("step"), data.get("item")) for _, _, data in outputs] == [
        ("words", None),
        *(("check", position) for position in range(5)),
        ("joined", None),
        (None, None),
    ]
    assert outputs[2][2]["output"] == {"word": "CAT", "flagged": False, "size": 3}
    assert outputs[-1][2]["output"]["text"] == "A CAT ON A MAT"
    assert events[-1][1] == "done"


async def test_flow_is_listed_with_its_schema(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        listed = (await flows.http.get("/v1/models")).json()
        shown = (await flows.http.get("/v1/models/penstock/spell")).json()
        wrong = await flows.http.post(
            "/v1/predictions", json={"version": "spell", "input": {"text": 7}}
        )
    assert "spell" in [one["id"] for one in listed["data"]]
    schemas = shown["latest_version"]["openapi_schema"]["components"]["schemas"]
    assert schemas["Input"]["required"] == ["text"]
    assert schemas["Output"]["properties"]["sizes"] == {
        "type": "array",
        "items": {"type": "integer"},
    }
    assert wrong.status_code == 422


async def test_large_fan_out_is_published_by_and_by(redis_url: str) -> None:
    words = [f"w{number}" for number in range(300)]
    async with world(redis_url, SPELL) as flows:
        run = await flows.run("spell", {"text": " ".join(words)})
        rows = await flows.until_rows(302)
    assert run["output"]["text"] == " ".join(words).upper()
    assert len({row.row_id for row in rows}) == len(rows) == 302
    assert run["metrics"]["cost_usd"] == charged_usd(rows)


BUDGET_USD = 1000.0
RACES = 16


async def test_key_needs_the_flow_alone_and_its_budget_counts_all_steps(
    redis_url: str, tmp_path: Path
) -> None:
    limits = Limits(budget_usd_per_month=BUDGET_USD)
    plan = Plan(budget_usd_per_month=BUDGET_USD)
    url = keys_url(
        tmp_path,
        plans={"usual": plan},
        tenants={"acme": "usual"},
        keys=[
            stored("flows", "acme", models=("spell",), limits=limits),
            stored("parts", "acme", models=(SPLIT.name,)),
        ],
    )
    async with world(redis_url, SPELL, keys_url=url) as flows:
        run = await flows.run("spell", {"text": "a cat"}, bearer("flows"))
        body = {"version": "spell", "input": {"text": "a"}}
        refused = await flows.http.post("/v1/predictions", json=body, headers=bearer("parts"))
        part = {"version": SPLIT.name, "input": {"text": "a"}}
        of_model = await flows.http.post("/v1/predictions", json=part, headers=bearer("flows"))
        with redis.Redis.from_url(redis_url, decode_responses=True) as client:
            used = await until_settled(client)
    assert run["status"] == "succeeded"
    assert (refused.status_code, of_model.status_code) == (403, 403)
    assert used == [run["metrics"]["cost_usd"]] * len(used) == [1.0] * len(used)
    assert used


async def test_a_run_that_is_deleted_before_its_cancel_is_settled_counts_as_its_rows(
    redis_url: str, tmp_path: Path
) -> None:
    """Another instance has canceled it and is about to record its cost."""
    plan, who = Plan(budget_usd_per_month=BUDGET_USD), bearer("one")
    url = keys_url(tmp_path, plans={"usual": plan}, tenants={"acme": "usual"}, one="acme")
    async with (
        world(redis_url, SPELL, keys_url=url, idle={CHECK.name}) as flows,
        RecordStores(redis_url, timeout_s=REDIS_LIMIT_S) as stores,
    ):
        await flows.broker.ensure_topic(jobs_topic_id(CHECK.name))
        run_id = await started(flows, "a cat", who)
        [row] = await flows.until_rows(1)
        assert await stores.records.cancel(run_id) == "canceled"
        deleted = await flows.http.delete(f"/v1/predictions/{run_id}", headers=who)
        assert deleted.status_code == 204
        left = await stores.records.read(run_id)
        assert left is not None
        assert left.reply is not None, "nothing says what it cost"
        with redis.Redis.from_url(redis_url, decode_responses=True) as client:
            assert await until_settled(client) == [row.cost_usd] == [0.25]


async def test_runs_canceled_and_deleted_at_the_same_moment_count_as_their_rows(
    redis_url: str, tmp_path: Path
) -> None:
    plan, who = Plan(budget_usd_per_month=RACES * BUDGET_USD), bearer("one")
    url = keys_url(tmp_path, plans={"usual": plan}, tenants={"acme": "usual"}, one="acme")
    async with world(redis_url, SPELL, keys_url=url, idle={CHECK.name}) as flows:
        await flows.broker.ensure_topic(jobs_topic_id(CHECK.name))
        runs = [await started(flows, "a cat", who) for _ in range(RACES)]
        rows = await flows.until_rows(RACES)
        await asyncio.gather(*(cancel_and_delete(flows, run, who) for run in runs))
        with redis.Redis.from_url(redis_url, decode_responses=True) as client:
            assert await until_settled(client) == [charged_usd(rows)] == [RACES * 0.25]


async def cancel_and_delete(flows: World, run_id: str, who: dict[str, str]) -> None:
    """Does both at the same time, and deletes again until the run has been canceled."""
    url = f"/v1/predictions/{run_id}"

    async def delete() -> None:
        while (deleted := await flows.http.delete(url, headers=who)).status_code == 409:
            pass
        assert deleted.status_code == 204, deleted.text

    await asyncio.gather(flows.http.post(f"{url}/cancel", headers=who), delete())


async def test_run_whose_canceler_died_is_settled_by_whoever_reads_it(redis_url: str) -> None:
    async with (
        world(redis_url, SPELL, idle={CHECK.name}) as flows,
        RecordStores(redis_url, timeout_s=REDIS_LIMIT_S) as stores,
    ):
        await flows.broker.ensure_topic(jobs_topic_id(CHECK.name))
        run_id = await started(flows, "a cat", {})
        [row] = await flows.until_rows(1)
        assert await stores.records.cancel(run_id) == "canceled"
        run = await flows.until_over(run_id)
    assert run["metrics"]["cost_usd"] == row.cost_usd == 0.25


async def until_settled(client: Any) -> list[float]:
    """Returns Redis's count for each budget once the run is settled."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            fields = [client.hgetall(key) for key in client.keys("penstock:limits:month:*usd")]
            used = [float(one.get("used", 0)) for one in fields]
            held = [name for one in fields for name in one if name.startswith("held:")]
            if used and all(used) and not client.hlen("penstock:predictions:holds"):
                return [one for one in used if one or not held]
            await asyncio.sleep(0.05)


async def test_caller_who_waits_gets_the_output_and_webhooks_their_events(redis_url: str) -> None:
    async with world(redis_url, SPELL, webhooks_private=True) as flows:
        await flows.broker.ensure_topic(WEBHOOKS_TOPIC_ID)
        await flows.broker.ensure_subscription("hooks", SubscriptionSettings(WEBHOOKS_TOPIC_ID))
        body = {
            "version": "spell",
            "input": {"text": "a cat"},
            "webhook": "http://127.0.0.1:9/hook",
        }
        answer = await flows.http.post("/v1/predictions", json=body, headers={"prefer": "wait=60"})
        shown = answer.json()
        events = []
        async with flows.broker.subscribe("hooks", max_messages=10) as hooks:
            async for message in hooks:
                hooks.ack(message)
                events.append(json.loads(message.data)["event"])
                if events[-1] == "completed":
                    break
    assert (answer.status_code, shown["status"]) == (201, "succeeded")
    assert shown["output"]["text"] == "A CAT"
    assert events[0] == "start"
    assert events.count("completed") == 1
