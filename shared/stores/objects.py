"""The object store: large inputs and results, uploaded files, and the documents of batches.

It is a folder on one machine and a bucket in the cloud, both through obstore. No object changes:
the key of an input or a result names its content, so a repeated put is harmless and a cached key
always means the same bytes. A document is written once (`create`), and the first writer wins.

obstore's synchronous calls run on threads. Its asynchronous ones abort the process (1 of 12 here,
obstore 0.12.1) when it exits soon after a call, because the answering thread still holds Python
objects.

A large object is written in pieces, so that memory need not hold all of it.

Signed links to objects let answers and webhooks name an image instead of carrying it.
api/routes/files.py serves them, in another format if `media_type` is not the object's own. The
signature is HMAC-SHA256 (RFC 2104) over key, media type and expiry, so none of them can be changed.

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

from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.concurrency import FairPermits
from shared.errors import BadInput, ConfigurationError, InputTooLarge, PenstockError, Unavailable

PART_BYTES = 8 * 1024 * 1024
"""Parts are uploaded one at a time. S3 and GCS take no less than 5 MiB, except for the last."""
WRITE_BYTES = 1024 * 1024
"""Pieces are gathered to this size, because each write is a hop to a thread."""
MEMORY_BYTES = 2 * PART_BYTES + WRITE_BYTES
"""The memory of one writer: a part that is gathered, and one that is on its way."""

TIMEOUT_S = 10.0
"""The longest that one put or get may take, retries included."""
KEY_LIMIT_BYTES = 512
SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
THREADS = 32
"""They wait for the store, so their number follows from its distance: a call to a bucket that is
30 ms away in each direction takes 65 ms, and 8 threads stored 112 files of 100 kB a second, where a
near bucket took 147. An owner has at most half of them, so that a tenant's uploads keep nobody from
the store."""
OWNER_SEGMENTS = 3
"""Keys of what belongs to a tenant begin with two folders and its digest, which has the same turns
in all folders. Other keys name a content within so many segments, so each has turns of its own."""
LIST_CHUNK = 1000

ERRORS = Counter(
    "penstock_objects_errors_total",
    "Puts and gets that the store failed or was too slow with",
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
"""The time that a link is valid. OpenAI's API promises the same for image URLs."""


def open_upload(store: Any, key: str, attributes: dict[str, str] | None) -> Any:
    """Opens obstore's writer of a multipart upload. It asks the store for nothing yet."""
    return obstore.open_writer(
        store, key, attributes=attributes, buffer_size=PART_BYTES, max_concurrency=1
    )


class ObjectWriter:
    """Writes one object in pieces: an async context manager.

    The object appears whole when the block ends. It never appears if the block raises.

    Args:
        work: runs a call on a thread of the store, and translates its errors.

    Raises:
        Unavailable: from any call, if the store is unreachable or too slow.
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
        """The bytes that were written so far."""

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
            # An upload that is not closed is given up. A folder drops its parts with it, a bucket
            # by the lifecycle rule for incomplete uploads.
            self._upload = None

    async def _flush(self) -> None:
        data, self._gathered = bytes(self._gathered), bytearray()
        if data:
            await self._work(lambda: self._upload.write(data))


def object_key(folder: str, data: bytes, media_type: str) -> str:
    """Returns the key of `data`: `folder`, its BLAKE2b digest (256 bits) in hex, extension."""
    return key_of_digest(folder, hashlib.blake2b(data, digest_size=32).hexdigest(), media_type)


def key_of_digest(folder: str, digest: str, media_type: str) -> str:
    """Returns the key of the data that has a digest, as `object_key` does."""
    return f"{folder}/{digest[:2]}/{digest}{_EXTENSIONS.get(media_type, '')}"


async def stored_input(blob: Blob, objects: ObjectStore) -> Blob:
    """Returns the blob for a message. A large one goes to the object store."""
    if blob.data is None or len(blob.data) <= INLINE_LIMIT_BYTES:
        return blob
    # The digest of 64 MiB takes 0.1 s, which would be a pause of all requests of an instance.
    key = await asyncio.to_thread(object_key, "inputs", blob.data, blob.media_type)
    await objects.put(key, blob.data, blob.media_type)
    return Blob(blob.media_type, object_key=key)


class GoogleCredentials:
    """The machine's credentials for a bucket, found by google-auth.

    obstore does not know workload identity federation. The credentials are loaded at the first use,
    on the thread of that call. obstore keeps the token until shortly before it expires.
    """

    def __init__(self) -> None:
        self._provider: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        """Returns an OAuth 2.0 token and its expiry. obstore wraps the errors of google-auth."""
        if self._provider is None:
            # Late, as requests comes with it, which an API on one machine has no need of.
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
    """Objects by key, in the folder or bucket that `url` names.

    Args:
        url: `file://DIR` (relative to the working directory, or absolute with a third slash),
            `gs://BUCKET/PREFIX`, `s3://BUCKET/PREFIX`, or `memory://` (this object's own, gone with
            it).
        setting: that has the URL, for errors.

    Raises:
        ConfigurationError: the URL is of no such form, or its folder can't be made.
    """

    def __init__(self, url: str, setting: str = "objects_url") -> None:
        self._url = url
        self._store = _open(url, setting)
        # The store has its own threads, because a store that hangs would block those of others.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="objects")
        self._turns = FairPermits(THREADS)
        # A folder keeps no media types, so the extension of the key names the type.
        self._keeps_media_type = not isinstance(self._store, store.LocalStore)

    @property
    def is_on_google(self) -> bool:
        """True if it is a bucket whose lifecycle rules remove what is old."""
        return self._url.startswith("gs://")

    async def put(self, key: str, data: bytes, media_type: str) -> None:
        """Writes an object atomically: a reader sees the old bytes or the new ones."""
        _check(key)
        attributes = {"Content-Type": media_type} if self._keeps_media_type else None
        with _translated("put", key):
            await self._work(
                key, partial(obstore.put, self._store, key, data, attributes=attributes)
            )

    async def get(self, key: str, max_bytes: int) -> bytes:
        """Returns the bytes of an object of at most `max_bytes`.

        Raises:
            BadInput: the key is not valid, or has no object.
            InputTooLarge: the object is larger. Nothing of it was loaded.
        """
        _check(key)
        with _translated("get", key):
            return await self._work(key, partial(_read, self._store, key, max_bytes))

    async def create(self, key: str, data: bytes, media_type: str) -> bool:
        """Writes an object unless it exists. Returns whether it did. If several try, one does.

        Raises:
            Unavailable: the store is unreachable or too slow. The object may have been written.
        """
        _check(key)
        attributes = {"Content-Type": media_type} if self._keeps_media_type else None
        call = partial(obstore.put, self._store, key, data, attributes=attributes, mode="create")
        with _translated("put", key):
            try:
                await self._work(key, call)
            except AlreadyExistsError:
                return False
        return True

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns `length` bytes from `start`, which the object must have.

        Raises:
            BadInput: the key is not valid, or has no object.
        """
        _check(key)
        if not length:
            return b""
        call = partial(obstore.get_range, self._store, key, start=start, length=length)
        with _translated("get", key):
            return bytes(await self._work(key, call))

    async def listing(self, folder: str, limit: int, after: str = "") -> list[StoredObject]:
        """Returns the objects below a folder in the order of their keys, at most `limit` of them.

        Args:
            folder: without a slash at its end.
            after: a key, of an object or not, behind which the listing begins.
        """
        _check(folder)
        with _translated("list", folder):
            return await self._work(folder, partial(_list, self._store, folder, limit, after))

    async def modified_before(self, folder: str, before_s: float) -> AsyncIterator[StoredObject]:
        """Yields the objects below a folder last written before `before_s` (Unix time)."""
        _check(folder)
        with _translated("list", folder):
            chunks = await self._work(
                folder, partial(obstore.list, self._store, f"{folder}/", chunk_size=LIST_CHUNK)
            )
            while chunk := await self._work(folder, partial(next, chunks, [])):
                for one in map(_stored, chunk):
                    if one.modified_at_s < before_s:
                        yield one

    async def folders(self, folder: str) -> list[str]:
        """Returns the names of the folders right below a folder, in order."""
        _check(folder)
        with _translated("list", folder):
            objects = await self._work(
                folder, partial(obstore.list_with_delimiter, self._store, f"{folder}/")
            )
        return sorted(path.rstrip("/").rpartition("/")[2] for path in objects["common_prefixes"])

    async def delete(self, key: str) -> None:
        """Removes an object. A missing object is not an error."""
        _check(key)
        with _translated("delete", key), suppress(FileNotFoundError):
            await self._work(key, partial(obstore.delete, self._store, key))

    def writer(self, key: str, media_type: str) -> ObjectWriter:
        """Writes one object in pieces, for an `async with`."""
        _check(key)
        attributes = {"Content-Type": media_type} if self._keeps_media_type else None
        opening = partial(open_upload, self._store, key, attributes)
        return ObjectWriter(opening, partial(self._write, key))

    def download(self, key: str, file: Path, max_bytes: int) -> None:
        """Writes an object into a file, on the thread that calls this. Raises as `get`."""
        _check(key)
        with _translated("get", key):
            object_ = obstore.get(self._store, key)
            _check_size(key, object_.meta["size"], max_bytes)
            with file.open("wb") as opened:
                for piece in object_:
                    opened.write(piece)

    async def rename(self, key: str, new_key: str) -> None:
        """Moves an object, in the place of another one if that is there. Its bytes stay there.

        Raises:
            Unavailable: the store is unreachable or too slow. One of the two keys has the object.
        """
        _check(key)
        _check(new_key)
        with _translated("put", new_key):
            await self._work(key, partial(obstore.rename, self._store, key, new_key))

    async def _write(self, key: str, call: Callable[[], Any]) -> None:
        with _translated("put", key):
            await self._work(key, call)

    async def _work(self, key: str, call: Callable[[], T]) -> T:
        owner = _owner_of(key)
        async with asyncio.timeout(TIMEOUT_S):
            await self._turns.take(owner)
            done = asyncio.get_running_loop().run_in_executor(self._threads, call)
            # The thread is busy until its call is over, even if nobody waits for it any more.
            done.add_done_callback(partial(self._end_turn, owner))
            return await asyncio.shield(done)

    def _end_turn(self, owner: str, done: asyncio.Future[Any]) -> None:
        self._turns.give(owner)
        if not done.cancelled():
            done.exception()  # whoever left does not miss it

    async def check(self) -> None:
        """Asks the store for an object that is not there, for readiness and `penstock doctor`.

        Raises:
            Unavailable: it is unreachable, or the credentials don't open it.
        """
        try:
            await self.get("check/none", max_bytes=0)
        except BadInput:
            return


def _list(source: Any, folder: str, limit: int, after: str) -> list[StoredObject]:
    objects: list[StoredObject] = []
    for chunk in obstore.list(source, folder, offset=after or None, chunk_size=LIST_CHUNK):
        objects += map(_stored, chunk)
        # A bucket lists in order, a folder does not.
        if len(objects) >= limit and not isinstance(source, store.LocalStore):
            break
    return sorted(objects)[:limit]


def _stored(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _read(source: Any, key: str, max_bytes: int) -> bytes:
    object_ = obstore.get(source, key)
    _check_size(key, object_.meta["size"], max_bytes)
    return bytes(object_.bytes())


def _check_size(key: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise InputTooLarge(f"object {key!r} has {size_bytes} bytes, above {max_bytes}")


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
        f"PENSTOCK_{setting.upper()}: {url!r} is not one of file://DIR, gs://BUCKET, s3://BUCKET, "
        "memory://",
        field=setting,
    )


def _owner_of(key: str) -> str:
    segments = key.split("/", OWNER_SEGMENTS)[:OWNER_SEGMENTS]
    return segments[-1] if _TENANT.fullmatch(segments[-1]) else "/".join(segments)


def _check(key: str) -> None:
    """Allows only plain path segments (no `..`, `%` or `//`), as keys come from messages."""
    if len(key) > KEY_LIMIT_BYTES or not _KEY.fullmatch(key):
        raise BadInput(f"{key[:80]!r} is not a valid object key", field="object_key")


@contextmanager
def _translated(operation: str, key: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        ERRORS.labels(operation).inc()
        reason = f"the object store did not answer in {TIMEOUT_S:g} s"
        raise Unavailable(reason, public=_OUT_OF_REACH) from error
    except (BaseError, OSError, ValueError) as error:
        # A put that gets "not found" has no bucket, which is not the caller's fault.
        if isinstance(error, FileNotFoundError) and operation == "get":
            raise BadInput(f"there is no object {key!r}", field="object_key") from error
        ERRORS.labels(operation).inc()
        reason = f"the object store failed on {key!r}: {_reason(error)}"
        raise Unavailable(reason, public=_OUT_OF_REACH) from error


def _reason(error: Exception) -> str:
    """Returns the first line of an obstore error. The other lines are debug output."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class LinkInvalid(PenstockError):
    """The link is not signed by this API, or has expired."""

    code = "link_invalid"
    public_by_default = None


class UrlSigner:
    """Signs and validates links.

    Args:
        secret: the same in all instances, so that each can serve every link. Empty: random per
            process.
        clock: unix seconds, for tests.
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
        """Returns the signed query of a link with a path of its own, valid until `expires_s`."""
        signature = self._signature(key, media_type, expires_s)
        return f"expires={expires_s}&signature={signature}"

    def check(self, key: str, media_type: str, expires_s: int, signature: str) -> None:
        """Lets a link pass.

        Raises:
            LinkInvalid: it is not ours, was changed, or has expired.
        """
        expected = self._signature(key, media_type, expires_s)
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape")):
            raise LinkInvalid("the link's signature is not valid")
        if expires_s <= self._clock():
            raise LinkInvalid("the link has expired")

    def _signature(self, key: str, media_type: str, expires_s: int) -> str:
        signed = f"{key}\n{media_type}\n{expires_s}".encode("utf-8", "surrogateescape")
        return hmac.digest(self._secret, signed, "sha256").hex()
