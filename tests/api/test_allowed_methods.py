"""Other requests sent by browsers, proxies, and link checkers.

HEAD, OPTIONS, preflights, and methods that a path does not support.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import TEXT
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
PREFLIGHT = {
    "origin": "https://app.example.com",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-penstock-deadline-ms",
}


@pytest.mark.parametrize(
    "path",
    [
        "/healthz",
        "/livez",
        "/readyz",
        "/docs",
        "/docs/assets/start.js",
        "/openapi.json",
        "/v1/models",
        "/v1/models/nowhere",
    ],
)
async def test_head_is_get_without_the_body(api: ApiUnderTest, path: str) -> None:
    head, got = await api.http.head(path), await api.http.get(path)
    assert head.status_code == got.status_code
    assert head.content == b""
    assert got.content
    for name in ("content-type", "content-length"):
        assert head.headers[name] == got.headers[name]


async def test_head_of_a_stream_ends(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        api.worker.go.clear()
        created = (await api.http.post("/v1/predictions", json=TEXT)).json()
        head = await api.http.head(created["urls"]["stream"])
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith("text/event-stream")
        api.worker.go.set()


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/embeddings", "POST, OPTIONS"),
        ("/v1/predictions", "GET, HEAD, POST, OPTIONS"),
        ("/predictions", "GET, HEAD, POST, OPTIONS"),
        ("/v1/predictions/mine", "GET, HEAD, PUT, DELETE, OPTIONS"),
        ("/v1/files", "GET, HEAD, POST, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/healthz", "GET, HEAD, OPTIONS"),
        ("/livez", "GET, HEAD, OPTIONS"),
    ],
)
async def test_allow_names_every_method_of_the_path(
    api: ApiUnderTest, path: str, allowed: str
) -> None:
    refused = await api.http.patch(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert refused.json()["error"]["code"] == "method_not_allowed"
    asked = await api.http.options(path)
    assert (asked.status_code, asked.content, asked.headers["allow"]) == (204, b"", allowed)


async def test_head_of_what_is_only_posted_is_refused(api: ApiUnderTest) -> None:
    response = await api.http.head("/v1/embeddings")
    assert (response.status_code, response.headers["allow"]) == (405, "POST, OPTIONS")


async def test_no_page_may_call_unless_it_is_let(api: ApiUnderTest) -> None:
    preflight = await api.http.options("/v1/embeddings", headers=PREFLIGHT)
    assert preflight.status_code == 204
    answer = await api.http.get("/v1/models", headers={"origin": PREFLIGHT["origin"]})
    for response in (preflight, answer):
        assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.fixture(params=["https://app.example.com, http://localhost:3000", "*"])
async def open_api(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ApiUnderTest]:
    async with running_api(
        settings_for(tmp_path, cors_origins=request.param, keys_url=keys_url(tmp_path, k="t"))
    ) as running:
        yield running


async def test_pages_of_named_origins_may_call(open_api: ApiUnderTest) -> None:
    origin, http = {"origin": PREFLIGHT["origin"]}, open_api.http
    # Browsers do not send a key with a preflight.
    preflight = await http.options("/v1/embeddings", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] in (origin["origin"], "*")
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-penstock-deadline-ms" in preflight.headers["access-control-allow-headers"]
    body = {"model": TEXT_MODEL.name, "input": "a"}
    for key, status in (("k", 200), ("wrong", 401)):
        answer = await http.post("/v1/embeddings", json=body, headers=origin | bearer(key))
        assert answer.status_code == status
        # A script that can't read why its request was rejected can't explain it to the user.
        assert answer.headers["access-control-allow-origin"] in (origin["origin"], "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


async def test_pages_of_other_origins_may_not(tmp_path: Path) -> None:
    async with running_api(settings_for(tmp_path, cors_origins="https://app.example.com")) as api:
        other = {"origin": "https://app.example.com.evil.example"}
        preflight = await api.http.options("/v1/embeddings", headers=PREFLIGHT | other)
        answer = await api.http.get("/v1/models", headers=other)
        assert preflight.status_code == 400
        for response in (preflight, answer):
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "origins", ["app.example.com", "https://app.example.com/", "https://a b", "https://a,*"]
)
def test_what_is_no_origin_is_refused(tmp_path: Path, origins: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_CORS_ORIGINS"):
        settings_for(tmp_path, cors_origins=origins)
