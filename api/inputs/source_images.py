"""Fetches and stores the files that inputs refer to: images and any other kind of file.

Inputs refer to files by data: URI, by the ID or URL of one of this API's files or results, or by an
https URL on another server (api/inputs/url_fetcher.py).
"""

from __future__ import annotations

import asyncio
import mimetypes
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote

from api.bodies import MAX_URL_CHARS
from api.errors import NotFound
from api.inputs.files import Files, is_media_type
from api.inputs.image_codec import ImageCodec, data_of_uri
from api.inputs.storage import StorageQuota
from api.inputs.url_fetcher import (
    ANY_FILE,
    MAX_BYTES,
    FetchedInput,
    FileRules,
    UrlFetcher,
)
from shared.errors import BadInput
from shared.models.blob import Blob
from shared.stores.objects import LinkInvalid, ObjectStore, UrlSigner, store_if_large

ACCEPTED = (
    "must be a data: URI, an https URL, or the ID or URL of a file uploaded to this "
    "API (POST /v1/files)"
)
OFF = (
    "must be a data: URI or a file uploaded to this API (POST /v1/files); this API "
    "does not fetch other URLs"
)
IMAGE_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
"""Buckets report the last two types for files of unknown type."""


@dataclass(frozen=True, slots=True)
class ImageCaller:
    """A request's tenant and deadline, and a counter for work done on its behalf."""

    tenant: str
    quota: StorageQuota
    """The tenant's storage quota."""
    base_url: str
    """The API's URL as seen by the caller, without a trailing slash."""
    deadline_s: float
    """Unix time at which to stop work on a source image."""
    keep_s: float
    """Seconds to keep an image that belongs to the request."""
    begin: Callable[[], Awaitable[None]]
    """Called before each fetch and each decode.

    Counts the first call toward the tenant's limits, or rejects it.
    """


class FetchedFile(NamedTuple):
    """A file that an input refers to, with the media type and name the caller specified."""

    data: bytes
    media_type: str
    name: str


class SupportsFetch(Protocol):
    """Fetches a signed link's target."""

    async def fetch(self, key: str, media_type: str, deadline_s: float) -> bytes:
        """Returns the data for a link whose signature has already been verified."""


class SupportsUploads(Protocol):
    """Files uploaded through OpenAI's API."""

    def has_id(self, name: str) -> bool:
        """Returns whether `name` looks like an upload ID."""
        ...

    async def load(self, tenant: str, file_id: str, max_bytes: int) -> tuple[bytes, str]:
        """Returns an upload's data and name.

        Raises:
            NotFound: the tenant has no upload with this ID.
            BadInput: the upload is larger than `max_bytes`.
            Unavailable: the object store is unreachable.
        """
        ...


class SourceImages:
    """Fetches and stores source images. Keeps no state between calls."""

    def __init__(
        self,
        objects: ObjectStore,
        files: Files,
        uploads: SupportsUploads,
        fetcher: SupportsFetch,
        url_signer: UrlSigner,
        image_codec: ImageCodec,
        url_fetcher: UrlFetcher,
    ) -> None:
        self._objects = objects
        self._files = files
        self._uploads = uploads
        self._fetcher = fetcher
        self._url_signer = url_signer
        self.codec = image_codec
        self._url_fetcher = url_fetcher

    async def fetch_image(self, url: str, caller: ImageCaller, field: str = "image") -> FetchedFile:
        """Fetches an image file from wherever it is stored.

        Raises:
            BadInput: the file does not exist, or fetching it is not allowed.
            Overloaded: too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        if not is_elsewhere(url, caller):
            return await self.fetch(url, caller, field)
        until_s = self._url_fetcher.until_s(caller.deadline_s)
        rules = FileRules(media_types=IMAGE_TYPES)
        fetched = await self._fetch_url(url, caller, field, until_s, rules)
        blob, data = fetched.blob, fetched.blob.data
        if blob.object_key is not None:
            data = await self._objects.get(blob.object_key, MAX_BYTES)
        return FetchedFile(data or b"", blob.media_type, fetched.name)

    async def fetch_images(
        self, wanted: Mapping[str, str], caller: ImageCaller
    ) -> dict[str, FetchedFile]:
        """Fetches several image files concurrently. Raises the same errors as `fetch_image`.

        Args:
            wanted: URLs, keyed by the field that contains each one.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    field: group.create_task(self.fetch_image(url, caller, field))
                    for field, url in wanted.items()
                }
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return {field: task.result() for field, task in tasks.items()}

    async def fetch_elsewhere(
        self, wanted: Iterable[tuple[str, str]], caller: ImageCaller
    ) -> dict[str, FetchedInput]:
        """Fetches files from other servers concurrently, each only once.

        Args:
            wanted: each file's URL and field.

        Returns:
            The files, keyed by URL.

        Raises:
            BadInput: a file can't be fetched.
            Overloaded: too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        until_s = self._url_fetcher.until_s(caller.deadline_s)
        fields = dict(wanted)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    url: group.create_task(self._fetch_url(url, caller, field, until_s, ANY_FILE))
                    for url, field in fields.items()
                }
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return {url: task.result() for url, task in tasks.items()}

    async def _fetch_url(
        self,
        url: str,
        caller: ImageCaller,
        field: str,
        until_s: float,
        rules: FileRules,
        keep_s: float = 0.0,
    ) -> FetchedInput:
        if self._url_fetcher.is_off:
            raise BadInput(f"{field}: {OFF}", field=field)
        await caller.begin()
        return await self._url_fetcher.fetch(
            url,
            quota=caller.quota,
            field=field,
            until_s=until_s,
            keep_until_s=max(caller.deadline_s, time.time() + max(keep_s, caller.keep_s)),
            rules=rules,
        )

    async def fetch_for_workers(
        self, url: str, caller: ImageCaller, field: str, rules: FileRules, keep_s: float
    ) -> tuple[str, str]:
        """Fetches a worker-only file from another server.

        Args:
            keep_s: how many seconds to remember the file, so that it is not downloaded again.

        Returns:
            The file's SHA-256 in hex, and its key in the object store.

        Raises:
            BadInput: the file can't be fetched.
            StorageFull: the tenant's storage quota is used up.
            Overloaded: too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        until_s = self._url_fetcher.until_s(caller.deadline_s)
        stored = rules._replace(is_stored=True)
        fetched = await self._fetch_url(url, caller, field, until_s, stored, keep_s)
        assert fetched.blob.object_key is not None, "the rules require a stored file; this is a bug"
        return fetched.sha256, fetched.blob.object_key

    async def fetch(self, url: str, caller: ImageCaller, field: str = "image") -> FetchedFile:
        """Returns the file for a data: URI, or for one of this API's IDs or URLs.

        Raises:
            BadInput: the URL is of a different kind, or its target does not exist.
            Overloaded: too many images are waiting to be encoded.
            DeadlineExceeded: the image was not encoded in time.
            Unavailable: Redis or the object store is unreachable.
        """
        await caller.begin()
        if url.startswith("data:"):
            return await _decode_data_uri(url, field)
        if self._uploads.has_id(url):
            return await self._load_upload(url, caller, field)
        folder, name, query = _split_url(url, caller, field)
        if folder == "files":
            return await self._load_file(name, caller, field)
        if folder == "objects":
            return await self._load_link(name, query, caller, field)
        raise BadInput(f"{field}: {ACCEPTED}", field=field)

    async def _load_file(self, file_id: str, caller: ImageCaller, field: str) -> FetchedFile:
        """Returns the file that one of this API's file URLs refers to."""
        if self._uploads.has_id(file_id):
            return await self._load_upload(file_id, caller, field)
        try:
            file = await self._files.find(caller.tenant, file_id)
            return FetchedFile(await self._files.read(file), file.content_type, file.name)
        except (NotFound, BadInput) as error:
            raise BadInput(f"{field}: {error.message}", field=field) from error

    async def _load_link(
        self, key: str, query_text: str, caller: ImageCaller, field: str
    ) -> FetchedFile:
        """Returns the result that a signed link refers to."""
        try:
            query = dict(parse_qsl(query_text))
            media_type = query["type"]
            self._url_signer.check(key, media_type, int(query["expires"]), query["signature"])
        except (KeyError, ValueError) as error:
            raise BadInput(f"{field}: not a link signed by this API", field=field) from error
        except LinkInvalid as error:
            raise BadInput(f"{field}: {error.message}", field=field) from error
        try:
            data = await self._fetcher.fetch(key, media_type, caller.deadline_s)
        except (NotFound, BadInput) as error:
            raise BadInput(f"{field}: {error.message}", field=field) from error
        return FetchedFile(data, media_type, "")

    async def _load_upload(self, file_id: str, caller: ImageCaller, field: str) -> FetchedFile:
        """Returns the file uploaded through OpenAI's API under this ID."""
        try:
            data, name = await self._uploads.load(caller.tenant, file_id, MAX_BYTES)
        except (NotFound, BadInput) as error:
            raise BadInput(f"{field}: {error.message}", field=field) from error
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return FetchedFile(data, media_type, name)

    async def keep(self, file: FetchedFile, caller: ImageCaller, name: str = "image") -> str:
        """Stores a data: URI's data as a file, and returns its URL.

        Records do not contain files. The file is kept as long as the prediction and gets the
        input's name, which error messages also use.

        Raises:
            StorageFull: the tenant's storage quota is used up.
            Unavailable: the object store is unreachable.
        """
        stored_file = await self._files.add(
            caller.quota._replace(field=name),
            file.data,
            name=name,
            content_type=file.media_type,
            keep_s=caller.keep_s,
        )
        return f"{caller.base_url}/v1/files/{stored_file.id}"

    async def store_large_source(self, source: Blob) -> Blob:
        """Returns the source, ready to send in a message.

        A large source is moved to the object store.
        """
        return await store_if_large(source, self._objects)


def is_elsewhere(url: str, caller: ImageCaller) -> bool:
    """Returns whether a URL points to a server other than this API's."""
    return url.startswith(("https://", "http://")) and not url.startswith(f"{caller.base_url}/")


async def _decode_data_uri(uri: str, field: str) -> FetchedFile:
    data = await data_of_uri(uri, field, field=field)
    media_type = uri[len("data:") : uri.index(",")].partition(";")[0].lower()
    return FetchedFile(data, media_type if is_media_type(media_type) else "", "")


def _split_url(url: str, caller: ImageCaller, field: str) -> tuple[str, str, str]:
    """Splits one of this API's URLs into folder, name, and query. Others have no folder.

    Raises:
        BadInput: the URL is too long.
    """
    if not url.startswith(f"{caller.base_url}/"):
        return "", url, ""
    if len(url) > MAX_URL_CHARS:  # the URL becomes part of the record
        raise BadInput(f"{field}: must be at most {MAX_URL_CHARS} characters", field=field)
    # Split manually because urlsplit raises on `//[`.
    path, _, query = url.removeprefix(caller.base_url).partition("#")[0].partition("?")
    folder, _, name = unquote(path.removeprefix("/").removeprefix("v1/")).partition("/")
    return folder, name, query
