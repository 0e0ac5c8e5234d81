"""Fetches, prepares and stores the source images of predictions.

Images are data: URIs or URLs of files and results of this API. Other URLs are not fetched, because
callers could use them to reach the internal network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote

from api.bodies import MAX_URL_CHARS
from api.errors import NotFound
from api.inputs.files import Files
from api.inputs.image_codec import ImageCodec, data_of_uri
from api.inputs.storage import StorageQuota
from shared.blob import Blob
from shared.catalog_entry import ImageDefaults
from shared.errors import BadInput
from shared.stores.objects import ObjectStore, stored_input
from shared.stores.signed_urls import LinkInvalid, UrlSigner

FOREIGN = (
    "only data: URIs and files of this API (POST /v1/files) are accepted; "
    "other URLs are not fetched"
)


@dataclass(frozen=True, slots=True)
class ImageCaller:
    """The tenant of a request, and its deadline."""

    tenant: str
    quota: StorageQuota
    """The storage quota of the tenant."""
    base_url: str
    """The URL of this API for the caller, without a slash at the end."""
    deadline_s: float
    """Unix time at which work on a source image is stopped."""
    keep_s: float
    """Seconds for which an image is kept that belongs to the request."""


class FetchedFile(NamedTuple):
    """A file that an input names. Its media type and name are as the caller gave them."""

    data: bytes
    media_type: str
    name: str


class SupportsFetch(Protocol):
    """Fetches the target of a signed link."""

    async def fetch(self, key: str, media_type: str, deadline_s: float) -> bytes:
        """Returns the bytes behind a link whose signature was verified."""


class SourceImages:
    """Fetches and stores source images. Has no state between calls."""

    def __init__(
        self,
        objects: ObjectStore,
        files: Files,
        fetcher: SupportsFetch,
        url_signer: UrlSigner,
        image_codec: ImageCodec,
    ) -> None:
        self._objects = objects
        self._files = files
        self._fetcher = fetcher
        self._url_signer = url_signer
        self._image_codec = image_codec

    async def fetch(self, url: str, caller: ImageCaller, field: str = "image") -> FetchedFile:
        """Fetches a data: URI, or a URL of this API.

        Args:
            url: in the input.
            caller: the owner of files.
            field: of the input, for errors.

        Raises:
            BadInput: the URL is neither, or its target does not exist.
        """
        if url.startswith("data:"):
            data = await data_of_uri(url, field, field=field)
            return FetchedFile(data, url[5:].partition(",")[0].partition(";")[0].lower(), "")
        if not url.startswith(f"{caller.base_url}/"):
            raise BadInput(f"{field}: {FOREIGN}", field=field)
        if len(url) > MAX_URL_CHARS:  # it becomes part of the record
            raise BadInput(f"{field}: longer than {MAX_URL_CHARS} characters", field=field)
        # The rest is a path and a query. It is split manually, because urlsplit raises on `//[`.
        path, _, query_text = url.removeprefix(caller.base_url).partition("#")[0].partition("?")
        folder, _, name = unquote(path.removeprefix("/").removeprefix("v1/")).partition("/")
        try:
            if folder == "files":
                file = await self._files.find(caller.tenant, name)
                return FetchedFile(await self._files.read(file), file.content_type, file.name)
            if folder == "objects":
                query = dict(parse_qsl(query_text))
                self._url_signer.check(
                    name, query["type"], int(query["expires"]), query["signature"]
                )
                data = await self._fetcher.fetch(name, query["type"], caller.deadline_s)
                return FetchedFile(data, query["type"], "")
        except (LinkInvalid, NotFound, BadInput, KeyError, ValueError) as error:
            reason = getattr(error, "message", "not a link that this API signed")
            raise BadInput(f"{field}: {reason}", field=field) from error
        raise BadInput(f"{field}: {FOREIGN}", field=field)

    async def prepare(
        self,
        data: bytes,
        size: tuple[int, int] | None,
        limits: ImageDefaults,
        caller: ImageCaller,
    ) -> tuple[Blob, tuple[int, int]]:
        """Returns the image as models take it, and its size.

        Args:
            data: the image file.
            size: the output size. None: the aspect ratio of the source, within `limits`.
            limits: the limits of the model.
            caller: the tenant and deadline.
        """
        return await self._image_codec.prepare_source(
            data, size, limits, caller.deadline_s, tenant=caller.tenant
        )

    async def keep(self, file: FetchedFile, caller: ImageCaller, name: str = "image") -> str:
        """Stores the bytes of a data: URI as a file, and returns its URL.

        Records do not hold files. The file is kept as long as the prediction.

        Raises:
            StorageFull: the tenant has no room for it.
            Unavailable: the object store is out of reach.
        """
        kept = await self._files.add(
            caller.quota, file.data, name=name, content_type=file.media_type, keep_s=caller.keep_s
        )
        return f"{caller.base_url}/v1/files/{kept.id}"

    async def stored(self, source: Blob) -> Blob:
        """Returns the source for a message. A large one goes to the object store."""
        return await stored_input(source, self._objects)
