"""`stream: true` for images, as OpenAI's client reads it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.api.fake_worker import png_of
from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.api.test_images import drawn, encoded
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
PATH = "/v1/images/generations"

api = api_with_redis(secret="s")


def webp(shade: int) -> bytes:
    return encoded(Image.new("RGB", (16, 16), (shade, 0, 0)), "webp", lossless=True)


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "data":
            event[name] = json.loads(value)
        elif name:
            event[name] = value
        elif event:
            yield event
            event = {}


async def record_being_drawn(api: ApiUnderTest) -> str:
    """The record of the prediction that the worker has claimed."""
    await api.worker.claimed.wait()
    return api.worker.jobs[-1].envelope.request_id


async def show(
    stores: RecordStores, record: str, step: int, *, index: int = 0, data: bytes = b""
) -> None:
    """Adds a preview, as workers do once a reader is watching."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not await stores.records.progress(record, step, 20):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await stores.previews.add(record, index, step, 20, data or webp(10 * step))


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
async def test_previews_come_while_it_is_drawn_and_then_the_image(
    api: ApiUnderTest, stores: RecordStores, output_format: str
) -> None:
    api.worker.go.clear()
    opening = asyncio.create_task(
        api.openai().images.generate(
            prompt="a",
            stream=True,
            partial_images=2,
            output_format=output_format,
            extra_body={"seed": 7},
        )
    )
    record = await record_being_drawn(api)
    for step in (3, 8, 9, 15):  # of 20: 3 is too early for the first of two, 9 for the second
        await show(stores, record, step)
    stream = await opening
    seen: list[Any] = [await anext(stream) for _ in range(2)]
    api.worker.go.set()
    seen += [event async for event in stream]
    kind = "image_generation"
    assert [one.type for one in seen] == [*[f"{kind}.partial_image"] * 2, f"{kind}.completed"]
    assert [one.partial_image_index for one in seen[:2]] == [0, 1]
    images = [Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in seen]
    assert [(one.format, one.size) for one in images] == [(output_format.upper(), (64, 64))] * 3
    shades = [np.asarray(one.convert("RGB"))[30, 30, 0] for one in images[:2]]
    assert np.allclose(shades, (80, 150), atol=4)
    (given,) = drawn(api)
    if output_format == "png":
        assert base64.b64decode(seen[2].b64_json) == png_of(given)
    assert (seen[2].size, seen[2].output_format, given.seed) == ("64x64", output_format, 7)


async def test_without_partial_images_only_the_whole_one_comes(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    api.worker.go.clear()
    body = {"prompt": "a", "stream": True}
    opening = asyncio.create_task(
        api.http.send(api.http.build_request("POST", PATH, json=body), stream=True)
    )
    record = await record_being_drawn(api)
    assert not await stores.records.progress(record, 1, 20), "nobody watches, so nothing is drawn"
    api.worker.go.set()
    answer = await opening
    (only,) = [event async for event in events(answer)]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert only["event"] == only["data"]["type"] == "image_generation.completed"
    assert "index" not in only["data"]
    assert "partial_image_index" not in only["data"]


async def test_several_images_are_told_apart(api: ApiUnderTest) -> None:
    body = {"prompt": "a", "stream": True, "n": 3, "seed": 5}
    async with api.http.stream("POST", PATH, json=body) as answer:
        seen = [event["data"] async for event in events(answer)]
    assert [(one["index"], one["seed"]) for one in seen] == [(0, 5), (1, 6), (2, 7)]
    assert [base64.b64decode(one["b64_json"]) for one in seen] == [
        png_of(one) for one in drawn(api)
    ]


async def test_edits_are_streamed_from_forms_and_json(api: ApiUnderTest) -> None:
    source = encoded(Image.new("RGB", (64, 64), "white"))
    stream = await api.openai().images.edit(image=source, prompt="a", stream=True)
    assert [event.type async for event in stream] == ["image_edit.completed"]
    uri = f"data:image/png;base64,{base64.b64encode(source).decode()}"
    body = {"prompt": "a", "images": [{"image_url": uri}], "stream": True}
    async with api.http.stream("POST", "/v1/images/edits", json=body) as answer:
        assert [event["event"] async for event in events(answer)] == ["image_edit.completed"]


async def test_a_reader_resumes_on_another_instance(
    api: ApiUnderTest, stores: RecordStores, tmp_path: Path, redis_url: str
) -> None:
    api.worker.go.clear()
    body = {"prompt": "a", "stream": True, "partial_images": 3, "n": 2}
    headers = {"idempotency-key": "k"}
    opening = asyncio.create_task(
        api.http.send(api.http.build_request("POST", PATH, json=body, headers=headers), stream=True)
    )
    record = await record_being_drawn(api)
    await show(stores, record, 6)
    await show(stores, record, 6, index=1)
    answer = await opening
    following = events(answer)
    first = await anext(following)
    await answer.aclose()
    assert (first["data"]["index"], first["data"]["partial_image_index"]) == (0, 0)
    async with running_api(
        settings_for(tmp_path, redis_url=redis_url, secret="s"), worker=api.worker
    ) as other:
        again = headers | {"last-event-id": first["id"]}
        async with other.http.stream("POST", PATH, json=body, headers=again) as answer:
            following = events(answer)
            second = await anext(following)
            api.worker.go.set()
            rest = [second] + [event async for event in following]
        kinds = [(one["data"]["type"].rpartition(".")[2], one["data"]["index"]) for one in rest]
        assert kinds == [("partial_image", 1), ("completed", 0), ("completed", 1)]
        assert len(api.worker.jobs) == 1, "it is drawn once"
        after_one = headers | {"last-event-id": rest[1]["id"]}
        async with other.http.stream("POST", PATH, json=body, headers=after_one) as answer:
            left = [event async for event in events(answer)]
        assert [one["id"] for one in left] == [rest[2]["id"]]
        at_end = headers | {"last-event-id": rest[2]["id"]}
        async with other.http.stream("POST", PATH, json=body, headers=at_end) as answer:
            assert [event async for event in events(answer)] == []


async def test_a_reader_who_hangs_up_and_can_not_come_back_ends_it(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    api.worker.go.clear()
    body = {"prompt": "a", "stream": True, "partial_images": 1}
    opening = asyncio.create_task(
        api.http.send(api.http.build_request("POST", PATH, json=body), stream=True)
    )
    record = await record_being_drawn(api)
    await show(stores, record, 12)
    answer = await opening
    await anext(events(answer))
    await answer.aclose()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (kept := await stores.records.read(record)) is None or kept.state != "canceled":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    api.worker.go.set()


async def test_damaged_preview_is_not_the_callers_fault(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    api.worker.go.clear()
    body = {"prompt": "a", "stream": True, "partial_images": 1}
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(api.http.post(PATH, json=body))
        record = await record_being_drawn(api)
        await show(stores, record, 12, data=b"damaged")
        answer = await answering
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_what_fails_before_the_first_event_is_an_error_of_the_request(
    api: ApiUnderTest,
) -> None:
    with pytest.raises(openai.BadRequestError, match="num_inference_steps"):
        await api.openai().images.generate(
            prompt="a", stream=True, extra_body={"num_inference_steps": 100_000}
        )
    assert api.worker.jobs == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stream": True, "partial_images": 4}, "partial_images"),
        ({"stream": True, "response_format": "url"}, "response_format"),
        ({"partial_images": 1}, "partial_images"),
        ({"stream": "perhaps"}, "stream"),
    ],
)
async def test_wrong_fields_are_named(
    api: ApiUnderTest, changes: dict[str, Any], field: str
) -> None:
    answer = await api.http.post(PATH, json={"prompt": "a"} | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_foreign_event_ids_are_refused(api: ApiUnderTest) -> None:
    headers = {"last-event-id": "7f2"}
    answer = await api.http.post(PATH, json={"prompt": "a", "stream": True}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last-event-id")
