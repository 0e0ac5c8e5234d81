"""A model withdrawn by an operator with `penstock models withdraw`, as callers see it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from shared.stores.cache import ResultCache
from shared.stores.withdrawals import REFRESH_S
from tests.api.harness import (
    CATALOG,
    IMAGE_MODEL,
    SERVED,
    TEXT_MODEL,
    ApiUnderTest,
    running_api,
    settings_for,
)
from tests.api.predicting import TEXT, WAIT, admitted, until_over
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

NAME, REVISION = TEXT_MODEL.name, TEXT_MODEL.revision
EMBEDDING = {"model": NAME, "input": "a cat"}
IMAGE = {"model": IMAGE_MODEL.name, "prompt": "a cat"}
CODE = "model_withdrawn"


class Operator:
    """Runs `penstock models` commands."""

    def types(self, *words: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, ["models", *words])
        assert done.exit_code == status, done.output
        return (done.stdout if status == 0 else done.stderr).strip()

    def withdraws(self, *words: str) -> str:
        return self.types("withdraw", NAME, "--revision", REVISION, *words)


@pytest.fixture
def operator(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Operator:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(Path("models.yaml").resolve()))
    return Operator()


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with (
        ResultCache(redis_url, 0) as cache,
        running_api(settings, cache=cache) as running,
    ):
        yield running
        running.worker.go.set()


async def looked(api: ApiUnderTest) -> None:
    """Makes the instance check immediately. Otherwise, it would check within REFRESH_S."""
    await api.dependencies.dispatcher.canaries.withdrawals.refresh()


async def typed(operator: Operator, *words: str) -> str:
    return await asyncio.to_thread(operator.withdraws, *words)


def error_of(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 503, answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    error: dict[str, Any] = answer.json()["error"]
    assert error["message"] == (
        f"model {NAME!r} was withdrawn by the operator of this API; it is unavailable until "
        "another revision is served or this one is restored"
    )
    assert (error["code"], error["param"]) == (CODE, "model")
    return error


async def test_requests_are_refused_within_seconds_and_others_are_not(
    api: ApiUnderTest, operator: Operator
) -> None:
    assert (await api.http.post("/v1/embeddings", json=EMBEDDING)).status_code == 200
    said = await typed(operator)
    assert said == f"{NAME}, revision {REVISION}: withdrawn; processes stop it within 3 s"
    assert REFRESH_S == 1.0
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (await api.http.post("/v1/embeddings", json=EMBEDDING)).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    error_of(await api.http.post("/v1/embeddings", json=EMBEDDING))
    error_of(await api.http.post("/v1/embeddings", json=EMBEDDING | {"model": f"{NAME}-too"}))
    prediction = await api.http.post("/v1/predictions", json=TEXT)
    assert (prediction.status_code, "withdrawn" in prediction.json()["detail"]) == (503, True)
    assert (await api.http.post("/v1/images/generations", json=IMAGE)).status_code == 200
    assert admitted() == 0
    ends = {row.status for row in api.rows if row.model == NAME}
    assert ends <= {"succeeded"}, "a request that was refused has a row"


async def test_whoever_waits_is_told_though_no_worker_is_there(
    api: ApiUnderTest, operator: Operator
) -> None:
    api.worker.is_silent = True
    asking = asyncio.create_task(api.http.post("/v1/embeddings", json=EMBEDDING))
    joining = asyncio.create_task(api.http.post("/v1/embeddings", json=EMBEDDING))
    waiting = asyncio.create_task(api.http.post("/v1/predictions", json=TEXT, headers=WAIT))
    alone = (await api.http.post("/v1/predictions", json=TEXT)).json()
    await api.worker.until_taken(3)
    await typed(operator)
    await looked(api)
    error_of(await asking)
    error_of(await joining)
    ended = [await until_over(api, alone), (await waiting).json()]
    for one in ended:
        assert one["status"] in ("failed", "starting"), one
    assert ended[0]["status"] == "failed"
    assert "was withdrawn by the operator" in ended[0]["error"]
    assert ended[0]["metrics"]["cost_usd"] == 0
    assert admitted() == 0
    assert sum(row.cost_usd or 0 for row in api.rows) == 0


async def test_cached_results_are_never_given_again(api: ApiUnderTest, operator: Operator) -> None:
    async def cache_says() -> str:
        answer = await api.http.post("/v1/embeddings", json=EMBEDDING)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-penstock-cache"])

    assert [await cache_says(), await cache_says()] == ["miss", "hit"]
    await typed(operator)
    await looked(api)
    error_of(await api.http.post("/v1/embeddings", json=EMBEDDING))
    said = await typed(operator, "--undo")
    assert said == f"{NAME}, revision {REVISION}: processes serve it again within 3 s"
    await looked(api)
    assert [await cache_says(), await cache_says()] == ["miss", "hit"]


async def test_another_revision_is_served(
    api: ApiUnderTest, operator: Operator, redis_url: str, tmp_path: Path
) -> None:
    await typed(operator)
    next_one = TEXT_MODEL.model_copy(update={"revision": "next"})
    catalog = type(CATALOG)((next_one,))
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with running_api(settings, catalog=catalog) as deployed:
        assert (await deployed.http.post("/v1/embeddings", json=EMBEDDING)).status_code == 200


async def test_commands_say_what_they_did(operator: Operator) -> None:
    def run() -> None:
        assert operator.types("withdrawn") == "no model is withdrawn"
        operator.withdraws()
        again = operator.withdraws()
        assert again == f"{NAME}, revision {REVISION}: it is already withdrawn"
        (listed,) = json.loads(operator.types("withdrawn", "--json"))
        assert (listed["model"], listed["revision"]) == (NAME, REVISION)
        assert listed["by"].startswith("user ")
        assert NAME in operator.types("withdrawn")
        operator.withdraws("--undo")
        assert operator.withdraws("--undo").endswith("it was not withdrawn")
        assert operator.types("withdrawn") == "no model is withdrawn"

    await asyncio.to_thread(run)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody", "--revision", "1"], "model 'nobody' does not exist"),
        ([NAME, "--revision", "7"], f"{NAME} has no revision '7'; the catalog contains {REVISION}"),
    ],
)
async def test_misspelt_names_are_refused(operator: Operator, words: list[str], said: str) -> None:
    assert said in await asyncio.to_thread(operator.types, "withdraw", *words, status=1)


async def test_redis_out_of_reach_is_said(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://127.0.0.1:1/0")
    words = ("withdraw", NAME, "--revision", REVISION)
    said = await asyncio.to_thread(operator.types, *words, status=1)
    assert "PENSTOCK_RECORDS_URL, PENSTOCK_REDIS_URL" in said
    assert SERVED.find(NAME).revision == REVISION
