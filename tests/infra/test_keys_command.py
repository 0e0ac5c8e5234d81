"""`penstock keys`, `tenants` and `plans`, as operators run them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from shared.tenants.api_key import parse_key
from shared.tenants.directory import Directory, decode_document


class Operator:
    """Runs commands against one directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        # A stack running in this folder would be a different one.
        monkeypatch.setenv("PENSTOCK_PROJECT", "penstock-local")

    def use(self, url: str) -> None:
        self._monkeypatch.setenv("PENSTOCK_KEYS_URL", url)

    def types(self, *words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    def reads(self, *words: str) -> Any:
        return json.loads(self.types(*words, "--json"))

    def refused(self, *words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 1, done.output
        return done.stderr

    def states_of(self, *keys: str) -> list[str]:
        document = decode_document(self.types("keys", "export").encode(), "x")
        parsed = [parse_key(key) for key in keys]
        return [Directory(document).find(key, 10**9).state for key in parsed if key is not None]


@pytest.fixture(params=["file", "redis"])
def operator(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> Operator:
    made = Operator(monkeypatch)
    made.use(redis_url if request.param == "redis" else (tmp_path / "keys.json").as_uri())
    return made


NAMELESS_USER = 2**31 - 7
MODEL = "all-MiniLM-L6-v2"
CREATE = ("keys", "create", "--tenant", "acme", "--name", "ci")


def test_a_user_without_a_name_is_logged_by_number(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: NAMELESS_USER)
    operator.types("keys", "init")
    assert operator.reads("keys", "audit")[0]["actor"] == f"user {NAMELESS_USER}"


def test_life_of_a_key(operator: Operator) -> None:
    assert "keys init" in operator.refused(*CREATE)
    operator.types("keys", "init")
    assert "a key directory already exists" in operator.refused("keys", "init")
    first = operator.types(*CREATE).strip()
    key_id = first[8:20]
    second = operator.reads("keys", "rotate", key_id, "--overlap", "1h")["value"]
    assert operator.states_of(first, second) == ["valid", "valid"]
    third = operator.types("keys", "rotate", key_id, "--overlap", "0s").strip()
    assert operator.states_of(first, second, third) == ["unknown", "unknown", "valid"]
    operator.types("keys", "revoke", key_id)
    assert operator.states_of(third) == ["revoked"]
    assert "is revoked" in operator.refused("keys", "rotate", key_id)
    assert "key 'nobody' does not exist" in operator.refused("keys", "revoke", "nobody")
    (listed,) = operator.reads("keys", "list")
    assert (listed["id"], listed["state"]) == (key_id, "revoked")
    assert operator.reads("keys", "list", "--tenant", "other") == []
    audit_events = operator.reads("keys", "audit")
    names = ["key.revoke", "key.rotate", "key.rotate", "key.create", "directory.start"]
    assert [act["action"] for act in audit_events] == names
    assert audit_events[0]["actor"].startswith("user ")
    shown = operator.types("keys", "list") + operator.types("keys", "audit")
    assert "revoked" in shown
    for key in (first, second, third):
        assert key[21:] not in shown + operator.types("keys", "export") + json.dumps(audit_events)


def test_options_of_a_key(operator: Operator) -> None:
    operator.types("keys", "init")
    narrow = ("--scope", "images", "--scope", "read", "--model", MODEL, "--expires-in", "90d")
    made = operator.reads(*CREATE, *narrow, "--limit", "requests_per_min=5")
    assert (made["scopes"], made["models"]) == (["read", "images"], [MODEL])
    assert made["expires_s"] == made["created_s"] + 90 * 86_400
    assert made["limits"]["requests_per_min"] == 5
    for wrong, reason in {
        ("--scope", "foo"): "must be one of",
        ("--expires-in", "soon"): "must be a duration",
        ("--limit", "x"): "must have the form FIELD=VALUE",
        ("--model", "gpt-9"): "models[0]: model 'gpt-9' is not in the catalog, which contains ",
        ("--limit", "weight=2"): "unknown field weight; accepted fields: budget_usd_per_month, ",
        ("--limit", "requests_per_min=0"): "requests_per_min",
    }.items():
        assert reason in operator.refused(*CREATE, *wrong)


def test_tenants_have_plans(operator: Operator) -> None:
    operator.types("keys", "init")
    assert "plan 'team' does not exist" in operator.refused(
        "tenants", "set", "acme", "--plan", "team"
    )
    operator.types("plans", "set", "team", "--set", "weight=2", "--set", "max_priority=batch")
    operator.types("tenants", "set", "acme", "--plan", "team")
    assert operator.reads("plans", "list")["team"]["weight"] == 2.0
    assert operator.reads("tenants", "list") == [
        {"tenant": "acme", "plan": "team", "frozen_s": None}
    ]
    assert "1 tenant uses it (acme)" in operator.refused("plans", "remove", "team")
    operator.types("plans", "set", "default")
    assert "would have no limits" in operator.refused("plans", "remove", "default")
    operator.types("tenants", "set", "acme", "--plan", "")
    operator.types("plans", "remove", "team")
    refused = operator.refused("plans", "set", "x", "--set", "weigh=1")
    assert (
        "unknown field weigh; did you mean weight? accepted fields: batch_price_share, " in refused
    )
    refused = operator.refused("plans", "set", "x", "--set", "requests_per_minute=10")
    assert "did you mean requests_per_min?" in refused
    refused = operator.refused("plans", "set", "x", "--set", 'per_model={"m": {"tokens": 1}}')
    assert "per_model[...]: unknown field tokens; did you mean tokens_per_min?" in refused
    refused = operator.refused("plans", "set", "x", "--set", "zzz=1")
    assert "unknown field zzz; accepted fields: " in refused


def test_frozen_tenant_keeps_its_plan_and_its_keys(operator: Operator) -> None:
    operator.types("keys", "init")
    key = operator.types(*CREATE).strip()
    other = operator.types("keys", "create", "--tenant", "other", "--name", "ci").strip()
    assert "tenant 'acm' does not exist" in operator.refused("tenants", "freeze", "acm")
    operator.types("plans", "set", "team")
    operator.types("tenants", "set", "acme", "--plan", "team")
    operator.types("tenants", "freeze", "acme")
    assert operator.states_of(key, other) == ["frozen", "valid"]
    (acme, _) = operator.reads("tenants", "list")
    assert acme["plan"] == "team"
    operator.types("tenants", "freeze", "acme")
    operator.types("tenants", "set", "acme", "--plan", "")
    assert operator.states_of(key) == ["frozen"]
    assert operator.reads("tenants", "list")[0]["frozen_s"] == acme["frozen_s"]
    operator.types("tenants", "thaw", "acme")
    assert operator.states_of(key, other) == ["valid", "valid"]
    acts = [act["action"] for act in operator.reads("keys", "audit")]
    assert acts[:4] == ["tenant.thaw", "tenant.set", "tenant.freeze", "tenant.set"]


def test_plans_that_cannot_work_are_refused(operator: Operator) -> None:
    operator.types("keys", "init")
    for wrong, reason in {
        "budget_webhook=javascript:alert(1)": "budget_webhook: 'javascript:alert(1)' must be an",
        'per_model={"gpt-9": {"requests_per_min": 1}}': "per_model['gpt-9']: model 'gpt-9' is not",
    }.items():
        assert reason in operator.refused("plans", "set", "team", "--set", wrong)
    assert operator.reads("plans", "list") == {}


def test_whole_key_is_never_repeated(operator: Operator) -> None:
    operator.types("keys", "init")
    key = operator.types(*CREATE).strip()
    operator.types("plans", "set", "team")
    for words in (
        ("keys", "revoke", key),
        ("keys", "rotate", key),
        ("keys", "create", "--tenant", "acme", "--name", key),
        ("keys", "create", "--tenant", key, "--name", "x"),
        ("tenants", "set", key, "--plan", "team"),
        ("plans", "set", key),
    ):
        assert key[21:40] not in operator.refused(*words), words
    assert key[21:40] not in operator.types("keys", "export") + operator.types("keys", "audit")


def test_directory_moves_from_a_file_to_redis(
    operator: Operator, tmp_path: Path, redis_url: str
) -> None:
    operator.use((tmp_path / "first.json").as_uri())
    operator.types("keys", "init")
    key = operator.types(*CREATE).strip()
    (tmp_path / "exported.json").write_text(operator.types("keys", "export"))
    operator.use(redis_url)
    operator.types("keys", "init", "--from", str(tmp_path / "exported.json"))
    assert operator.states_of(key) == ["valid"]


def test_export_into_an_object_store_is_a_directory(
    operator: Operator, tmp_path: Path, redis_url: str
) -> None:
    operator.use((tmp_path / "first.json").as_uri())
    operator.types("keys", "init")
    key = operator.types(*CREATE).strip()
    url = (tmp_path / "exports").as_uri()
    for _ in range(2):
        assert f"exported 1 keys to {url}/keys-" in operator.types("keys", "export", "--to", url)
    exports = sorted((tmp_path / "exports").iterdir())
    assert len(exports) == 2
    operator.use(redis_url)
    operator.types("keys", "init", "--from", str(exports[-1]))
    assert operator.states_of(key) == ["valid"]
    assert "--to: must be file://DIR" in operator.refused("keys", "export", "--to", "ftp://x")


def test_no_directory_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PENSTOCK_KEYS_URL" in Operator(monkeypatch).refused("keys", "list")


def test_exported_directory_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KEYS_URL", f"file://{tmp_path}/keys.json")
    done = CliRunner().invoke(app, ["keys", "init", "--from", str(tmp_path / "missing.json")])
    assert (done.exit_code, (tmp_path / "keys.json").exists()) == (2, False)
    assert "missing.json" in done.stderr
