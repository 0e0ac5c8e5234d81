"""Builds the images for a request: fetches the files and prepares them for models.

Image endpoints, image model predictions, and batch lines all build their images here.

An adapter (LoRA) can be specified by its file's URL if the catalog allows that URL. The API fetches
the file like any other input. From then on, the cache, rows, and workers identify the adapter by
the fetched file's digest, no matter what the URL returns later. A caller who appends `#sha256=…` to
the URL gets the file with that digest, or an error. Fetched files are remembered per tenant, so no
tenant can get an adapter whose URL it can't access.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from api.inputs.codec_protocol import UNPADDED, Padding
from api.inputs.guides import (
    CONTROL_IMAGE,
    IP_ADAPTER_IMAGE,
    ControlFields,
    ImageFields,
    guide_urls,
    place_of_control,
)
from api.inputs.image_codec import PreparedSource
from api.inputs.source_images import FetchedFile, ImageCaller, SourceImages
from api.inputs.storage import owner_of
from api.inputs.url_fetcher import FileRules
from shared.errors import BadInput
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.tasks.image import ControlInput, ImageInput, IpAdapterInput, choose_adapter

USUAL_STRENGTH = 0.8
MAX_MASK_BLUR = 64.0
"""In pixels."""

ADAPTER_FIELD = "lora_weights"
ADAPTER_KEPT_S = 12 * 3600.0
"""How long an unchanged file is reused without being downloaded again. Stored inputs are kept for
days.
"""
_DIGEST = re.compile(r"sha256=([0-9a-f]{64})")


class ImageSource(NamedTuple):
    """A source image to start from, and its mask. Both files are identified by slot."""

    image: str
    strength: float
    """Ignored by models that edit the source as a whole."""
    mask: str | None = None
    redraws: Literal["transparent", "white"] = "white"
    """The part of the mask to redraw."""
    blur: float = 0.0
    """Softness of the mask edge, as in ImageCodec.prepare_mask."""
    padding: Padding = UNPADDED
    """Padding around the image, as in ImageCodec.prepare_source. It is always redrawn."""


class ImageDraft:
    """One request's images, while the files are being fetched and prepared.

    Call `fetch` before `first`.

    Args:
        body: the parameters, validated with `check_guides` and `check_accepted`.
        model: the model that draws the images.
        size: requested width and height. None: the source's or control's size if there is one,
            otherwise the model's default.
        owner: the files' owner, which counts the work done on them.
        images: fetches and stores the files.
    """

    def __init__(
        self,
        body: ImageFields,
        model: Model,
        size: tuple[int, int] | None,
        owner: ImageCaller,
        images: SourceImages,
    ) -> None:
        self._body = body
        self._model = model
        self._size = size
        self._owner = owner
        self._images = images
        self._files: dict[str, bytes] = {}
        self._inline: dict[str, FetchedFile] = {}

    async def fetch(self, files: Mapping[str, bytes | str]) -> None:
        """Concurrently fetches all files specified by URL.

        Args:
            files: each file's data or URL, keyed by its slot in the request.

        Raises:
            BadInput: a file does not exist, or fetching it is not allowed. The message names its
                slot.
            Overloaded: too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        urls = {place: file for place, file in files.items() if isinstance(file, str)}
        fetched = await self._images.fetch_images(urls, self._owner) if urls else {}
        self._files = {place: file for place, file in files.items() if isinstance(file, bytes)}
        self._files |= {place: file.data for place, file in fetched.items()}
        self._inline = {
            place: file for place, file in fetched.items() if urls[place].startswith("data:")
        }

    async def first(self, source: ImageSource | None = None) -> ImageInput:
        """Returns the first image. The other images differ only in their seeds.

        Args:
            source: the image to start from, or None to draw from the prompt.

        Raises:
            BadInput: the model can't draw the image, or a file is damaged or not an image.
            Overloaded: too many images are waiting to be decoded, or too many files are being
                fetched.
            DeadlineExceeded: an image was not decoded in time.
            Unavailable: the object store is unreachable.
        """
        if source is None:
            first, size = first_image(self._body, self._model, self._size), self._size
        else:
            first = await self._start_from(source)
            size = first.width, first.height
        first = await self._guide(first, size)
        return await self._adapt(first)

    async def store(self, first: ImageInput) -> ImageInput:
        """Returns an image ready to send, with large sources moved to the object store.

        Raises:
            Unavailable: the object store is unreachable.
        """
        return first.with_sources(
            [await self._images.store_large_source(blob) for blob in first.sources]
        )

    async def keep_inline(self) -> dict[str, str]:
        """Stores the files that were sent as data: URIs, and returns their URLs, keyed by slot.

        Raises:
            StorageFull: the tenant's storage quota is used up.
            Unavailable: the object store is unreachable.
        """
        return {
            place: await self._images.keep(file, self._owner, place.rpartition(".")[2])
            for place, file in self._inline.items()
        }

    async def _start_from(self, source: ImageSource) -> ImageInput:
        """Returns an image that starts from a source."""
        image = await self._prepare(source.image, self._size, source.padding)
        first = first_image(self._body, self._model, image.size)
        if self._model.image.accepts("strength"):
            _check_strength(first.steps, source.strength)
            first = msgspec.structs.replace(first, strength=source.strength)
        mask = None
        if source.mask is not None or source.padding != UNPADDED:
            mask = await self._prepare_mask(source, image)
        return msgspec.structs.replace(first, image=image.image, mask=mask)

    async def _guide(self, first: ImageInput, size: tuple[int, int] | None) -> ImageInput:
        """Returns an image with the request's guides.

        Args:
            size: width and height of the image to draw. None means the control's size, if any.
        """
        body = self._body
        if CONTROL_IMAGE in self._files:
            control, (width, height) = await self._control(body, CONTROL_IMAGE, size)
            first = msgspec.structs.replace(first, width=width, height=height, control=control)
        size = first.width, first.height
        for index, more in enumerate(body.more_controls or ()):
            control, _ = await self._control(more, place_of_control(index), size)
            first = msgspec.structs.replace(first, more_controls=(*first.more_controls, control))
        if IP_ADAPTER_IMAGE in self._files:
            first = msgspec.structs.replace(first, ip_adapter=await self._ip_adapter())
        return first

    async def _control(
        self, fields: ControlFields, place: str, size: tuple[int, int] | None
    ) -> tuple[ControlInput, tuple[int, int]]:
        """Returns a control and its image's size."""
        assert fields.control is not None, "validated by check_guides; this is a bug"
        entry = self._model.image.controls[fields.control]
        image = await self._prepare(place, size, field=place)
        scale = fields.controlnet_conditioning_scale
        if scale is None:
            scale = entry.scale
        start, end = fields.part
        control = ControlInput(fields.control, entry.version, image.image, scale, start, end)
        return control, image.size

    async def _ip_adapter(self) -> IpAdapterInput:
        name, scale = self._body.ip_adapter, self._body.ip_adapter_scale
        assert name is not None, "validated by check_guides; this is a bug"
        entry, data = self._model.image.ip_adapters[name], self._files[IP_ADAPTER_IMAGE]
        await self._owner.begin()
        image = await self._images.codec.prepare_reference(
            data, self._owner.deadline_s, tenant=self._owner.tenant, field=IP_ADAPTER_IMAGE
        )
        return IpAdapterInput(name, entry.version, image, entry.scale if scale is None else scale)

    async def _adapt(self, first: ImageInput) -> ImageInput:
        """Returns an image, fetching its adapter if it is specified by URL.

        Raises:
            BadInput: the file can't be fetched, or has a different digest. The error names
                `lora_weights`.
        """
        chosen, urls = first.adapter, self._model.image.adapter_urls
        if chosen is None or not chosen.url:
            return first
        assert urls is not None, "choose_adapter accepts no URL without them; this is a bug"
        url, expected = _split(chosen.url)
        rules = FileRules(within=urls.allowed, max_bytes=urls.max_bytes, sha256=expected)
        sha256, key = await self._images.fetch_for_workers(
            url, self._owner, ADAPTER_FIELD, rules, ADAPTER_KEPT_S
        )
        if expected and sha256 != expected:
            raise BadInput(
                f"{ADAPTER_FIELD}: the digest of the file at this URL is sha256={sha256}, which "
                "doesn't match the one after the #",
                field=ADAPTER_FIELD,
            )
        digest, owner = f"sha256:{sha256}", owner_of(self._owner.tenant)
        adapter = msgspec.structs.replace(
            chosen, name=digest, version=digest, object_key=key, owner=owner, url=""
        )
        return msgspec.structs.replace(first, adapter=adapter)

    async def _prepare(
        self,
        place: str,
        size: tuple[int, int] | None,
        padding: Padding = UNPADDED,
        field: str = "image",
    ) -> PreparedSource:
        """Returns the image in a slot, in the form models expect. Errors name `field`."""
        await self._owner.begin()
        return await self._images.codec.prepare_source(
            self._files[place],
            size,
            self._model.image,
            self._owner.deadline_s,
            tenant=self._owner.tenant,
            padding=padding,
            field=field,
        )

    async def _prepare_mask(self, source: ImageSource, image: PreparedSource) -> Blob:
        """Returns a source's mask in the form models expect."""
        await self._owner.begin()
        return await self._images.codec.prepare_mask(
            b"" if source.mask is None else self._files[source.mask],
            image,
            source.redraws,
            source.blur,
            self._owner.deadline_s,
            tenant=self._owner.tenant,
            padding=source.padding,
        )


def first_image(body: ImageFields, model: Model, size: tuple[int, int] | None) -> ImageInput:
    """Returns a request's first image, without its files.

    Args:
        size: width and height, or None for the model's default.

    Raises:
        BadInput: the request has more steps than the model allows, or an adapter the model does not
            have.
    """
    defaults = model.image
    steps = defaults.steps if body.num_inference_steps is None else body.num_inference_steps
    if steps > defaults.longest_steps:
        reason = f"must be at most {defaults.longest_steps} for {model.name}, got {steps}"
        raise BadInput(f"num_inference_steps: {reason}", field="num_inference_steps")
    scale = defaults.guidance_scale if body.guidance_scale is None else body.guidance_scale
    width, height = size or (defaults.width, defaults.height)
    return ImageInput(
        prompt=body.prompt,
        width=width,
        height=height,
        steps=steps,
        guidance_scale=scale,
        seed=secrets.randbelow(2**32) if body.seed is None else body.seed,
        scheduler=body.scheduler or defaults.scheduler,
        negative_prompt=body.negative_prompt or "",
        adapter=choose_adapter(model, body.lora_weights, body.lora_scale, takes_urls=True),
        clip_skip=body.clip_skip or None,
        guidance_rescale=body.guidance_rescale or 0.0,
    )


def names_files(body: ImageFields, first: ImageInput) -> bool:
    """Returns whether any guide or adapter in the request needs to be fetched."""
    return bool(guide_urls(body)) or (first.adapter is not None and bool(first.adapter.url))


def consecutive(first: ImageInput, start: int, count: int) -> list[ImageInput]:
    """Returns a request's images: copies of the first, with consecutive seeds from `start`."""
    return [msgspec.structs.replace(first, seed=start + number) for number in range(count)]


def size_of(text: str, model: Model) -> tuple[int, int]:
    """Parses and validates WIDTHxHEIGHT.

    Raises:
        BadInput: the model does not support the size.
    """
    width, height = (int(length) for length in text.split("x"))
    return check_size(width, height, model)


def check_size(width: int, height: int, model: Model) -> tuple[int, int]:
    """Validates and returns an output size in pixels.

    Raises:
        BadInput: the model does not support the size.
    """
    limits = model.image
    if width % limits.multiple or height % limits.multiple:
        raise BadInput(
            f"size: width and height must be multiples of {limits.multiple} for {model.name}",
            field="size",
        )
    if width * height > limits.largest_pixels:
        reason = (
            f"{width}x{height} is {width * height} pixels, which exceeds the maximum of "
            f"{limits.largest_pixels} for {model.name}"
        )
        raise BadInput(f"size: {reason}", field="size")
    return width, height


def _check_strength(steps: int, strength: float) -> None:
    """Checks that at least one step will run.

    Raises:
        BadInput: the strength is too low.
    """
    if int(steps * strength) < 1:
        reason = (
            f"{strength:g} times {steps} steps is less than one step; increase strength or "
            "num_inference_steps"
        )
        raise BadInput(f"strength: {reason}", field="strength")


def _split(text: str) -> tuple[str, str]:
    """Returns an adapter's URL and the hex digest after the #, which is empty if absent.

    Raises:
        BadInput: the part after the # is not a digest.
    """
    url, _, fragment = text.partition("#")
    if not fragment:
        return url, ""
    if (digest := _DIGEST.fullmatch(fragment)) is None:
        reason = "the part after the # must be sha256= followed by 64 digits (0-9, a-f)"
        raise BadInput(f"{ADAPTER_FIELD}: {reason}", field=ADAPTER_FIELD)
    return url, digest[1]
