"""The fields in a catalog entry (`models.yaml`), without task-specific rules."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Literal, Self

from pydantic import (
    AwareDatetime,
    Field,
    field_validator,
    model_validator,
)

from shared.models.blob import INLINE_LIMIT_BYTES, SLOT_INLINE_LIMIT_BYTES
from shared.models.class_variables import PlainVariables, SecretVariables
from shared.models.entry_fields import EntryPart, Positive, Revision, Source, check_quoted
from shared.models.flow_plan import FlowPlan
from shared.models.image_entry import ImageDefaults
from shared.models.interface import ModelInterface

Replies = Literal["direct", "slots"]
"""The inbox topic used for replies (docs/decisions/0001-reply-inboxes.md).

`direct`: one subscription, for items that take milliseconds. `slots`: a filtered subscription per
request in flight, for items that take seconds. Each slot is billed for every reply, so those
replies are kept small: results over 1 KiB go to the object store.
"""

MAX_WORK = 1_000_000_000
DEFAULT_STARTUP_S = 180.0
MAX_STARTUP_S = 7200.0

ServedApi = Literal["transcription", "speech", "ocr"]
"""An endpoint from another API that a custom model serves in addition to predictions.

`transcription`: OpenAI's /v1/audio/transcriptions and /v1/audio/translations. `speech`: OpenAI's
/v1/audio/speech. `ocr`: Mistral's /v1/ocr. See shared/models/tasks/custom.py for their inputs.
"""
WORK_UNITS: Mapping[ServedApi, str] = {
    "transcription": "seconds",
    "speech": "characters",
    "ocr": "pages",
}
"""Unit of work for a class's inputs, keyed by the endpoint that it serves."""
Rerank = Literal["cosine", "cross-encoder"]
"""Method that a similarity model uses to compare a text to a query.

`cosine`: cosine of vectors from an encoder that reads each text separately. `cross-encoder`: a
model that reads both texts together (`AutoModelForSequenceClassification` with one label).
"""
MAX_DEADLINE_S = 86_400
"""Upper bound across all models and callers."""

GpuTypeName = Literal["l4", "a100", "a100-80gb", "h100", "rtx-pro-6000", "t4"]
"""The GPU types described in infra/kubernetes/gpus.yaml. A test compares the two lists."""
MAX_SHARES: dict[str, int] = {"l4": 22, "a100": 36, "t4": 14}
"""Maximum number of workers that can share a GPU: each gets at least 1 GiB of the GPU's memory, not
counting what CUDA contexts need. GKE allows 48, and larger GPUs hit that limit first. A test
compares these numbers with the memory in infra/kubernetes/gpus.yaml.
"""

GPU_COUNTS: dict[str, tuple[int, ...]] = {"t4": (1, 2, 4)}
"""GPUs per machine. Other types have machines with 1, 2, 4, and 8. A test compares these numbers
with the machines in infra/kubernetes/gpus.yaml.
"""

DEFAULT_DISK_BYTES = 4 * 1024**3

NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]{2,199}$"


class Batch(EntryPart):
    """Limits on one batch: the task's budget and a number of items."""

    max_tokens: Positive | None = None
    """Maximum tokens per batch. Encoders default to 32,768.

    For an encoder, a worker finds the right number for its device, up to this value
    (workers/autotune/batch_budget.py).
    """
    max_pixel_steps: Positive | None = None
    max_items: Positive = 64
    """Encoders default to 1,024, or to fewer if the token limit is lower. The item limit shrinks
    along with the token limit.
    """
    max_work: Positive | None = None
    """For custom models that assign weights to their items. None means `max_items` times the
    heaviest item's weight.
    """
    key: str | None = None
    """A custom model's input that must have the same value for all items in a batch.

    None if items with any values may share a batch.
    """


class ItemWork(EntryPart):
    """Upper bounds for a custom model's items."""

    max: int | None = Field(None, ge=1, le=MAX_WORK)
    """Maximum weight, which is the amount that limits reserve for each item."""
    max_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Maximum number of seconds that a class without `predict_batch` may spend on an item,
    regardless of its weight.

    None means until the request's deadline.
    """


class Deadline(EntryPart):
    """Seconds from receipt to response: the default, and the maximum that a caller may request."""

    default_s: float = Field(30.0, gt=0, le=MAX_DEADLINE_S)
    longest_s: float = Field(300.0, gt=0, le=MAX_DEADLINE_S)


class Cache(EntryPart):
    """Cache settings: how long results are kept (0: not at all), and for which callers.

    `tenant`: only callers from a tenant that has sent the same input before. `global`: all callers.
    With `global`, a response reveals to one tenant (through `x-penstock-cache` and its timing)
    whether another tenant has sent the same input, so use it only for models whose inputs are not
    secret.
    """

    ttl_s: int = Field(86400, ge=0)
    scope: Literal["global", "tenant"] = "tenant"


class Gpu(EntryPart):
    """The GPUs requested by a worker, or how many workers share one GPU."""

    type: Literal[GpuTypeName, "none"] = "none"
    share: int = Field(1, ge=1, le=48)
    sharing: Literal["time-sharing", "mps"] = "time-sharing"
    """Specifies whether the `share` workers take turns using their GPU. The values are GKE's terms.

    `time-sharing`: in turns. `mps`: at the same time, through NVIDIA's Multi-Process Service, which
    limits each worker to its share of the memory and compute units.
    """
    count: Positive = 1
    """GPUs per worker. Engine `vllm` splits a model between them (tensor parallelism)."""
    provisioning: Literal["standard", "flex-start"] = "standard"
    """`flex-start`: only nodes from Google's Dynamic Workload Scheduler.

    They cost less, but may wait indefinitely for capacity and are shut down after seven days.
    `standard`: a reservation named in the deployment, then spot capacity, then on-demand capacity.
    """

    @model_validator(mode="after")
    def _has_machine(self) -> Self:
        if self.count == 1:
            return self
        if self.type == "none":
            raise ValueError("count: requires a GPU type; omit it or set type")
        counts = GPU_COUNTS.get(self.type, (1, 2, 4, 8))
        if self.count not in counts:
            known = ", ".join(map(str, counts))
            raise ValueError(
                f"count: no machine has {self.count} GPUs of type {self.type}; use one of {known}"
            )
        if self.share > 1:
            raise ValueError("share: a worker with several GPUs can't share them; omit it or count")
        return self

    @model_validator(mode="after")
    def _memory_is_enough_to_share(self) -> Self:
        max_share = MAX_SHARES.get(self.type, 48)
        if self.share > max_share:
            raise ValueError(
                f"share: must be at most {max_share} for {self.type} so that each worker has at "
                f"least 1 GiB of GPU memory, got {self.share}"
            )
        if self.sharing == "mps" and self.share == 1:
            raise ValueError("sharing: mps requires a share of at least 2; omit it or set share")
        return self


class Replicas(EntryPart):
    """Bounds for the autoscaler."""

    min: int = Field(0, ge=0)
    max: int = Field(10, ge=1)


@lru_cache(maxsize=1024)
def _digest_of_figures(*figures: float) -> str:
    return hashlib.blake2b(repr(figures).encode(), digest_size=4).hexdigest()


class PriceTerms(EntryPart):
    """The price for a delivered item."""

    version: str | None = Field(None, pattern=r"^[!-~]{1,64}$")
    """The name for these terms in rows and on invoices. None means a digest of the terms' values.
    """
    per_million_tokens_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    per_million_output_tokens_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The price of the tokens that a text model generates. None means the same price as for the
    tokens it reads.
    """
    per_million_cached_tokens_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The price of prompt tokens that a worker had already processed.

    None means the same price as for other tokens.
    """
    per_million_pixel_steps_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    per_item_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price of a delivered result, regardless of its size."""
    per_work_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price per unit of work, as returned by a custom class's `work`.

    For classes without it, each item counts as 1 unit.
    """
    per_second_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price per second of compute time. A batch's time is split among its items."""
    cached_share: float = Field(0.0, ge=0, le=1)
    """The fraction of the price to charge for a result that comes from the cache or from an
    identical item in flight.
    """

    @field_validator("version", mode="before")
    @classmethod
    def _version_is_text(cls, value: object) -> object:
        return check_quoted("version", value)

    @cached_property
    def name(self) -> str:
        """The name of the version.

        Different terms get different versions, unless the catalog specifies the version.
        """
        figures = [
            self.per_million_tokens_usd,
            self.per_million_pixel_steps_usd,
            self.cached_share,
        ]
        written = (self.per_million_output_tokens_usd, self.per_million_cached_tokens_usd)
        if written != (None, None):  # entries without them keep their earlier versions
            figures += [-1.0 if price is None else price for price in written]
        if self.per_item_usd:  # as above
            figures.append(self.per_item_usd)
        if self.per_work_usd or self.per_second_usd:
            figures += [-1.0, self.per_work_usd, self.per_second_usd]
        return self.version or _digest_of_figures(*figures)


class PriceChange(PriceTerms):
    """Terms for requests that arrive at or after a given time."""

    starts_at: AwareDatetime
    """RFC 3339, with a time zone: `2026-12-01T00:00:00Z`."""

    @cached_property
    def starts_at_s(self) -> float:
        return self.starts_at.timestamp()


class Price(PriceTerms):
    """A model's price terms, and how they change over time.

    A change is added to the catalog before it takes effect, so that API instances and workers from
    every release charge the same for a request.
    """

    changes: tuple[PriceChange, ...] = ()

    @model_validator(mode="after")
    def _changes_are_in_order(self) -> Self:
        starts = [change.starts_at_s for change in self.changes]
        if starts != sorted(set(starts)):
            raise ValueError("changes: each starts_at must be later than the previous one")
        names = [self.name, *(change.name for change in self.changes)]
        if len(set(names)) < len(names):
            raise ValueError("changes: each change must have a different version")
        return self

    def terms_at(self, at_s: float) -> PriceTerms:
        """Returns the terms for a request that arrives at `at_s`, in Unix seconds."""
        terms: PriceTerms = self
        for change in self.changes:
            if at_s < change.starts_at_s:
                break
            terms = change
        return terms


class ModelResources(EntryPart):
    """Resources that a model may use in each model process.

    Except for `gpu_memory_bytes`, these apply only to classes.
    """

    gpu_memory_bytes: Positive | None = None
    """GPU memory that the model's weights and its largest batch take up together. Required if the
    model shares workers with other models, because all of them stay in memory.
    """
    memory_bytes: Positive | None = None
    """Memory limit for the model's process and its child processes. If they exceed it, they are
    killed. None means 80% of the memory available to the machine or its control group.
    """
    disk_bytes: Positive = DEFAULT_DISK_BYTES
    """Maximum disk space that the model's processes may use at once, not counting the files in the
    class's folder, and also the maximum size of one file.

    Limited to half of the free space at startup. If they exceed it, they are killed.
    """


MAX_TEXT_ADAPTERS = 64
"""Maximum number of LoRA adapters per text model. All of them are loaded when the engine starts."""

ServedName = Annotated[str, Field(pattern=NAME_PATTERN)]


class TextAdapter(EntryPart):
    """A low-rank change (LoRA) to a text model's weights, requested by a separate model name."""

    source: Source
    """Same kinds of sources as for models.

    With llama.cpp, this is a GGUF file. With vLLM, it is a folder saved by PEFT, with
    adapter_config.json and adapter_model.safetensors.
    """
    revision: Revision = "main"

    @property
    def version(self) -> str:
        """The weights' location, which identifies them in cache keys."""
        return f"{self.source}@{self.revision}"


class Generation(EntryPart):
    """Defaults and limits for a text model's parameters, in tokens."""

    context_tokens: Positive = 2048
    """Maximum total number of tokens in a prompt and its continuation."""
    default_tokens: Positive = 256
    """Maximum number of generated tokens if the caller does not set one."""
    longest_tokens: Positive = 1024
    """Maximum that a caller may request."""
    chunk_tokens: Positive = 256
    """Number of prompt tokens to read between two generation steps for other texts."""
    lookup_tokens: int = Field(0, ge=0, le=64)
    """Maximum number of tokens to guess at once from earlier text, if only one text is being
    generated.
    """
    adapters: dict[ServedName, TextAdapter] = Field({}, max_length=MAX_TEXT_ADAPTERS)
    """Adapters, keyed by the name under which requests use them in place of the model's."""

    @model_validator(mode="after")
    def _fits_the_context(self) -> Self:
        if not self.default_tokens <= self.longest_tokens < self.context_tokens:
            raise ValueError("must satisfy default_tokens <= longest_tokens < context_tokens")
        return self


class EmbeddingLimits(EntryPart):
    """Limits on an embeddings request."""

    max_items: Positive = 2048
    max_input_bytes: Positive = 64 * 1024
    max_input_tokens: Positive | None = None
    """Maximum number of tokens that the model reads from a text, including special tokens and the
    prompt. A budget reserves at most the price of that many tokens per text. A worker whose model
    reads more than that does not start. If None, a budget reserves one token per byte.
    """


class Tolerance(EntryPart):
    """Maximum distance between results and the reference, which is torch fp32.

    `cosine`: minimum cosine similarity of an embedding to the reference. It applies to the minimum
    over a calibration set, not the mean, because callers receive individual vectors. `psnr_db`:
    minimum peak signal-to-noise ratio for an image. `rouge_l`: minimum ROUGE-L for a canary's text
    if texts are compared at all, which requires temperature 0.
    """

    cosine: float = Field(0.9999, ge=0, le=1)
    psnr_db: float = Field(30.0, ge=0)
    rouge_l: float | None = Field(None, gt=0, le=1)


class Canary(EntryPart):
    """A new revision that serves a share of the requests alongside the revision in the entry.

    It has separate workers and topics. It stops receiving requests as soon as it falls behind the
    other revision by more than any of these limits (shared/canary/verdict.py).
    """

    revision: Revision
    source: Source | None = None
    """The source of the canary's weights. None means the model's source."""
    share: float = Field(0.05, gt=0, le=0.5)
    """The fraction of requests the canary receives."""
    by: Literal["input", "tenant"] = "input"
    """How to split requests.

    `input`: a tenant's identical requests go to the same revision. `tenant`: all of a tenant's
    requests go to the same revision.
    """
    replicas: Replicas = Replicas(min=1)
    """Bounds for scaling the canary's workers. While no workers are up, the canary receives no
    requests.
    """
    error_ratio: float = Field(0.02, ge=0, lt=1)
    """How much the canary's fraction of failed items may exceed the other revision's."""
    p95_ratio: float = Field(1.5, ge=1)
    """Maximum ratio of the canary's 95th percentile response time to the other revision's."""
    compare_share: float = Field(0.1, ge=0, le=1)
    """The fraction of the canary's requests that the other revision also processes, to compare
    results.
    """
    tolerance: Tolerance | None = None
    """Maximum distance between the canary's results and the other revision's. None means the
    model's `tolerance`.
    """

    @field_validator("replicas")
    @classmethod
    def _has_a_worker(cls, value: Replicas) -> Replicas:
        if value.min < 1:
            raise ValueError(
                "min must be at least 1 because a canary without workers receives no requests "
                "to trigger scaling"
            )
        return value


class FlowEntry(FlowPlan):
    """One served flow, as described in the catalog (docs/reference/flows.md)."""

    name: str = Field(pattern=NAME_PATTERN)
    aliases: tuple[str, ...] = ()
    deadline: Deadline = Deadline()
    """Deadline for all steps combined."""
    max_in_flight: Positive = 512
    """Maximum number of runs that an API instance may be starting at the same time, as with a
    model.
    """
    api: Literal["transcription", "ocr"] | None = None
    """An endpoint from OpenAI's or Mistral's API that the flow also serves."""
    gives: None = None


class WorkersEntry(EntryPart):
    """Workers that serve several models (docs/decisions/0114-shared-workers.md)."""

    name: str = Field(pattern=NAME_PATTERN)
    models: tuple[str, ...] = Field(min_length=2)
    """Names of entries in `models`, all of which must have the same `gpu` and must not set
    `replicas`.
    """
    replicas: Replicas = Replicas()


class CatalogEntry(EntryPart):
    """One served model, as described in the catalog. `models.yaml` has two complete examples."""

    name: str = Field(pattern=NAME_PATTERN)
    task: str
    """The name of a task in shared/models/tasks."""
    source: Source
    revision: Revision = "main"
    aliases: tuple[str, ...] = ()
    backend: Literal["auto", "torch", "onnx"] = "auto"
    """The library used to compute results.

    `auto`: the fastest within the tolerance. Image models need torch.
    """
    engine: Literal["auto", "llama.cpp", "vllm"] = "auto"
    """The engine for a text model, which runs as a server in a separate process.

    `llama.cpp` reads GGUF files. `vllm` requires the vllm command on the worker's PATH; version
    0.1.0 called it `backend: vllm`, which still works. `auto`: no server; the library selected by
    `backend` is used.
    """
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """`auto`: the fastest library within the tolerance. For images, the best choice for the device.

    `int4` is for text models on CPUs.
    """
    tolerance: Tolerance = Tolerance()
    dimensions: Positive | None = None
    batch: Batch = Batch()
    work: ItemWork = ItemWork()
    max_in_flight: Positive = 512
    """While this many items are waiting for a worker, an API instance accepts items only from
    tenants below their fair share, and rejects other items with a 429.

    Encoders default to four times their largest batch if that is more.
    """
    deadline: Deadline = Deadline()
    cache: Cache = Cache()
    deterministic: bool = False
    """True if a custom model returns equal outputs for equal inputs.

    Its results are then cached, and compared with a canary's.
    """
    api: ServedApi | None = None
    """The endpoint that a custom model serves in addition to predictions.

    None means no other endpoint.
    """
    rerank: Rerank = "cosine"
    """The kind of similarity model. Not allowed for other models."""
    replies: Replies = "direct"
    """Image models default to `slots`, which work only if results can be stored in the object
    store.
    """
    text: EmbeddingLimits = EmbeddingLimits()
    image: ImageDefaults = ImageDefaults()
    generation: Generation = Generation()
    gpu: Gpu = Gpu()
    replicas: Replicas = Replicas()
    resources: ModelResources = ModelResources()
    environment: PlainVariables = Field({})
    """Environment variables for a class's process, in addition to those in its cog.yaml."""
    secrets: SecretVariables = Field({})
    """The same for variables with secret values: each secret's location, keyed by variable name."""
    processes: Positive | None = None
    """Model processes per worker, each with an instance of the class; overrides the settings. None
    means the number in the settings, or one per core or GPU. Use 1 for a class that listens on a
    fixed port or keeps shared state in memory.
    """
    startup_s: float = Field(DEFAULT_STARTUP_S, gt=0, le=MAX_STARTUP_S)
    """Time limit for a model process to load and warm up this model.

    A process that is not ready by then is killed. Weight downloads and installations happen earlier
    and do not count toward the limit.
    """
    price: Price = Price()
    canary: Canary | None = None
    """A new revision that receives a share of the requests. None if there is no canary."""
    interface: ModelInterface | None = None
    """A custom model's inputs and output. In the catalog file, this is the path of the model's
    penstock.schema.json, relative to the catalog's folder. Defaults to the file in a `local:`
    source's folder.
    """

    @model_validator(mode="after")
    def _names_each_variable_once(self) -> Self:
        if both := sorted(self.environment.keys() & self.secrets.keys()):
            raise ValueError(f"secrets.{both[0]}: is also in environment; remove one of them")
        return self

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """The source and revision of all of the model's weights.

        A canary's weights are listed under both names.
        """
        own = {self.name: (self.source, self.revision)}
        for kind, beside in (("", self.image.controls), ("ip_adapter ", self.image.ip_adapters)):
            for name, companion in beside.items():
                own[f"{self.name} {kind}{name}"] = (companion.source, companion.revision)
        for name, adapter in self.generation.adapters.items():
            own[f"{self.name} adapter {name}"] = (adapter.source, adapter.revision)
        return own

    @property
    def reply_limit_bytes(self) -> int:
        """Maximum size of a blob in a reply. Larger blobs are put into the object store."""
        return SLOT_INLINE_LIMIT_BYTES if self.replies == "slots" else INLINE_LIMIT_BYTES
