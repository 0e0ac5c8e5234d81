"""/v1/admin: keys with the admin scope change keys, plans and tenants, and changes are recorded."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from shared.stores.key_stores import KeyRedis
from shared.tenants.administration import Administration, InUse
from shared.tenants.api_key import parse_key
from shared.tenants.directory import Document
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.keys import bearer, key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
ROOT, PLAIN = bearer("root"), bearer("plain")
KEY = key_for("of somebody else")
NEW = {"tenant": "acme", "name": "website"}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    keys = (stored("root", "ops", scopes=("all", "admin")), stored("plain", "acme"))
    async with KeyRedis(redis_url, timeout_s=WAIT_LIMIT_S) as store:
        admin = Administration(store, actor="user ann", address="desk")
        await admin.start_directory(Document(keys=keys))
    async with running_api(settings_for(tmp_path, keys_url=redis_url)) as running:
        yield running


async def ask(api: ApiUnderTest, method: str, path: str, body: object = None) -> Any:
    answer = await api.http.request(method, f"/v1/admin{path}", json=body, headers=ROOT)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def refused(api: ApiUnderTest, method: str, path: str) -> str:
    """The reason a change was rejected: it would remove something still in use."""
    answer = await api.http.request(method, f"/v1/admin{path}", headers=ROOT)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "in_use"), answer.text
    assert answer.headers["x-should-retry"] == "false"
    return str(error["message"])


async def status_of(api: ApiUnderTest, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await api.http.get("/v1/models", headers=headers)).status_code


async def test_life_of_a_key(api: ApiUnderTest) -> None:
    made = await ask(api, "POST", "/keys", NEW | {"expires_in_s": 3600, "scopes": ["read"]})
    value, key_id = made.pop("value"), made["id"]
    assert parse_key(value)
    assert made["object"] == "api_key"
    assert (made["tenant"], made["scopes"], made["state"]) == ("acme", ["read"], "valid")
    assert made["expires_at"] == made["created_at"] + 3600
    assert made["redacted_value"] == f"pk_live_{key_id}_…"
    assert await status_of(api, value) == 200
    assert await ask(api, "GET", f"/keys/{key_id}") == made

    rotated = await ask(api, "POST", f"/keys/{key_id}/rotate", {"overlap_s": 60})
    assert rotated["old_secret_until"] is not None
    assert [await status_of(api, key) for key in (value, rotated["value"])] == [200, 200]
    last = await ask(api, "POST", f"/keys/{key_id}/rotate", {"overlap_s": 0})
    statuses = [await status_of(api, key) for key in (value, rotated["value"], last["value"])]
    assert statuses == [401, 401, 200]

    gone = {"id": key_id, "object": "api_key.deleted", "deleted": True}
    assert await ask(api, "DELETE", f"/keys/{key_id}") == gone
    assert await status_of(api, last["value"]) == 401
    assert (await ask(api, "GET", f"/keys/{key_id}"))["state"] == "revoked"
    assert await ask(api, "DELETE", f"/keys/{key_id}") == gone

    listed = json.dumps([await ask(api, "GET", "/keys"), await ask(api, "GET", "/audit")])
    for key in (value, rotated["value"], last["value"]):
        assert key[21:] not in listed
    assert "hash" not in listed
    assert "salt" not in listed


async def test_keys_come_in_pages(api: ApiUnderTest) -> None:
    made = [(await ask(api, "POST", "/keys", NEW))["id"] for _ in range(3)]
    first = await ask(api, "GET", "/keys?limit=2&tenant=acme")
    assert (first["object"], first["has_more"], len(first["data"])) == ("list", True, 2)
    second = await ask(api, "GET", f"/keys?limit=2&tenant=acme&after={first['last_id']}")
    assert second["has_more"] is False
    found = [key["id"] for key in first["data"] + second["data"]]
    assert found == [stored("plain", "acme").id, *made]
    wrong = await api.http.get("/v1/admin/keys?after=nobody", headers=ROOT)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "after")


async def test_last_use_is_shown(api: ApiUnderTest) -> None:
    await api.http.get("/v1/models", headers=PLAIN)
    access: Any = api.dependencies.access
    await access.directory.note_uses()
    found = await ask(api, "GET", f"/keys/{stored('plain', 'acme').id}")
    assert found["last_used_at"] is not None


async def test_tenants_get_plans(api: ApiUnderTest) -> None:
    plan = await ask(api, "PUT", "/plans/team", {"weight": 2.0, "requests_per_min": 60})
    assert (plan["name"], plan["plan"]["weight"]) == ("team", 2.0)
    assert await ask(api, "GET", "/plans") == {"object": "list", "data": [plan]}
    assert (await ask(api, "PUT", "/tenants/acme", {"plan": "team"}))["plan"] == "team"
    access = api.dependencies.access
    caller = access.caller_of([(b"authorization", PLAIN["authorization"].encode())])
    assert (caller.plan.weight, caller.plan.requests_per_min) == (2.0, 60)
    tenants = (await ask(api, "GET", "/tenants"))["data"]
    assert [(one["name"], one["plan"]) for one in tenants] == [("acme", "team"), ("ops", None)]
    assert await refused(api, "DELETE", "/plans/team") == (
        "the plan 'team' is in use: 1 tenant uses it (acme); assign a different plan to it first"
    )
    await ask(api, "PUT", "/tenants/acme", {"plan": None})
    await ask(api, "DELETE", "/plans/team")
    assert (await ask(api, "GET", "/plans"))["data"] == []


async def test_a_tenant_is_frozen_and_keeps_its_plan(api: ApiUnderTest) -> None:
    await ask(api, "PUT", "/plans/team", {"requests_per_min": 60})
    await ask(api, "PUT", "/tenants/acme", {"plan": "team"})
    frozen = await ask(api, "PUT", "/tenants/acme", {"frozen": True})
    assert (frozen["plan"], frozen["frozen_at"] is None) == ("team", False)
    denied = await api.http.get("/v1/models", headers=PLAIN)
    assert (denied.status_code, denied.json()["error"]["code"]) == (403, "tenant_frozen")
    assert (await ask(api, "PUT", "/tenants/acme", {"frozen": True})) == frozen
    assert (await ask(api, "PUT", "/tenants/acme", {"frozen": False})) == frozen | {
        "frozen_at": None
    }
    assert (await api.http.get("/v1/models", headers=PLAIN)).status_code == 200
    acts = [act["type"] for act in (await ask(api, "GET", "/audit"))["data"]]
    assert acts[0] == "tenant.thaw"
    assert "tenant.freeze" in acts


@pytest.mark.parametrize(
    ("tenant", "body", "status"),
    [
        ("ops", {"frozen": True}, 409),
        ("nobody", {"frozen": True}, 404),
        ("acme", {"frozen": True, "plan": None}, 400),
        ("acme", {"frozen": None}, 400),
        ("acme", {"frozen": "yes"}, 400),
    ],
)
async def test_a_tenant_that_can_not_be_frozen(
    api: ApiUnderTest, tenant: str, body: dict[str, Any], status: int
) -> None:
    answer = await api.http.put(f"/v1/admin/tenants/{tenant}", json=body, headers=ROOT)
    assert answer.status_code == status, answer.text
    listed = (await ask(api, "GET", "/tenants"))["data"]
    assert [entry["frozen_at"] for entry in listed] == [None, None]


async def test_default_plan_stays(api: ApiUnderTest) -> None:
    """Without it, tenants without a plan would have no limits."""
    await ask(api, "PUT", "/plans/default", {"requests_per_min": 1})
    reason = await refused(api, "DELETE", "/plans/default")
    assert "would have no limits" in reason
    assert "PUT" in reason
    assert [one["name"] for one in (await ask(api, "GET", "/plans"))["data"]] == ["default"]
    sent = [await api.http.get("/v1/models", headers=PLAIN) for _ in range(2)]
    assert [answer.status_code for answer in sent] == [200, 200]
    await ask(api, "PUT", "/plans/default", {})


@pytest.mark.parametrize("name", ["a/b", "/", "ü ?#%", "a//b/"])
async def test_tenants_of_any_name_get_plans(api: ApiUnderTest, name: str) -> None:
    await ask(api, "PUT", "/plans/team", {"weight": 2.0})
    made = await ask(api, "POST", "/keys", {"tenant": name, "name": "x"})
    path = f"/tenants/{quote(name, safe='')}"
    assert (await ask(api, "PUT", path, {"plan": "team"}))["name"] == name
    caller = api.dependencies.access.caller_of([(b"x-api-key", made["value"].encode())])
    assert (caller.tenant, caller.plan_name) == (name, "team")


async def test_plan_in_use_names_its_tenants(api: ApiUnderTest) -> None:
    await ask(api, "PUT", "/plans/team", {})
    for number in range(12):
        await ask(api, "PUT", f"/tenants/t{number:02}", {"plan": "team"})
    reason = await refused(api, "DELETE", "/plans/team")
    assert "12 tenants use it (t00, t01, t02, t03, t04 and 7 more)" in reason


async def test_key_does_not_end_itself(api: ApiUnderTest) -> None:
    root = stored("root", "ops").id
    reason = await refused(api, "DELETE", f"/keys/{root}")
    assert "can't revoke itself" in reason
    made = await ask(api, "POST", "/keys", {"tenant": "ops", "name": "b", "scopes": ["admin"]})
    other = {"authorization": f"Bearer {made['value']}"}
    answer = await api.http.delete(f"/v1/admin/keys/{root}", headers=other)
    assert answer.status_code == 200
    assert (await api.http.get("/v1/admin/keys", headers=ROOT)).status_code == 401


async def test_two_keys_that_end_each_other_at_once_leave_one(redis_url: str) -> None:
    keys = [stored(name, "ops", scopes=("admin",)) for name in ("one", "two")]
    async with KeyRedis(redis_url, timeout_s=WAIT_LIMIT_S) as store:
        admins = [Administration(store, actor=f"key {key.id}", address="desk") for key in keys]
        await admins[0].start_directory(Document(keys=(*keys, stored("plain", "acme"))))
        await admins[0].revoke_key(keys[1].id)
        # Its instance has not yet learned that the key was revoked.
        with pytest.raises(InUse, match="last key with the admin scope"):
            await admins[1].revoke_key(keys[0].id)
        await admins[1].revoke_key(stored("plain", "acme").id)


async def test_every_act_is_noted(api: ApiUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = await ask(api, "POST", "/keys", NEW)
    await ask(api, "DELETE", f"/keys/{made['id']}")
    page = await ask(api, "GET", "/audit?limit=2")
    assert (page["has_more"], page["last_id"]) == (True, page["data"][1]["id"])
    revoked, created = page["data"]
    assert (revoked["type"], revoked["target"]) == ("key.revoke", made["id"])
    assert revoked["actor"] == f"key {stored('root', 'ops').id}"
    assert revoked["address"] == "127.0.0.1"
    assert (revoked["before"]["tenant"], "revoked_s" in revoked["before"]) == ("acme", False)
    assert revoked["after"]["revoked_s"] is not None
    assert (created["type"], created["before"]) == ("key.create", None)
    (rest,) = (await ask(api, "GET", f"/audit?after={page['last_id']}"))["data"]
    assert (rest["type"], rest["actor"], rest["address"]) == (
        "directory.start",
        "user ann",
        "desk",
    )
    logged = [vars(record) for record in caplog.records if record.message == "keys changed"]
    assert [(line["action"], line["target"]) for line in logged] == [
        ("key.create", made["id"]),
        ("key.revoke", made["id"]),
    ]
    assert made["value"][21:] not in str(logged)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("GET", "/audit?after=x", None, 400, "after"),
        ("GET", "/audit?after=1-", None, 400, "after"),
        ("GET", "/audit?limit=0", None, 400, "limit"),
        ("POST", "/keys", {}, 400, None),
        ("POST", "/keys", NEW | {"tenant": "a\n"}, 400, "keys[2].tenant"),
        ("POST", "/keys", NEW | {"name": ""}, 400, "name"),
        ("POST", "/keys", NEW | {"scopes": ["everything"]}, 400, "scopes[0]"),
        ("POST", "/keys", NEW | {"limits": {"max_in_flight": 0}}, 400, "limits.max_in_flight"),
        ("POST", "/keys", NEW | {"expires_in_s": 0}, 400, "expires_in_s"),
        ("POST", "/keys", NEW | {"secret": "mine"}, 400, None),
        ("GET", "/keys/nobody", None, 404, "id"),
        ("DELETE", "/keys/nobody", None, 404, "id"),
        ("POST", "/keys/nobody/rotate", {}, 404, "id"),
        ("POST", "/keys/nobody/rotate", {"overlap_s": -1}, 400, "overlap_s"),
        ("POST", "/keys/n\u00f6body/rotate", {}, 404, "id"),
        ("PUT", "/plans/team", {"weight": 0}, 400, "weight"),
        ("PUT", "/plans/team", {"wait": 0}, 400, None),
        ("PUT", "/plans/team", {"on_limit_store_outage": "open"}, 400, "on_limit_store_outage"),
        ("DELETE", "/plans/team", None, 404, "plan"),
        ("PUT", "/tenants/acme", {"plan": "gold"}, 400, "tenants['acme'].plan"),
        ("PUT", "/tenants/acme", {}, 400, None),
        ("PUT", "/tenants/acme/", {"plan": None}, 404, None),
        ("PUT", "/plans/a/b", {}, 404, None),
        ("PUT", "/plans/a%2Fb", {}, 400, "plan"),
        ("POST", "/keys", NEW | {"tenant": ".."}, 400, "tenant"),
        ("POST", "/keys", NEW | {"tenant": "%0a"}, 400, "tenant"),
        ("PUT", "/plans/team", {"budget_webhook": "javascript:x"}, 400, "budget_webhook"),
        ("PUT", "/plans/team", {"budget_webhook": "https://localhost/"}, 400, "budget_webhook"),
        ("PUT", "/plans/team", {"per_model": {"gpt-9": {}}}, 400, "per_model['gpt-9']"),
        ("PUT", "/plans/team", {"requests_per_min": 2**54}, 400, "requests_per_min"),
        ("POST", "/keys", NEW | {"models": ["gpt-9"]}, 400, "models[0]"),
        ("POST", "/keys", NEW | {"models": []}, 400, "models"),
        ("POST", "/keys", NEW | {"scopes": []}, 400, "scopes"),
        ("POST", "/keys", NEW | {"name": "a\u202e"}, 400, "name"),
        *(
            (*asked, 400, field)
            for asked, field in (
                (("POST", "/keys", NEW | {"name": f"x{KEY}"}), "name"),
                (("POST", "/keys", NEW | {"tenant": KEY}), "tenant"),
                (("POST", "/keys", NEW | {"models": [KEY]}), "models[0]"),
                (("GET", f"/keys/{KEY}", None), "id"),
                (("DELETE", f"/keys/{KEY}", None), "id"),
                (("POST", f"/keys/{KEY}/rotate", {}), "id"),
                (("PUT", f"/plans/{KEY}", {}), "plan"),
                (("PUT", f"/plans/{KEY[:50]}", {}), "plan"),
                (("PUT", "/plans/team", {"per_model": {KEY: {}}}), "per_model"),
                (("PUT", f"/tenants/{KEY}", {"plan": None}), "tenant"),
                (("PUT", "/tenants/acme", {"plan": KEY}), "plan"),
            )
        ),
    ],
)  # fmt: skip
async def test_wrong_request_names_the_field_and_changes_nothing(
    api: ApiUnderTest, method: str, path: str, body: object, status: int, field: str | None
) -> None:
    answer = await api.http.request(method, f"/v1/admin{path}", json=body, headers=ROOT)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), answer.text
    assert KEY[21:] not in answer.text
    assert len((await ask(api, "GET", "/audit"))["data"]) == 1
    broken = await api.http.post("/v1/admin/keys", content=b'{"a', headers=ROOT)
    assert broken.status_code == 400


ASKED: list[tuple[str, str, Any]] = [
    ("GET", "/keys", None),
    ("POST", "/keys", NEW),
    ("GET", "/keys/x", None),
    ("DELETE", "/keys/x", None),
    ("POST", "/keys/x/rotate", {}),
    ("GET", "/plans", None),
    ("PUT", "/plans/x", {}),
    ("DELETE", "/plans/x", None),
    ("GET", "/tenants", None),
    ("PUT", "/tenants/x", {"plan": None}),
    ("GET", "/audit", None),
]


async def test_nobody_else_administers(api: ApiUnderTest, tmp_path: Path) -> None:
    for method, path, body in ASKED:
        for headers, status in ((PLAIN, 403), ({}, 401)):
            answer = await api.http.request(method, f"/v1/admin{path}", json=body, headers=headers)
            assert answer.status_code == status, path
            if status == 403:
                assert answer.json()["error"]["code"] == "missing_scope"
                assert "'admin'" in answer.json()["error"]["message"]
    async with running_api(settings_for(tmp_path)) as open_api:
        for method, path, body in ASKED:
            answer = await open_api.http.request(method, f"/v1/admin{path}", json=body)
            assert answer.status_code == 403


async def test_keys_in_a_file_are_only_shown(tmp_path: Path) -> None:
    key = stored("root", "ops", scopes=("admin",))
    url = keys_url(tmp_path, keys=(key,), a="acme")
    before = (tmp_path / "keys.json").read_bytes()
    async with running_api(settings_for(tmp_path, keys_url=url)) as api:
        answers: list[httpx.Response] = []
        for method, path, body in ASKED:
            path = path.replace("/x", f"/{key.id}") if path.startswith("/keys") else path
            answers.append(
                await api.http.request(method, f"/v1/admin{path}", json=body, headers=ROOT)
            )
            expected = 200 if method == "GET" else 409
            assert answers[-1].status_code == expected, answers[-1].text
        refused = next(answer for answer in answers if answer.status_code == 409)
        assert refused.json()["error"]["code"] == "keys_read_only"
        assert "read-only" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
    assert (tmp_path / "keys.json").read_bytes() == before
