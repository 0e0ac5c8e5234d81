"""Text adapters, which callers request like models."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from infra.cli.main import app
from shared.models.catalog import Catalog, Model
from shared.models.tasks.text import GenerationInput
from shared.stores.cache import cache_key
from tests.api.harness import WRITER, ApiUnderTest, running_api, settings_for
from tests.keys import bearer, keys_url, stored

pytestmark = pytest.mark.anyio

PRICE = {"per_million_tokens_usd": 1.0}


def writer(**adapters: str) -> Model:
    sources = {name.replace("_", "-"): {"source": place} for name, place in adapters.items()}
    fields: dict[str, Any] = WRITER.model_dump(exclude_unset=True)
    fields |= {"engine": "vllm", "price": PRICE}
    fields["generation"] = {**fields["generation"], "adapters": sources}
    return Model.model_validate(fields)


CATALOG = Catalog((writer(writer_law="local:law", writer_poems="local:poems"),))


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url), catalog=CATALOG) as running:
        yield running


async def test_every_text_api_takes_an_adapters_name_as_a_model(api: ApiUnderTest) -> None:
    """The model's own workers get all jobs, which name the adapter."""
    client, name = api.openai(), "writer-law"
    say: Any = [{"role": "user", "content": "say a b"}]
    chat = await client.chat.completions.create(model=name, messages=say)
    completion = await client.completions.create(model=name, prompt="say a b")
    response = await client.responses.create(model=name, input="say a b", store=False)
    message = {"model": name, "messages": say, "max_tokens": 8}
    answer = await api.http.post("/v1/messages", json=message)
    assert [reply.model for reply in (chat, completion, response)] == [name] * 3
    assert answer.json()["model"] == name
    assert {job.envelope.model for job in api.worker.jobs} == {name}


async def test_the_models_list_names_the_model_of_an_adapter(api: ApiUnderTest) -> None:
    listed = (await api.http.get("/v1/models")).json()["data"]
    assert [(item["id"], item.get("parent"), item.get("root")) for item in listed] == [
        ("writer", None, None),
        ("writer-law", "writer", "writer"),
        ("writer-poems", "writer", "writer"),
    ]
    assert listed[1]["price"] == PRICE
    assert (await api.http.get("/v1/models/writer-law")).json() == listed[1]
    status = (await api.http.get("/v1/status")).json()["data"]
    assert [item["model"] for item in status] == [item["id"] for item in listed]


async def test_a_key_sees_an_adapters_model_only_if_it_may_use_it(
    tmp_path: Path, redis_url: str
) -> None:
    keys = [
        stored("one", "tenant", models=("writer-law",)),
        stored("two", "tenant", models=("writer-law", "writer")),
    ]
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=keys_url(tmp_path, keys=keys))
    async with running_api(settings, catalog=CATALOG) as api:
        for key, parent in (("one", None), ("two", "writer")):
            url = "/v1/models"
            listed = (await api.http.get(url, headers=bearer(key))).json()["data"]
            item = (await api.http.get(f"{url}/writer-law", headers=bearer(key))).json()
            assert item in listed
            assert (item.get("parent"), item.get("root")) == (parent, parent)


async def test_an_adapters_results_are_its_own(api: ApiUnderTest) -> None:
    client = api.openai()
    for name in ("writer", "writer-law", "writer-poems") * 2:
        await client.completions.create(model=name, prompt="say a b", seed=1)
    assert [job.envelope.model for job in api.worker.jobs] == [
        "writer",
        "writer-law",
        "writer-poems",
    ]
    assert [(row.model, row.cache) for row in api.rows] == [
        ("writer", "memory"),
        ("writer-law", "memory"),
        ("writer-poems", "memory"),
    ]


def test_another_source_is_another_key() -> None:
    text = GenerationInput(4, 1, prompt="say a")
    catalogs = [Catalog((writer(writer_law=place),)) for place in ("local:old", "local:new")]
    keys = [cache_key(catalog.find("writer-law"), text, "one") for catalog in catalogs]
    assert len({*keys, cache_key(CATALOG.find("writer"), text, "one")}) == 3


async def test_a_key_allows_an_adapter_only_by_its_own_name(tmp_path: Path, redis_url: str) -> None:
    url = keys_url(tmp_path, keys=[stored("one", "tenant", models=("writer-law",))])
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=url)
    async with running_api(settings, catalog=CATALOG) as api:
        body = {"prompt": "say a", "max_tokens": 4}
        statuses = [
            (
                await api.http.post(
                    "/v1/completions", json=body | {"model": name}, headers=bearer("one")
                )
            ).status_code
            for name in ("writer", "writer-law", "writer-poems")
        ]
    assert statuses == [403, 200, 403]


async def test_an_adapter_is_withdrawn_together_with_its_model(
    api: ApiUnderTest, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.yaml"
    entry = CATALOG.find("writer").model_dump(exclude_unset=True, mode="json")
    file.write_text(json.dumps({"models": [entry]}))
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(file))

    async def withdraw(name: str) -> Result:
        words = ["models", "withdraw", name, "--revision", "main"]
        return await asyncio.to_thread(lambda: CliRunner().invoke(app, words))

    refused = await withdraw("writer-law")
    assert refused.exit_code
    assert "writer-law is an adapter of writer" in refused.stderr
    assert (await withdraw("writer")).exit_code == 0
    await api.dependencies.dispatcher.canaries.withdrawals.refresh()
    body = {"model": "writer-law", "prompt": "say a"}
    answer = await api.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "model_withdrawn")
    assert "writer-law" in error["message"]
