"""The fields of an entry in the catalog (`models.yaml`), without the rules of its task."""

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

from shared.blob import INLINE_LIMIT_BYTES, SLOT_INLINE_LIMIT_BYTES
from shared.class_variables import PlainVariables, SecretVariables
from shared.entry_fields import EntryPart, Positive, Revision, Source, quoted
from shared.flow_plan import FlowPlan
from shared.image_entry import ImageDefaults
from shared.model_interface import ModelInterface

Replies = Literal["direct", "slots"]
"""Which of the two topics of an inbox takes the replies (docs/decisions/0001-reply-inboxes.md).

`direct`: one subscription, for items that take milliseconds. `slots`: a filtered subscription for a
request in flight, for items that take seconds. Each slot is billed for each reply, so replies there
are small: results above 1 KiB are in the object store.
"""

MAX_WORK = 1_000_000_000
DEFAULT_STARTUP_S = 180.0
MAX_STARTUP_S = 7200.0

ServedApi = Literal["transcription", "speech", "ocr"]
"""An endpoint of another API that a custom model serves, beside predictions.

`transcription`: OpenAI's /v1/audio/transcriptions and /v1/audio/translations. `speech`: its
/v1/audio/speech. `ocr`: Mistral's /v1/ocr.
shared/tasks/custom.py says which inputs it has then.
"""
Rerank = Literal["cosine", "cross-encoder"]
"""How a similarity model compares a text with a query.

`cosine`: of the vectors of an encoder, which reads each text alone. `cross-encoder`: a model that
reads both together (`AutoModelForSequenceClassification` with one label).
"""
MAX_DEADLINE_S = 86_400
"""No model, and no caller, asks for more."""

GpuTypeName = Literal["l4", "a100", "a100-80gb", "h100", "rtx-pro-6000", "t4"]
"""The types of infra/kubernetes/gpus.yaml, which describes them. A test compares the two."""
MAX_SHARES: dict[str, int] = {"l4": 22, "a100": 36, "t4": 14}
"""The most workers that may share a GPU: each gets 1 GiB of its memory at least, after the part
that CUDA contexts need. GKE allows 48, which larger GPUs reach first. A test compares them with the
memory in infra/kubernetes/gpus.yaml.
"""

DEFAULT_DISK_BYTES = 4 * 1024**3

NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]{2,199}$"


class Batch(EntryPart):
    """Limits of one batch: the budget of its task, and a number of items."""

    max_tokens: Positive | None = None
    max_pixel_steps: Positive | None = None
    max_items: Positive = 64
    max_work: Positive | None = None
    """Of custom models that weigh their items. None: `max_items` of the heaviest."""
    key: str | None = None
    """The input of a custom model whose values are equal in a batch. None: any may share
    one."""


class ItemWork(EntryPart):
    """Bounds of an item of a custom model."""

    max: int | None = Field(None, ge=1, le=MAX_WORK)
    """Maximum weight, which limits reserve."""
    max_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Maximum time in seconds that a class without `predict_batch` computes an item, whatever it
    weighs. None: until the deadline of its request."""


class Deadline(EntryPart):
    """Seconds from receipt to answer: the default, and the longest that a caller may ask for."""

    default_s: float = Field(30.0, gt=0, le=MAX_DEADLINE_S)
    longest_s: float = Field(300.0, gt=0, le=MAX_DEADLINE_S)


class Cache(EntryPart):
    """Cache settings: the time that results are kept (0: never), and who may get them.

    `tenant`: callers of the tenant that sent the same input before. `global`: all callers. Then the
    response shows one tenant (by `x-penstock-cache` and by its time) whether another one sent the
    same input. Use it for models whose inputs are not secret.
    """

    ttl_s: int = Field(86400, ge=0)
    scope: Literal["global", "tenant"] = "tenant"


class Gpu(EntryPart):
    """The GPU type a worker asks for and how many workers share one of them in time."""

    type: Literal[GpuTypeName, "none"] = "none"
    share: int = Field(1, ge=1, le=48)
    provisioning: Literal["standard", "flex-start"] = "standard"
    """`flex-start`: nodes of Google's Dynamic Workload Scheduler alone. They cost less and wait for
    capacity, for as long as that takes, and they end after seven days. `standard`: a reservation
    that the deployment names, spot and on demand, in this order.
    """

    @model_validator(mode="after")
    def _memory_is_enough_to_share(self) -> Self:
        most = MAX_SHARES.get(self.type, 48)
        if self.share > most:
            raise ValueError(
                f"share: {self.share} workers on one {self.type} get less than 1 GiB of its memory "
                f"each; at most {most}"
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
    """The price of tokens that a text model writes. None: as for those that it reads."""
    per_million_cached_tokens_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The price of prompt tokens that a worker had computed before. None: as for others."""
    per_million_pixel_steps_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    per_item_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price of a delivered result, whatever its size."""
    per_work_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price of a unit of work, as `work` of a custom class says it. Others have 1."""
    per_second_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The price of a second of computing. The time of a batch is divided among its items."""
    cached_share: float = Field(0.0, ge=0, le=1)
    """The part of the price for a result from the cache or of an identical item in flight."""

    @field_validator("version", mode="before")
    @classmethod
    def _version_is_text(cls, value: object) -> object:
        return quoted("version", value)

    @property
    def name(self) -> str:
        """The version. Other figures have another one, unless the catalog names it."""
        figures = [
            self.per_million_tokens_usd,
            self.per_million_pixel_steps_usd,
            self.cached_share,
        ]
        written = (self.per_million_output_tokens_usd, self.per_million_cached_tokens_usd)
        if written != (None, None):  # entries without them keep the versions that they had
            figures += [-1.0 if price is None else price for price in written]
        if self.per_item_usd:  # as above
            figures.append(self.per_item_usd)
        if self.per_work_usd or self.per_second_usd:
            figures += [-1.0, self.per_work_usd, self.per_second_usd]
        return self.version or _digest_of_figures(*figures)


class PriceChange(PriceTerms):
    """Terms that hold from a moment on, for requests that arrive then or later."""

    starts_at: AwareDatetime
    """RFC 3339, with a zone: `2026-12-01T00:00:00Z`."""

    @cached_property
    def starts_at_s(self) -> float:
        """The moment in Unix seconds."""
        return self.starts_at.timestamp()


class Price(PriceTerms):
    """The terms of a model, and how they change.

    A change is in the catalog before it starts. So API instances and workers of every release in
    between charge a request alike.
    """

    changes: tuple[PriceChange, ...] = ()

    @model_validator(mode="after")
    def _changes_are_in_order(self) -> Self:
        starts = [change.starts_at_s for change in self.changes]
        if starts != sorted(set(starts)):
            raise ValueError("changes: starts_at goes up from change to change")
        names = [self.name, *(change.name for change in self.changes)]
        if len(set(names)) < len(names):
            raise ValueError("changes: each has another version")
        return self

    def terms_at(self, at_s: float) -> PriceTerms:
        """The terms for a request that arrives at `at_s`, in Unix seconds."""
        terms: PriceTerms = self
        for change in self.changes:
            if at_s < change.starts_at_s:
                break
            terms = change
        return terms


class ModelResources(EntryPart):
    """What a model may take in each model process. All but `gpu_memory_bytes` is of classes."""

    gpu_memory_bytes: Positive | None = None
    """Memory of the GPU that its weights and its largest batch take together. It is needed if the
    model shares workers with others, which all stay in that memory."""
    memory_bytes: Positive | None = None
    """Memory of its process and of all that it starts. Above it, they are killed. None: 80 % of the
    machine's, or of its control group's."""
    disk_bytes: Positive = DEFAULT_DISK_BYTES
    """What they have on disk at a time, above the files of the class's folder, and the largest file
    that they may write. At most half of what is free when it starts. Above it, they are killed."""


class Generation(EntryPart):
    """Defaults and bounds of a text model's parameters, in tokens."""

    context_tokens: Positive = 2048
    """Maximum tokens of a prompt and its continuation together."""
    default_tokens: Positive = 256
    """Maximum generated tokens, if the caller does not say."""
    longest_tokens: Positive = 1024
    """The most that a caller may ask for."""
    chunk_tokens: Positive = 256
    """Prompt tokens that are read between two steps of the texts that are being written."""
    lookup_tokens: int = Field(0, ge=0, le=64)
    """The most that are guessed at a time from what a text said before, while it writes alone."""

    @model_validator(mode="after")
    def _fits_the_context(self) -> Self:
        if not self.default_tokens <= self.longest_tokens < self.context_tokens:
            raise ValueError("default_tokens <= longest_tokens < context_tokens")
        return self


class GenerationLimits(EntryPart):
    """Limits of an embeddings request."""

    max_items: Positive = 2048
    max_input_bytes: Positive = 64 * 1024
    max_input_tokens: Positive | None = None
    """Tokens that the model reads of a text, special tokens and prompt included. A budget reserves
    at most their price for a text. A worker whose model reads more does not start. None: a budget
    reserves a token for each byte."""


class Tolerance(EntryPart):
    """Maximum distance of results from those of torch fp32, the reference.

    `cosine`: the least cosine similarity of an embedding to the reference's. The minimum over a
    calibration set counts, not the mean, since a caller gets single vectors. `psnr_db`: the least
    peak signal-to-noise ratio of an image. `rouge_l`: the least ROUGE-L of a text of a canary, if
    these are compared at all. Only texts at temperature 0 are.
    """

    cosine: float = Field(0.9999, ge=0, le=1)
    psnr_db: float = Field(30.0, ge=0)
    rouge_l: float | None = Field(None, gt=0, le=1)


class Canary(EntryPart):
    """A new revision that serves a share of the requests alongside the one in the entry.

    It has workers and topics of its own. It gets nothing more as soon as it does worse than the
    other revision, by any of the limits here (shared/canary/verdict.py).
    """

    revision: Revision
    source: Source | None = None
    """The source of its weights. None: the source of the model."""
    share: float = Field(0.05, gt=0, le=0.5)
    """The part of the requests that it gets."""
    by: Literal["input", "tenant"] = "input"
    """The key of the split. `input`: equal requests of a tenant get the same revision.
    `tenant`: all requests of a tenant do.
    """
    replicas: Replicas = Replicas(min=1)
    """Bounds of the autoscaler of its workers. With none of them up it gets no requests."""
    error_ratio: float = Field(0.02, ge=0, lt=1)
    """The part of its items that may fail, above that of the other revision."""
    p95_ratio: float = Field(1.5, ge=1)
    """Its 95th percentile of seconds to the response may be this multiple of the other one's."""
    compare_share: float = Field(0.1, ge=0, le=1)
    """The part of its requests that the other revision computes too, to compare the results."""
    tolerance: Tolerance | None = None
    """Maximum distance of its results from the other revision's. None: as `tolerance`
    says."""

    @field_validator("replicas")
    @classmethod
    def _has_a_worker(cls, value: Replicas) -> Replicas:
        if value.min < 1:
            raise ValueError("min is 1 or more: without a worker it gets no requests to scale by")
        return value


class FlowEntry(FlowPlan):
    """One served flow, as the catalog describes it (docs/reference/flows.md)."""

    name: str = Field(pattern=NAME_PATTERN)
    aliases: tuple[str, ...] = ()
    deadline: Deadline = Deadline()
    """Of all steps together."""
    max_in_flight: Positive = 512
    """As of a model: the runs that an API instance is starting."""
    api: Literal["transcription", "ocr"] | None = None
    """The endpoint of OpenAI's or Mistral's API that it serves too."""
    gives: None = None


class WorkersEntry(EntryPart):
    """Workers that serve several models (docs/decisions/0114-shared-workers.md)."""

    name: str = Field(pattern=NAME_PATTERN)
    models: tuple[str, ...] = Field(min_length=2)
    """Names of entries of `models`, which have the same `gpu` and no `replicas`."""
    replicas: Replicas = Replicas()


class CatalogEntry(EntryPart):
    """One served model, as the catalog describes it. `models.yaml` has two in full."""

    name: str = Field(pattern=NAME_PATTERN)
    task: str
    """The name of a task in shared/tasks."""
    source: Source
    revision: Revision = "main"
    aliases: tuple[str, ...] = ()
    backend: Literal["auto", "torch", "onnx", "vllm"] = "auto"
    """The library that computes. `auto`: the fastest within the tolerance. Image models need torch.

    `vllm` is for text models, if vLLM is installed."""
    engine: Literal["auto", "llama.cpp"] = "auto"
    """What computes a text model. `llama.cpp`: its own server, in a process of its own, which reads
    GGUF files. `auto`: the library that `backend` names."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """`auto`: the fastest that the tolerance allows. For images, the best for the device.

    `int4` is for text models on CPUs."""
    tolerance: Tolerance = Tolerance()
    dimensions: Positive | None = None
    batch: Batch = Batch()
    work: ItemWork = ItemWork()
    max_in_flight: Positive = 512
    """While this number of items wait for a worker, an API instance takes items (429) only of
    tenants that have less than their share.
    """
    deadline: Deadline = Deadline()
    cache: Cache = Cache()
    deterministic: bool = False
    """True if a custom model gives equal outputs for equal inputs. Then results are cached,
    and those of a canary are compared.
    """
    api: ServedApi | None = None
    """What a custom model serves beside predictions. None: nothing."""
    rerank: Rerank = "cosine"
    """What a similarity model is. Others leave it out."""
    replies: Replies = "direct"
    """Image models have `slots` by default. These need results that the object store can hold."""
    text: GenerationLimits = GenerationLimits()
    image: ImageDefaults = ImageDefaults()
    generation: Generation = Generation()
    gpu: Gpu = Gpu()
    replicas: Replicas = Replicas()
    resources: ModelResources = ModelResources()
    environment: PlainVariables = Field({})
    """Variables that the process of a class gets, beside those of its cog.yaml."""
    secrets: SecretVariables = Field({})
    """The same for secrets: where each is, by the name of its variable."""
    processes: Positive | None = None
    """Model processes of a worker, each with an instance of the class, whatever the settings say.
    None: as these say, or one for each core or GPU. 1 is for a class that listens on a fixed port,
    or keeps what others need in its memory.
    """
    startup_s: float = Field(DEFAULT_STARTUP_S, gt=0, le=MAX_STARTUP_S)
    """Time limit for a model process to load and warm up this model. A process that is not ready
    then is killed. Downloads of weights, and installations, happen before and do not count.
    """
    price: Price = Price()
    canary: Canary | None = None
    """A new revision that gets a share of the requests. None: there is none."""
    interface: ModelInterface | None = None
    """What a custom model takes and returns. In the file it is the path of its
    penstock.schema.json, from the catalog's folder. Default: the one in the folder of a `local:`
    source.
    """

    flow: FlowPlan | None = None
    """The steps of a flow, which is an entry of `flows`. None: it is a model."""

    @model_validator(mode="after")
    def _names_each_variable_once(self) -> Self:
        if both := sorted(self.environment.keys() & self.secrets.keys()):
            raise ValueError(f"secrets.{both[0]}: environment has it too; leave one of them out")
        return self

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Source and revision of all its weights: its own by its name, others' by both names."""
        own = {self.name: (self.source, self.revision)}
        for kind, beside in (("", self.image.controls), ("ip_adapter ", self.image.ip_adapters)):
            for name, one in beside.items():
                own[f"{self.name} {kind}{name}"] = (one.source, one.revision)
        return own

    @property
    def reply_limit_bytes(self) -> int:
        """The largest blob in a reply. A larger one is in the object store."""
        return SLOT_INLINE_LIMIT_BYTES if self.replies == "slots" else INLINE_LIMIT_BYTES
