"""From the `input` of a prediction to the items of its job: checked, with the model's defaults, and a source picture.

Pictures come as data: URIs or as URLs of our own files and results. Other URLs are not fetched: whoever may name a URL
that this API opens can look around in the network that it stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from api.errors import NotFound
from api.inputs.files import Files
from api.inputs.image_codec import ImageCodec, data_of_uri
from api.inputs.image_params import check_strength, checked_size, first_image, size_of
from api.inputs.texts import text_inputs
from api.predictions.results import ResultFetcher
from api.problem_details import inside_input
from api.schemas.replicate import LONGEST_URL, PictureInput, TextsInput
from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.catalog import Model
from shared.errors import BadInput, InputTooLarge
from shared.stores.objects import ObjectStore, object_key
from shared.stores.signed_urls import LinkInvalid, Links
from shared.tasks import Input

MOST_FIELDS = 100
MOST_TEXTS = 128
"""A prediction is one message, its answer another: both are to stay far below Pub/Sub's 10 MB."""
MOST_TEXT_BYTES = 1024 * 1024
USUAL_STRENGTH = 0.8
FOREIGN = "only data: URIs and files of this API (POST /v1/files) are accepted; other URLs are not fetched"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a prediction is to compute."""

    inputs: Sequence[Input]
    shown: dict[str, Any]
    """The input as it is kept and shown: as it was given, a picture inside it by the URL of a file."""
    is_list: bool
    """Whether the output is a list, or its only element."""
    is_repeatable: bool
    output_format: str = "png"


class InputReader:
    """Reads inputs; holds nothing between two calls."""

    def __init__(
        self, objects: ObjectStore, files: Files, fetcher: ResultFetcher, links: Links, image_codec: ImageCodec
    ) -> None:
        self._objects = objects
        self._files = files
        self._fetcher = fetcher
        self._links = links
        self._image_codec = image_codec

    async def read(
        self, given: dict[str, Any], model: Model, tenant: str, base_url: str, *, deadline_s: float
    ) -> Inputs:
        """The inputs of one prediction.

        Args:
            given: the `input` of the body.
            model: that is to compute them.
            tenant: whose files may be named.
            base_url: what URLs of our own begin with, without a slash at the end.
            deadline_s: Unix time until which a source picture may be worked on.

        Raises:
            InvalidFields: something in it is wrong.
            Overloaded: too many pictures wait to be decoded.
            DeadlineExceeded: the source picture was not decoded in time.
            Unavailable: the object store is out of reach.
        """
        if len(given) > MOST_FIELDS:
            raise BadInput(f"input: {len(given)} fields; at most {MOST_FIELDS} are allowed", field="input")
        with inside_input():
            if model.task == "embedding":
                return _texts(TextsInput.model_validate(given, strict=True), given, model)
            wish = PictureInput.model_validate(given, strict=True)
            return await self._pictures(wish, given, model, _Caller(tenant, base_url, deadline_s))

    async def _pictures(self, wish: PictureInput, given: dict[str, Any], model: Model, caller: _Caller) -> Inputs:
        size, shown = _size(wish, model), given
        if wish.image is None:
            first = first_image(wish, model, size or (model.image.width, model.image.height))
        else:
            strength = wish.strength or wish.prompt_strength or USUAL_STRENGTH
            data = await self._picture(wish.image, caller)
            source, size = await self._image_codec.prepare_source(data, size, model.image, caller.deadline_s)
            first = first_image(wish, model, size)
            check_strength(first.steps, strength)
            source = await self._traveling(source)
            first = msgspec.structs.replace(first, image=source, strength=strength)
            if wish.image.startswith("data:"):
                shown = given | {"image": await self._url_of(wish.image, data, caller)}
        inputs = [msgspec.structs.replace(first, seed=first.seed + number) for number in range(wish.num_outputs)]
        return Inputs(inputs, shown, True, wish.seed is not None, wish.output_format)

    async def _picture(self, url: str, caller: _Caller) -> bytes:
        """The bytes that a data: URI holds, or one of our own URLs names."""
        if url.startswith("data:"):
            return await data_of_uri(url, "image", field="image")
        if not url.startswith(f"{caller.base_url}/"):
            raise BadInput(f"image: {FOREIGN}", field="image")
        if len(url) > LONGEST_URL:  # it is kept in the record
            raise BadInput(f"image: longer than {LONGEST_URL} characters", field="image")
        # What follows our own address is a path and a query, which need no parser: urlsplit raises on `//[`.
        path, _, query_text = url.removeprefix(caller.base_url).partition("#")[0].partition("?")
        folder, _, name = unquote(path.removeprefix("/").removeprefix("v1/")).partition("/")
        try:
            if folder == "files":
                file = await self._files.find(caller.tenant, name)
                return await self._files.read(file)
            if folder == "objects":
                query = dict(parse_qsl(query_text))
                self._links.check(name, query["type"], int(query["expires"]), query["signature"])
                return await self._fetcher.fetch(name, query["type"], caller.deadline_s)
        except (LinkInvalid, NotFound, BadInput, KeyError, ValueError) as error:
            reason = getattr(error, "message", "not a link that this API signed")
            raise BadInput(f"image: {reason}", field="image") from error
        raise BadInput(f"image: {FOREIGN}", field="image")

    async def _url_of(self, uri: str, data: bytes, caller: _Caller) -> str:
        """The URL of a file with what came inside the input: a record is no place for it."""
        media_type = uri.partition(";")[0].removeprefix("data:")
        file = await self._files.add(caller.tenant, data, name="image", content_type=media_type)
        return f"{caller.base_url}/v1/files/{file.id}"

    async def _traveling(self, source: Blob) -> Blob:
        """The source as it travels: too large for a message, it lies in the object store."""
        if source.data is None or len(source.data) <= INLINE_LIMIT_BYTES:
            return source
        key = object_key("inputs", source.data, source.media_type)
        await self._objects.put(key, source.data, source.media_type)
        return Blob(source.media_type, object_key=key)


@dataclass(frozen=True, slots=True)
class _Caller:
    tenant: str
    base_url: str
    deadline_s: float


def _texts(wish: TextsInput, given: dict[str, Any], model: Model) -> Inputs:
    inputs = text_inputs(wish.given, model, truncate=wish.truncate or "none")
    if len(inputs) > MOST_TEXTS:
        raise BadInput(f"texts: {len(inputs)} texts; at most {MOST_TEXTS} are allowed in a prediction", field="texts")
    listed = [wish.given] if isinstance(wish.given, str) else wish.given
    if sum(len(text.encode()) for text in listed) > MOST_TEXT_BYTES:
        raise InputTooLarge(f"texts: together longer than {MOST_TEXT_BYTES} bytes", field="texts")
    return Inputs(inputs, given, not isinstance(wish.given, str), is_repeatable=True)


def _size(wish: PictureInput, model: Model) -> tuple[int, int] | None:
    """The size asked for; None: nothing was said."""
    if wish.size:
        return size_of(wish.size, model)
    if not (wish.width or wish.height):
        return None
    return checked_size(wish.width or model.image.width, wish.height or model.image.height, model)
