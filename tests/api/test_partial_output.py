"""Output from a class that yields, as shown by GET and webhooks while the class is running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replicate.client import Client

from shared.broker.transport import WEBHOOKS_SUBSCRIPTION_ID
from shared.webhooks.event import WebhookEvent, decode_webhook_event
from tests.api.harness import ApiUnderTest
from tests.api.predicting import until_over
from tests.api.serving_classes import predict
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=60)]

YIELDS = """
class Predictor(BasePredictor):
    def predict(self, folder: str) -> {kind}:
        for number, piece in enumerate({pieces}):
            while not os.path.exists(os.path.join(folder, str(number))):
                time.sleep(0.01)
            yield piece
"""


async def until_shown(api: ApiUnderTest, created: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns the prediction, as GET returns it, once its output has `count` elements."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            found: dict[str, Any] = (await api.http.get(created["urls"]["get"])).json()
            if len(found["output"] or []) == count:
                return found
            await asyncio.sleep(0.02)


async def start(api: ApiUnderTest, tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Creates a prediction that yields one piece for each file that is created."""
    body = {"version": "mine", "input": {"folder": str(tmp_path / "class")}, **more}
    created: dict[str, Any] = (await api.http.post("/v1/predictions", json=body)).json()
    return created


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("ConcatenateIterator[str]", ["gr", "", "\u00fcn\u2028", "x"]),
        ("Iterator[str]", ["line\nbreak", "", "c", "d"]),
        ("Iterator[dict]", [{"a": 1}, {}, {"b": [None]}, {}]),
    ],
)
async def test_output_grows_in_get_while_the_class_yields(
    serve: Any, tmp_path: Path, kind: str, pieces: list[Any]
) -> None:
    api = await serve(YIELDS.format(kind=kind, pieces=repr(pieces)))
    created = await start(api, tmp_path)
    assert (await api.http.get(created["urls"]["get"])).json()["output"] is None
    for number in (0, 1, 2):  # the last two arrive together
        (tmp_path / "class" / str(number)).touch()
    shown = await until_shown(api, created, 3)
    assert (shown["status"], shown["output"]) == ("processing", pieces[:3])
    listed = (await api.http.get("/v1/predictions")).json()["results"]
    assert listed[0]["output"] is None
    (tmp_path / "class" / "3").touch()
    assert (await until_over(api, created))["output"] == pieces


async def test_files_are_there_before_the_end(serve: Any, tmp_path: Path) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, folder: str) -> Iterator[Path]:
            path = Path(os.environ["TMPDIR"]) / "one.txt"
            for size in (3, 70_000):
                path.write_bytes(b"a" * size)
                yield path
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
    """
    api = await serve(body)
    created = await start(api, tmp_path)
    small, large = (await until_shown(api, created, 2))["output"]
    assert small == "data:text/plain;base64,YWFh"
    assert (await api.http.get(large)).content == b"a" * 70_000
    (tmp_path / "class" / "go").touch()
    over = await until_over(api, created)
    assert over["output"][1].partition("?")[0] == large.partition("?")[0]


async def test_replicates_client_iterates_over_the_output(serve: Any, tmp_path: Path) -> None:
    """The client uses only what each response adds, so the pieces before that must not change."""
    words = [f"{number} " for number in range(30)]
    api = await serve(YIELDS.format(kind="ConcatenateIterator[str]", pieces=repr(words)))
    client = Client(api_token="any", base_url=api.url)
    client.poll_interval = 0.05
    folder = {"folder": str(tmp_path / "class")}
    prediction = await client.predictions.async_create(version="mine", input=folder)

    async def go() -> None:
        for number in range(30):
            (tmp_path / "class" / str(number)).touch()
            await asyncio.sleep(0.02)

    going = asyncio.create_task(go())
    found = [piece async for piece in prediction.async_output_iterator()]
    await going
    await client._async_client.aclose()
    assert found == words


async def test_what_get_has_shown_is_charged_if_it_is_canceled(serve: Any, tmp_path: Path) -> None:
    api = await serve(YIELDS.format(kind="Iterator[str]", pieces="['a', 'b']"))
    for is_read in (True, False):
        created = await start(api, tmp_path)
        (tmp_path / "class" / "0").touch()
        if is_read:
            await until_shown(api, created, 1)
        shown = ["a"] if is_read else None
        canceled = (await api.http.post(created["urls"]["cancel"])).json()
        assert (canceled["status"], canceled["output"]) == ("canceled", shown)
        over = await until_charged(api, created)
        assert (over["status"], over["output"]) == ("canceled", shown)
    async with asyncio.timeout(WAIT_LIMIT_S):
        while len(api.rows) < 2:  # noqa: ASYNC110 - rows have no signal
            await asyncio.sleep(0.02)
    assert [row.cost_usd for row in api.rows] == [0.25, 0.0]


FAILS = """
class Predictor(BasePredictor):
    def predict(self) -> {kind}:
        yield from {pieces}
        {end}
"""


@pytest.mark.parametrize(
    ("kind", "pieces", "end"),
    [
        ("ConcatenateIterator[str]", ["gr\u00fcn", "", "x"], "raise ValueError('no')"),
        ("Iterator[dict]", [{"a": None}, {}], "raise ValueError('no')"),
        ("Iterator[str]", ["a"], "yield b''"),
        ("Iterator[str]", ["a"], "os._exit(3)"),
        ("Iterator[str]", [], "raise ValueError('no')"),
    ],
)
async def test_output_before_a_failure_stays_and_costs_nothing(
    serve: Any, kind: str, pieces: list[Any], end: str
) -> None:
    api = await serve(FAILS.format(kind=kind, pieces=repr(pieces), end=end))
    failed = await predict(api)
    assert (failed["status"], failed["output"]) == ("failed", pieces or None)
    assert failed["error"]
    assert failed["metrics"]["cost_usd"] == 0
    assert (await api.http.get(failed["urls"]["get"])).json() == failed
    listed = (await api.http.get("/v1/predictions")).json()["results"]
    assert listed[0]["output"] == (pieces or None)


async def test_files_before_a_failure_stay_until_it_is_deleted(serve: Any, tmp_path: Path) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, folder: str) -> Iterator[Path]:
            path = Path(os.environ["TMPDIR"]) / "one.txt"
            path.write_bytes(b"a" * 70_000)
            yield path
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
            raise ValueError("no")
    """
    api = await serve(body)
    created = await start(api, tmp_path)
    await until_shown(api, created, 1)
    (tmp_path / "class" / "go").touch()
    failed = await until_over(api, created)
    (link,) = failed["output"]
    assert (await api.http.get(link)).content == b"a" * 70_000
    assert (await api.http.delete(failed["urls"]["get"])).status_code == 204
    assert (await api.http.get(link)).status_code == 404


async def test_output_of_an_asynchronous_class_stays_when_it_fails(serve: Any) -> None:
    """Cog keeps output only for synchronous classes."""
    body = """
    class Predictor(BasePredictor):
        async def predict(self) -> AsyncIterator[str]:
            yield "a"
            raise ValueError("no")
    """
    assert (await predict(await serve(body)))["output"] == ["a"]


async def until_charged(api: ApiUnderTest, created: dict[str, Any]) -> dict[str, Any]:
    """Returns the prediction once its worker has also finished it."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            found: dict[str, Any] = (await api.http.get(created["urls"]["get"])).json()
            if "cost_usd" in found["metrics"]:
                return found
            await asyncio.sleep(0.02)


async def test_a_webhook_is_notified_of_growth_and_once_of_the_end(
    serve: Any, tmp_path: Path
) -> None:
    api = await serve(
        YIELDS.format(kind="Iterator[str]", pieces="['a', 'b', 'c']"),
        settings={"webhooks_private": True},
    )
    created = await start(api, tmp_path, webhook="http://127.0.0.1:9/hook")
    async with api.broker.subscribe(WEBHOOKS_SUBSCRIPTION_ID, max_messages=100) as messages:
        events = told(api, messages)
        grown = []
        for number in range(2):
            (tmp_path / "class" / str(number)).touch()
            while (event := await anext(events)).event != "output":
                assert event.event in ("start", "logs")
            grown.append(event.sequence)
        assert grown == [1, 2]
        (tmp_path / "class" / "2").touch()
        await until_over(api, created)
        rest = [await anext(events)]
        while rest[-1].event != "completed":
            rest.append(await anext(events))
    assert [one.event for one in rest].count("completed") == 1
    assert rest[-2].event == "output"


async def told(api: ApiUnderTest, messages: Any) -> AsyncIterator[WebhookEvent]:
    """Yields the published events, each once."""
    async for message in messages:
        messages.ack(message)
        yield decode_webhook_event(message.data)
