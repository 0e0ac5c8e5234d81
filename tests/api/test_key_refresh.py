"""Keys change while the API runs; what is broken or gone changes nothing."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from api.errors import Unauthorized
from api.http.auth import ApiKeys
from api.http.key_refresh import STALE_LIMIT_S, LiveDirectory
from shared.errors import ConfigurationError, Unavailable
from shared.stores.key_file import KeyFile
from shared.stores.key_stores import key_store
from shared.tenants.key_store import StoredDocument
from tests.keys import key_for, keys_url
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
    (b'{"tenants": {"acme": {"plan": "gold"}}}', r"tenants\['acme'\].plan: there is no plan"),
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
        told = [record for record in caplog.records if "could not be read" in record.message]
        assert len(told) == 1  # once, not every two seconds
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
        ({}, r"keys\[1\].id: .* is there twice"),
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
        with pytest.raises(Unavailable, match="can't be checked now"):
            gets_in(keys, "a")
        assert "out of reach" in keys.keys_status()
        # Whoever asks for the state is not to learn where the keys are.
        assert str(tmp_path) not in keys.keys_status()
        assert "No such file" in caplog.records[-1].__dict__["reason"]


class Broken(KeyFile):
    """A store with a bug, from its second read on."""

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
        with pytest.raises(Unavailable, match="can't be checked now"):
            gets_in(keys, "a")
        assert "refresh" in keys.keys_status()
        assert "ZeroDivisionError" in caplog.text
