"""The Predictions API through Replicate's own client, as its users call it."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replicate.client import Client
from replicate.exceptions import ModelError, ReplicateError
from replicate.helpers import FileOutput
from replicate.pagination import async_paginate
from replicate.webhook import Webhooks, WebhookSigningSecret

from shared.models.tasks.embedding import TextInput
from shared.models.tasks.image import ImageInput
from shared.webhooks.event import signature
from tests.api.fake_worker import png_of, vector_of
from tests.api.harness import (
    CATALOG,
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    running_api,
    settings_for,
)
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
TEXT_REF, IMAGE_REF = f"anyone/{TEXT_MODEL.name}", f"anyone/{IMAGE_MODEL.name}"
SECRET = "whsec_" + "A" * 43 + "="
KEY = key_for("k")


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(
        tmp_path,
        redis_url=redis_url,
        secret="s",
        webhook_secrets=SECRET,
        keys_url=keys_url(tmp_path, k="acme"),
    )
    async with running_api(settings) as running:
        yield running


@pytest.fixture
async def client(api: ApiUnderTest) -> AsyncIterator[Any]:
    """Untyped, so that tests can inspect raw output."""
    made = Client(api_token=KEY, base_url=api.url)
    yield made
    await made._async_client.aclose()
    made._client.close()


async def test_run_gives_the_vector(client: Any) -> None:
    vector = await client.async_run(TEXT_REF, input={"text": "a cat"})
    assert vector == pytest.approx(vector_of(TextInput("a cat")).tolist())


async def test_run_of_a_version_gives_images(api: ApiUnderTest, client: Any) -> None:
    """The client also checks the version's output schema."""
    model = await client.models.async_get(IMAGE_REF)
    version = model.latest_version
    images = await client.async_run(
        f"{IMAGE_REF}:{version.id}", input={"prompt": "a", "seed": 3, "num_outputs": 2}
    )
    assert all(isinstance(image, FileOutput) for image in images)
    drawn = [item.input for item in api.worker.items if isinstance(item.input, ImageInput)]
    assert [await image.aread() for image in images] == [png_of(given) for given in drawn]
    assert [given.seed for given in drawn] == [3, 4]


async def test_run_that_outlives_its_wait_is_polled_until_it_is_over(
    api: ApiUnderTest, client: Any
) -> None:
    api.worker.go.clear()
    running = asyncio.create_task(client.async_run(TEXT_REF, input={"text": "a"}, wait=1))
    await api.worker.claimed.wait()
    done, _ = await asyncio.wait([running], timeout=1.6)
    assert not done
    api.worker.go.set()
    assert await running == pytest.approx(vector_of(TextInput("a")).tolist())


async def test_deployment_is_the_model_itself(client: Any) -> None:
    deployment = await client.deployments.async_get(TEXT_REF)
    assert deployment.current_release.configuration.max_instances == TEXT_MODEL.replicas.max
    created = await deployment.predictions.async_create({"text": "a"}, wait=20)
    assert created.output == pytest.approx(vector_of(TextInput("a")).tolist())


async def test_failure_is_a_model_error(client: Any) -> None:
    with pytest.raises(ModelError, match="breaks the model"):
        await client.async_run(TEXT_REF, input={"text": "broken"})


async def test_wrong_input_is_an_error_that_names_the_field(client: Any) -> None:
    with pytest.raises(ReplicateError) as caught:
        await client.async_run(IMAGE_REF, input={"seed": 1})
    assert caught.value.status == 422
    assert caught.value.title == "Input validation failed"
    assert caught.value.detail == "- input.prompt: Field required"


async def test_file_is_sent_ahead_and_drawn_from(api: ApiUnderTest, client: Any) -> None:
    source = io.BytesIO(png_of(ImageInput("", 64, 64, 1, 1.0, 9, "ddim")))
    await client.async_run(IMAGE_REF, input={"prompt": "a", "image": source})
    (item,) = api.worker.items
    assert isinstance(item.input, ImageInput)
    assert item.input.image is not None
    assert item.input.strength == 0.8


async def test_create_reload_wait_cancel_and_list(
    api: ApiUnderTest, client: Any, redis_url: str
) -> None:
    api.worker.go.clear()
    create = client.predictions.async_create
    first, second = [await create(version=TEXT_MODEL.name, input={"text": text}) for text in "ab"]
    assert first.status == "starting"
    async with asyncio.timeout(WAIT_LIMIT_S):
        while first.status != "processing":
            await first.async_reload()
    async with RecordStores(redis_url) as stores:
        await stores.records.progress(first.id, 1, 4)
    await first.async_reload()
    assert (first.progress.percentage, first.progress.current, first.progress.total) == (0.25, 1, 4)
    await second.async_cancel()
    api.worker.go.set()
    await first.async_wait()
    assert first.status == "succeeded"
    page = await client.predictions.async_list()
    assert [(one.id, one.status) for one in page] == [
        (second.id, "canceled"),
        (first.id, "succeeded"),
    ]


async def test_models_are_listed_for_each_client_in_its_shape(
    api: ApiUnderTest, client: Any
) -> None:
    names = [model.name for model in CATALOG.models]
    page = await client.models.async_list()
    assert [(model.owner, model.name) for model in page] == [("penstock", name) for name in names]
    assert page[0].latest_version.id == (await client.models.async_get(TEXT_REF)).latest_version.id
    openai = api.openai(api_key=KEY)
    assert [model.id async for model in openai.models.list()] == names
    # Clients with a different name get OpenAI's format under /v1; elsewhere there is only
    # Replicate's.
    keyed = {"authorization": f"Bearer {KEY}"}
    assert (await api.http.get("/v1/models", headers=keyed)).json()["object"] == "list"
    assert len((await api.http.get("/models", headers=keyed)).json()["results"]) == len(names)


async def test_many_models_come_in_pages(
    api: ApiUnderTest, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.replicate.models.PAGE", 1)
    pages = [page async for page in async_paginate(client.models.async_list)]
    assert [[model.name for model in page] for page in pages] == [
        [model.name] for model in CATALOG.models
    ]
    assert (pages[0].previous, pages[-1].next) == (None, None)
    assert pages[-1].previous is not None
    with pytest.raises(ReplicateError, match="is invalid; use the cursor"):
        await client.models.async_list("/v1/models?cursor=x")


async def test_wrong_key_is_told_when_models_are_listed(api: ApiUnderTest) -> None:
    client = Client(api_token="wrong", base_url=api.url)
    with pytest.raises(ReplicateError) as caught:
        await client.models.async_list()
    await client._async_client.aclose()
    assert (caught.value.status, caught.value.title) == (401, "Unauthenticated")


async def test_stream_tells_everything_once(api: ApiUnderTest, client: Any, redis_url: str) -> None:
    api.worker.go.clear()
    created = await client.models.predictions.async_create(TEXT_REF, input={"texts": ["a", "b"]})
    await api.worker.claimed.wait()
    async with RecordStores(redis_url) as stores:
        await stores.records.progress(created.id, 1, 2)
    events = []
    async for event in created.async_stream():
        events.append(event)
        api.worker.go.set()
    assert [event.event.value for event in events] == ["logs", "logs", "output", "output", "done"]
    headers = {"authorization": f"Bearer {KEY}", "last-event-id": events[2].id}
    rest = await api.http.get(created.urls["stream"], headers=headers)
    assert rest.headers["content-type"].startswith("text/event-stream")
    assert [line for line in rest.text.splitlines() if line.startswith("event: ")] == [
        "event: output",
        "event: done",
    ]


async def test_stream_of_a_failure_ends_with_its_error(client: Any) -> None:
    created = await client.models.predictions.async_create(TEXT_REF, input={"text": "broken"})
    with pytest.raises(RuntimeError, match="breaks the model"):
        async for _ in created.async_stream():
            pass


async def test_secret_verifies_what_is_signed_for_the_tenant(client: Any) -> None:
    secret = await client.webhooks.default.async_secret()
    assert isinstance(secret, WebhookSigningSecret)
    body, at_s = b'{"id":"x"}', 1_790_000_000
    headers = {
        "webhook-id": "m",
        "webhook-timestamp": str(at_s),
        "webhook-signature": signature([secret.key], "m", at_s, body),
    }
    Webhooks.validate(headers=headers, body=body.decode(), secret=secret)


async def test_account_hardware_and_deployments_are_told(client: Any) -> None:
    account = await client.accounts.async_current()
    assert (account.type, account.username) == ("organization", "acme")
    hardware = {one.sku: one.name for one in await client.hardware.async_list()}
    deployments = {
        one.name: one
        async for page in async_paginate(client.deployments.async_list)
        for one in page.results
    }
    assert set(deployments) == {model.name for model in CATALOG.models}
    used = {one.current_release.configuration.hardware for one in deployments.values()}
    assert used == set(hardware)
    name = f"anyone/{TEXT_MODEL.name}"
    assert (await client.deployments.async_get(name)).current_release.model == name
