"""The image section of a catalog entry, and the models that may be added to its weights."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shared.models.entry_fields import EntryPart, Positive, Revision, Source
from shared.models.image_interface import ImageInterface
from shared.models.schedulers import SCHEDULER_NAMES

MAX_ADAPTERS = 256
"""Maximum adapters per model. The whole entry is passed to model processes as a command-line
argument.
"""
MIN_LORA_SCALE, MAX_LORA_SCALE = -1.0, 3.0
"""Same range as for Replicate's models with adapters."""
DEFAULT_ADAPTER_BYTES = 1024**3

UrlBeginning = Annotated[
    str, Field(pattern=r"^https://[a-z0-9][a-z0-9.-]*(:[0-9]+)?/([^\s?#%\\]+/)?$", max_length=300)
]
"""An https URL with a lowercase host and a folder that ends with a slash."""

RequestedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name that a request uses to select one of several adapters or ControlNets."""

MAX_CONTROL_SCALE = 2.0

MAX_IP_ADAPTER_SCALE = 2.0
_PLACE_PATTERN = r"^([A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*)?$"


class Adapter(EntryPart):
    """A low-rank change (LoRA) to an image model's weights, which requests may select."""

    source: Annotated[
        str, Field(pattern=r"^(hf:|gs://|local:|package:)[^\s]+\.safetensors$", max_length=300)
    ]
    """The adapter's file. Same kinds of sources as for models: `hf:ORG/NAME/FILE`,
    `gs://BUCKET/FILE`, `local:FILE`, `package:IMPORT.NAME/FILE`.
    """
    revision: Revision = "main"
    """A Hub repository's revision. A copy from a bucket is stored under this name."""
    digest: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$")
    """The file's digest, checked when the file is read. None accepts any file."""
    scale: float = Field(1.0, ge=MIN_LORA_SCALE, le=MAX_LORA_SCALE)
    """The `lora_scale` for requests that don't set one."""
    max_rank: int = Field(128, ge=1, le=1024)

    @property
    def version(self) -> str:
        """The file's digest or, if the entry does not set one, a digest of the file's location."""
        if self.digest is not None:
            return self.digest
        place = f"{self.source}@{self.revision}"
        return f"source:{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}"


class AdapterUrls(EntryPart):
    """Adapter files that requests may specify by https URL."""

    allowed: tuple[UrlBeginning, ...] = Field(min_length=1, max_length=16)
    """Allowed prefixes for a file's URL and each URL it redirects to: a bucket, or a folder in a
    bucket.
    """
    max_bytes: Positive = Field(256 * 1024**2, le=1024**3)
    """Maximum file size."""
    max_rank: int = Field(128, ge=1, le=1024)
    disk_bytes: Positive = 4 * 1024**3
    """Maximum total size of the files on a worker's disk. Beyond that, the least recently used
    files of the tenant that uses the most space are deleted.
    """

    @model_validator(mode="after")
    def _holds_a_file(self) -> Self:
        if self.disk_bytes < self.max_bytes:
            raise ValueError(
                "disk_bytes: must be at least max_bytes so that the largest allowed file fits"
            )
        return self


class _FolderBeside(EntryPart):
    """A folder of weights that an image model loads alongside its own."""

    source: Source
    revision: Revision = "main"

    @cached_property
    def version(self) -> str:
        """A digest of everything that affects results, except the scale, which requests set."""
        text = self.model_dump_json(exclude={"scale"})
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Control(_FolderBeside):
    """A ControlNet trained for the image model: a folder saved by diffusers' ControlNetModel."""

    preprocessor: Literal["none", "canny", "tile"] = "none"
    """How to convert a caller's image to a map. `none`: the image is already a map (depth or a
    pose). `canny`: edges, like OpenCV's `Canny`. `tile`: a coarser image.
    """
    canny_low: int = Field(100, ge=0, le=2040)
    canny_high: int = Field(200, ge=0, le=2040)
    """`canny` thresholds for gradients |dx| + |dy|, in levels."""
    tile_factor: float = Field(1.0, ge=1, le=8)
    """Factor by which `tile` shrinks the width and height before enlarging them again."""
    scale: float = Field(1.0, ge=0, le=MAX_CONTROL_SCALE)
    """`controlnet_conditioning_scale` for requests that don't set it."""

    @model_validator(mode="after")
    def _thresholds_are_in_order(self) -> Self:
        if self.canny_low > self.canny_high:
            raise ValueError("canny_low must not exceed canny_high")
        return self


class IpAdapter(_FolderBeside):
    """An image model's IP-Adapter: a file, and the image encoder it was trained with.

    `subfolder`, `weight_name`, and `image_encoder_folder` are the same as in diffusers'
    `load_ip_adapter`.
    """

    subfolder: str = Field("", pattern=_PLACE_PATTERN, max_length=200)
    """Subfolder, within the source, that contains the file."""
    weight_name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors$", max_length=200)
    image_encoder_folder: str = Field("image_encoder", pattern=_PLACE_PATTERN, max_length=200)
    """Folder with transformers' CLIPVisionModelWithProjection, relative to `subfolder`, or to the
    source if the value contains a slash.
    """
    digest: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$")
    """The file's digest, checked when the file is read. None accepts any file."""
    scale: float = Field(1.0, ge=0, le=MAX_IP_ADAPTER_SCALE)
    """The `ip_adapter_scale` for requests that don't set one."""


class UpscaleStep(EntryPart):
    """The custom model that upscales images on request (shared/models/after_image.py)."""

    model: str
    """The model's name in the catalog. The model takes the inputs `image` and `scale`, and returns
    a PNG file.
    """


class SafetyStep(EntryPart):
    """The custom model that checks every image before it is delivered."""

    model: str
    """The model's name in the catalog. The model takes an `image` input and returns an object with
    `is_safe`.
    """
    threshold: float | None = Field(None, ge=0, le=1)
    """Value for the model's `threshold` input. None means the model's default."""


class DeepCacheSettings(EntryPart):
    """Settings for reusing a UNet's deep features across several steps, named as in DeepCache.

    This is faster, but the images differ.
    """

    cache_interval: int = Field(3, ge=2, le=20)
    """Interval, in steps, at which the whole UNet is computed."""
    cache_branch_id: int = Field(0, ge=0, le=8)
    """In the other steps, only this many of the UNet's first layers, and one more of its last
    layers than that, are computed.
    """


class ImageDefaults(EntryPart):
    """Defaults and limits for an image model's parameters.

    `scheduler` is one of the names in shared.models.schedulers.
    """

    width: Positive = 512
    height: Positive = 512
    steps: Positive = 20
    longest_steps: Positive = 100
    guidance_scale: float = Field(7.5, ge=0)
    scheduler: str = "ddim"
    largest_pixels: Positive = 1024 * 1024
    """Maximum width x height in a request."""
    multiple: Positive = 8
    """Width and height must be multiples of this number (the VAE's scale)."""
    interface: ImageInterface | None = None
    """The pipeline's tasks and fields, as written by `penstock models check`: either the file's
    path, relative to the catalog's folder, or its contents. The defaults above then come from the
    pipeline. If None, the API accepts all fields, and the worker rejects fields the pipeline does
    not support.
    """
    join: Literal["auto", "never"] = "auto"
    """`auto`: images join a running batch between two steps if the model is a diffusers pipeline
    (docs/reference/image-models.md). `never`: batches run as a whole.
    """
    compile: Literal["auto", "always", "never"] = "auto"
    """torch.compile for the denoiser and VAE at the default size. `auto`: on GPUs. `always`: on
    CPUs too.

    With `deep_cache`, nothing is compiled.
    """
    compiled_rank: int = Field(32, ge=1, le=1024)
    """Maximum rank of adapters in compiled code, which computes all of them at this rank. Batches
    with adapters of a higher rank, or outside the UNet's attention blocks, run uncompiled.
    """
    adapters: dict[RequestedName, Adapter] = Field({}, max_length=MAX_ADAPTERS)
    """The adapters that requests may select as `lora_weights`, by name."""
    adapter_urls: AdapterUrls | None = None
    """The files that requests may specify by URL as `lora_weights`. None means URLs are not
    accepted.
    """
    adapter_memory_bytes: Positive = DEFAULT_ADAPTER_BYTES
    """Maximum total size of the adapters in a model process's memory, in the model's precision. The
    least recently used adapters are dropped to make room.
    """
    upscale: UpscaleStep | None = None
    """The model that makes images two or four times as large. If None, requests can't ask for
    larger images.
    """
    safety: SafetyStep | None = None
    """The model that decides whether an image is delivered. If None, all images are delivered."""
    controls: dict[RequestedName, Control] = Field({})
    """ControlNets, keyed by the names callers use."""
    ip_adapters: dict[RequestedName, IpAdapter] = Field({})
    """IP-Adapters, keyed by the names callers use."""
    deep_cache: DeepCacheSettings | None = None
    """If None, every step computes the whole UNet."""
    guidance_stop: float = Field(1.0, ge=0, le=1)
    """Fraction of the steps after which the negative prompt no longer applies, like `stop` in
    diffusers' guiders. Later steps need half as much computation
    (https://arxiv.org/abs/2404.07724).
    """

    @model_validator(mode="before")
    @classmethod
    def _take_defaults_of_pipeline(cls, value: Any) -> Any:
        known = value.get("interface") if isinstance(value, dict) else None
        if known is None:
            return value
        interface = ImageInterface.model_validate(known)
        return {**interface.defaults.model_dump(), **value, "interface": interface}

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.interface is None:
            return self
        needed = self.interface.defaults.multiple
        if self.multiple % needed:
            raise ValueError(
                f"multiple must be a multiple of {needed}, which {self.interface.pipeline} "
                f"requires, got {self.multiple}"
            )
        for name in ("width", "height"):
            if (side := getattr(self, name)) % self.multiple:
                raise ValueError(f"{name} must be a multiple of {self.multiple}, got {side}")
        return self

    @property
    def schedulers(self) -> tuple[str, ...]:
        """The schedulers that requests may specify."""
        return SCHEDULER_NAMES if self.interface is None else self.interface.schedulers

    def accepts(self, field: str) -> bool:
        """Returns whether requests may include a field, based on the interface if it is known."""
        return self.interface is None or self.interface.accepts(field)

    @property
    def has_adapters(self) -> bool:
        """True if images may be drawn with adapters."""
        return bool(self.adapters) or self.adapter_urls is not None

    @property
    def compile_mode(self) -> Literal["auto", "always", "never"]:
        """The effective value of `compile`.

        A compiled graph does not expose its inner features.
        """
        return self.compile if self.deep_cache is None else "never"

    @property
    def shortcuts(self) -> tuple[object, ...]:
        """Settings that change the results compared with computing every step in full.

        Empty if there are none.
        """
        chosen: tuple[object, ...] = ()
        if (cache := self.deep_cache) is not None:
            chosen += ("deep_cache", cache.cache_interval, cache.cache_branch_id)
        if self.guidance_stop < 1:
            chosen += ("guidance_stop", float(self.guidance_stop))
        return chosen

    @model_validator(mode="after")
    def _can_be_compiled(self) -> Self:
        if self.deep_cache is not None and self.compile == "always":
            raise ValueError("compile must be auto or never with deep_cache, got always")
        return self
