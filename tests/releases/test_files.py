"""This tree reads each release's files: messages, Redis, cache, rows, files, keys, catalogs.

A rollout mixes two releases for minutes and a canary for hours, and stored data lives even longer.
A field whose name, type, or default changes would lose data between releases, so the change fails
here.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from PIL import Image

from infra.bigquery import schema
from shared.messages import (
    BatchedReply,
    decode_job,
    decode_reply,
    decode_reply_batch,
    decode_reply_body,
    encode_job,
    encode_reply,
    encode_reply_batch,
    encode_reply_body,
    is_reply_batch,
)
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from shared.stores.cache import ENTRY_SCHEMA, ResultCache
from shared.tenants.directory import Document, decode_document, encode_document
from shared.tenants.plan import Limits, Plan, Rates
from shared.usage.bigquery import RowLine
from shared.usage.writer import RowWriter
from shared.webhooks.event import (
    decode_batch_event,
    decode_webhook_event,
    encode_batch_event,
    encode_webhook_event,
)
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.moved_clock import MovedClock
from tests.keys import stored
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.releases.history import FILES, ROOT, last_release, releases
from tests.releases.stored import load, raw
from tests.releases.write import DRAWER, IDEMPOTENT, IDEMPOTENT_BODY, MODELS, REQUESTS

pytestmark = pytest.mark.anyio

DIRECTORY = "penstock:keys"
RESULT = f"penstock:result:{ENTRY_SCHEMA}:"
RECORD, TOKENS = "penstock:record:", "penstock:tokens:"
LATER_S = 30.0
"""Seconds since the release wrote its files. The release's data has not expired by then."""
_URL = re.compile(r"https?://[^/\s\"]+|[?&](expires|signature|sig|exp)=[^\s\"&]*")


@dataclass
class Release:
    """A release's files."""

    folder: Path

    def __getattr__(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def of_topics(self, start: str) -> list[tuple[bytes, dict[str, str]]]:
        """The data and attributes of the release's messages on some topics."""
        return [
            (raw(one["data"]), one["attributes"])
            for one in self.messages
            if one["topic"].startswith(start)
        ]

    def catalog(self, folder: Path) -> Catalog:
        """The catalog that the release served, with its models at their current location."""
        text = (self.folder / "catalog.yaml").read_text()
        path = folder / "catalog.yaml"
        path.write_text(text.replace(MODELS, str(self.folder / "models")))
        return read_catalog(path)


@pytest.fixture(params=releases())
def release(request: pytest.FixtureRequest) -> Release:
    return Release(FILES / request.param)


@pytest.fixture
def clock(release: Release, redis_url: str) -> Iterator[MovedClock]:
    """The time when the release wrote its files, and the release's Redis."""
    load(redis_url, release.redis)
    with pytest.MonkeyPatch.context() as patch:
        moved = MovedClock(redis_url, patch)
        moved.move(release.release["written_at_s"] + LATER_S - time.time())
        yield moved
        moved.close()


@pytest.fixture
async def stores(clock: MovedClock, redis_url: str) -> AsyncIterator[RecordStores]:
    async with RecordStores(redis_url) as opened:
        yield opened


@pytest.fixture
async def api(
    release: Release, clock: MovedClock, redis_url: str, tmp_path: Path
) -> AsyncIterator[ApiUnderTest]:
    """This tree's API, running on the data that the release left."""
    shutil.copytree(release.folder / "objects", tmp_path / "objects")
    settings = settings_for(
        tmp_path, redis_url=redis_url, keys_url=redis_url, secret="of a release"
    )
    async with AsyncExitStack() as opened:
        running = await opened.enter_async_context(
            running_api(settings, catalog=release.catalog(tmp_path))
        )
        running.http.headers["authorization"] = f"Bearer {release.release['key']}"
        yield running


def lacking(old: Any, new: Any, path: str = "") -> list[str]:
    """Differences that lose data: parts of `old` that `new` lacks or changes. Additions are
    fine.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        gone = [f"{path}.{name} is gone" for name in old if name not in new]
        return gone + [
            reason
            for name in old
            if name in new
            for reason in lacking(old[name], new[name], f"{path}.{name}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [reason for at, pair in pairs for reason in lacking(*pair, f"{path}[{at}]")]
    return [] if old == new else [f"{path}: {str(old)[:200]!r} became {str(new)[:200]!r}"]


def again(
    messages: Sequence[tuple[bytes, dict[str, str]]],
    recode: Callable[[bytes, dict[str, str]], tuple[bytes, dict[str, str]]],
) -> list[str]:
    """The data lost by messages when they are read and sent again."""
    reasons = []
    for data, attributes in messages:
        data_again, attributes_again = recode(data, attributes)
        reasons += lacking(attributes, attributes_again, "attributes")
        reasons += lacking(json.loads(data), json.loads(data_again), "data")
    return reasons


def test_what_is_lost_or_renamed_is_noticed() -> None:
    old = {"a": 1, "of": [{"b": 2}, {"c": None}]}
    assert lacking(old, old | {"new": 3}) == []
    assert lacking(old, {"of": [{"b": 3}, {}]}) == [
        ".a is gone",
        ".of[0].b: '2' became '3'",
        ".of[1].c is gone",
    ]


def test_each_cut_left_its_files() -> None:
    """A new `version` requires running `python -m tests.releases.write`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == last_release()
    numbers = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert set(numbers) <= set(releases())


def test_jobs_are_read(release: Release) -> None:
    jobs = release.of_topics("jobs.")
    tasks = {json.loads(data)["items"][0]["input"]["type"] for data, _ in jobs}
    assert {"text", "image", "similarity", "generation"} <= tasks
    assert any(attributes.get("prediction") for _, attributes in jobs)
    assert any(attributes.get("batch_id") for _, attributes in jobs)
    assert again(jobs, lambda data, attributes: encode_job(decode_job(data, attributes))) == []


def test_replies_are_read(release: Release) -> None:
    replies = [one for one in release.of_topics("inbox.") if not is_reply_batch(one[1])]
    assert replies
    assert again(replies, lambda *one: encode_reply(decode_reply(*one))) == []


def test_replies_that_share_a_message_are_read(release: Release) -> None:
    def recode(data: bytes, attributes: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        parts = decode_reply_batch(data, attributes)
        bodies = [encode_reply_body(decode_reply_body(one.body)) for one in parts]
        batched = [
            (one.request_id, one.part, body) for one, body in zip(parts, bodies, strict=True)
        ]
        return encode_reply_batch(batched, attributes.get("slot", ""))

    batches = [one for one in release.of_topics("inbox.") if is_reply_batch(one[1])]
    if release.folder.name == "0.1.0":
        assert not batches, "it sent each reply by itself"
    assert BatchedReply.__struct_fields__ == ("request_id", "part", "body")
    assert again(batches, recode) == []


def test_webhook_events_are_read(release: Release) -> None:
    def recode(data: bytes, attributes: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        if "batch" in attributes:
            return encode_batch_event(decode_batch_event(data))
        return encode_webhook_event(decode_webhook_event(data))

    events = release.of_topics("webhooks")
    assert events
    assert again(events, recode) == []


async def test_records_are_read(release: Release, stores: RecordStores) -> None:
    hashes = {
        key.removeprefix(RECORD): value["hash"]
        for key, value in release.redis.items()
        if key.startswith(RECORD)
    }
    assert len(hashes) > len(REQUESTS)
    for name, old in hashes.items():
        record = await stores.records.read(name)
        assert record is not None
        assert record.is_over
        assert (record.state, record.attempts) == (old["state"], int(old.get("attempts", 0)))
        assert record.document == raw(old.get("document", ""))
        times = {field: float(value) for field, value in old.items() if field.endswith("_at_s")}
        assert lacking(times, msgspec.structs.asdict(record)) == []
        reply = old.get("reply")
        if reply is not None:
            assert record.reply is not None
            read = json.loads(encode_reply_body(record.reply))
            assert lacking(json.loads(raw(reply)), read, name) == []


async def test_streams_are_read(release: Release, stores: RecordStores) -> None:
    streams = {key: one["stream"] for key, one in release.redis.items() if key.startswith(TOKENS)}
    assert streams
    for key, entries in streams.items():
        record, _, index = key.removeprefix(TOKENS).rpartition(":")
        (chunks,) = await stores.tokens.read_written([(record, int(index))])
        old = [msgspec.msgpack.decode(raw(fields["c"])) for _, fields in entries]
        assert lacking(old, [msgspec.to_builtins(one) for one in chunks], key) == []


async def test_cache_entries_are_read(release: Release, clock: MovedClock, redis_url: str) -> None:
    old = {
        key.removeprefix(RESULT): msgspec.msgpack.decode(raw(one["string"]))
        for key, one in release.redis.items()
        if key.startswith(RESULT)
    }
    kinds = {entry[1]["type"] for entry in old.values()}
    assert {"embedding", "image"} <= kinds, "a new schema of entries is a new key, and a miss"
    async with ResultCache(redis_url, 0) as cache:
        hits = await cache.get_many(old)
    new = {
        key: msgspec.msgpack.decode(msgspec.msgpack.encode(hit.result)) for key, hit in hits.items()
    }
    assert lacking({key: entry[1] for key, entry in old.items()}, new) == []


async def test_api_answers_as_the_release_did(release: Release, api: ApiUnderTest) -> None:
    reasons = []
    for path, old in release.answers.items():
        response = await api.http.get(path)
        if isinstance(old, str):
            new: Any = response.text
        else:
            new = response.json()
        reasons += lacking(_placed(old), _placed(new), path)
    assert reasons == []


async def test_key_and_cached_vectors_are_found(release: Release, api: ApiUnderTest) -> None:
    name, path, body = REQUESTS[0]
    assert name == "embeddings"
    response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    cached = response.headers["x-penstock-cache"]
    assert "miss" not in cached, "texts that the release computed are computed again"


async def test_cached_images_are_found(release: Release, api: ApiUnderTest) -> None:
    """No worker is running here to draw the image again."""
    wish = {"prompt": "a blue square", "seed": 5}
    assert (f"prediction of {DRAWER}", "/v1/predictions", {"version": DRAWER, "input": wish}) in (
        REQUESTS
    )
    body = {"model": DRAWER, "response_format": "b64_json", **wish}
    response = await api.http.post("/v1/images/generations", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-penstock-cache"] == "hit"
    png = base64.b64decode(response.json()["data"][0]["b64_json"])
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        assert image.size == (64, 64)


async def test_answer_under_an_idempotency_key_is_repeated(
    release: Release, api: ApiUnderTest, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:  # its clock can't be moved
        ends = "penstock:answers:ends"
        now_s = client.time()[0]
        client.zadd(ends, {key: now_s + 3600 for key in client.zrange(ends, 0, -1)}, xx=True)
    response = await api.http.post("/v1/embeddings", content=IDEMPOTENT_BODY, headers=IDEMPOTENT)
    assert response.headers.get("idempotent-replayed") == "true"
    assert response.text == release.release["once"]


def test_directory_of_keys_is_read(release: Release) -> None:
    data = raw(release.redis[DIRECTORY]["hash"]["document"])
    document = decode_document(data, "redis")
    assert document.tenants["acme"].plan == "team"
    assert decode_document(encode_document(document), "written") == document


def test_directory_of_keys_names_only_what_it_uses() -> None:
    """The previous release reads it, and rejects fields it does not recognize."""
    plan = Plan(weight=2.0, per_model={"mini": Rates(requests_per_min=5)})
    key = msgspec.structs.replace(stored("a", "acme"), limits=Limits(max_in_flight=3))
    document = Document(plans={"team": plan}, keys=(key,))
    written = json.loads(encode_document(document))
    assert written["plans"] == {
        "team": {"weight": 2.0, "per_model": {"mini": {"requests_per_min": 5}}}
    }
    assert written["keys"][0]["limits"] == {"max_in_flight": 3}
    assert decode_document(encode_document(document), "written") == document


class Listed:
    """Accepts rows, as BigQuery does."""

    linger_s = 0.0

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def send(self, rows: Sequence[RowLine]) -> list[tuple[RowLine, str]]:
        with self._lock:
            self.rows += map(json.loads, rows)
        return []


async def test_rows_on_the_disk_are_sent(release: Release, tmp_path: Path) -> None:
    columns = {
        kind: {column["name"] for column in schema(table)}
        for kind, table in {"usage": "rows", "hours": "worker_hours"}.items()
    }
    folders = sorted({path.parent for path in (release.folder / "rows").rglob("*.segment")})
    assert len(folders) >= 3
    for folder in folders:
        lines = [
            line for path in folder.glob("*.segment") for line in path.read_text().splitlines()
        ]
        shutil.copytree(folder, tmp_path / folder.name)
        sender = Listed()
        async with RowWriter(sender, spool_dir=tmp_path / folder.name) as writer:
            assert await writer.flush(WAIT_LIMIT_S)
        assert sorted(map(json.dumps, sender.rows)) == sorted(
            json.dumps(json.loads(line)) for line in lines
        )
        known = columns["hours" if folder.name.startswith("hours") else "usage"]
        assert {name for row in sender.rows for name in row} <= known


def test_shipped_catalog_is_read(release: Release) -> None:
    catalog = read_catalog(release.folder / "models.yaml")
    assert {model.task for model in catalog.models} == {"embedding", "image"}


def _placed(value: Any) -> Any:
    """A response without the parts that depend on the machine or on when the request was made."""
    if isinstance(value, dict):
        return {name: _placed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_placed(one) for one in value]
    return _URL.sub("", value) if isinstance(value, str) else value
