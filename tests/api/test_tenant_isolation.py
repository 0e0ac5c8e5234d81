"""No route shows or changes another tenant's objects: tries all routes with the other tenant's
ids.
"""

import re
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.api.harness import TEXT_MODEL, WRITER, ApiUnderTest, running_api, settings_for
from tests.api.routes import routes_of
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
ACME, OTHER = bearer("a"), bearer("o")
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings"}
BODY = {"model": TEXT_MODEL.name, "input": "the merger is off"}
OF_EVERYBODY = {
    *("/healthz", "/livez", "/readyz", "/docs", "/", "/openapi.json"),
    "/v1/objects/{key:path}",  # open to anyone with the signed link
}
SHOWN_TO_ALL = {"model": TEXT_MODEL.name, "name": TEXT_MODEL.name, "owner": "any", "version": "x"}
"""Parts of paths that do not belong to any tenant."""


class Belongings(NamedTuple):
    """A tenant's ids, by their names in paths."""

    ids: dict[str, list[str]]

    @property
    def all(self) -> list[str]:
        return [one for found in self.ids.values() for one in found]


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(
        tmp_path,
        redis_url=redis_url,
        secret="s",
        webhook_secrets="whsec_" + "A" * 43 + "=",
        keys_url=keys_url(tmp_path, a="acme", o="other"),
    )
    async with running_api(settings) as running:
        yield running


@pytest.fixture
async def acmes(api: ApiUnderTest) -> Belongings:
    """Acme's belongings: predictions, files from both APIs, a batch."""
    text = {"version": TEXT_MODEL.name, "input": {"text": "a"}}
    http: Any = api.http
    made = (await http.post("/v1/predictions", json=text, headers=ACME)).json()
    own = (await http.put("/v1/predictions/acmes-own", json=text, headers=ACME)).json()
    file = (await http.post("/v1/files", files={"content": b"x"}, headers=ACME)).json()
    line = str(LINE | {"body": BODY}).replace("'", '"').encode()
    upload = {"file": ("a.jsonl", line)}
    lines = (
        await http.post("/v1/files", files=upload, data={"purpose": "batch"}, headers=ACME)
    ).json()
    asked = {
        "input_file_id": lines["id"],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    chat = {
        "model": WRITER.name,
        "messages": [{"role": "user", "content": "say a secret"}],
        "stream": True,
    }
    events = (await http.post("/v1/chat/completions", json=chat, headers=ACME)).text
    (completion, *_) = re.findall(r'"id":"([\w-]+)"', events)
    background = {"model": WRITER.name, "input": "say a secret", "background": True}
    response = (await http.post("/v1/responses", json=background, headers=ACME)).json()
    batch = (await http.post("/v1/batches", json=asked, headers=ACME)).json()
    said = {"items": [{"type": "message", "role": "user", "content": "a secret"}]}
    conversation = (await http.post("/v1/conversations", json=said, headers=ACME)).json()
    items = f"/v1/conversations/{conversation['id']}/items"
    (item,) = (await http.get(items, headers=ACME)).json()["data"]
    return Belongings(
        {
            "prediction_id": [made["id"], own["id"]],
            "file_id": [file["id"], lines["id"]],
            "batch_id": [batch["id"]],
            "completion_id": [completion],
            "response_id": [response["id"]],
            "conversation_id": [conversation["id"]],
            "item_id": [item["id"]],
        }
    )


def paths_of(api: ApiUnderTest, *methods: str) -> list[tuple[str, str]]:
    return [
        (method, path)
        for method, path in routes_of(api.app)
        if method in methods and path not in OF_EVERYBODY
    ]


def filled(path: str, ids: dict[str, list[str]]) -> list[str]:
    """The path with every combination of ids."""
    names = re.findall(r"{(\w+)(?::\w+)?}", path)
    unknown = set(names) - ids.keys() - SHOWN_TO_ALL.keys() - {"key_id", "request_id"}
    assert not unknown, f"{path}: say here whose {unknown} is"
    choices = [ids.get(name) or [SHOWN_TO_ALL.get(name, "x")] for name in names]
    found = []
    for values in product(*choices):
        one = path
        for name, value in zip(names, values, strict=True):
            one = re.sub(rf"{{{name}(:\w+)?}}", value, one)
        found.append(one)
    return found


async def test_nothing_of_another_tenant_is_shown(api: ApiUnderTest, acmes: Belongings) -> None:
    nobody = {name: [one[:-1] + "0"] for name, (one, *_) in acmes.ids.items()}
    shown_to_acme = 0
    for _, template in paths_of(api, "GET"):
        has_id = any(f"{{{name}}}" in template for name in acmes.ids)
        for path in filled(template, acmes.ids):
            answer = await api.http.get(path, headers=OTHER)
            if has_id:
                # The response is the same as for an unknown ID, so not even the object's existence
                # is revealed.
                unknown = await api.http.get(filled(template, nobody)[0], headers=OTHER)
                assert answer.status_code == unknown.status_code == 404, path
                shown_to_acme += (await api.http.head(path, headers=ACME)).status_code == 200
            assert not [one for one in acmes.all if one in answer.text and one not in path], path
    assert shown_to_acme >= len(acmes.all)


async def test_nothing_of_another_tenant_is_changed(api: ApiUnderTest, acmes: Belongings) -> None:
    tried = 0
    for method, template in paths_of(api, "POST", "DELETE", "PATCH"):
        if any(f"{{{name}}}" in template for name in acmes.ids):
            for path in filled(template, acmes.ids):
                answer = await api.http.request(method, path, json={}, headers=OTHER)
                assert answer.status_code == 404, (method, path)
                tried += 1
    assert tried >= len(acmes.all)
    for kind, name in (
        ("predictions", "prediction_id"),
        ("files", "file_id"),
        ("batches", "batch_id"),
    ):
        for one in acmes.ids[name]:
            assert (await api.http.get(f"/v1/{kind}/{one}", headers=ACME)).status_code == 200


async def test_file_of_another_tenant_is_no_input(api: ApiUnderTest, acmes: Belongings) -> None:
    asked = {
        "input_file_id": acmes.ids["file_id"][1],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    answer = await api.http.post("/v1/batches", json=asked, headers=OTHER)
    assert answer.status_code in (400, 404)


async def test_cached_result_of_another_tenant_is_computed_again(api: ApiUnderTest) -> None:
    found = [
        (await api.http.post("/v1/embeddings", json=BODY, headers=key)).headers["x-penstock-cache"]
        for key in (ACME, ACME, OTHER, OTHER)
    ]
    assert found == ["miss", "hit", "miss", "hit"]
