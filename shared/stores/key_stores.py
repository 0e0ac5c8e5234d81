"""Finds the key store at PENSTOCK_KEYS_URL and the names that its plans and keys may use.

In a file that the API only reads, such as one mounted by Secret Manager or Kubernetes. The CLI
first appends an audit event to FILE.audit.jsonl, then replaces the whole file. Last-used times are
not recorded.

In Redis: one hash, a stream of audit events, and a hash of last uses. The directory is a single
versioned value, so readers never see a partial change and concurrent writers don't undo each
other's changes. No key has a TTL, so Redis doesn't evict anything. A Redis instance that has lost
its data has no version. Readers then keep their snapshots, and a copy in their region's Redis.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

import msgspec
from prometheus_client import Counter, Gauge
from redis.connection import parse_url

from shared.errors import MALFORMED, ConfigurationError, Unavailable
from shared.models.catalog import Catalog
from shared.stores.redis_client import KEY_PREFIX, RedisLink, RedisStore, load_script
from shared.tenants.directory import MAX_KEYS
from shared.tenants.key_store import (
    HOW_TO_START,
    MAX_AUDIT_EVENTS,
    AuditEvent,
    KeysReadOnly,
    KeyStore,
    LoggedEvent,
    NoDirectory,
    StoredDocument,
)
from shared.tenants.rules import Served
from shared.webhooks.event import parse_webhook_url

log = logging.getLogger(__name__)

ERRORS = Counter(
    "penstock_keys_errors_total",
    "Failed round trips to Redis about API keys, by operation.",
    ["operation"],
)
UP = Gauge(
    "penstock_keys_redis_up",
    "1 while Redis is being asked for API keys, 0 while the breaker is open.",
)
COPY_UP = Gauge(
    "penstock_keys_copy_redis_up",
    "1 while the region's Redis is being asked for the copy of API keys, 0 while the breaker is "
    "open.",
)
_REPLACE = load_script("shared/stores/key_replace.lua")
_USES = load_script("shared/stores/key_uses.lua")


class KeyRedis(RedisStore):
    """A directory stored in a Redis instance."""

    def __init__(self, redis_url: str, *, timeout_s: float = 1.0) -> None:
        super().__init__(
            RedisLink(
                "keys",
                redis_url,
                timeout_s=timeout_s,
                up=UP,
                errors=ERRORS,
                field="keys_url",
                checks_policy=True,
            )
        )
        self._commands = self._link.commands("the API key store")
        self._directory = f"{KEY_PREFIX}keys"
        self._audit = f"{KEY_PREFIX}keys:audit"
        self._used = f"{KEY_PREFIX}keys:used"
        self.source = "Redis"
        self.read_only = ""

    def read_at_start(self) -> StoredDocument | None:
        """Returns None because Redis isn't queried until the store is open."""
        return None

    async def read(self, version: str = "") -> StoredDocument | None:
        """Reads the directory. Returns None if the version is unchanged.

        Raises:
            NoDirectory: Redis has no directory, or has lost it.
        """
        if version:
            known_version = await self._commands.run("HGET", self._directory, "version")
            if known_version is not None and known_version.decode("latin-1") == version:
                return None
        new, data = await self._commands.run("HMGET", self._directory, "version", "document")
        if new is None or data is None:
            reason = f"Redis contains no API keys; {HOW_TO_START}"
            raise NoDirectory(reason, public=reason)
        return StoredDocument(new.decode("latin-1"), data)

    async def replace(self, version: str, data: bytes, act: AuditEvent) -> bool:
        """Replaces the directory if it is at this version, and records the action.

        Raises:
            Unavailable: Redis did not respond, but may have replaced it.
        """
        args = (version, secrets.token_hex(8), data, msgspec.json.encode(act), MAX_AUDIT_EVENTS)
        done = await self._commands.run_script(_REPLACE, [self._directory, self._audit], *args)
        return bool(done)

    async def audit_events(self, limit: int, before: str = "") -> list[LoggedEvent]:
        """Returns the audit events before `before`, newest first."""
        end = f"({before}" if before else "+"
        entries = await self._commands.run("XREVRANGE", self._audit, end, "-", "COUNT", limit)
        return [
            LoggedEvent(act_id.decode(), msgspec.json.decode(fields[b"act"], type=AuditEvent))
            for act_id, fields in entries
        ]

    async def note_uses(self, used_s: Mapping[str, int]) -> None:
        """Records when keys were last used."""
        if used_s:
            pairs = [word for pair in used_s.items() for word in pair]
            await self._commands.run_script(_USES, [self._used], 2 * MAX_KEYS, *pairs)

    async def uses(self) -> dict[str, int]:
        """Returns when keys were last used, in Unix seconds, keyed by ID."""
        used = await self._commands.run("HGETALL", self._used)
        return {key_id.decode(): int(used_s) for key_id, used_s in used.items()}


class KeyCopy(RedisStore):
    """A copy of a directory in the region's Redis.

    Instances need that Redis anyway. An instance that starts while the directory's region is
    unreachable therefore has the same keys as its neighbors.
    """

    def __init__(self, redis_url: str) -> None:
        super().__init__(RedisLink("keys copy", redis_url, up=COPY_UP, errors=ERRORS))
        self._commands = self._link.commands("the API key copy")
        self._key = f"{KEY_PREFIX}keys:copy"

    async def keep(self, document: StoredDocument, at_s: float, keep_s: float) -> None:
        """Writes the copy.

        Args:
            at_s: Unix time when the directory was known to be current.
            keep_s: how long the copy stays useful, in seconds.
        """
        data = msgspec.msgpack.encode((document.version, document.data, at_s))
        await self._commands.run("SET", self._key, data, "EX", max(1, round(keep_s)))

    async def read(self) -> tuple[StoredDocument, float] | None:
        """Returns the copy and the last time it was known to be current.

        None if there is no copy.
        """
        data = await self._commands.run("GET", self._key)
        if data is None:
            return None
        version, document, at_s = msgspec.msgpack.decode(data, type=tuple[str, bytes, float])
        return StoredDocument(version, document), at_s


class KeyFile:
    """A file that contains the directory.

    The whole file is read each time, because mounted secrets do not preserve modification times.
    """

    def __init__(self, path: Path, *, is_writable: bool = False) -> None:
        self._path = path
        self._audit = path.with_name(f"{path.name}.audit.jsonl")
        self._lock = path.with_name(f"{path.name}.lock")
        self.source = str(path)
        self.read_only = "" if is_writable else f"API keys are in {path}, which is read-only"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    def read_at_start(self) -> StoredDocument:
        """Reads the file.

        Raises:
            ConfigurationError: the file can't be read.
        """
        try:
            return self._read()
        except Unavailable as error:
            raise ConfigurationError(
                f"PENSTOCK_KEYS_URL: {error.message}", field="keys_url"
            ) from error

    async def read(self, version: str = "") -> StoredDocument | None:
        """Reads the file. Returns None if the version is unchanged.

        Raises:
            NoDirectory: the file does not exist.
            Unavailable: the file can't be read.
        """
        document = await asyncio.to_thread(self._read)
        return None if document.version == version else document

    def _read(self) -> StoredDocument:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError as error:
            raise NoDirectory(f"{self._path}: {error.strerror}; {HOW_TO_START}") from error
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror or error}") from error
        return StoredDocument(hashlib.sha256(data).hexdigest(), data)

    async def replace(self, version: str, data: bytes, act: AuditEvent) -> bool:
        """Replaces the file if it is at this version. Other processes wait until this is done.

        Raises:
            KeysReadOnly: the file can't be changed here.
            Unavailable: the file can't be written.
        """
        if self.read_only:
            raise KeysReadOnly(self.read_only)
        return await asyncio.to_thread(self._replace, version, data, act)

    def _replace(self, version: str, data: bytes, act: AuditEvent) -> bool:
        with self._lock_file():
            try:
                if version != self._read().version:
                    return False
            except NoDirectory:
                if version:
                    return False
            # A logged action that then fails is less misleading than an action missing from the
            # log.
            with self._audit.open("ab") as audit:
                audit.write(msgspec.json.encode(act) + b"\n")
                _to_disk(audit.fileno())
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as new:
                try:
                    new.write(data)
                    new.flush()
                    with suppress(FileNotFoundError):  # a new file is readable only by its owner
                        os.fchmod(new.fileno(), stat.S_IMODE(self._path.stat().st_mode))
                    _to_disk(new.fileno())
                    os.replace(new.name, self._path)
                except BaseException:
                    os.unlink(new.name)
                    raise
        return True

    @contextmanager
    def _lock_file(self) -> Iterator[None]:
        try:
            with self._lock.open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror or error}") from error

    async def audit_events(self, limit: int, before: str = "") -> list[LoggedEvent]:
        """Returns the audit events before `before`, newest first.

        Raises:
            Unavailable: the events can't be read.
        """
        limit = min(limit, MAX_AUDIT_EVENTS)
        return await asyncio.to_thread(lambda: list(islice(self._read_events(before), limit)))

    def _read_events(self, before: str) -> Iterator[LoggedEvent]:
        """Yields the readable events before `before`, newest first."""
        try:
            lines = self._audit.read_bytes().splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise Unavailable(f"{self._audit}: {error.strerror or error}") from error
        end = min(int(before.partition("-")[0]), len(lines)) if before else len(lines)
        for number in reversed(range(end)):
            try:
                event = msgspec.json.decode(lines[number], type=AuditEvent)
            except MALFORMED as error:  # a write that was cut off
                place = f"{self._audit}:{number + 1}"
                log.warning("audit event left out", extra={"place": place, "reason": str(error)})
                continue
            yield LoggedEvent(str(number), event)

    async def note_uses(self, used_s: Mapping[str, int]) -> None:
        """Does nothing, because uses are not stored in the file."""

    async def uses(self) -> dict[str, int]:
        """Returns nothing, because uses are not stored."""
        return {}


def _to_disk(descriptor: int) -> None:
    os.fsync(descriptor)


def key_store(url: str, *, is_writable: bool = False) -> KeyStore:
    """Returns the store at `url` without opening it.

    Args:
        url: `file:///PATH`, or a Redis URL.
        is_writable: True if a file may be changed here. Redis can always be changed.

    Raises:
        ConfigurationError: the URL does not name a store.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"PENSTOCK_KEYS_URL: {error}", field="keys_url") from error
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return KeyFile(Path(unquote(parts.path)), is_writable=is_writable)
    if parts.scheme in ("redis", "rediss", "unix"):
        try:
            parse_url(url)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigurationError(f"PENSTOCK_KEYS_URL: {error}", field="keys_url") from error
        return KeyRedis(url)
    raise ConfigurationError(
        "PENSTOCK_KEYS_URL: must be file:///PATH, redis://HOST or rediss://HOST", field="keys_url"
    )


def list_served_names(catalog: Catalog, *, allow_private: bool) -> Served:
    """Returns the names that a deployment's plans and keys may use.

    Args:
        allow_private: True if the deployment's webhooks may use private addresses and http.
    """
    return Served(
        units={model.name: model.definition.unit for model in catalog.served},
        aliases={alias: model.name for model in catalog.served for alias in model.aliases},
        check_webhook=partial(parse_webhook_url, allow_private=allow_private),
    )
