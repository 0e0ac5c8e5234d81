"""The fields of an entry in the catalog (`models.yaml`), without task-specific rules."""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from typing import Literal, Self

from pydantic import (
    AwareDatetime,
    Field,
    field_validator,
    model_validator,
)

from shared.models.blob import INLINE_LIMIT_BYTES, SLOT_INLINE_LIMIT_BYTES
from shared.models.class_variables import PlainVariables, SecretVariables
from shared.models.entry_fields import EntryPart, Positive, Revision, Source, quoted
from shared.models.flow_plan import FlowPlan
from shared.models.image_entry import ImageDefaults
from shared.models.interface import ModelInterface

Replies = Literal["direct", "slots"]
"""The inbox topic used for replies (docs/decisions/0001-reply-inboxes.md).

`direct`: one subscription, for items that take milliseconds. `slots`: a filtered subscription per
request in flight, for items that take seconds. Each slot is billed for each reply, so replies there
are small: results above 1 KiB are in the object store.
"""

MAX_WORK = 1_000_000_000
DEFAULT_STARTUP_S = 180.0
MAX_STARTUP_S = 7200.0

ServedApi = Literal["transcription", "speech", "ocr"]
"""An endpoint of another API that a custom model serves in addition to predictions.

`transcription`: OpenAI's /v1/audio/transcriptions and /v1/audio/translations. `speech`: OpenAI's
/v1/audio/speech. `ocr`: Mistral's /v1/ocr. See shared/models/tasks/custom.py for their inputs.
"""
Rerank = Literal["cosine", "cross-encoder"]
"""Method by which a similarity model compares a text with a query.

`cosine`: cosine of vectors from an encoder, which reads each text separately. `cross-encoder`: a
model that reads both texts together (`AutoModelForSequenceClassification` with one label).
"""
MAX_DEADLINE_S = 86_400
"""Upper bound for all models and callers."""

GpuTypeName = Literal["l4", "a100", "a100-80gb", "h100", "rtx-pro-6000", "t4"]
"""The GPU types described in infra/kubernetes/gpus.yaml. A test compares the two."""
MAX_SHARES: dict[str, int] = {"l4": 22, "a100": 36, "t4": 14}
"""Maximum number of workers that may share a GPU: each gets at least 1 GiB of its memory, after the
part that CUDA contexts need.

GKE allows 48, which larger GPUs reach first. A test compares these numbers with the memory in
infra/kubernetes/gpus.yaml.
"""

DEFAULT_DISK_BYTES = 4 * 1024**3

NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]{2,199}$"


class Batch(EntryPart):
    """Limits of one batch: the task's budget, and a number of items."""

    max_tokens: Positive | None = None
    """Tokens in one batch. Small models need tens of thousands to fill a GPU
    (docs/measurements/gpu.md).
    """
    max_pixel_steps: Positive | None = None
    max_items: Positive = 64
    max_work: Positive | None = None
    """For custom models that weigh their items. None: `max_items` of the heaviest."""
    key: str | None = None
    """The input of a custom model that must have equal values within a batch.

    None: any values may share one.
    """


class ItemWork(EntryPart):
    """Upper bounds for an item of a custom model."""

    max: int | None = Field(None, ge=1, le=MAX_WORK)
    """Maximum weight, which limits reserve."""
    max_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Maximum seconds that a class without `predict_batch` computes an item, whatever it weighs.

    None: until the deadline of its request.
    """


class Deadline(EntryPart):
    """Seconds from receipt to answer: the default, and the maximum that a caller may request."""

    default_s: float = Field(30.0, gt=0, le=MAX_DEADLINE_S)
    longest_s: float = Field(300.0, gt=0, le=MAX_DEADLINE_S)


class Cache(EntryPart):
    """Cache settings: how long results are kept (0: never), and for which callers.

    `tenant`: callers of the tenant that sent the same input before. `global`: all callers. The
    response then reveals to one tenant (by `x-penstock-cache` and by its time) whether another one
    sent the same input. Use it only for models whose inputs are not secret.
    """

    ttl_s: int = Field(86400, ge=0)
    scope: Literal["global", "tenant"] = "tenant"


class Gpu(EntryPart):
    """The GPU type requested by a worker, and how many workers time-share one GPU."""

    type: Literal[GpuTypeName, "none"] = "none"
    share: int = Field(1, ge=1, le=48)
    provisioning: Literal["standard", "flex-start"] = "standard"
    """`flex-start`: only nodes of Google's Dynamic Workload Scheduler.

    They cost less, wait for capacity however long it takes, and end after seven days. `standard`: a
    reservation named in the deployment, spot, and on demand, in this order.
    """

    @model_validator(mode="after")
    def _memory_is_enough_to_share(self) -> Self:
        most = MAX_SHARES.get(self.type, 48)
        if self.share > most:
            raise ValueError(
                f"share: must be at most {most} for {self.type}, so that each worker gets at "
                f"least 1 GiB of its memory, got {self.share}"
            )
        return self


class Replicas(EntryPart):
    """Bounds of the autoscaler."""

    min: int = Field(0, ge=0)
    max: int = Field(10, ge=1)


@lru_cache(maxsize=1024)
def _digest_of_figures(*figures: float) -> str:
    return hashlib.blake2b(repr(figures).encode(), digest_size=4).hexdigest()


class PriceTerms(EntryPart):
    """The price of a delivered item."""

    version: str | None = Field(None, pattern=r"^[!-~]{1,64}$")
    """The name of these terms in rows and invoices. None: a digest of the figures."""
    per_million_tokens_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    per_million_output_tokens_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The price of tokens generated by a text model. None: the same as for tokens it reads."""
    per_million_cached_tokens_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The price of prompt tokens that a worker had already computed.

    None: the same as for others.
    """
    per_million_pixel_steps_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    per_item_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price of a delivered result, whatever its size."""
    per_work_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price per unit of work, as returned by `work` of a custom class.

    Classes without it have 1 unit per item.
    """
    per_second_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price per second of computing. The time of a batch is divided among its items."""
    cached_share: float = Field(0.0, ge=0, le=1)
    """The fraction of the price to charge for a result from the cache or of an identical item in
    flight.
    """

    @field_validator("version", mode="before")
    @classmethod
    def _version_is_text(cls, value: object) -> object:
        return quoted("version", value)

    @property
    def name(self) -> str:
        """The version.

        Different figures have different versions, unless the catalog names the version.
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
    """RFC 3339, with a zone: `2026-12-01T00:00:00Z`."""

    @cached_property
    def starts_at_s(self) -> float:
        return self.starts_at.timestamp()


class Price(PriceTerms):
    """The terms of a model, and how they change.

    A change is in the catalog before it starts, so that API instances and workers of every release
    charge a request the same.
    """

    changes: tuple[PriceChange, ...] = ()

    @model_validator(mode="after")
    def _changes_are_in_order(self) -> Self:
        starts = [change.starts_at_s for change in self.changes]
        if starts != sorted(set(starts)):
            raise ValueError("changes: starts_at must increase from one change to the next")
        names = [self.name, *(change.name for change in self.changes)]
        if len(set(names)) < len(names):
            raise ValueError("changes: each must have a different version")
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

    Only `gpu_memory_bytes` is not limited to classes.
    """

    gpu_memory_bytes: Positive | None = None
    """GPU memory that its weights and its largest batch take together.

    Required if the model shares workers with others, which all stay in memory.
    """
    memory_bytes: Positive | None = None
    """Memory of its process and its child processes.

    If they exceed it, they are killed. None: 80 % of the memory available to the machine or its
    control group.
    """
    disk_bytes: Positive = DEFAULT_DISK_BYTES
    """Disk space of its processes at a time, in addition to the files in the class's folder, and
    maximum file size.

    At most half of the free space at startup. If they exceed it, they are killed.
    """


class Generation(EntryPart):
    """Defaults and limits of a text model's parameters, in tokens."""

    context_tokens: Positive = 2048
    """Maximum tokens of a prompt and its continuation together."""
    default_tokens: Positive = 256
    """Maximum number of generated tokens, unless set by the caller."""
    longest_tokens: Positive = 1024
    """Maximum that a caller may request."""
    chunk_tokens: Positive = 256
    """Prompt tokens to read between two generation steps of other texts."""
    lookup_tokens: int = Field(0, ge=0, le=64)
    """Maximum tokens to guess at a time from earlier text, while a text is generated alone."""

    @model_validator(mode="after")
    def _fits_the_context(self) -> Self:
        if not self.default_tokens <= self.longest_tokens < self.context_tokens:
            raise ValueError("must satisfy default_tokens <= longest_tokens < context_tokens")
        return self


class EmbeddingLimits(EntryPart):
    """Limits of an embeddings request."""

    max_items: Positive = 2048
    max_input_bytes: Positive = 64 * 1024
    max_input_tokens: Positive | None = None
    """Maximum tokens that the model reads of a text, including special tokens and prompt.

    A budget reserves at most their price per text. A worker whose model reads more does not start.
    None: a budget reserves one token per byte.
    """


class Tolerance(EntryPart):
    """Maximum distance of results from torch fp32 results, which are the reference.

    `cosine`: minimum cosine similarity of an embedding to the reference. It applies to the minimum
    over a calibration set, not the mean, because callers receive single vectors. `psnr_db`: minimum
    peak signal-to-noise ratio of an image. `rouge_l`: minimum ROUGE-L of a canary's text, if texts
    are compared at all, which requires temperature 0.
    """

    cosine: float = Field(0.9999, ge=0, le=1)
    psnr_db: float = Field(30.0, ge=0)
    rouge_l: float | None = Field(None, gt=0, le=1)


class Canary(EntryPart):
    """A new revision that serves a share of the requests alongside the revision in the entry.

    It has separate workers and topics. It no longer receives requests as soon as it does worse than
    the other revision by any of these limits (shared/canary/verdict.py).
    """

    revision: Revision
    source: Source | None = None
    """The source of its weights. None: the model's source."""
    share: float = Field(0.05, gt=0, le=0.5)
    """The fraction of requests that it receives."""
    by: Literal["input", "tenant"] = "input"
    """How to split requests.

    `input`: equal requests of a tenant go to the same revision. `tenant`: all requests of a tenant
    do.
    """
    replicas: Replicas = Replicas(min=1)
    """Bounds for scaling its workers. While none of them is up, it receives no requests."""
    error_ratio: float = Field(0.02, ge=0, lt=1)
    """The fraction of its items that may fail in excess of the other revision's."""
    p95_ratio: float = Field(1.5, ge=1)
    """Maximum ratio of its 95th percentile response time to the other revision's."""
    compare_share: float = Field(0.1, ge=0, le=1)
    """The fraction of its requests that the other revision also computes, to compare results."""
    tolerance: Tolerance | None = None
    """Maximum distance of its results from the other revision's. None: the model's `tolerance`."""

    @field_validator("replicas")
    @classmethod
    def _has_a_worker(cls, value: Replicas) -> Replicas:
        if value.min < 1:
            raise ValueError(
                "min must be at least 1, because a canary without workers receives no requests "
                "to scale by"
            )
        return value


class FlowEntry(FlowPlan):
    """One served flow, as described in the catalog (docs/reference/flows.md)."""

    name: str = Field(pattern=NAME_PATTERN)
    aliases: tuple[str, ...] = ()
    deadline: Deadline = Deadline()
    """For all steps together."""
    max_in_flight: Positive = 512
    """The same as for a model: maximum number of runs that an API instance is starting."""
    api: Literal["transcription", "ocr"] | None = None
    """An endpoint of OpenAI's or Mistral's API that it serves in addition."""
    gives: None = None


class WorkersEntry(EntryPart):
    """Workers that serve several models (docs/decisions/0114-shared-workers.md)."""

    name: str = Field(pattern=NAME_PATTERN)
    models: tuple[str, ...] = Field(min_length=2)
    """Names of entries in `models`, which must have the same `gpu` and no `replicas`."""
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
    """The library that computes results.

    `auto`: the fastest within the tolerance. Image models need torch.
    """
    engine: Literal["auto", "llama.cpp", "vllm"] = "auto"
    """The engine for a text model, as a server in a separate process.

    `llama.cpp` reads GGUF files. `vllm` requires its command on the PATH of the worker; version
    0.1.0 called it `backend: vllm`, which still works. `auto`: no server, but the library selected
    by `backend`.
    """
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """`auto`: the fastest within the tolerance. For images, the best for the device.

    `int4` is for text models on CPUs.
    """
    tolerance: Tolerance = Tolerance()
    dimensions: Positive | None = None
    batch: Batch = Batch()
    work: ItemWork = ItemWork()
    max_in_flight: Positive = 512
    """While this many items wait for a worker, an API instance accepts items only from tenants
    below their fair share, and rejects others with 429.
    """
    deadline: Deadline = Deadline()
    cache: Cache = Cache()
    deterministic: bool = False
    """True if a custom model returns equal outputs for equal inputs.

    Its results are then cached, and compared with a canary's.
    """
    api: ServedApi | None = None
    """The endpoint that a custom model serves in addition to predictions.

    None: no other endpoint.
    """
    rerank: Rerank = "cosine"
    """The kind of a similarity model. Not allowed for other models."""
    replies: Replies = "direct"
    """Image models default to `slots`, which require results that can be put into the object store.
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
    """The same for secrets: the location of each by variable name."""
    processes: Positive | None = None
    """Model processes per worker, each with an instance of the class, regardless of the settings.

    None: the number in the settings, or one per core or GPU. Use 1 for a class that listens on a
    fixed port, or keeps shared state in memory.
    """
    startup_s: float = Field(DEFAULT_STARTUP_S, gt=0, le=MAX_STARTUP_S)
    """Time limit for a model process to load and warm up this model.

    A process that is not ready by then is killed. Downloads of weights and installations happen
    before and do not count.
    """
    price: Price = Price()
    canary: Canary | None = None
    """A new revision that receives a share of the requests. None: no canary."""
    interface: ModelInterface | None = None
    """The inputs and output of a custom model.

    In the file, the path of its penstock.schema.json, relative to the catalog's folder. Default:
    the file in the folder of a `local:` source.
    """

    @model_validator(mode="after")
    def _names_each_variable_once(self) -> Self:
        if both := sorted(self.environment.keys() & self.secrets.keys()):
            raise ValueError(f"secrets.{both[0]}: is also in environment; leave one of them out")
        return self

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Source and revision of all its weights. Others are under both names."""
        own = {self.name: (self.source, self.revision)}
        for kind, beside in (("", self.image.controls), ("ip_adapter ", self.image.ip_adapters)):
            for name, companion in beside.items():
                own[f"{self.name} {kind}{name}"] = (companion.source, companion.revision)
        return own

    @property
    def reply_limit_bytes(self) -> int:
        """Maximum size of a blob in a reply. A larger one is put into the object store."""
        return SLOT_INLINE_LIMIT_BYTES if self.replies == "slots" else INLINE_LIMIT_BYTES
