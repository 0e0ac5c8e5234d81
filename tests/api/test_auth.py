"""Authentication: keys in headers, and keyless callers on the machine itself."""

import hmac
from collections.abc import Callable
from pathlib import Path

import pytest

from api.errors import Unauthorized
from api.http.auth import ApiKeys, access_of
from api.http.key_refresh import LiveDirectory
from shared.errors import ConfigurationError
from shared.stores.key_stores import key_store
from shared.tenants.api_key import (
    ALPHABET,
    CHECKSUM_LENGTH,
    SECRET_LENGTH,
    checksum,
    hash_of,
    key_of,
    new_key,
)
from shared.tenants.plan import Caller, Limits, Plan
from tests.api.harness import TEXT_MODEL, running_api, settings_for
from tests.keys import bearer, key_for, keys_url, stored

pytestmark = pytest.mark.anyio
NOW_S = 1_000_000.0
TEXT = {"model": TEXT_MODEL.name, "input": "a"}
KEYS = [
    stored("revoked", "acme", revoked_s=5),
    stored("expired", "acme", expires_s=int(NOW_S)),
    stored("lasting", "acme", expires_s=int(NOW_S) + 1),
]


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    url = keys_url(
        tmp_path,
        plans={"team": Plan(weight=2.0)},
        tenants={"acme": "team"},
        keys=[*KEYS, stored("narrow", "acme", limits=Limits(requests_per_min=3))],
        a="acme",
        o="other",
    )
    return ApiKeys(LiveDirectory(key_store(url)), lambda: NOW_S)


def ask(keys: ApiKeys, *headers: tuple[str, str]) -> Caller:
    return keys.caller_of([(name.encode(), value.encode("latin-1")) for name, value in headers])


@pytest.mark.parametrize(
    "header",
    [
        ("authorization", "Bearer {}"),
        ("authorization", "bearer   {} "),
        ("authorization", "Token {}"),
        ("x-api-key", "{}"),
    ],
)
async def test_key_is_found_wherever_clients_send_it(
    keys: ApiKeys, header: tuple[str, str]
) -> None:
    caller = ask(keys, (header[0], header[1].format(key_for("a"))))
    assert (caller.tenant, caller.plan.weight) == ("acme", 2.0)
    assert caller.key_id in key_for("a")


async def test_caller_has_the_limits_of_its_key(keys: ApiKeys) -> None:
    assert ask(keys, ("x-api-key", key_for("narrow"))).key_limits == Limits(requests_per_min=3)
    assert ask(keys, ("x-api-key", key_for("o"))).plan == Plan()


@pytest.mark.parametrize("authorization", ["Bearer {key}", "Basic x", "Bearer "])
async def test_one_key_in_both_headers_is_accepted(keys: ApiKeys, authorization: str) -> None:
    key = key_for("a")
    headers = ("authorization", authorization.format(key=key)), ("x-api-key", key)
    assert ask(keys, *headers).tenant == "acme"


async def test_two_keys_that_differ_are_refused(keys: ApiKeys) -> None:
    a, o = key_for("a"), key_for("o")
    for pair in (
        [("authorization", f"Bearer {a}"), ("x-api-key", o)],
        [("authorization", f"Bearer {a}"), ("authorization", f"Token {o}")],
        [("x-api-key", a), ("x-api-key", "x")],
    ):
        with pytest.raises(Unauthorized, match="two different API keys"):
            ask(keys, *pair)


@pytest.mark.parametrize(
    ("name", "reason"), [("revoked", "is revoked"), ("expired", "is expired"), ("x", "invalid")]
)
async def test_holder_of_a_key_is_told_why_it_is_refused(
    keys: ApiKeys, name: str, reason: str
) -> None:
    assert ask(keys, ("x-api-key", key_for("lasting"))).tenant == "acme"
    with pytest.raises(Unauthorized, match=reason):
        ask(keys, ("x-api-key", key_for(name)))


async def test_who_knows_only_the_id_is_told_nothing(keys: ApiKeys) -> None:
    for name in ("a", "revoked", "expired", "nobody"):
        guess = key_of(stored(name, "t").id, "0" * SECRET_LENGTH)
        with pytest.raises(Unauthorized, match=r"^the API key is invalid$"):
            ask(keys, ("x-api-key", guess.text))


async def test_every_wrong_key_takes_the_same_path(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rejection makes the same calls, regardless of the reason."""
    calls: list[str] = []

    def counted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object) -> object:
            calls.append(name)
            return call(*args)

        return counting

    monkeypatch.setattr("shared.tenants.directory.hash_of", counted("hash", hash_of))
    monkeypatch.setattr("hmac.compare_digest", counted("compare", hmac.compare_digest))
    wrong_secret = key_of(stored("a", "t").id, "0" * SECRET_LENGTH).text
    for key in (key_for("nobody"), wrong_secret, key_for("revoked"), key_for("expired")):
        calls.clear()
        with pytest.raises(Unauthorized):
            ask(keys, ("x-api-key", key))
        assert calls == ["hash", "compare", "compare"]


async def test_no_random_key_gets_in(keys: ApiKeys) -> None:
    for _ in range(10_000):
        with pytest.raises(Unauthorized):
            keys.caller_of([(b"x-api-key", new_key().text.encode())])


async def test_no_key_with_one_wrong_character_gets_in(keys: ApiKeys) -> None:
    key = key_for("a")
    for place, right in enumerate(key):
        for wrong in (*ALPHABET, "_", "-", " ", "\x00", "é", "", right + right):
            changed = key[:place] + wrong + key[place + 1 :]
            if changed.strip() != key:
                with pytest.raises(Unauthorized):
                    ask(keys, ("x-api-key", changed))


async def test_correct_checksum_does_not_make_a_key(keys: ApiKeys) -> None:
    start = key_for("a")[:-CHECKSUM_LENGTH]
    for place, right in enumerate(start):
        for wrong in set(ALPHABET) - {right}:
            changed = start[:place] + wrong + start[place + 1 :]
            with pytest.raises(Unauthorized):
                ask(keys, ("x-api-key", changed + checksum(changed)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "api.example.com", ""])
async def test_no_service_to_others_without_keys(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_KEYS_URL: is required"):
        access_of(settings_for(tmp_path, host=host))
    access_of(settings_for(tmp_path, host=host, keys_url=keys_url(tmp_path)))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
async def test_machine_itself_needs_no_key(tmp_path: Path, host: str) -> None:
    access = access_of(settings_for(tmp_path, host=host))
    for headers in ([], [(b"authorization", b"Bearer x")], [(b"host", b"[::1]:8080")]):
        assert access.caller_of(headers).tenant == "default"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:1"}, 200),
        ({"host": "app.localhost"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "https://app.example.com"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_pages_of_strangers_reach_no_open_api(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    """The pages' host name may resolve to this machine (DNS rebinding), and their forms need no
    host name.
    """
    settings = settings_for(tmp_path, cors_origins="https://app.example.com")
    async with running_api(settings) as api:
        assert (await api.http.get("/v1/models", headers=headers)).status_code == status
        plain = headers | {"content-type": "text/plain"}
        answer = await api.http.post("/v1/embeddings", json=TEXT, headers=plain)
        assert answer.status_code == status
        assert len(api.worker.jobs) == (status == 200)
        assert (await api.http.get("/healthz", headers=headers)).status_code == 200


async def test_keys_open_the_api_under_every_name(tmp_path: Path) -> None:
    async with running_api(settings_for(tmp_path, keys_url=keys_url(tmp_path, a="acme"))) as api:
        headers = bearer("a") | {"host": "api.example.com", "origin": "https://other.example"}
        assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
