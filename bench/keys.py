"""The cost of a key for a request, and whether the time of a refusal reveals part of the key."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress

from api.errors import Unauthorized
from api.http.auth import ApiKeys, RawHeaders
from api.http.key_refresh import LiveDirectory
from bench.report import Figure, Outcome
from shared.stores.key_stores import KeyFile
from shared.tenants.api_key import SALT_BYTES, SECRET_LENGTH, ApiKey, hash_of, key_of, new_key
from shared.tenants.directory import (
    MAX_KEYS,
    Directory,
    Document,
    StoredKey,
    decode_document,
    encode_document,
)
from shared.tenants.key_store import StoredDocument

CALLS = 200
ROUNDS = 100
FLAT_WITHIN = 0.05
"""Share of the median: a third of a microsecond, far below what a network hides."""


class _Kept(KeyFile):
    """A store with one document."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.source = "bench"

    def read_at_start(self) -> StoredDocument:
        return StoredDocument("1", self._data)


def run() -> Outcome:
    """Measures keys of each kind in turns, so that a busy moment meets all of them."""
    keys = {name: new_key() for name in ("valid", "revoked", "expired", "unknown")}
    wrong = key_of(keys["valid"].id, "0" * SECRET_LENGTH)
    others = [_stored(new_key()) for _ in range(MAX_KEYS - 3)]
    named = (
        _stored(keys["valid"]),
        _stored(keys["revoked"], revoked_s=1),
        _stored(keys["expired"], expires_s=1),
    )
    data = encode_document(Document(keys=(*others, *named)))
    access = ApiKeys(LiveDirectory(_Kept(data)))
    sent = {name: _headers(key.text) for name, key in (keys | {"wrong secret": wrong}).items()}
    sent["malformed"] = _headers("pk_live_x")
    seconds: dict[str, list[float]] = {name: [] for name in sent}
    for _ in range(ROUNDS):
        for name, headers in sent.items():
            seconds[name].append(_time(access, headers))
    medians = {name: statistics.median(samples) * 1e6 for name, samples in seconds.items()}
    refused = [medians[name] for name in ("wrong secret", "revoked", "expired", "unknown")]
    spread = (max(refused) - min(refused)) / statistics.median(refused)
    figures = [Figure(f"{name} key", value, "µs") for name, value in medians.items()]
    figures.append(Figure("spread of refusals", spread, "of the median", "<=", FLAT_WITHIN))
    figures += _figures_of_document(data)
    return Outcome(figures)


def _figures_of_document(data: bytes) -> list[Figure]:
    began_s = time.process_time()
    Directory(decode_document(data, "bench"))
    read_ms = (time.process_time() - began_s) * 1000
    return [
        Figure(f"directory of {MAX_KEYS} keys", len(data) / 1e6, "MB"),
        Figure(f"reading {MAX_KEYS} keys", read_ms, "ms"),
    ]


def _stored(key: ApiKey, **ends: int) -> StoredKey:
    salt = bytes(SALT_BYTES)
    return StoredKey(
        id=key.id,
        tenant="acme",
        name="bench",
        salt=salt.hex(),
        hash=hash_of(salt, key).hex(),
        created_s=1,
        revoked_s=ends.get("revoked_s"),
        expires_s=ends.get("expires_s"),
    )


def _headers(key: str) -> RawHeaders:
    usual = [(name, b"x" * 20) for name in (b"host", b"accept", b"user-agent", b"content-type")]
    return [*usual, (b"authorization", b"Bearer " + key.encode())]


def _time(access: ApiKeys, headers: RawHeaders) -> float:
    """Seconds of CPU for one call: other processes do not count."""
    began_s = time.process_time()
    for _ in range(CALLS):
        with suppress(Unauthorized):
            access.caller_of(headers)
    return (time.process_time() - began_s) / CALLS
