"""Keys change while the API is running; a broken or missing file changes nothing."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from api.errors import Unauthorized
from api.http.auth import ApiKeys
from api.http.key_refresh import LOOK_AGAIN_S, STALE_LIMIT_S, LiveDirectory
from shared.errors import ConfigurationError, Unavailable
from shared.stores.key_stores import KeyFile, KeyRedis, key_store, list_served_names
from shared.tenants.administration import Administration
from shared.tenants.directory import Document
from shared.tenants.key_store import StoredDocument
from shared.tenants.plan import Plan
from tests.api.harness import CATALOG, IMAGE_MODEL, TEXT_MODEL
from tests.keys import key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
BROKEN = [
    (b"", "not JSON"),
    (b'{"keys": [{"id": "', "not JSON"),
    (b'{"tenants": {"\xff": {}}}', "not JSON"),
    (b"[]", "Expected `object`, got `array`"),
    (b'{"keyz": []}', "unknown field `keyz`"),
    (b'{"plans": {"a": {"weight": 0}}}', r"plans\[...\].weight: Expected `float` >= 0.01"),
    (b'{"plans": {"a b": {}}}', "plans: key in `plans`|plans"),
    (
        b'{"tenants": {"acme": {"plan": "gold"}}}',
        r"tenants\['acme'\].plan: plan 'gold' does not exist",
    ),
    (b'{"tenants": {"": {"plan": "gold"}}}', r"tenants\[''\]: a tenant's name"),
]


def failures(reason: str) -> float:
    name = "penstock_keys_refresh_failures_total"
    return REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0


def gets_in(keys: ApiKeys, name: str) -> bool:
    try:
        keys.caller_of([(b"x-api-key", key_for(name).encode())])
    except Unauthorized:
        return False
    return True


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not is_so():  # noqa: ASYNC110 - the file gives no signal
            await asyncio.sleep(0.01)


async def test_changed_file_is_read(tmp_path: Path) -> None:
    url = keys_url(tmp_path, a="acme")
    directory = LiveDirectory(key_store(url), refresh_s=0.01)
    async with ApiKeys(directory) as keys:
        assert (gets_in(keys, "a"), gets_in(keys, "b")) == (True, False)
        keys_url(tmp_path, b="acme")
        await until(lambda: gets_in(keys, "b"))
        assert not gets_in(keys, "a")


@pytest.mark.parametrize(("content", "reason"), BROKEN)
async def test_broken_file_replaces_nothing(
    tmp_path: Path, content: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = keys_url(tmp_path, a="acme")
    directory = LiveDirectory(key_store(url), refresh_s=1e6)
    async with ApiKeys(directory) as keys:
        before = failures("invalid")
        (tmp_path / "keys.json").write_bytes(content)
        for _ in range(2):
            await directory.refresh()
        assert gets_in(keys, "a")
        assert keys.keys_status() == "ok"
        assert failures("invalid") == before + 2
        assert REGISTRY.get_sample_value("penstock_keys_up") == 0
        told = [record for record in caplog.records if "could not read" in record.message]
        assert len(told) == 1  # once, rather than every two seconds
        keys_url(tmp_path, b="acme")
        await directory.refresh()
        assert gets_in(keys, "b")
        assert REGISTRY.get_sample_value("penstock_keys_up") == 1


@pytest.mark.parametrize(("content", "reason"), BROKEN)
def test_broken_file_is_refused_at_the_start(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"^PENSTOCK_KEYS_URL: {file}: .*({reason})"):
        LiveDirectory(key_store(file.as_uri()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"secret": "x"}, "unknown field `secret`"),
        ({"hash": "00"}, r"keys\[...\].hash|keys\[1\].hash"),
        ({"hash": ""}, r"keys\[1\].hash: is empty"),
        ({"tenant": ""}, r"keys\[1\].tenant: a tenant's name"),
        ({"tenant": "a\nb"}, r"keys\[1\].tenant: a tenant's name"),
        ({"tenant": "ü" * 129}, r"keys\[1\].tenant: a tenant's name"),
        ({"id": "short"}, "keys"),
        ({"scopes": ["everything"]}, "Invalid enum value 'everything'"),
        ({"expires_s": "tomorrow"}, "Expected `int . null`, got `str`"),
        ({}, r"keys\[1\].id: .* occurs twice"),
    ],
)
def test_wrong_key_in_a_file_is_named(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    file = tmp_path / "keys.json"
    keys_url(tmp_path, a="acme")
    document = json.loads(file.read_bytes())
    document["keys"].append(document["keys"][0] | change)
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match=reason):
        LiveDirectory(key_store(file.as_uri()))


TEXT, IMAGE, ALIAS = TEXT_MODEL.name, IMAGE_MODEL.name, TEXT_MODEL.aliases[0]
UNUSABLE: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"budget_webhook": "javascript:alert(1)"}, {}, r"plans\['team'\].budget_webhook: 'java"),
    ({"budget_webhook": "http://acme.example/"}, {}, "must be an https URL"),
    ({"budget_webhook": "https://10.0.0.1/"}, {}, "not public"),
    ({"budget_webhook": f"https://acme.example/?k={key_for('a')}"}, {}, "looks like an API key"),
    (
        {"per_model": {"gpt-9": {}}},
        {},
        r"plans\['team'\].per_model\['gpt-9'\]: model 'gpt-9' is not in the",
    ),
    ({"per_model": {ALIAS: {}}}, {}, f"is an alias; use the model's name, '{TEXT}'"),
    ({"per_model": {TEXT: {"pixel_steps_per_min": 1}}}, {}, "use tokens_per_min"),
    ({"per_model": {IMAGE: {"tokens_per_min": 1}}}, {}, "use pixel_steps_per_min"),
    ({"per_model": {TEXT: {"tokens_per_min": 2**54}}}, {}, "must be at most 9007199254740992"),
    ({"max_in_flight": 2**54}, {}, r"plans\['team'\].max_in_flight: must be at most"),
    ({}, {"models": ["gpt-9"]}, r"keys\[0\].models\[0\]: model 'gpt-9' is not in the catalog"),
    ({}, {"models": [ALIAS]}, "is an alias"),
    ({}, {"models": []}, r"keys\[0\].models: must not be empty"),
    ({}, {"scopes": []}, r"keys\[0\].scopes: must not be empty"),
    ({}, {"name": "a\x1b[2J"}, r"keys\[0\].name: must not contain unprintable characters"),
    ({}, {"name": f"my {key_for('b')}"}, r"keys\[0\].name: looks like an API key"),
    ({}, {"tenant": key_for("b")}, r"keys\[0\].tenant: looks like an API key"),
    (
        {},
        {"limits": {"requests_per_min": 2**54}},
        r"keys\[0\].limits.requests_per_min: must be at most",
    ),
    ({}, {"expires_s": 1_798_761_600_000}, r"keys\[0\].expires_s: must be before the year 10000"),
]


@pytest.mark.parametrize(("plan", "key", "reason"), UNUSABLE)
async def test_file_with_what_cannot_work_is_refused_with_its_line(
    tmp_path: Path, plan: dict[str, object], key: dict[str, object], reason: str
) -> None:
    file = tmp_path / "keys.json"
    keys_url(tmp_path, plans={"team": Plan()}, a="acme")
    good = json.loads(file.read_bytes())
    wrong = json.loads(file.read_bytes())
    wrong["plans"]["team"] |= plan
    wrong["keys"][0] |= key
    file.write_text(json.dumps(wrong, indent=1))
    served = list_served_names(CATALOG, allow_private=False)
    with pytest.raises(ConfigurationError, match=reason) as refused:
        LiveDirectory(key_store(file.as_uri()), served=served)
    found = re.match(rf"PENSTOCK_KEYS_URL: {file}: line (\d+): ", refused.value.message)
    assert found is not None
    (field,) = plan or key
    assert f'"{field}"' in "".join(file.read_text().splitlines()[: int(found[1])][-5:])
    assert key_for("b")[21:] not in refused.value.message
    # Expired keys may refer to deleted entries, and a running instance keeps its directory.
    file.write_text(json.dumps(good))
    directory = LiveDirectory(key_store(file.as_uri()), refresh_s=1e6, served=served)
    async with ApiKeys(directory) as keys:
        file.write_text(json.dumps(wrong))
        await directory.refresh()
        assert gets_in(keys, "a")
    wrong["plans"]["team"] = {}
    wrong["keys"][0]["revoked_s"] = 5
    file.write_text(json.dumps(wrong))
    LiveDirectory(key_store(file.as_uri()), served=served)


async def test_redis_that_names_a_model_that_is_gone_still_lets_in(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The file was checked when it was changed. The catalog has dropped the model since then."""
    async with KeyRedis(redis_url) as store:
        admin = Administration(store, actor="user ann", address="desk")
        await admin.start_directory(Document(keys=(stored("a", "acme", models=("gone",)),)))
    served = list_served_names(CATALOG, allow_private=False)
    async with ApiKeys(LiveDirectory(KeyRedis(redis_url), refresh_s=1e6, served=served)) as keys:
        assert gets_in(keys, "a")
    assert "keys[0].models[0]: model 'gone' is not in the catalog" in str(
        [vars(record) for record in caplog.records]
    )


@pytest.mark.parametrize(
    "url",
    ["file:///nowhere/keys.json", "file:relative", "gs://b/k", "x", "redis://h:x"],
)
def test_url_without_keys_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_KEYS_URL"):
        LiveDirectory(key_store(url))


async def test_keys_outlive_their_source_for_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    url = keys_url(tmp_path, a="acme")
    directory = LiveDirectory(key_store(url), lambda: now_s, refresh_s=1e6)
    async with ApiKeys(directory) as keys:
        (tmp_path / "keys.json").unlink()
        now_s = STALE_LIMIT_S
        await directory.refresh()
        assert gets_in(keys, "a")
        assert REGISTRY.get_sample_value("penstock_keys_age_seconds") == STALE_LIMIT_S
        now_s += 1
        with pytest.raises(Unavailable, match="can't be verified right now"):
            gets_in(keys, "a")
        assert "unreachable" in keys.keys_status()
        # A caller that requests the state must not learn where the keys are stored.
        assert str(tmp_path) not in keys.keys_status()
        assert "No such file" in caplog.records[-1].__dict__["reason"]


class Counted(KeyFile):
    """A store that counts how often it is read."""

    reads = 0

    async def read(self, version: str = "") -> StoredDocument | None:
        self.reads += 1
        return await super().read(version)


async def meets(keys: ApiKeys, name: str) -> bool:
    await keys.meet([(b"x-api-key", key_for(name).encode())])
    return gets_in(keys, name)


async def test_key_that_was_just_made_is_known_at_once(tmp_path: Path) -> None:
    url = keys_url(tmp_path, a="acme")
    async with ApiKeys(LiveDirectory(key_store(url), refresh_s=1e6)) as keys:
        assert not gets_in(keys, "b")
        keys_url(tmp_path, a="acme", b="acme")
        assert await meets(keys, "b")


async def test_new_secret_of_a_key_is_known_at_once(tmp_path: Path) -> None:
    keys_url(tmp_path, a="acme")
    async with (
        KeyFile(tmp_path / "keys.json", is_writable=True) as store,
        ApiKeys(LiveDirectory(KeyFile(tmp_path / "keys.json"), refresh_s=1e6)) as keys,
    ):
        admin = Administration(store, actor="user ann", address="desk")
        issued = await admin.rotate_key(stored("a", "acme").id, 0)
        headers = [(b"x-api-key", issued.key.text.encode())]
        await keys.meet(headers)
        assert keys.caller_of(headers).tenant == "acme"


async def test_wrong_keys_are_looked_for_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, pauses = 100.0, list[float]()

    async def pass_time(pause_s: float) -> None:
        nonlocal now_s
        if 0 < pause_s < 1e6:
            pauses.append(pause_s)
            now_s += pause_s
        await real_sleep(pause_s if pause_s >= 1e6 else 0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr("api.http.key_refresh.asyncio.sleep", pass_time)
    keys_url(tmp_path, a="acme")
    store = Counted(tmp_path / "keys.json")
    async with ApiKeys(LiveDirectory(store, lambda: now_s, refresh_s=1e6)) as keys:
        before = store.reads
        found = await asyncio.gather(*(meets(keys, f"wrong {one}") for one in range(200)))
        assert not any(found)
        assert (store.reads - before, pauses) == (2, [LOOK_AGAIN_S])
        for one in range(5):
            assert not await meets(keys, f"later {one}")
        assert store.reads - before == 2 + 5
        assert pauses == [LOOK_AGAIN_S] * 6
        assert not await meets(keys, "later 1")  # at once
        for header in ([], [(b"x-api-key", b"x")], [(b"x-api-key", key_for("a").encode())]):
            await keys.meet(header)
        assert store.reads - before == 2 + 5


class Broken(KeyFile):
    """A store with a bug that shows up starting with the second read."""

    reads = 0

    async def read(self, version: str = "") -> StoredDocument | None:
        self.reads += 1
        if self.reads > 1:
            raise ZeroDivisionError
        return await super().read(version)


async def test_instance_that_would_see_no_revocation_lets_nobody_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys_url(tmp_path, a="acme")
    directory = LiveDirectory(Broken(tmp_path / "keys.json"), refresh_s=0.001)
    async with ApiKeys(directory) as keys:
        await until(lambda: directory.current() is None)
        with pytest.raises(Unavailable, match="can't be verified right now"):
            gets_in(keys, "a")
        assert "refresh" in keys.keys_status()
        assert "ZeroDivisionError" in caplog.text
