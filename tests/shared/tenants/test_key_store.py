"""Behavior shared by all stores for the key directory, in a file and in Redis, and changes to the
directory.
"""

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import redis

from shared.errors import BadInput, ConfigurationError, Unavailable
from shared.stores.key_stores import KeyFile, KeyRedis, key_store
from shared.stores.redis_client import NO_REDIS
from shared.tenants.administration import (
    FORGOTTEN_AFTER_S,
    Administration,
    InUse,
    IssuedKey,
    KeyRequest,
    NotThere,
)
from shared.tenants.api_key import ApiKey, parse_key
from shared.tenants.directory import Directory, Document, KeyState, StoredTenant, encode_document
from shared.tenants.key_store import AuditEvent, KeysReadOnly, KeyStore, NoDirectory
from shared.tenants.plan import Limits, Plan
from tests.clock import Clock
from tests.keys import key_for, stored

pytestmark = pytest.mark.anyio
ACT = AuditEvent(at_s=1.5, actor="user ann", address="desk", action="test", target="x")
KEY = KeyRequest("acme", "website")


@pytest.fixture(params=["file", "redis"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str
) -> AsyncIterator[KeyStore]:
    url = redis_url if request.param == "redis" else (tmp_path / "keys.json").as_uri()
    async with key_store(url, is_writable=True) as opened:
        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
async def admin(store: KeyStore, clock: Clock) -> Administration:
    made = Administration(store, actor="user ann", address="desk", clock=clock)
    await made.start_directory(Document())
    return made


async def state_of(admin: Administration, key: ApiKey, now_s: float) -> KeyState:
    return Directory(await admin.read()).find(key, now_s).state


async def test_store_begins_without_a_directory(store: KeyStore) -> None:
    with pytest.raises(NoDirectory):
        await store.read()
    assert not await store.replace("1", b"{}", ACT)
    assert await store.replace("", b"{}", ACT)
    assert not await store.replace("", b'{"keys": []}', ACT)
    found = await store.read()
    assert found is not None
    assert found.data == b"{}"


async def test_only_a_new_version_is_read(store: KeyStore) -> None:
    await store.replace("", b"{}", ACT)
    first = await store.read("another")
    assert first is not None
    assert await store.read(first.version) is None
    assert await store.replace(first.version, b'{"keys": []}', ACT)
    second = await store.read(first.version)
    assert second is not None
    assert second.data == b'{"keys": []}'
    assert not await store.replace(first.version, b"{}", ACT)


async def test_acts_are_kept_newest_first(store: KeyStore) -> None:
    version = ""
    for number in range(5):
        act = msgspec.structs.replace(ACT, target=f"key {number}", after={"number": number})
        assert await store.replace(version, f'{{"keys": [{" " * number}]}}'.encode(), act)
        found = await store.read(version)
        assert found is not None
        version = found.version
    assert not await store.replace("old", b"{}", ACT)  # changes that failed are not recorded
    first = await store.audit_events(2)
    rest = await store.audit_events(10, first[-1].id)
    assert [noted.act.after for noted in first + rest] == [{"number": n} for n in (4, 3, 2, 1, 0)]
    assert first[0].act.at_s == ACT.at_s
    assert await store.audit_events(10, rest[-1].id) == []
    assert len(await store.audit_events(10, "9" * 18)) == 5
    assert await store.audit_events(10, "0-1") == []


async def test_latest_use_is_kept_in_redis(store: KeyStore) -> None:
    await store.note_uses({})
    await store.note_uses({"a": 5, "b": 7})
    await store.note_uses({"a": 3, "b": 8})
    assert await store.uses() == ({"a": 5, "b": 8} if isinstance(store, KeyRedis) else {})


async def test_new_key_is_accepted_and_only_its_hash_is_stored(
    store: KeyStore, admin: Administration, clock: Clock
) -> None:
    limits = Limits(requests_per_min=5)
    request = KeyRequest("acme", "ci", ("embeddings",), ("minilm",), limits, 100)
    issued = await admin.create_key(request)
    assert parse_key(issued.key.text) == issued.key
    state, caller = Directory(await admin.read()).find(issued.key, clock.now_s)
    assert (state, caller.tenant, caller.key_id) == ("valid", "acme", issued.key.id)
    assert (caller.scopes, caller.models) == (frozenset({"embeddings"}), frozenset({"minilm"}))
    assert caller.key_limits == limits
    assert await state_of(admin, issued.key, 1_000_100) == "expired"
    secret = issued.key.text.rpartition("_")[2]
    found = await store.read()
    assert found is not None
    audit_events = msgspec.json.encode([noted.act for noted in await store.audit_events(10)])
    assert secret.encode() not in found.data + audit_events
    assert issued.stored.hash.encode() not in audit_events


async def test_rotated_key_has_two_secrets_for_a_time(admin: Administration, clock: Clock) -> None:
    first = await admin.create_key(KEY)
    second = await admin.rotate_key(first.key.id, 60)
    states = [await state_of(admin, one.key, clock.now_s + 59) for one in (first, second)]
    assert states == ["valid", "valid"]
    states = [await state_of(admin, one.key, clock.now_s + 60) for one in (first, second)]
    assert states == ["unknown", "valid"]
    third = await admin.rotate_key(first.key.id, 0)
    states = [await state_of(admin, one.key, clock.now_s) for one in (first, second, third)]
    assert states == ["unknown", "unknown", "valid"]


async def test_revoked_key_ends_with_its_old_secret(admin: Administration, clock: Clock) -> None:
    first = await admin.create_key(KEY)
    second = await admin.rotate_key(first.key.id, 60)
    revoked = await admin.revoke_key(first.key.id)
    assert revoked.revoked_s == clock.now_s
    assert await state_of(admin, second.key, clock.now_s) == "revoked"
    assert await state_of(admin, first.key, clock.now_s) == "unknown"
    clock.now_s += 5
    assert (await admin.revoke_key(first.key.id)).revoked_s == revoked.revoked_s
    with pytest.raises(BadInput, match="is revoked"):
        await admin.rotate_key(first.key.id, 0)


async def test_ended_keys_are_forgotten_in_the_end(admin: Administration, clock: Clock) -> None:
    old = await admin.create_key(KEY)
    await admin.revoke_key(old.key.id)
    clock.now_s += FORGOTTEN_AFTER_S + 1
    new = await admin.create_key(KEY)
    assert [key.id for key in (await admin.read()).keys] == [new.key.id]


async def test_plans_and_tenants_are_set(
    store: KeyStore, admin: Administration, clock: Clock
) -> None:
    with pytest.raises(BadInput, match="plan 'team' does not exist"):
        await admin.set_tenant("acme", "team")
    await admin.set_plan("team", Plan(weight=4.0))
    await admin.set_tenant("acme", "team")
    key = (await admin.create_key(KEY)).key
    assert Directory(await admin.read()).find(key, 0).caller.plan.weight == 4.0
    with pytest.raises(InUse, match=r"1 tenant uses it \(acme\)"):
        await admin.set_plan("team", None)
    await admin.set_plan("default", Plan(weight=2.0))
    await admin.set_tenant("acme", None)
    await admin.set_plan("team", None)
    assert Directory(await admin.read()).find(key, 0).caller.plan.weight == 2.0
    with pytest.raises(NotThere):
        await admin.set_plan("team", None)
    with pytest.raises(BadInput):
        await admin.set_plan("no plan", Plan())
    audit_events = [(noted.act.action, noted.act.target) for noted in await store.audit_events(3)]
    assert audit_events == [
        ("plan.remove", "team"),
        ("tenant.set", "acme"),
        ("plan.set", "default"),
    ]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (KEY._replace(tenant=""), "a tenant's name"),
        (KEY._replace(tenant="a\nb"), "a tenant's name"),
        (KEY._replace(name=""), "length >= 1"),
        (KEY._replace(expires_in_s=0), "must be in the future"),
    ],
)
async def test_wrong_request_changes_nothing(
    admin: Administration, request_: KeyRequest, reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        await admin.create_key(request_)
    assert (await admin.read()).keys == ()


async def test_unknown_keys_are_not_there(admin: Administration) -> None:
    for asked in (admin.revoke_key("nobody"), admin.rotate_key("nobody", 0)):
        with pytest.raises(NotThere):
            await asked
    with pytest.raises(BadInput, match="overlap"):
        await admin.rotate_key("nobody", -1)


async def test_changes_at_the_same_time_all_happen(
    store: KeyStore, admin: Administration, clock: Clock
) -> None:
    first, second = await admin.create_key(KEY), await admin.create_key(KEY)
    made = await asyncio.gather(
        *(admin.create_key(KEY) for _ in range(8)),
        admin.rotate_key(first.key.id, 60),
        admin.revoke_key(second.key.id),
        admin.rotate_key(first.key.id, 60),
    )
    issued = [one for one in made if isinstance(one, IssuedKey)]
    directory = Directory(await admin.read())
    states = [directory.find(one.key, clock.now_s).state for one in issued]
    assert states == ["valid"] * 10
    assert directory.find(second.key, clock.now_s).state == "revoked"
    assert directory.find(first.key, clock.now_s).state == "unknown"  # two rotations later
    assert len((await admin.read()).keys) == 10
    assert len(await store.audit_events(100)) == 1 + 2 + 11


async def test_file_that_others_manage_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(encode_document(Document(tenants={}, keys=(stored("a", "acme"),))))
    admin = Administration(KeyFile(file), actor="key x", address="127.0.0.1")
    for asked in (admin.create_key(KEY), admin.set_tenant("acme", None)):
        with pytest.raises(KeysReadOnly, match="read-only"):
            await asked
    assert sorted(os.listdir(tmp_path)) == ["keys.json"]


async def test_audit_event_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    store = KeyFile(tmp_path / "keys.json", is_writable=True)
    await store.replace("", b"{}", ACT)
    with (tmp_path / "keys.json.audit.jsonl").open("ab") as audit:
        audit.write(b'{"at_s": \n\xff\n')
    for limit in (1, 10):
        assert [event.id for event in await store.audit_events(limit)] == ["0"]


async def test_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    store = KeyFile(file, is_writable=True)
    assert await store.replace("", b"{}", ACT)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    current = await store.read()
    assert current is not None
    assert await store.replace(current.version, b'{"keys": []}', ACT)
    assert file.stat().st_mode & 0o777 == 0o640


async def test_two_tenants_cannot_freeze_each_other(
    store: KeyStore, admin: Administration, clock: Clock
) -> None:
    """Both keys' requests were accepted before either tenant was frozen."""
    issued = {
        tenant: await admin.create_key(KeyRequest(tenant, "x", ("admin",)))
        for tenant in ("acme", "globex")
    }
    first, second = (
        Administration(store, actor=f"key {issued_key.key.id}", address="desk", clock=clock)
        for issued_key in issued.values()
    )
    await first.freeze_tenant("globex", is_frozen=True)
    with pytest.raises(InUse, match="has just been frozen"):
        await second.freeze_tenant("acme", is_frozen=True)
    directory = Directory(await admin.read())
    assert directory.find(issued["acme"].key, clock.now_s).state == "valid"


async def test_file_that_is_not_replaced_leaves_no_copy(tmp_path: Path) -> None:
    store = KeyFile(tmp_path / "keys.json", is_writable=True)
    await store.replace("", b"{}", ACT)
    before = sorted(os.listdir(tmp_path))
    current = await store.read()
    assert current is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(Unavailable, match="File too large"):
            await store.replace(current.version, b" " * 200_000, ACT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("url", ["redis://[bad", "file://[/keys.json", "keys.json"])
def test_setting_that_names_no_store(url: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_KEYS_URL"):
        key_store(url)


async def test_nothing_is_changed_in_a_lost_redis(redis_url: str) -> None:
    """A key created at this point would be the only one that every instance knows."""
    async with KeyRedis(redis_url) as store:
        admin = Administration(store, actor="key x", address="127.0.0.1")
        await admin.start_directory(Document(tenants={}, keys=(stored("a", "acme"),)))
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        with pytest.raises(NoDirectory):
            await admin.create_key(KEY)
        with pytest.raises(BadInput, match="plan 'gone' does not exist"):
            await admin.start_directory(Document(tenants={"a": StoredTenant("gone")}))


async def test_redis_out_of_reach_is_told() -> None:
    async with KeyRedis(NO_REDIS) as store:
        for asked in (store.read(), store.audit_events(1), store.uses(), store.note_uses({"a": 1})):
            with pytest.raises(Unavailable):
                await asked


async def test_same_document_is_read_from_both(tmp_path: Path, redis_url: str) -> None:
    data = encode_document(Document(keys=(stored("a", "acme"),)))
    (tmp_path / "keys.json").write_bytes(data)
    async with KeyRedis(redis_url) as in_redis:
        await in_redis.replace("", data, ACT)
        key = parse_key(key_for("a"))
        assert key is not None
        for store in (in_redis, KeyFile(tmp_path / "keys.json")):
            admin = Administration(store, actor="", address="")
            assert Directory(await admin.read()).find(key, 0).state == "valid"
