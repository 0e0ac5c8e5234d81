"""Options in headers: valid options reach the job within their limits; others are rejected by name
and range.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis

from infra.local.redis_server import RedisServer
from tests.api.asked import PNG, URI
from tests.api.harness import (
    CATALOG,
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    running_api,
    settings_for,
)

pytestmark = pytest.mark.anyio

ROUTES = {
    "/v1/embeddings": {"model": TEXT_MODEL.name, "input": "a cat"},
    "/v1/images/generations": {"prompt": "a cat", "size": "64x64"},
    "/v1/images/edits": {"prompt": "a cat", "images": [{"image_url": URI}]},
    "/v1/predictions": {"version": TEXT_MODEL.name, "input": {"text": "a cat"}},
    f"/v1/models/owner/{IMAGE_MODEL.name}/predictions": {"input": {"prompt": "a cat"}},
}
LIMIT_HEADERS = ["x-penstock-deadline-ms", "x-penstock-queue-limit-ms"]
RANGE = "a whole number of milliseconds from 1 to 86400000"
ABSURD = [
    "99999999999999",
    "86400001",
    "9" * 400,
    "9" * 5000,
    "0",
    "-5",
    "1.5",
    "1e3",
    "",
    "soon",
    "\u0661",
    "\u00b2",
    "1, 2",
]


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> AsyncIterator[ApiUnderTest]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    given = settings_for(tmp_path_factory.mktemp("api"), redis_url=redis_server.url, secret="s")
    async with running_api(given) as running:
        yield running


async def refused(
    api: ApiUnderTest, path: str, headers: list[tuple[bytes, bytes]]
) -> tuple[str, str]:
    taken = len(api.worker.jobs)
    answer = await api.http.post(path, json=ROUTES[path], headers=headers)
    assert len(api.worker.jobs) == taken
    if path.endswith("predictions"):
        assert answer.status_code == 422
        (wrong,) = answer.json()["invalid_fields"]
        return wrong["field"], wrong["description"]
    assert answer.status_code == 400
    error = answer.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("header", LIMIT_HEADERS)
@pytest.mark.parametrize("value", ABSURD, ids=lambda value: value[:20])
async def test_absurd_limit_is_refused_with_its_range(
    api: ApiUnderTest, path: str, header: str, value: str
) -> None:
    field, reason = await refused(api, path, [(header.encode(), value.encode())])
    assert field == header
    assert reason.endswith(RANGE)
    assert len(reason) < 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("header", "value", "wanted"),
    [
        ("cancel-after", "999h", "from 1s to 24h"),
        ("cancel-after", "9" * 400, "from 1s to 24h"),
        ("cancel-after", "0s", "from 1s to 24h"),
        ("cancel-after", "", "from 1s to 24h"),
        ("x-penstock-lane", "", "interactive or batch"),
        ("x-penstock-lane", "b" * 3000, "interactive or batch"),
        ("idempotency-key", "", "1 to 255 visible ASCII characters"),
        ("idempotency-key", "k" * 256, "1 to 255 visible ASCII characters"),
    ],
    ids=lambda value: value[:20],
)
async def test_others_too(
    api: ApiUnderTest, path: str, header: str, value: str, wanted: str
) -> None:
    field, reason = await refused(api, path, [(header.encode(), value.encode())])
    assert field == header
    assert reason.endswith(wanted)
    assert len(reason) < 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "header", [*LIMIT_HEADERS, "cancel-after", "x-penstock-lane", "idempotency-key"]
)
async def test_header_that_says_two_things_is_refused(
    api: ApiUnderTest, path: str, header: str
) -> None:
    field, reason = await refused(
        api, path, [(header.encode(), b"5000"), (header.encode(), b"6000")]
    )
    assert (field, reason.removeprefix(f"{header}: ")) == (header, "must be sent only once")


@pytest.mark.parametrize("path", ROUTES)
async def test_longest_limits_are_the_models(api: ApiUnderTest, path: str) -> None:
    day_ms = "86400000"
    headers = {"cache-control": "no-store", "cancel-after": "24h"} | dict.fromkeys(
        LIMIT_HEADERS, day_ms
    )
    taken = len(api.worker.jobs)
    assert (await api.http.post(path, json=ROUTES[path], headers=headers)).status_code in (200, 201)
    await api.worker.until_taken(taken + 1)
    envelope = api.worker.jobs[-1].envelope
    longest_s = CATALOG.find(envelope.model).deadline.longest_s
    assert envelope.deadline_s - envelope.received_at_s == pytest.approx(longest_s)
    assert envelope.start_by_s - envelope.received_at_s == pytest.approx(86_400)


async def test_lists_go_on_in_a_second_header(api: ApiUnderTest) -> None:
    headers = [
        ("cache-control", "max-age=0"),
        ("cache-control", "No-Store"),
        ("prefer", "respond-async"),
    ]
    taken = len(api.worker.jobs)
    waited = await api.http.post(
        "/v1/predictions", json=ROUTES["/v1/predictions"], headers=[*headers, ("prefer", "wait")]
    )
    assert waited.json()["status"] == "succeeded"
    assert (api.worker.jobs[taken].body.cache_read, api.worker.jobs[taken].body.cache_write) == (
        False,
        False,
    )


@pytest.mark.parametrize("preference", ["wait=" + "9" * 400, 'wait="30"', "WAIT = 30; a=b", "wait"])
async def test_wait_of_any_length_is_at_most_a_minute(api: ApiUnderTest, preference: str) -> None:
    given = ROUTES["/v1/predictions"]
    answer = await api.http.post("/v1/predictions", json=given, headers={"prefer": preference})
    assert (answer.status_code, answer.json()["status"]) == (201, "succeeded")


@pytest.mark.parametrize(
    "preference", ["wait=-1", "wait=soon", "wait=\u0661", "wait=", "waiting", "", ",,"]
)
async def test_preference_that_makes_no_sense_is_ignored(
    api: ApiUnderTest, preference: str
) -> None:
    """As required by RFC 7240."""
    api.worker.go.clear()
    headers = {b"prefer": preference.encode(), b"cache-control": b"no-store"}
    answer = await api.http.post("/v1/predictions", json=ROUTES["/v1/predictions"], headers=headers)
    api.worker.go.set()
    assert (answer.status_code, answer.json()["status"]) == (201, "starting")


@pytest.mark.parametrize("charset", ["utf-7", "undefined", "idna", "unicode_escape", "x" * 300])
async def test_form_in_another_charset_is_refused(api: ApiUnderTest, charset: str) -> None:
    """Some of Python's codecs fail in unusual ways, and some produce lone surrogates, which no
    message can carry.
    """
    body = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n+2AA-\r\n'
    body += (
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        + PNG
        + b"\r\n--b--\r\n"
    )
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    for path in ("/v1/images/edits", "/v1/files"):
        answer = await api.http.post(path, content=body, headers=headers)
        assert answer.status_code in (400, 422)
        assert "content-type: forms must use UTF-8" in answer.text
