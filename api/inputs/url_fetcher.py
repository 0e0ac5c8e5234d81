"""Fetches inputs specified by https URL before the request is accepted.

Every address is checked before connecting, and again at each redirect (shared/web/pinned_http.py).
A body is stored in the object store as it arrives, so even a large body needs only enough memory
for one part. Bytes, time, redirects, and concurrent fetches are limited.

A file with an ETag is not downloaded again while its request exists, because a repeated request
only checks whether the file has changed. On each instance, a tenant's concurrent requests for the
same URL share one download.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from email.utils import collapse_rfc2231_value
from ipaddress import ip_network
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from prometheus_client import Counter
from yarl import URL

from api.bodies import MAX_URL_CHARS
from api.errors import NotNow
from api.inputs.files import is_charset
from api.inputs.storage import Storage, StorageQuota, StorageReservation
from shared.errors import (
    BadInput,
    ConfigurationError,
    InputTooLarge,
    Overloaded,
    PenstockError,
    Unavailable,
)
from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.process.concurrency import FairPermits
from shared.settings import ApiSettings
from shared.stores.fetched_urls import FetchedUrl, FetchedUrls
from shared.stores.objects import ObjectStore, key_of_digest
from shared.web.pinned_http import CONNECT_LIMIT_S, Resolve, open_pinned_session, resolve
from shared.web.public_url import Reach, UrlForbidden, is_within, parse_public_url

if TYPE_CHECKING:
    from aiohttp import ClientResponse

MAX_BYTES = 64 * 1024 * 1024
"""Same limit as for uploaded files."""
MAX_REDIRECTS = 5
MAX_AT_A_TIME = 16
"""Maximum concurrent fetches on this instance. Each fetch uses as much memory as one object writer.
A tenant gets at most half of the fetches.
"""
IDLE_LIMIT_S = 10.0
"""Maximum pause between two chunks of a body."""
CHUNK_BYTES = 256 * 1024
FOLDER = "inputs"
ANY_TYPE = "application/octet-stream"
_HTTPS_PORT = 443
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CODING = re.compile(r"[a-z0-9.+-]{1,16}")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}")
_HEADERS = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "Penstock-Fetch/1"}

FETCHES = Counter(
    "penstock_api_fetched_inputs_total",
    "Inputs fetched by URL: fetched, shared (with another request), unchanged (by ETag), "
    "refused, failed.",
    ["end"],
)


class FetchedInput(NamedTuple):
    """A fetched file, either inline or in the object store."""

    blob: Blob
    name: str
    sha256: str
    """SHA-256 of the data, in hex."""


class FileRules(NamedTuple):
    """Requirements on a file fetched by URL."""

    media_types: tuple[str, ...] = ()
    """Accepted media type prefixes. If empty, all types are accepted."""
    within: tuple[str, ...] = ()
    """Allowed prefixes for the file's URL and for every redirect. If empty, any URL is allowed."""
    max_bytes: int = MAX_BYTES
    sha256: str = ""
    """The digest the caller expects, in hex.

    A remembered file with this digest is not requested again. The caller checks the digests of
    fetched files. Empty if the caller does not expect a specific digest.
    """
    is_stored: bool = False
    """True if even a small file must be in the object store, where it counts toward the quota."""


ANY_FILE = FileRules()


class FetchFailed(NotNow):
    """The server did not return the file at an input's URL, but might do so later."""


class _OutOfTime(FetchFailed):
    """The request ran out of time first."""


class _Download(NamedTuple):
    """A shared download's key: tenant, URL, and requirements."""

    quota: StorageQuota
    """The tenant's quota.

    The quota has no field name, because requests sharing the download may use different fields.
    """
    url: str
    rules: FileRules


@dataclass(frozen=True, slots=True)
class HostRules:
    """Hosts and ports from which inputs may be fetched."""

    names: frozenset[tuple[str, int]]
    """`*` matches any host, and `*.example.com` matches any host below example.com."""

    @classmethod
    def read(cls, setting: str) -> HostRules:
        """Parses comma-separated HOST or HOST:PORT entries, already validated by the settings."""
        names = set()
        for entry in filter(None, map(str.strip, setting.split(","))):
            host, _, port = entry.partition(":")
            names.add((host.lower().rstrip("."), int(port or _HTTPS_PORT)))
        return cls(frozenset(names))

    def allow(self, url: URL) -> bool:
        """Returns whether a URL's host and port are allowed."""
        host, port = (url.raw_host or "").lower().rstrip("."), url.port or 0
        if ("*", port) in self.names or (host, port) in self.names:
            return True
        labels = host.split(".")
        above = (".".join(labels[number:]) for number in range(1, len(labels)))
        return any((f"*.{name}", port) in self.names for name in above)


class UrlFetcher:
    """Fetches files by URL.

    Args:
        settings: allowed hosts and networks, and the time limit per request.
        storage: stores fetched files within their tenant's quota.
        resolve: returns all addresses of a host and port.

    Raises:
        ConfigurationError: the certificate authority file can't be read.
    """

    def __init__(
        self,
        settings: ApiSettings,
        storage: Storage,
        fetched_urls: FetchedUrls,
        resolve: Resolve = resolve,
    ) -> None:
        self._hosts = HostRules.read(settings.fetch_hosts)
        if self._hosts.names:
            import aiohttp  # noqa: F401  at the start, so that no request waits for it
        networks = filter(None, map(str.strip, settings.fetch_networks.split(",")))
        self._reach = Reach(networks=tuple(ip_network(network) for network in networks))
        self._limit_s = settings.fetch_limit_s
        self._tls = _authorities(settings.fetch_ca)
        self._storage = storage
        self._fetched_urls = fetched_urls
        self._resolve = resolve
        self._permits = FairPermits(MAX_AT_A_TIME)
        self._downloads: dict[_Download, asyncio.Future[FetchedInput | PenstockError | None]] = {}
        """Downloads in progress. Each resolves to the file, the server's error, or None if the
        request that started the download stopped it.
        """

    @property
    def is_off(self) -> bool:
        """True if no hosts are allowed."""
        return not self._hosts.names

    def until_s(self, deadline_s: float) -> float:
        """Returns the Unix time by which a request's fetches must finish if they start now.

        Args:
            deadline_s: the request's deadline, as Unix time.
        """
        return min(deadline_s, time.time() + self._limit_s)

    async def fetch(
        self,
        url: str,
        *,
        quota: StorageQuota,
        field: str,
        until_s: float,
        keep_until_s: float,
        rules: FileRules = ANY_FILE,
    ) -> FetchedInput:
        """Fetches one file.

        Args:
            quota: the tenant's storage quota. Tenants take turns.
            until_s: the Unix time returned by the method `until_s`.
            keep_until_s: Unix time until which the file is remembered and counts toward the quota,
                usually the end of the request.

        Raises:
            BadInput: the file may not be fetched from there, or does not meet the requirements. The
                message contains the reason.
            FetchFailed: the server did not return the file in time.
            InputTooLarge: the file is larger than the rules allow.
            StorageFull: the tenant's storage quota is used up.
            Overloaded: too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        download = _Download(quota._replace(field=""), url, rules)
        end = "failed"
        try:
            shared = await self._join_download(download, until_s)
            if shared is not None:
                end = "shared"
                return shared
            fetched, end = await self._download_once(download, until_s, keep_until_s)
            return fetched
        except (FetchFailed, Overloaded, Unavailable) as error:
            raise _of_field(error, field) from error
        except BadInput as error:
            end = "refused"
            raise _of_field(error, field) from error
        finally:
            FETCHES.labels(end).inc()

    async def _join_download(self, download: _Download, until_s: float) -> FetchedInput | None:
        """Waits for another request's identical download. Returns None if there is none.

        A waiting request does not hold a permit, and downloads the file itself if the other request
        finishes first. Raises the same errors as `fetch`.
        """
        while (running := self._downloads.get(download)) is not None:
            try:
                async with asyncio.timeout(max(0.0, until_s - time.time())):
                    outcome = await asyncio.shield(running)
            except TimeoutError as error:
                raise self._out_of_time() from error
            if isinstance(outcome, PenstockError):
                raise outcome
            if outcome is not None:
                return outcome
        return None

    async def _download_once(
        self, download: _Download, until_s: float, keep_until_s: float
    ) -> tuple[FetchedInput, str]:
        """Returns the file, marked as `fetched` or `unchanged`.

        Other requests may share the download.
        """
        running = self._downloads[download] = asyncio.get_running_loop().create_future()
        outcome: FetchedInput | PenstockError | None = None
        try:
            outcome, end = await self._fetch_once(download, until_s, keep_until_s)
        except (_OutOfTime, Overloaded):
            raise  # other requests may have more time left
        except PenstockError as error:
            outcome = error
            raise
        finally:
            del self._downloads[download]
            running.set_result(outcome)
        return outcome, end

    async def _fetch_once(
        self, download: _Download, until_s: float, keep_until_s: float
    ) -> tuple[FetchedInput, str]:
        quota, url, rules = download
        tenant = quota.tenant
        place = _Place(self._storage, quota, keep_until_s)
        fetch = _Fetch(self._hosts, self._reach, self._tls, self._resolve, rules, place)
        fetch.check_url(url)
        async with self._hold_permit(tenant, until_s):
            known = await self._fetched_urls.find(tenant, url)
            if known is not None and not fetch.accepts(known):
                known = None
            if known is not None and known.sha256 == rules.sha256:
                return _as_input(known), "unchanged"
            try:
                async with asyncio.timeout(max(0.0, until_s - time.time())):
                    loaded = await fetch.run(url, known)
            except TimeoutError as error:
                raise self._out_of_time() from error
        if isinstance(loaded, FetchedUrl):
            return _as_input(loaded), "unchanged"
        if loaded.tagged is not None:
            await self._fetched_urls.put(tenant, url, loaded.tagged, keep_until_s - time.time())
        return FetchedInput(loaded.blob, loaded.name, loaded.sha256), "fetched"

    def _out_of_time(self) -> FetchFailed:
        return _OutOfTime(f"the download did not finish within {self._limit_s:g} s")

    @asynccontextmanager
    async def _hold_permit(self, tenant: str, until_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(0.0, until_s - time.time())):
                await self._permits.take(tenant)
        except TimeoutError as error:
            raise Overloaded("too many files are being fetched; try again later") from error
        try:
            yield
        finally:
            self._permits.give(tenant)


def _as_input(known: FetchedUrl) -> FetchedInput:
    blob = Blob(known.media_type, object_key=known.object_key)
    return FetchedInput(blob, known.name, known.sha256)


class _Place(NamedTuple):
    """A fetched file's location, and the Unix time until which the file counts toward the quota."""

    storage: Storage
    quota: StorageQuota
    keep_until_s: float


class _Loaded(NamedTuple):
    blob: Blob
    name: str
    sha256: str
    tagged: FetchedUrl | None
    """Facts to remember about the file, if it has an ETag or its digest was expected."""


class _Unchanged(Exception):
    """The server reports that the remembered file is still current."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One fetch: follows redirects, and checks the response."""

    hosts: HostRules
    reach: Reach
    tls: ssl.SSLContext | None
    resolve: Resolve
    rules: FileRules
    place: _Place

    async def run(self, url: str, known: FetchedUrl | None) -> _Loaded | FetchedUrl:
        """Returns the fetched file, or `known` if the server reports that it has not changed."""
        target = url
        for _ in range(MAX_REDIRECTS + 1):
            parsed = self.check_url(target)
            try:
                answered = await self._ask(parsed, url, known)
            except _Unchanged:
                assert known is not None, "requested by its tag; this is a bug"
                return known
            if isinstance(answered, _Loaded):
                return answered
            target = answered
        raise BadInput(f"exceeds the maximum of {MAX_REDIRECTS} redirects")

    def accepts(self, known: FetchedUrl) -> bool:
        """Returns whether a file fetched earlier meets the requirements of this fetch.

        The file may have been fetched with different requirements, or before an operator changed
        the settings.
        """
        try:
            self.check_url(known.final_url)
        except BadInput:
            return False
        accepted = self.rules.media_types
        return (
            bool(known.sha256)
            and known.size_bytes <= self.rules.max_bytes
            and (not accepted or known.media_type.startswith(accepted))
        )

    def check_url(self, target: str) -> URL:
        """Parses a file or redirect URL, and checks it against settings and rules.

        Raises:
            BadInput: the URL is too long.
            UrlForbidden: files may not be fetched from there.
        """
        if len(target) > MAX_URL_CHARS:  # the URL becomes part of the record
            raise BadInput(f"must be at most {MAX_URL_CHARS} characters")
        parsed = parse_public_url(target, self.reach)
        if not self.hosts.allow(parsed):
            raise UrlForbidden(
                f"{parsed.host}:{parsed.port} is not an allowed host and port for fetching "
                "inputs; send the file as a data: URI or upload it (POST /v1/files)"
            )
        if self.rules.within and not is_within(parsed, self.rules.within):
            raise UrlForbidden(
                f"{parsed.host}{parsed.path[:200]} is not under {', '.join(self.rules.within)}"
            )
        return parsed

    async def _ask(self, url: URL, requested_url: str, known: FetchedUrl | None) -> _Loaded | str:
        """Requests the URL. Returns the file, or the URL to which the server redirects."""
        from aiohttp import ClientError, ClientTimeout

        is_known = known is not None and known.final_url == str(url)
        tag = known.etag if known and is_known else ""
        headers = _HEADERS | ({"if-none-match": tag} if tag else {})
        timeout = ClientTimeout(total=None, connect=CONNECT_LIMIT_S, sock_read=IDLE_LIMIT_S)
        has_answered = False
        try:
            async with (
                open_pinned_session(
                    url, self.reach, timeout, resolve=self.resolve, tls=self.tls
                ) as session,
                session.get(url, headers=headers, allow_redirects=False) as answer,
            ):
                if answer.status in _REDIRECTS:
                    return _resolve_redirect(url, answer)
                if answer.status == 304 and tag:
                    raise _Unchanged
                self._check(answer)
                has_answered = True
                return await _load(answer, requested_url, self.place, self.rules)
        except Unavailable as error:
            if has_answered:  # the object store is unreachable, not the server
                raise
            raise FetchFailed(error.public_message) from error
        except (ClientError, TimeoutError, ConnectionError, OSError, ValueError) as error:
            raise FetchFailed(f"{url.host}: {_reason_of(error)}") from error

    def _check(self, answer: ClientResponse) -> None:
        """Checks a response's status and headers.

        Raises:
            BadInput: the response does not meet the requirements.
            FetchFailed: the server reported a problem.
        """
        if answer.status >= 500 or answer.status in (408, 425, 429):
            raise FetchFailed(f"{answer.url.host} returned {answer.status}")
        if answer.status != 200:
            raise BadInput(f"{answer.url.host} returned {answer.status}; expected 200")
        if (coding := answer.headers.get("content-encoding", "identity").lower()) != "identity":
            named = coding if _CODING.fullmatch(coding) else "unknown"
            raise BadInput(f"its content-encoding must not be set, got {named}")
        media_type = _media_type(answer)
        accepted = self.rules.media_types
        if accepted and not media_type.startswith(accepted):
            raise BadInput(
                f"its content-type is {media_type}; expected one of "
                + ", ".join(
                    accepted_type + "*" if accepted_type.endswith("/") else accepted_type
                    for accepted_type in accepted
                )
            )
        if (answer.content_length or 0) > self.rules.max_bytes:
            raise _too_large(self.rules)


def _reason_of(error: Exception) -> str:
    """Returns the reason a fetch failed, without including anything the host sent."""
    from aiohttp import (
        ClientConnectorCertificateError,
        ClientConnectorError,
        ClientPayloadError,
        ClientSSLError,
        ServerDisconnectedError,
    )

    reasons: tuple[tuple[type[Exception], str], ...] = (
        (ClientConnectorCertificateError, "its certificate is not valid for this name"),
        (ClientSSLError, "TLS failed"),
        (ClientConnectorError, "the connection failed"),
        (TimeoutError, "the server did not respond in time"),
        (ClientPayloadError, "the response was cut off"),
        (ServerDisconnectedError, "the server closed the connection"),
        (ConnectionError, "the server closed the connection"),
    )
    return next(
        (reason for kind, reason in reasons if isinstance(error, kind)),
        "the response is not valid HTTP",
    )


def _resolve_redirect(url: URL, answer: ClientResponse) -> str:
    try:
        return str(url.join(URL(answer.headers.get("location", ""))))
    except ValueError as error:
        raise BadInput(f"{url.host} redirects to an invalid URL") from error


async def _load(
    answer: ClientResponse, requested_url: str, place: _Place, rules: FileRules
) -> _Loaded:
    """Reads a body. Unless it is small, it is stored in the object store as it arrives."""
    media_type, name = _media_type(answer), _name_of(answer, requested_url)
    pieces = answer.content.iter_chunked(CHUNK_BYTES)
    head = bytearray()
    async for piece in pieces:
        head += piece
        if len(head) > rules.max_bytes:
            raise _too_large(rules)
        if len(head) > INLINE_LIMIT_BYTES:
            break
    else:
        if not rules.is_stored:
            blob = Blob(media_type, data=bytes(head))
            return _Loaded(blob, name, hashlib.sha256(head).hexdigest(), None)
    size_bytes = max(len(head), answer.content_length or 0)
    async with place.storage.reserve(place.quota, size_bytes) as room:
        stored = await _store(bytes(head), pieces, media_type, place.storage.objects, rules, room)
        await place.storage.hold(place.quota.tenant, stored.size_bytes, place.keep_until_s)
    key, sha256 = stored.key, stored.sha256
    tag, control = answer.headers.get("etag", ""), answer.headers.get("cache-control", "")
    tagged = None
    if (tag or rules.sha256) and "no-store" not in control.lower():
        final_url, size_bytes = str(answer.url), stored.size_bytes
        tagged = FetchedUrl(final_url, tag, key, media_type, size_bytes, name, sha256)
    return _Loaded(Blob(media_type, object_key=key), name, sha256, tagged)


class _Stored(NamedTuple):
    """A body in the object store."""

    key: str
    size_bytes: int
    sha256: str


async def _store(
    head: bytes,
    pieces: AsyncIterator[bytes],
    media_type: str,
    objects: ObjectStore,
    rules: FileRules,
    room: StorageReservation,
) -> _Stored:
    """Stores a body as it arrives. `head` is the part that has already arrived."""
    # The body's digest, which is used as the key, is not known until the whole body has arrived.
    passing = f"{FOLDER}/passing/{secrets.token_hex(16)}"
    digest, sha256 = hashlib.blake2b(head, digest_size=32), hashlib.sha256(head)
    size_bytes = len(head)
    async with objects.writer(passing, media_type) as writer:
        await writer.write(head)
        async for piece in pieces:
            size_bytes += len(piece)
            if size_bytes > rules.max_bytes:
                raise _too_large(rules)
            await room.cover(size_bytes)
            digest.update(piece)
            sha256.update(piece)
            await writer.write(piece)
    key = key_of_digest(FOLDER, digest.hexdigest(), media_type)
    await objects.rename(passing, key)
    return _Stored(key, size_bytes, sha256.hexdigest())


def _media_type(answer: ClientResponse) -> str:
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type if _MEDIA_TYPE.fullmatch(media_type) else ANY_TYPE


def _name_of(answer: ClientResponse, requested_url: str) -> str:
    """Returns the name sent by the server, or else the last part of the requested path."""
    head, filename = Message(), None
    head["content-disposition"] = answer.headers.get("content-disposition", "")
    # The parser raises on a mix of numbered and unnumbered name parts, and on some charsets.
    with suppress(TypeError, ValueError):
        sent = head.get_param("filename", "", "content-disposition")
        if isinstance(sent, str) or is_charset(sent[0] or "us-ascii"):
            filename = collapse_rfc2231_value(sent).strip()
    path = filename or unquote(URL(requested_url).raw_path)
    name = PurePosixPath(path.replace("\\", "/").replace("\0", "")).name[:255]
    return name.encode(errors="replace").decode()  # decoding may produce a lone surrogate


def _too_large(rules: FileRules) -> InputTooLarge:
    return InputTooLarge(f"the file exceeds the maximum of {rules.max_bytes} bytes")


def _authorities(path: str) -> ssl.SSLContext | None:
    if not path:
        return None
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigurationError(f"PENSTOCK_FETCH_CA: {path}: {error}", field="fetch_ca") from error
    return context


def _of_field(error: PenstockError, field: str) -> PenstockError:
    """Returns the same error with the field's name added."""
    if isinstance(error, Overloaded):
        return Overloaded(f"{field}: {error.message}", retry_after_s=error.retry_after_s)
    if isinstance(error, Unavailable):
        return error
    # The storage quota for a download has no field name.
    return type(error)(f"{field}: {error.message.removeprefix(': ')}", field=field)
