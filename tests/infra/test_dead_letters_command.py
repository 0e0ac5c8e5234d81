"""`penstock dead-letters`, as operators run it, on the embedded Pub/Sub."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.transport import dead_letter_topic_id, make_jobs, workers_subscription_id
from shared.messages import (
    Envelope,
    Item,
    Job,
    JobBody,
    ReplyBody,
    decode_job,
    encode_job,
    encode_reply_body,
)
from shared.models.tasks.embedding import TextInput
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

ENTRY = """models:
  - {name: texts, task: embedding, source: "hf:a/texts", dimensions: 4, batch: {max_tokens: 64}, deadline: {default_s: 30, longest_s: 300}}
"""  # noqa: E501
REASON = "it killed three workers"


class Site:
    """A deployment with one model, whose dead letters stay in the subscription."""

    def __init__(self, endpoint: str, redis_url: str, project: str) -> None:
        self.endpoint, self.redis_url, self.project = endpoint, redis_url, project

    async def _provision(self) -> None:
        async with PubSubAdmin(self.project, self.endpoint) as admin:
            await make_jobs(admin, "texts")

    async def _die(self, request_id: str, **envelope: Any) -> None:
        now_s = time.time()
        facts: dict[str, Any] = {
            "tenant": "acme",
            "received_at_s": now_s,
            "published_at_s": now_s,
            "deadline_s": now_s - 5,
            "attempt": 4,
            "prediction": "1",
            "part": 0,
        } | envelope
        body = JobBody([Item(0, TextInput(text=request_id))])
        job = Job(Envelope(request_id=request_id, model="texts", **facts), body)
        data, attributes = encode_job(job)
        async with PubSubTransport(self.project, self.endpoint) as broker:
            given = {**attributes, "penstock_reason": REASON}
            await broker.publish(dead_letter_topic_id("texts"), data, given)

    async def _claim(self, request_id: str, *, is_over: bool) -> None:
        async with RecordStores(self.redis_url) as stores:
            assert (await stores.records.claim([request_id]))[0] is not None
            if is_over:
                reply = encode_reply_body(ReplyBody([]))
                assert await stores.records.finish(request_id, "failed", reply) is not None

    async def _pulled(self) -> Job:
        async with (
            asyncio.timeout(WAIT_LIMIT_S),
            PubSubTransport(self.project, self.endpoint) as broker,
            broker.subscribe(workers_subscription_id("texts"), max_messages=1) as worker,
        ):
            async for message in worker:
                worker.ack(message)
                return decode_job(message.data, message.attributes)
        raise AssertionError("no job")

    def provision(self) -> None:
        asyncio.run(self._provision())

    def die(self, request_id: str, *, is_over: bool = False, **envelope: Any) -> None:
        """A prediction whose job became a dead letter after a worker had claimed it."""
        asyncio.run(self._claim(request_id, is_over=is_over))
        asyncio.run(self._die(request_id, **envelope))

    def pulled(self) -> Job:
        """The next job that a worker would get."""
        return asyncio.run(self._pulled())


@pytest.fixture
def site(
    pubsub_endpoint: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Site:
    made = Site(pubsub_endpoint, redis_url, f"dead-{uuid.uuid4().hex[:8]}")
    (tmp_path / "models.yaml").write_text(ENTRY)
    settings = {
        "PROJECT": made.project,
        "PUBSUB_ENDPOINT": pubsub_endpoint,
        "REDIS_URL": redis_url,
        "MODELS_FILE": str(tmp_path / "models.yaml"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    monkeypatch.setattr("infra.cli.dead_letters.letters.NEXT_WAIT_S", 0.5)
    made.provision()
    return made


def types(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["dead-letters", *words])
    assert done.exit_code == status, done.output
    return done.stdout if status == 0 else done.stderr


def listed() -> dict[str, dict[str, Any]]:
    """The listed dead letters, keyed by request id."""
    found: list[dict[str, Any]] = json.loads(types("list", "--json"))
    return {one["request_id"]: one for one in found}


def test_letters_are_listed_and_stay(site: Site) -> None:
    site.die("waits")
    site.die("answered", is_over=True)
    for _ in range(2):
        letters = listed()
        assert {name: one["awaited"] for name, one in letters.items()} == {
            "waits": True,
            "answered": False,
        }
    assert (letters["waits"]["tenant"], letters["waits"]["reason"]) == ("acme", REASON)
    table = types("list", "texts")
    assert letters["waits"]["id"] in table
    assert REASON in table


def test_letter_of_a_step_names_its_flow_and_waits_for_its_run(site: Site) -> None:
    step: dict[str, Any] = {"flow": "spell", "step": "check", "prediction": "", "part": 1001}
    site.die("waits", **step)
    site.die("answered", is_over=True, **step)
    letters = listed()
    assert letters["waits"]["reason"] == f"flow spell, step check: {REASON}"
    assert {name: one["awaited"] for name, one in letters.items()} == {
        "waits": True,
        "answered": False,
    }


def test_letter_is_shown_with_its_body(site: Site, tmp_path: Path) -> None:
    site.die("waits")
    letter_id = listed()["waits"]["id"]
    body = tmp_path / "body"
    shown = json.loads(types("show", "texts", letter_id, "--data", str(body)))
    assert shown["attributes"]["request_id"] == "waits"
    assert len(body.read_bytes()) == shown["bytes"] > 0
    assert "no dead letter '7'" in types("show", "texts", "7", status=1)
    nowhere = str(tmp_path / "missing" / "body")
    assert f"{nowhere}: No such file" in types(
        "show", "texts", letter_id, "--data", nowhere, status=1
    )


def test_job_runs_again_with_its_id_and_a_new_deadline(site: Site) -> None:
    site.die("waits", start_by_s=time.time() - 3)
    site.die("answered", is_over=True)
    assert types("replay", "texts", "--all") == "texts: 1 run again, 1 left\n"
    envelope = site.pulled().envelope
    assert (envelope.request_id, envelope.prediction, envelope.attempt) == ("waits", "1", 1)
    assert envelope.deadline_s == pytest.approx(time.time() + 300, abs=WAIT_LIMIT_S)
    assert envelope.start_by_s == 0
    assert listed().keys() == {"answered"}


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_letter_that_is_named_twice_is_taken_once(site: Site, verb: str) -> None:
    site.die("waits", is_over=verb == "discard")
    letter_id = listed()["waits"]["id"]
    done = {"replay": "run again", "discard": "discarded"}[verb]
    assert types(verb, "texts", letter_id, letter_id) == f"texts: 1 {done}, 0 left\n"


def test_claims_of_workers_that_died_do_not_count_again(site: Site) -> None:
    """Otherwise a worker would give up on the job before trying it."""

    async def unfinished() -> int:
        async with RecordStores(site.redis_url) as stores:
            (claim,) = await stores.records.claim(["waits"])
            assert claim is not None
            return claim.unfinished

    site.die("waits")
    assert asyncio.run(unfinished()) == 1
    types("replay", "texts", "--all", "--deadline", "60")
    assert asyncio.run(unfinished()) == 0


def test_nobody_gets_a_second_answer(site: Site) -> None:
    site.die("answered", is_over=True)
    site.die("late", prediction="", inbox="inbox.1")
    letters = listed()
    said = types("replay", "texts", letters["answered"]["id"], status=1)
    assert "its caller already got a response: failed" in said
    said = types("replay", "texts", letters["late"]["id"], status=1)
    assert "deadline has passed" in said
    assert listed().keys() == {"answered", "late"}


def test_what_is_awaited_is_not_discarded_by_chance(site: Site) -> None:
    site.die("waits")
    site.die("answered", is_over=True)
    waits = listed()["waits"]["id"]
    assert "add --force" in types("discard", "texts", waits, status=1)
    assert types("discard", "texts", "--all") == "texts: 1 discarded, 1 left\n"
    assert listed().keys() == {"waits"}
    assert types("discard", "texts", waits, "--force") == "texts: 1 discarded, 0 left\n"


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_letters_are_named_or_all_are_meant(site: Site, verb: str) -> None:
    site.die("waits")
    assert "or use --all" in types(verb, "texts", status=1)
    assert "or use --all" in types(verb, "texts", "1", "--all", status=1)
    assert "nowhere" in types(verb, "nowhere", "--all", status=1)
