"""Image: turns a prompt, or an image and a prompt, into an image."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import msgspec

from shared.errors import BadInput
from shared.models.blob import FILE_FORMAT, Blob
from shared.models.entry import CatalogEntry
from shared.models.flow_types import StepSchema
from shared.models.image_entry import MAX_LORA_SCALE, MIN_LORA_SCALE
from shared.models.tasks.base import (
    MAX_STEP_SEED,
    FirstGuesses,
    LinkTo,
    StepInput,
    Task,
    TaskInput,
    TaskResult,
    WorkBound,
)

_MAX_TOLD = 50
"""Maximum number of adapter names listed in an error. The model's schema lists all the names."""

MAX_PROMPT_CHARS = 32_000


class ChosenAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The adapter to draw an image with.

    `version`: the digest of the adapter's file in the API's catalog. For a file specified by URL,
    it is the fetched file's digest, which is also its name; `object_key` is the file's key in the
    object store, and `owner` is the tenant's digest. `url`: where to fetch the file, until it has
    been fetched.
    """

    name: str
    version: str
    scale: float
    object_key: str = ""
    owner: str = ""
    url: str = ""


class ControlInput(msgspec.Struct, omit_defaults=True):
    """A ControlNet to draw an image with, by its name in the catalog, and the control image.

    `digest`: digest of the ControlNet's entry. `scale` multiplies its contribution. `start` and
    `end`: the range of steps, from 0 to 1, in which it contributes.
    """

    name: str
    digest: str
    image: Blob
    scale: float
    start: float = 0.0
    end: float = 1.0

    def cache_form(self) -> tuple[object, ...]:
        """Returns everything that affects the result. The image is represented by its digest."""
        numbers = (float(self.scale), float(self.start), float(self.end))
        return ("control", self.name, self.digest, *self.image.identity, *numbers)


class IpAdapterInput(msgspec.Struct, omit_defaults=True):
    """An IP-Adapter to draw an image with, by its name in the catalog, and the adapter's image.

    `version`: version of its catalog entry. `scale` multiplies its contribution.
    """

    name: str
    version: str
    image: Blob
    scale: float

    def cache_form(self) -> tuple[object, ...]:
        """Returns everything that affects the result. The image is represented by its digest."""
        return ("ip_adapter", self.name, self.version, *self.image.identity, float(self.scale))


class ImageInput(TaskInput, tag="image"):
    """One image to draw. If `image` is set, the image is redrawn (image-to-image) at `strength`.

    `mask`: a grayscale image of the same size as the output. `image` is redrawn only where the mask
    is not black. `control`: a ControlNet that guides the drawing; `more_controls` are additional
    ones.
    `ip_adapter`: a reference image for the drawing. `clip_skip`: how many of CLIP's last layers to
    skip for `prompt`. `guidance_rescale`: how much of the contrast added by guidance is removed,
    from 0 to 1 (https://arxiv.org/abs/2305.08891).
    """

    prompt: str
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    scheduler: str
    negative_prompt: str = ""
    image: Blob | None = None
    strength: float | None = None
    mask: Blob | None = None
    adapter: ChosenAdapter | None = None
    clip_skip: int | None = None
    guidance_rescale: float = 0.0
    control: ControlInput | None = None
    ip_adapter: IpAdapterInput | None = None
    more_controls: tuple[ControlInput, ...] = ()

    @property
    def controls(self) -> Sequence[ControlInput]:
        """All of the image's ControlNets. Releases up to 0.1 read only the first one."""
        return [] if self.control is None else [self.control, *self.more_controls]

    @property
    def guides(self) -> Sequence[ControlInput | IpAdapterInput]:
        """All ControlNets in order, then the IP-Adapter if there is one."""
        return [*self.controls, *([] if self.ip_adapter is None else [self.ip_adapter])]

    @property
    def sources(self) -> Sequence[Blob]:
        """The image to start from, its mask, and the images for the ControlNets and IP-Adapter."""
        own = [blob for blob in (self.image, self.mask) if blob is not None]
        return (*own, *(guide.image for guide in self.guides))

    def with_sources(self, sources: Sequence[Blob]) -> Self:
        """Returns the same input with its images replaced."""
        remaining_sources, moved = iter(sources), dict[str, Any]()
        for name in ("image", "mask"):
            if getattr(self, name) is not None:
                moved[name] = next(remaining_sources)
        guides = [
            msgspec.structs.replace(guide, image=next(remaining_sources)) for guide in self.guides
        ]
        if self.ip_adapter is not None:
            moved["ip_adapter"] = guides.pop()
        if guides:
            moved |= {"control": guides[0], "more_controls": tuple(guides[1:])}
        return msgspec.structs.replace(self, **moved)

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns pixel-steps. With a source image, only some of the steps run."""
        share = 1.0 if self.strength is None else self.strength
        return self.width * self.height * max(1, int(self.steps * share))

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns pixel-steps. Some families round fractional steps up."""
        share = 1.0 if self.strength is None else self.strength
        steps = self.steps - int(max(self.steps - self.steps * share, 0))
        return WorkBound(self.width * self.height * max(1, steps))

    def cache_form(self) -> tuple[object, ...]:
        """Returns every parameter. 7 and 7.0 count as the same guidance scale.

        Files are represented by their digests.
        """
        size = (self.width, self.height, self.steps)
        guidance = float(self.guidance_scale)
        options: tuple[object, ...] = (guidance, self.seed, self.scheduler)
        options += (self.prompt, self.negative_prompt)
        # Included only if set, so that the keys of other requests stay the same.
        if self.clip_skip or self.guidance_rescale:
            options += (self.clip_skip or 0, float(self.guidance_rescale))
        if (chosen := self.adapter) is not None:
            options += ("adapter", chosen.name, chosen.version, float(chosen.scale))
        guided = tuple(guide.cache_form() for guide in self.guides)
        if self.image is None:
            return ("image", size, options, *guided)
        strength = None if self.strength is None else float(self.strength)
        source = (self.image.identity, strength)
        masked = () if self.mask is None else (self.mask.identity,)
        return ("image", size, options, *source, *masked, *guided)


class ImagesInput(TaskInput, tag="images"):
    """The images in a request with steps after each image: `first`, drawn with several seeds.

    Large sources are in the object store. `is_repeatable`: True if identical requests produce
    identical images, which may be cached. `upscale`: factor by which to enlarge the images.
    """

    first: ImageInput
    seeds: list[int]
    is_repeatable: bool
    upscale: int = 1

    @property
    def images(self) -> list[ImageInput]:
        return [msgspec.structs.replace(self.first, seed=seed) for seed in self.seeds]

    def estimate_work(self, entry: CatalogEntry) -> int:
        return len(self.seeds) * self.first.estimate_work(entry)

    def cache_form(self) -> tuple[object, ...]:
        return ("images", *self.first.cache_form(), *self.seeds, self.upscale)

    def step_value(self) -> dict[str, Any]:
        drawings = [StepInput(image, self.is_repeatable) for image in self.images]
        return {"drawings": drawings, "upscale": self.upscale}


class ImageResult(TaskResult, tag="image"):
    """One encoded image, with the seed that reproduces it."""

    image: Blob
    width: int
    height: int
    seed: int
    pixel_steps: int
    truncated_tokens: int | None = None
    """Number of tokens cut because a prompt was too long for the model. None if unknown."""
    adapter: str | None = None
    """Name of the adapter used to draw the image, if any."""

    @property
    def blobs(self) -> Sequence[Blob]:
        return (self.image,)

    def with_blobs(self, blobs: Sequence[Blob]) -> Self:
        """Returns the same result with its image replaced."""
        return msgspec.structs.replace(self, image=blobs[0])

    def to_output(self, media_type: str, link_to: LinkTo) -> str:
        """Returns a `data:` URI for a small image that needs no conversion; otherwise, a URL."""
        if self.image.data is not None and media_type == self.image.media_type:
            return f"data:{media_type};base64,{base64.b64encode(self.image.data).decode()}"
        return link_to(self.image.object_key)

    def step_value(self) -> Blob:
        return self.image

    @classmethod
    def count_truncated(cls, results: Sequence[TaskResult], *, is_asked: bool = True) -> int | None:
        """Returns the number of tokens cut from the prompts.

        All images in a request have the same prompts.
        """
        counts = [result.truncated_tokens for result in results if isinstance(result, ImageResult)]
        return max((count for count in counts if count is not None), default=None)


class ImagesResult(TaskResult, tag="images"):
    """Images from a request with steps after each image (see after_image.py), in request order."""

    images: list[ImageResult | None]
    """None stands for a withheld image."""

    @property
    def delivered(self) -> list[ImageResult]:
        return [image for image in self.images if image is not None]

    @property
    def withheld(self) -> int:
        return self.images.count(None)

    @property
    def blobs(self) -> Sequence[Blob]:
        return [image.image for image in self.delivered]

    def with_blobs(self, blobs: Sequence[Blob]) -> Self:
        """Returns the same images with their data replaced."""
        remaining_blobs = iter(blobs)
        images = [image and image.with_blobs([next(remaining_blobs)]) for image in self.images]
        return msgspec.structs.replace(self, images=images)

    def to_output(self, media_type: str, link_to: LinkTo) -> list[str]:
        """Returns URIs for the images that are delivered."""
        return [image.to_output(media_type, link_to) for image in self.delivered]

    def step_value(self) -> list[Blob]:
        return list(self.blobs)


def choose_adapter(
    entry: CatalogEntry, name: str | None, scale: float | None, *, takes_urls: bool = False
) -> ChosenAdapter | None:
    """Returns the adapter selected by `lora_weights` and `lora_scale`, or None if there is none.

    Args:
        scale: the adapter's strength. None means the catalog's default.
        takes_urls: True if `name` may be a file's URL, which this function's caller then fetches.

    Raises:
        BadInput: the model doesn't have the adapter, or a scale is set without an adapter.
    """
    if name is None:
        if scale is not None:
            raise BadInput(
                "lora_scale: requires lora_weights; omit it otherwise", field="lora_scale"
            )
        return None
    by_url = takes_urls and entry.image.adapter_urls is not None and name.startswith("https://")
    adapter = None if by_url else entry.image.adapters.get(name)
    if adapter is None and not by_url:
        raise BadInput(
            f"lora_weights: {_no_such_adapter(entry, name, takes_urls)}", field="lora_weights"
        )
    used = scale
    if used is None:
        used = 1.0 if adapter is None else adapter.scale
    if not MIN_LORA_SCALE <= used <= MAX_LORA_SCALE:
        raise BadInput(
            f"lora_scale: must be from {MIN_LORA_SCALE:g} to {MAX_LORA_SCALE:g}, got {used}",
            field="lora_scale",
        )
    if adapter is None:
        return ChosenAdapter("", "", used, url=name)
    return ChosenAdapter(name, adapter.version, used)


def _no_such_adapter(entry: CatalogEntry, name: str, takes_urls: bool) -> str:
    adapters, urls = entry.image.adapters, entry.image.adapter_urls if takes_urls else None
    if not adapters and urls is None:
        return f"{entry.name} does not support adapters; omit it"
    available = [", ".join(list(adapters)[:_MAX_TOLD])] if adapters else []
    if len(adapters) > _MAX_TOLD:
        available[0] += f" and {len(adapters) - _MAX_TOLD} more"
    if urls is not None:
        available.append(f"files by URL under {', '.join(urls.allowed)}")
    return f"{name[:80]!r} is not an adapter of {entry.name}; it has {', and '.join(available)}"


def step_fields(entry: CatalogEntry) -> dict[str, Any]:
    """Returns an image model's flow step inputs as JSON Schema, without a start image."""
    prompt = {"type": "string", "maxLength": MAX_PROMPT_CHARS}
    adapters: dict[str, Any] = {}
    if entry.image.adapters:
        adapters["lora_weights"] = {"type": "string", "enum": list(entry.image.adapters)}
        scales = {"minimum": MIN_LORA_SCALE, "maximum": MAX_LORA_SCALE}
        adapters["lora_scale"] = {"type": "number", **scales}
    fields = adapters | {
        "prompt": prompt | {"minLength": 1},
        "negative_prompt": prompt,
        "width": {"type": "integer", "minimum": entry.image.multiple},
        "height": {"type": "integer", "minimum": entry.image.multiple},
        "num_inference_steps": {
            "type": "integer",
            "minimum": 1,
            "maximum": entry.image.longest_steps,
        },
        "guidance_scale": {"type": "number", "minimum": 0, "maximum": 100},
        "seed": {"type": "integer", "minimum": 0, "maximum": MAX_STEP_SEED},
        "scheduler": {"type": "string", "enum": list(entry.image.schedulers)},
    }
    return {name: field for name, field in fields.items() if entry.image.accepts(name)}


class ImageTask(Task):
    """Diffusion models. The unit of work and price is the pixel-step."""

    name = "image"
    noun = "an image model"
    gen_ai_operation = "generate_content"
    unit = "pixel_steps"
    first_guesses: ClassVar = FirstGuesses(item_s=2.0, gap_s=0.5, batch_s=1.0)
    stores_blobs = True
    is_compiled = True

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes torch the backend and uses slots for replies, because an item takes seconds."""
        return {"backend": "torch", "replies": "slots"}

    def check_entry(self, entry: CatalogEntry) -> None:
        """Requires the entry to set a pixel-step budget."""
        if entry.backend != "torch":
            raise ValueError(f"{self.noun} requires the torch backend")
        if entry.batch.max_pixel_steps is None:
            raise ValueError(f"{self.noun} requires batch.max_pixel_steps")

    def budget(self, entry: CatalogEntry) -> int:
        assert entry.batch.max_pixel_steps is not None, (
            "validated when the catalog was read; this is a bug"
        )
        return entry.batch.max_pixel_steps

    def tolerance(self, entry: CatalogEntry) -> float:
        """Returns the minimum peak signal-to-noise ratio, in dB, for images to count as equal."""
        return entry.tolerance.psnr_db

    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        fields = {"type": "object", "properties": step_fields(entry), "required": ["prompt"]}
        return StepSchema(fields, {"type": "string", "format": FILE_FORMAT})

    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        """Accepts a prompt, or `drawing`: an image from ImagesInput."""
        if isinstance(drawing := values.get("drawing"), StepInput):
            return drawing
        limits, prompt = entry.image, values.get("prompt")
        if not isinstance(prompt, str) or not 0 < len(prompt) <= MAX_PROMPT_CHARS:
            raise BadInput(
                f"prompt: must be text of 1 to {MAX_PROMPT_CHARS} characters", field="prompt"
            )
        width, height = values.get("width", limits.width), values.get("height", limits.height)
        if width % limits.multiple or height % limits.multiple:
            raise BadInput(
                f"width, height: must be multiples of {limits.multiple} for {entry.name}",
                field="width",
            )
        if width * height > limits.largest_pixels:
            raise BadInput(
                f"width, height: {width}x{height} is {width * height} pixels, which exceeds the "
                f"maximum of {limits.largest_pixels} for {entry.name}",
                field="width",
            )
        seed = values.get("seed")
        image = ImageInput(
            prompt=prompt,
            width=width,
            height=height,
            steps=values.get("num_inference_steps", limits.steps),
            guidance_scale=values.get("guidance_scale", limits.guidance_scale),
            seed=secrets.randbelow(2**32) if seed is None else seed,
            scheduler=values.get("scheduler", limits.scheduler),
            negative_prompt=values.get("negative_prompt", ""),
            adapter=choose_adapter(entry, values.get("lora_weights"), values.get("lora_scale")),
        )
        return StepInput(image, seed is not None)

    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """Returns the work for the largest image with the maximum number of steps."""
        return WorkBound(entry.image.largest_pixels * entry.image.longest_steps)

    def least_work(self, entry: CatalogEntry) -> int:
        """Returns the work for one step of the smallest image."""
        return entry.image.multiple**2


IMAGE = ImageTask()
