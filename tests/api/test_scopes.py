"""What a key may do: 401 and 403 in the shape of each API, scopes and models of keys."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http.scopes import SCOPE_OF_GROUP, MissingScope, check_scope, scope_of
from shared.tenants.directory import SCOPES
from shared.tenants.plan import Caller
from tests.api.harness import (
    CATALOG,
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    running_api,
    settings_for,
)
from tests.api.routes import routes_of
from tests.keys import bearer, keys_url, stored

pytestmark = pytest.mark.anyio
TEXT = {"model": TEXT_MODEL.name, "input": "a"}
DRAWING = {"model": IMAGE_MODEL.name, "prompt": "a"}
PREDICTION = {"version": TEXT_MODEL.name, "input": {"text": "a"}}
EMBEDDINGS, GENERATIONS, PREDICTIONS = (
    ("POST", "/v1/embeddings", TEXT),
    ("POST", "/v1/images/generations", DRAWING),
    ("POST", "/v1/predictions", PREDICTION),
)
OWN_ID = ("PUT", "/v1/predictions/mine", PREDICTION)
OF_MODEL = ("POST", f"/models/a/{TEXT_MODEL.name}/predictions", {"input": {"text": "a"}})
LISTS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/predictions", None),
    ("GET", "/v1/files", None),
    ("GET", "/v1/webhooks/default/secret", None),
]
MODELS: tuple[str, str, Any] = ("GET", "/v1/models", None)


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    keys = [stored(scope, "acme", scopes=(scope,)) for scope in SCOPES]
    keys += [
        stored("texts", "acme", models=(TEXT_MODEL.name,)),
        stored("revoked", "acme", revoked_s=5),
        stored("expired", "acme", expires_s=5),
    ]
    settings = settings_for(
        tmp_path,
        redis_url=redis_url,
        webhook_secrets="whsec_" + "A" * 43 + "=",
        keys_url=keys_url(tmp_path, keys=keys, a="acme"),
    )
    async with running_api(settings) as running:
        yield running


async def ask(api: ApiUnderTest, name: str, asked: tuple[str, str, Any]) -> httpx.Response:
    method, path, body = asked
    return await api.http.request(method, path, json=body, headers=bearer(name))


@pytest.mark.parametrize("name", ["revoked", "expired", "nobody"])
async def test_wrong_key_is_401_in_the_shape_of_each_api(api: ApiUnderTest, name: str) -> None:
    for asked in (EMBEDDINGS, GENERATIONS, MODELS, ("GET", "/v1/files", None)):
        answer = await ask(api, name, asked)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    for asked in (PREDICTIONS, OWN_ID, OF_MODEL, LISTS[0]):
        answer = await ask(api, name, asked)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.headers["content-type"] == "application/problem+json"
        assert (answer.json()["title"], answer.json()["status"]) == ("Unauthenticated", 401)


async def test_missing_scope_is_403_in_the_shape_of_each_api(api: ApiUnderTest) -> None:
    answer = await ask(api, "images", EMBEDDINGS)
    assert answer.status_code == 403
    assert answer.json()["error"] == {
        "message": "this API key lacks the scope 'embeddings'",
        "type": "permission_error",
        "param": None,
        "code": "missing_scope",
    }
    answer = await ask(api, "images", OWN_ID)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "title": "Forbidden",
        "detail": "this API key lacks the scope 'predictions'",
        "status": 403,
    }


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("a", [EMBEDDINGS, GENERATIONS, PREDICTIONS, OF_MODEL, *LISTS]),
        ("all", [EMBEDDINGS, GENERATIONS, PREDICTIONS, OF_MODEL, *LISTS]),
        ("embeddings", [EMBEDDINGS]),
        ("images", [GENERATIONS]),
        ("predictions", [PREDICTIONS, OF_MODEL, LISTS[0], LISTS[2]]),
        ("files", [LISTS[1]]),
        ("read", LISTS),
        ("batches", []),
        ("usage", []),
        ("admin", []),
    ],
)
async def test_key_does_what_its_scopes_say(
    api: ApiUnderTest, name: str, allowed: list[tuple[str, str, Any]]
) -> None:
    everything = [EMBEDDINGS, GENERATIONS, PREDICTIONS, OF_MODEL, *LISTS]
    answers = {asked[:2]: (await ask(api, name, asked)).status_code for asked in everything}
    expected = {asked[:2] for asked in allowed}
    assert {asked for asked, status in answers.items() if status != 403} == expected
    assert {status for status in answers.values()} <= {200, 201, 403}
    assert (await ask(api, name, MODELS)).status_code == 200


async def test_missing_scope_is_told_before_an_answer_is_replayed(api: ApiUnderTest) -> None:
    keyed = {"idempotency-key": "k"}
    answers = [
        await api.http.post("/v1/embeddings", json=TEXT, headers=bearer(name) | keyed)
        for name in ("embeddings", "images", "all")
    ]
    assert [answer.status_code for answer in answers] == [200, 403, 200]
    drawn = [
        await api.http.post("/v1/images/generations", json=DRAWING, headers=bearer(name) | keyed)
        for name in ("all", "texts")
    ]
    assert [answer.status_code for answer in drawn] == [422, 422]
    other = {"idempotency-key": "l"}
    drawn = [
        await api.http.post("/v1/images/generations", json=DRAWING, headers=bearer(name) | other)
        for name in ("all", "texts")
    ]
    assert [answer.status_code for answer in drawn] == [200, 403]


async def test_model_of_another_key_is_403_and_not_listed(api: ApiUnderTest) -> None:
    assert (await ask(api, "texts", EMBEDDINGS)).status_code == 200
    answer = await ask(api, "texts", GENERATIONS)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "model_not_allowed"
    assert IMAGE_MODEL.name in answer.json()["error"]["message"]
    assert (await ask(api, "texts", ("POST", GENERATIONS[1], {"prompt": "a"}))).status_code == 403
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a"}}
    refused = await ask(api, "texts", ("POST", "/v1/predictions", body))
    assert (refused.status_code, refused.json()["title"]) == (403, "Forbidden")
    assert {job.envelope.model for job in api.worker.jobs} == {TEXT_MODEL.name}

    listed = await ask(api, "texts", MODELS)
    assert [model["id"] for model in listed.json()["data"]] == [TEXT_MODEL.name]
    paged = (await ask(api, "texts", ("GET", "/models", None))).json()
    assert [model["name"] for model in paged["results"]] == [TEXT_MODEL.name]
    assert len((await ask(api, "a", MODELS)).json()["data"]) == len(CATALOG.models)
    for path in (
        "/v1/models/{}",
        "/v1/models/a/{}",
        "/v1/models/a/{}/versions",
        "/deployments/a/{}",
    ):
        for name, status in ((TEXT_MODEL.name, 200), (IMAGE_MODEL.name, 404)):
            answer = await ask(api, "texts", ("GET", path.format(name), None))
            assert answer.status_code == status, path


async def test_alias_of_a_model_is_the_model(api: ApiUnderTest) -> None:
    body = TEXT | {"model": TEXT_MODEL.aliases[0]}
    assert (await ask(api, "texts", ("POST", "/v1/embeddings", body))).status_code == 200


async def test_each_route_has_a_scope(api: ApiUnderTest) -> None:
    """A route without one is for unrestricted keys only: nobody would find out."""
    open_to_all = {"healthz", "readyz", "docs", "console", "openapi.json", "", "objects"}
    for _, path in routes_of(api.app):
        group = path.removeprefix("/v1").split("/")[1]
        assert group in SCOPE_OF_GROUP or group in open_to_all, path


def test_administration_is_never_part_of_all() -> None:
    for scopes in (None, frozenset({"all"}), frozenset({"read", "usage"})):
        with pytest.raises(MissingScope, match="'admin'"):
            check_scope(Caller(scopes=scopes), "GET", "/v1/admin/keys")
    check_scope(Caller(scopes=frozenset({"admin"})), "POST", "/v1/admin/keys")
    assert scope_of("/v1/something/new") == "all"
