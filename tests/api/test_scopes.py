"""A key's permissions: 401 and 403 in each API's format, key scopes and models."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.endpoints import ACCESS_RULES
from api.http.auth import KeyScope, MissingScope
from shared.tenants.directory import SCOPES, Scope
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
        stored("writes", "acme", models=("writer",)),
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
        "message": "this API key does not have the required scope 'embeddings'",
        "type": "permission_error",
        "param": None,
        "code": "missing_scope",
    }
    answer = await ask(api, "images", OWN_ID)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "title": "Forbidden",
        "detail": "this API key does not have the required scope 'predictions'",
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


OPEN_TO_ALL = {
    "health",
    "healthz",
    "livez",
    "readyz",
    "docs",
    "console",
    "openapi.json",
    "",
    "objects",
}


EXPECTED_SCOPES: dict[KeyScope, dict[str, str]] = {
    "embeddings": {
        "/embeddings": "POST",
        "/rerank": "POST",
    },
    "images": {
        "/images/generations": "POST",
        "/images/edits": "POST",
        "/images/variations": "POST",
    },
    "audio": {
        "/audio/transcriptions": "POST",
        "/audio/translations": "POST",
        "/audio/speech": "POST",
    },
    "ocr": {
        "/ocr": "POST",
    },
    "text": {
        "/chat/completions": "POST GET",
        "/chat/completions/{completion_id}": "GET POST DELETE",
        "/chat/completions/{completion_id}/messages": "GET",
        "/completions": "POST",
        "/responses": "POST",
        "/responses/{response_id}": "GET DELETE",
        "/responses/{response_id}/input_items": "GET",
        "/responses/{response_id}/cancel": "POST",
        "/messages": "POST",
        "/messages/count_tokens": "POST",
        "/responses/input_tokens": "POST",
        "/tokenize": "POST",
        "/conversations": "POST",
        "/conversations/{conversation_id}": "GET POST DELETE",
        "/conversations/{conversation_id}/items": "GET POST",
        "/conversations/{conversation_id}/items/{item_id}": "GET DELETE",
    },
    "predictions": {
        "/models/{owner}/{name}/predictions": "POST",
        "/deployments/{owner}/{name}/predictions": "POST",
        "/predictions/{prediction_id}/cancel": "POST",
        "/predictions/{prediction_id}/stream": "GET",
        "/predictions/{prediction_id}/webhooks": "GET",
        "/predictions/{prediction_id}/webhooks/replay": "POST",
        "/webhooks/default/secret": "GET",
        "/predictions": "GET POST",
        "/predictions/{prediction_id}": "GET DELETE PUT",
    },
    "files": {
        "/files": "GET POST",
        "/files/{file_id}": "GET DELETE",
        "/files/{file_id}/content": "GET",
    },
    "batches": {
        "/batches": "GET POST",
        "/batches/{batch_id}": "GET",
        "/batches/{batch_id}/cancel": "POST",
    },
    "usage": {
        "/usage": "GET",
        "/organization/costs": "GET",
        "/organization/usage/embeddings": "GET",
        "/organization/usage/images": "GET",
        "/reports": "GET",
        "/reports/{name}": "GET",
        "/invoices": "GET",
    },
    "admin": {
        "/admin/keys": "GET POST",
        "/admin/keys/{key_id}": "GET DELETE",
        "/admin/keys/{key_id}/rotate": "POST",
        "/admin/plans": "GET",
        "/admin/plans/{name:path}": "PUT DELETE",
        "/admin/tenants": "GET",
        "/admin/tenants/{name:path}": "PUT",
        "/admin/audit": "GET",
        "/admin/predictions/{request_id}": "GET",
    },
    "any": {
        "/models": "GET",
        "/models/{model}": "GET",
        "/models/{owner}/{name}": "GET",
        "/models/{owner}/{name}/versions": "GET",
        "/models/{owner}/{name}/versions/{version}": "GET",
        "/deployments": "GET",
        "/deployments/{owner}/{name}": "GET",
        "/hardware": "GET",
        "/status": "GET",
        "/account": "GET",
    },
}
EXPECTED: dict[tuple[str, str], KeyScope] = {
    (method, path): scope
    for scope, paths in EXPECTED_SCOPES.items()
    for path, methods in paths.items()
    for method in methods.split()
}
"""The scope that each route requires, by method and path without the version."""


async def test_each_route_requires_the_scope_in_the_documentation(api: ApiUnderTest) -> None:
    """An endpoint without a scope accepts only unrestricted keys, which could go unnoticed."""
    routes = {
        (method, path)
        for method, path in routes_of(api.app)
        if without_version(path).split("/")[1] not in OPEN_TO_ALL
    }
    assert {(method, without_version(path)) for method, path in routes} == EXPECTED.keys()
    scopes = {route: ACCESS_RULES.scope_of(*route) for route in routes}
    assert scopes == {
        (method, path): EXPECTED[method, without_version(path)] for method, path in routes
    }


def without_version(path: str) -> str:
    return path.removeprefix("/v1").removeprefix("/v2")


def may(scope: Scope, method: str, needed: KeyScope) -> bool:
    """True if docs/how-to/keys.md allows a key with one scope to use the endpoint."""
    if needed in ("any", scope):
        return True
    return needed != "admin" and (scope == "all" or (scope == "read" and method == "GET"))


async def test_each_scope_opens_its_routes_and_no_others(api: ApiUnderTest) -> None:
    wrong = []
    for (method, template), needed in EXPECTED.items():
        path = "/v1" + re.sub(r"\{[^}]*\}", "nothing", template)
        for scope in SCOPES:
            answer = await api.http.request(method, path, headers=bearer(scope))
            if (answer.status_code != 403) != may(scope, method, needed):
                wrong.append((scope, method, path, answer.status_code))
    assert wrong == []


async def stored_work(api: ApiUnderTest) -> dict[str, str]:
    """The ids of the objects stored by each endpoint, by the scope they belong to."""
    writer = {"model": "writer", "stream": True}
    predicted = (await ask(api, "a", PREDICTIONS)).json()["id"]
    drawing = ("POST", "/v1/predictions", {"version": IMAGE_MODEL.name, "input": {"prompt": "a"}})
    drawn = (await ask(api, "a", drawing)).json()["id"]
    response = ("POST", "/v1/responses", writer | {"input": "say a", "store": True})
    chat = writer | {"messages": [{"role": "user", "content": "say a"}]}
    ids = []
    for asked in (response, ("POST", "/v1/chat/completions", chat)):
        answer = await ask(api, "a", asked)
        assert answer.status_code == 200, answer.text
        ids.append(answer.headers["location"].rpartition("/")[2])
    return {"predictions": predicted, "images": drawn, "responses": ids[0], "chats": ids[1]}


PREFIXES = {"completion_id": "chatcmpl-", "response_id": "resp_"}


def place_of(template: str, stored_id: str) -> str:
    """A stored object's path, with the id in the form that the route expects."""
    digits = re.split("[-_]", stored_id)[1]
    return "/v1" + re.sub(
        r"\{([^}]*)\}", lambda name: PREFIXES.get(name[1], "pred_") + digits, template
    )


STORED = [
    (method, path, scope)
    for (method, path), scope in EXPECTED.items()
    if method != "PUT" and re.search(r"\{(completion|response|prediction)_id\}", path)
]


@pytest.mark.parametrize(("method", "template", "scope_of_route"), STORED)
async def test_stored_objects_keep_their_scope_on_every_route(
    api: ApiUnderTest, method: str, template: str, scope_of_route: KeyScope
) -> None:
    """A chat or a response requires the scope `text` even on routes of predictions."""
    ids = await stored_work(api)

    async def statuses(scopes: list[Scope], kind: str) -> set[int]:
        """Each deletion gets a new object."""
        found = set()
        for scope in scopes:
            stored = await stored_work(api) if method == "DELETE" and scope in allowed else ids
            path = place_of(template, stored[kind])
            found.add((await api.http.request(method, path, headers=bearer(scope))).status_code)
        return found

    for kind in ids:
        needed: set[KeyScope] = {scope_of_route}
        if kind in ("responses", "chats"):
            needed.add("text")
        allowed = [scope for scope in SCOPES if all(may(scope, method, each) for each in needed)]
        forbidden = [scope for scope in SCOPES if scope not in allowed]
        refused, accepted = await statuses(forbidden, kind), await statuses(allowed, kind)
        if accepted == {404}:  # this route has no such object
            assert refused <= {403, 404}, kind
        else:
            assert refused <= {403}, kind
            assert not accepted & {403, 404}, kind


async def test_key_of_one_model_meets_nothing_of_others(api: ApiUnderTest) -> None:
    ids = await stored_work(api)
    wrong = []
    for method, template, _ in sorted(STORED, key=lambda route: route[0] == "DELETE"):
        for kind, stored_id in ids.items():
            path = place_of(template, stored_id)
            answer = await api.http.request(method, path, headers=bearer("texts"))
            expected = kind == "predictions"
            if (answer.status_code != 403) != expected:
                wrong.append((method, path, kind, answer.status_code))
    assert wrong == []
    listed = (await ask(api, "texts", LISTS[0])).json()["results"]
    assert listed == []  # its own was just deleted
    assert {one["id"] for one in (await ask(api, "predictions", LISTS[0])).json()["results"]} == {
        ids["images"]
    }
    whole = (await ask(api, "a", LISTS[0])).json()["results"]
    left = {place_of("{id}", one) for kind, one in ids.items() if kind != "predictions"}
    assert {f"/v1{one['id']}" for one in whole} == left


NAMED: dict[str, dict[str, Any]] = {
    "/embeddings": TEXT,
    "/rerank": {"model": TEXT_MODEL.name, "query": "a", "documents": ["b"]},
    "/images/generations": DRAWING,
    "/images/edits": DRAWING,
    "/images/variations": {"model": IMAGE_MODEL.name},
    "/audio/transcriptions": {"model": "writer"},
    "/audio/translations": {"model": "writer"},
    "/audio/speech": {"model": "writer", "input": "a"},
    "/ocr": {"model": "writer", "document": {"type": "file", "file_id": "file-a"}},
    "/chat/completions": {"model": "writer", "messages": [{"role": "user", "content": "a"}]},
    "/completions": {"model": "writer", "prompt": "a"},
    "/responses": {"model": "writer", "input": "a"},
    "/messages/count_tokens": {"model": "writer", "messages": [{"role": "user", "content": "a"}]},
    "/responses/input_tokens": {"model": "writer", "input": "a"},
    "/tokenize": {"model": "writer", "prompt": "a"},
    "/messages": {
        "model": "writer",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "a"}],
    },
    "/predictions": {"version": "writer", "input": {"prompt": "a"}},
    "/predictions/{prediction_id}": {"version": "writer", "input": {"prompt": "a"}},
    "/models/{owner}/{name}/predictions": {"input": {"prompt": "a"}},
    "/deployments/{owner}/{name}/predictions": {"input": {"prompt": "a"}},
}


FORMS = {
    "/images/edits": "image",
    "/images/variations": "image",
    "/audio/transcriptions": "file",
    "/audio/translations": "file",
}
"""The routes that take a form, with the name of their file field."""


async def test_no_route_runs_a_model_of_another_key(api: ApiUnderTest) -> None:
    document = (await api.http.get("/openapi.json", headers=bearer("a"))).json()
    named = {
        (method.upper(), without_version(path))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "X-Penstock-Deadline-Ms"
        in [header["name"] for header in operation.get("parameters", ())]
    }
    assert {path for _, path in named} == NAMED.keys()
    for method, path in named:
        headers = bearer("writes" if path in ("/embeddings", "/rerank") else "texts")
        body, where = NAMED[path], re.sub(r"\{[^}]*\}", "writer", f"/v1{path}")
        if path in FORMS:
            file = {FORMS[path]: ("a.png", b"a", "image/png")}
            answer = await api.http.post(where, data=body, files=file, headers=headers)
        else:
            answer = await api.http.request(method, where, json=body, headers=headers)
        assert answer.status_code == 403, (path, answer.text)
    assert not api.worker.jobs


def test_the_console_offers_every_scope() -> None:
    script = Path(__file__).parents[2] / "api" / "console_page" / "js" / "keys.js"
    listed = re.search(r"const SCOPES = \[(.*?)\];", script.read_text(), re.DOTALL)
    assert listed is not None
    assert re.findall(r'"(\w+)"', listed[1]) == list(SCOPES)


def test_administration_is_never_part_of_all() -> None:
    for scopes in (None, frozenset({"all"}), frozenset({"read", "usage"})):
        with pytest.raises(MissingScope, match="'admin'"):
            ACCESS_RULES.check(Caller(scopes=scopes), "GET", "/v1/admin/keys")
    ACCESS_RULES.check(Caller(scopes=frozenset({"admin"})), "POST", "/v1/admin/keys")
    assert ACCESS_RULES.scope_of("GET", "/v1/something/new") == "all"
