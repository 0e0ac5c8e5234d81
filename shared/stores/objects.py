"""The object store: large inputs and results, uploaded files, and batch documents.

It is a folder on one machine or a bucket in the cloud, both accessed through obstore. Objects never
change: inputs and results are keyed by their content, so repeating a put is harmless and a cached
key always refers to the same data. A document is written once (`create`); the first writer wins.

obstore's synchronous calls run in threads. Its asynchronous calls abort the process (1 time in 12
here, obstore 0.12.1) if it exits soon after a call, because the responding thread still holds
Python objects.

Large objects are written in pieces, so they don't have to fit in memory.

Signed links to objects let responses and webhooks refer to an image instead of including it.
api/routes/files.py serves them, converting the format if `media_type` differs from the object's.
The signature is HMAC-SHA256 (RFC 2104) over the key, media type, and expiry, so none of these can
be changed.

Calls raise Unavailable if the store is unreachable.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

import google.auth
import obstore
from obstore import store
from obstore.exceptions import AlreadyExistsError, BaseError
from prometheus_client import Counter

from shared.errors import BadInput, ConfigurationError, InputTooLarge, PenstockError, Unavailable
from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.process.concurrency import FairPermits

PART_BYTES = 8 * 1024 * 1024
"""Parts are uploaded one at a time. S3 and GCS require at least 5 MiB, except for the last part."""
WRITE_BYTES = 1024 * 1024
"""Pieces are buffered up to this size, because each write uses a thread."""
MEMORY_BYTES = 2 * PART_BYTES + WRITE_BYTES
"""Memory used by a writer: one part being collected and one being uploaded."""

TIMEOUT_S = 10.0
"""Maximum duration of a put or get, including retries."""
KEY_LIMIT_BYTES = 512
SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
THREADS = 32
"""Threads wait for the store, so the number of threads needed depends on the store's latency. With
a one-way latency of 30 ms to the bucket, a call took 65 ms, and 8 threads stored 112 files (100 kB
each) per second, compared with 147 per second for a nearby bucket.

An owner gets at most half of the threads, so that one tenant's uploads can't lock out others.
"""
OWNER_SEGMENTS = 3
"""Keys of a tenant's objects start with two folders and the tenant's digest, so a tenant is treated
as a single owner across all folders.

Other keys identify content within this many segments, so each counts as a separate owner.
"""
LIST_CHUNK = 1000

ERRORS = Counter(
    "penstock_objects_errors_total",
    "Puts and gets that failed or took too long",
    ["operation"],
)
T = TypeVar("T")

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._=-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")
_TENANT = re.compile(r"[0-9a-f]{32}")
_EXTENSIONS = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "application/json": ".json",
    "application/jsonl": ".jsonl",
}
_CLOUD: dict[str, Any] = {
    "client_options": {"timeout": "10s", "connect_timeout": "3s", "allow_http": True},
    "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=TIMEOUT_S)},
}

_OUT_OF_REACH = "the object store is unreachable; try again"

LINK_VALID_S = 3600
"""How long a link is valid. OpenAI's API promises the same for image URLs."""


def open_upload(store: Any, key: str, attributes: dict[str, str] | None) -> Any:
    """Opens obstore's writer for a multipart upload. Does not call the store yet."""
    return obstore.open_writer(
        store, key, attributes=attributes, buffer_size=PART_BYTES, max_concurrency=1
    )


class ObjectWriter:
    """Writes one object in pieces: an async context manager.

    The object appears, complete, when the context exits. It never appears if the block raises.

    Raises:
        Unavailable: raised by any call if the store is unreachable or too slow.
    """

    def __init__(
        self,
        opening: Callable[[], Any],
        work: Callable[[Callable[[], Any]], Awaitable[None]],
    ) -> None:
        self._opening = opening
        self._work = work
        self._gathered = bytearray()
        self._upload: Any = None
        self.size_bytes = 0
        """Number of bytes written so far."""

    async def __aenter__(self) -> Self:
        self._upload = self._opening()
        return self

    async def write(self, data: bytes) -> None:
        """Adds a piece of any size."""
        self.size_bytes += len(data)
        self._gathered += data
        if len(self._gathered) >= WRITE_BYTES:
            await self._flush()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        upload = self._upload
        try:
            if error is None:
                await self._flush()
                await self._work(upload.close)
        finally:
            # An upload that is never completed is abandoned. A folder deletes its parts
            # immediately; a bucket does so through its lifecycle rule for incomplete uploads.
            self._upload = None

    async def _flush(self) -> None:
        data, self._gathered = bytes(self._gathered), bytearray()
        if data:
            await self._work(lambda: self._upload.write(data))


def object_key(folder: str, data: bytes, media_type: str) -> str:
    """Returns the key for `data`: `folder`, its BLAKE2b digest (256 bits) in hex, and extension."""
    return key_of_digest(folder, hashlib.blake2b(data, digest_size=32).hexdigest(), media_type)


def key_of_digest(folder: str, digest: str, media_type: str) -> str:
    """Returns the key for data with this digest, in the same form as `object_key`."""
    return f"{folder}/{digest[:2]}/{digest}{_EXTENSIONS.get(media_type, '')}"


async def store_if_large(blob: Blob, objects: ObjectStore) -> Blob:
    """Returns the blob for a message. A large blob is moved to the object store."""
    if blob.data is None or len(blob.data) <= INLINE_LIMIT_BYTES:
        return blob
    # Hashing 64 MiB takes 0.1 s, which would stall every request on the instance.
    key = await asyncio.to_thread(object_key, "inputs", blob.data, blob.media_type)
    await objects.put(key, blob.data, blob.media_type)
    return Blob(blob.media_type, object_key=key)


class GoogleCredentials:
    """The machine's credentials for a bucket, found by google-auth.

    obstore does not support workload identity federation. Credentials are loaded on first use, in
    the thread of that call. obstore keeps the token until shortly before it expires.
    """

    def __init__(self) -> None:
        self._provider: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        """Returns an OAuth 2.0 token and its expiry. obstore wraps google-auth's errors."""
        if self._provider is None:
            # Imported late because it loads the requests library, which a single-machine API does
            # not need.
            from obstore.auth.google import GoogleCredentialProvider

            credentials, _ = google.auth.default(scopes=SCOPES)
            self._provider = GoogleCredentialProvider(credentials)
        return self._provider()


class StoredObject(NamedTuple):
    """An object in a listing."""

    key: str
    size_bytes: int
    modified_at_s: float = 0.0
    """Unix time."""


class ObjectStore:
    """Objects in the folder or bucket at `url`, accessed by key.

    Args:
        url: `file://DIR` (relative to the working directory, or absolute with a third slash),
            `gs://BUCKET/PREFIX`, `s3://BUCKET/PREFIX`, or `memory://` (private to this object).
        setting: the setting that contains the URL, for error messages.

    Raises:
        ConfigurationError: the URL has a different form, or its folder can't be created.
    """

    def __init__(self, url: str, setting: str = "objects_url") -> None:
        self._url = url
        self._store = _open(url, setting)
        # The store has its own threads because a hung store would otherwise block other work.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="objects")
        self._turns = FairPermits(THREADS)
        # A folder does not store media types, so the type is derived from the key's extension.
        self._keeps_media_type = not isinstance(self._store, store.LocalStore)

    @property
    def is_on_google(self) -> bool:
        """True if the store is a bucket whose lifecycle rules delete old objects."""
        return self._url.startswith("gs://")

    async def put(self, key: str, data: bytes, media_type: str) -> None:
        """Writes an object atomically: a reader sees either the old data or the new."""
        _check(key)
        attributes = {"Content-Type": media_type} if self._keeps_media_type else None
        with _translate_errors("put", key):
            await self._work(
                key, partial(obstore.put, self._store, key, data, attributes=attributes)
            )

    async def get(self, key: str, max_bytes: int) -> bytes:
        """Returns the data of an object no larger than `max_bytes`.

        Raises:
            BadInput: the key is invalid, or the object does not exist.
            InputTooLarge: the object is larger. None of it was loaded.
        """
        _check(key)
        with _translate_errors("get", key):
            return await self._work(key, partial(_read, self._store, key, max_bytes))

    async def create(self, key: str, data: bytes, media_type: str) -> bool:
        """Writes an object unless it already exists.

        Returns whether it was written. If there are several writers, only one succeeds.

        Raises:
            Unavailable: the store is unreachable or too slow. The object may have been written.
        """
        _check(key)
        attributes = {"Content-Type": media_type} if self._keeps_media_type else None
        call = partial(obstore.put, self._store, key, data, attributes=attributes, mode="create")
        with _translate_errors("put", key):
            try:
                await self._work(key, call)
            except AlreadyExistsError:
                return False
        return True

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns `length` bytes from `start`. The object must contain all of them.

        Raises:
            BadInput: the key is invalid, or the object does not exist.
        """
        _check(key)
        if not length:
            return b""
        call = partial(obstore.get_range, self._store, key, start=start, length=length)
        with _translate_errors("get", key):
            return bytes(await self._work(key, call))

    async def listing(self, folder: str, limit: int, after: str = "") -> list[StoredObject]:
        """Returns up to `limit` objects in a folder and its subfolders, in key order.

        Args:
            folder: folder without a trailing slash.
            after: the listing starts after this key, whether or not it exists.
        """
        _check(folder)
        with _translate_errors("list", folder):
            return await self._work(folder, partial(_list, self._store, folder, limit, after))

    async def list_modified_before(
        self, folder: str, before_s: float
    ) -> AsyncIterator[StoredObject]:
        """Yields a folder's objects, at any depth, last written before `before_s` (Unix time)."""
        _check(folder)
        with _translate_errors("list", folder):
            chunks = await self._work(
                folder, partial(obstore.list, self._store, f"{folder}/", chunk_size=LIST_CHUNK)
            )
            while chunk := await self._work(folder, partial(next, chunks, [])):
                for stored_object in map(_to_stored_object, chunk):
                    if stored_object.modified_at_s < before_s:
                        yield stored_object

    async def folders(self, folder: str) -> list[str]:
        """Returns the names of the folders directly below a folder, in order."""
        _check(folder)
        with _translate_errors("list", folder):
            objects = await self._work(
                folder, partial(obstore.list_with_delimiter, self._store, f"{folder}/")
            )
        return sorted(path.rstrip("/").rpartition("/")[2] for path in objects["common_prefixes"])

    async def delete(self, key: str) -> None:
        """Deletes an object. A missing object is not an error."""
        _check(key)
        with _translate_errors("delete", key), suppress(FileNotFoundError):
            await self._work(key, partial(obstore.delete, self._store, key))

    def writer(self, key: str, media_type: str) -> ObjectWriter:
        """Writes one object in pieces, for use in `async with`."""
        _check(key)
        attributes = {"Content-Type": media_type} if self._keeps_media_type else None
        opening = partial(open_upload, self._store, key, attributes)
        return ObjectWriter(opening, partial(self._write, key))

    def download(self, key: str, file: Path, max_bytes: int) -> None:
        """Writes an object to a file, in the calling thread. Raises the same errors as `get`."""
        _check(key)
        with _translate_errors("get", key):
            object_ = obstore.get(self._store, key)
            _check_size(key, object_.meta["size"], max_bytes)
            with file.open("wb") as target:
                for piece in object_:
                    target.write(piece)

    async def rename(self, key: str, new_key: str) -> None:
        """Moves an object, replacing any object already at the new key. The data is not downloaded.

        Raises:
            Unavailable: the store is unreachable or too slow. The object is at either the old key
                or the new one.
        """
        _check(key)
        _check(new_key)
        with _translate_errors("put", new_key):
            await self._work(key, partial(obstore.rename, self._store, key, new_key))

    async def _write(self, key: str, call: Callable[[], Any]) -> None:
        with _translate_errors("put", key):
            await self._work(key, call)

    async def _work(self, key: str, call: Callable[[], T]) -> T:
        owner = _owner_of(key)
        async with asyncio.timeout(TIMEOUT_S):
            await self._turns.take(owner)
            done = asyncio.get_running_loop().run_in_executor(self._threads, call)
            # The thread is busy until its call returns, even if no caller is waiting for it.
            done.add_done_callback(partial(self._end_turn, owner))
            return await asyncio.shield(done)

    def _end_turn(self, owner: str, done: asyncio.Future[Any]) -> None:
        self._turns.give(owner)
        if not done.cancelled():
            done.exception()  # the caller has disconnected, so the error is dropped

    async def check(self) -> None:
        """Requests a nonexistent object from the store, for readiness checks and `penstock doctor`.

        Raises:
            Unavailable: the store is unreachable, or the credentials are not accepted.
        """
        try:
            await self.get("check/none", max_bytes=0)
        except BadInput:
            return


def _list(source: Any, folder: str, limit: int, after: str) -> list[StoredObject]:
    objects: list[StoredObject] = []
    for chunk in obstore.list(source, folder, offset=after or None, chunk_size=LIST_CHUNK):
        objects += map(_to_stored_object, chunk)
        # A bucket lists objects in order, but a folder doesn't.
        if len(objects) >= limit and not isinstance(source, store.LocalStore):
            break
    return sorted(objects)[:limit]


def _to_stored_object(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _read(source: Any, key: str, max_bytes: int) -> bytes:
    object_ = obstore.get(source, key)
    _check_size(key, object_.meta["size"], max_bytes)
    return bytes(object_.bytes())


def _check_size(key: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise InputTooLarge(
            f"object {key!r} is {size_bytes} bytes, which exceeds the maximum of {max_bytes}"
        )


def _open(url: str, setting: str) -> Any:
    scheme, separator, rest = url.partition("://")
    try:
        if scheme == "file" and rest:
            return store.LocalStore(Path(rest).absolute(), mkdir=True)
        if scheme == "memory" and separator:
            return store.MemoryStore()
        if scheme == "gs" and rest:
            return store.from_url(url, credential_provider=GoogleCredentials(), **_CLOUD)
        if scheme == "s3" and rest:
            return store.from_url(url, **_CLOUD)
    except (BaseError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"PENSTOCK_{setting.upper()}: {url}: {_reason(error)}", field=setting
        ) from error
    raise ConfigurationError(
        f"PENSTOCK_{setting.upper()}: must be file://DIR, gs://BUCKET, s3://BUCKET or memory://, "
        f"got {url!r}",
        field=setting,
    )


def _owner_of(key: str) -> str:
    segments = key.split("/", OWNER_SEGMENTS)[:OWNER_SEGMENTS]
    return segments[-1] if _TENANT.fullmatch(segments[-1]) else "/".join(segments)


def _check(key: str) -> None:
    """Allows only plain path segments (no `..`, `%`, or `//`), because keys come from messages."""
    if len(key) > KEY_LIMIT_BYTES or not _KEY.fullmatch(key):
        raise BadInput(f"{key[:80]!r} is not a valid object key", field="object_key")


@contextmanager
def _translate_errors(operation: str, key: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        ERRORS.labels(operation).inc()
        reason = f"the object store did not respond within {TIMEOUT_S:g} s"
        raise Unavailable(reason, public=_OUT_OF_REACH) from error
    except (BaseError, OSError, ValueError) as error:
        # If a put returns "not found", the bucket does not exist, which is not the caller's fault.
        if isinstance(error, FileNotFoundError) and operation == "get":
            raise BadInput(f"object {key!r} does not exist", field="object_key") from error
        ERRORS.labels(operation).inc()
        reason = f"the object store failed for {key!r}: {_reason(error)}"
        raise Unavailable(reason, public=_OUT_OF_REACH) from error


def _reason(error: Exception) -> str:
    """Returns the first line of an obstore error. The other lines are debug output."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class LinkInvalid(PenstockError):
    """The link was not signed by this API, or has expired."""

    code = "link_invalid"
    public_by_default = None


class UrlSigner:
    """Signs and validates links.

    Args:
        secret: the same on all instances, so that any instance can serve any link. Empty: random
            per process.
        clock: Unix seconds, for tests.
    """

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret.encode() if secret else secrets.token_bytes(32)
        self._clock = clock

    def path(self, key: str, media_type: str) -> str:
        """Returns a signed path and query for the object `key`, valid for 60 minutes."""
        expires_s = int(self._clock()) + LINK_VALID_S
        query = {
            "type": media_type,
            "expires": expires_s,
            "signature": self._signature(key, media_type, expires_s),
        }
        return f"/v1/objects/{quote(key)}?{urlencode(query)}"

    def query(self, key: str, media_type: str, expires_s: int) -> str:
        """Returns the signed query for a link with a different path, valid until `expires_s`."""
        signature = self._signature(key, media_type, expires_s)
        return f"expires={expires_s}&signature={signature}"

    def check(self, key: str, media_type: str, expires_s: int, signature: str) -> None:
        """Checks a link.

        Raises:
            LinkInvalid: the link was not signed by this API, was changed, or has expired.
        """
        expected = self._signature(key, media_type, expires_s)
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape")):
            raise LinkInvalid("the link's signature is invalid")
        if expires_s <= self._clock():
            raise LinkInvalid("the link has expired")

    def _signature(self, key: str, media_type: str, expires_s: int) -> str:
        signed = f"{key}\n{media_type}\n{expires_s}".encode("utf-8", "surrogateescape")
        return hmac.digest(self._secret, signed, "sha256").hex()
