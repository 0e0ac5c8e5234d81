"""The signed link to a prediction's events, which Replicate's Node client and browsers follow
without a key.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from shared.predictions import STREAM_LINK_S
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
ACME, OTHER = bearer("a"), bearer("o")


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    keys = keys_url(tmp_path, a="acme", o="other")
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", keys_url=keys)
    async with running_api(settings) as running:
        yield running


async def created(api: ApiUnderTest, own_id: str, keyed: dict[str, str] = ACME) -> dict[str, Any]:
    """A finished prediction whose id was chosen by its caller."""
    answer = await api.http.put(
        f"/v1/predictions/{own_id}",
        json={"version": TEXT_MODEL.name, "input": {"text": "a"}},
        headers=keyed | {"prefer": "wait"},
    )
    made: dict[str, Any] = answer.json()
    assert made["status"] == "succeeded"
    return made


async def test_link_tells_the_events_without_a_key(api: ApiUnderTest) -> None:
    made = await created(api, "mine")
    answer = await api.http.get(made["urls"]["stream"])
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("event: done\nid: 3.0\ndata: {}\n\n")


async def test_link_is_the_same_each_time(api: ApiUnderTest) -> None:
    made = await created(api, "mine")
    again = await api.http.get(made["urls"]["get"], headers=ACME)
    assert again.json()["urls"] == made["urls"]


async def test_link_is_of_one_prediction_of_one_tenant(api: ApiUnderTest) -> None:
    """Two tenants may choose the same id."""
    mine = URL((await created(api, "same"))["urls"]["stream"])
    theirs = URL((await created(api, "same", OTHER))["urls"]["stream"])
    second = URL((await created(api, "second"))["urls"]["stream"])
    record, expires = theirs.query["record"], int(mine.query["expires"])
    assert record != mine.query["record"]
    for changed, status in (
        (mine.update_query(record=record), 403),
        (mine.update_query(expires=str(expires + STREAM_LINK_S)), 403),
        (mine.update_query(signature=theirs.query["signature"]), 403),
        (mine.update_query(signature="é"), 403),
        (mine.update_query(expires="soon"), 422),
        (mine.with_query(None), 401),
        (mine.with_path(second.path, keep_query=True), 404),
    ):
        assert (await api.http.get(str(changed))).status_code == status, changed


async def test_key_is_checked_where_one_is_sent(api: ApiUnderTest) -> None:
    link = (await created(api, "mine"))["urls"]["stream"]
    wrong = {"x-api-key": "wrong"}
    answers = [await api.http.get(link, headers=keyed) for keyed in (ACME, OTHER, wrong)]
    assert [answer.status_code for answer in answers] == [200, 404, 401]


async def test_signature_of_a_stream_opens_no_object(api: ApiUnderTest) -> None:
    link = URL((await created(api, "mine"))["urls"]["stream"])
    query = {**link.query, "type": "text/event-stream"}
    path = f"/v1/objects/streams/{query.pop('record')}"
    answer = await api.http.get(path, params=query)
    assert answer.status_code in (400, 404), answer.text


async def test_link_ends_soon_and_only_reads(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = URL((await created(api, "mine"))["urls"]["stream"])
    for method, path in (
        ("GET", "/v1/predictions/mine"),
        ("POST", "/v1/predictions/mine/cancel"),
    ):
        answer = await api.http.request(method, path, params=link.query)
        assert answer.status_code == 401, path
    monkeypatch.setattr(api.dependencies.url_signer, "_clock", lambda: int(link.query["expires"]))
    assert (await api.http.get(str(link))).status_code == 403


async def test_link_is_in_no_log(api: ApiUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    link = URL((await created(api, "mine"))["urls"]["stream"])
    with caplog.at_level("DEBUG"):
        for one in (link, link.update_query(expires="5")):
            await api.http.get(str(one))
    # The client's logs and uvicorn's access log, which api/server.py disables when running as a
    # process.
    others = ("httpx", "httpcore", "uvicorn.access")
    ours = [entry for entry in caplog.records if not entry.name.startswith(others)]
    assert not [entry for entry in ours if link.query["signature"] in str(vars(entry))]
