"""The definition of a task: inputs and results of its items, and rules for its models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.models.entry import CatalogEntry
from shared.models.flow_types import StepSchema

MAX_JOB_ITEMS = 16
Unit: TypeAlias = Literal["tokens", "pixel_steps", "work"]


class LinkTo(Protocol):
    """Returns the URL of a result."""

    def __call__(self, key: str | None, media_type: str = "") -> str:
        """Returns the URL.

        Args:
            key: key in the object store. None: the result is in its record.
            media_type: media type of the data. Empty: the output format chosen by the caller.
        """


class WorkBound(NamedTuple):
    """Maximum work of an item."""

    work: int
    """Work in the unit of its task."""
    output_tokens: int = 0
    """Number of these units that are generated tokens."""


class TaskInput(msgspec.Struct, omit_defaults=True):
    """The input of one item. Each task has one or more tagged subclasses."""

    @property
    def sources(self) -> Sequence[Blob]:
        """Data in the input that may be too large for a message."""
        return ()

    def with_sources(self, sources: Sequence[Blob]) -> Self:
        """Returns the same input with its `sources` replaced."""
        raise NotImplementedError

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns the approximate work in the unit of its task. Limits reserve this amount."""
        raise NotImplementedError

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns the maximum work. Budgets reserve its price."""
        return WorkBound(self.estimate_work(entry))

    def cache_form(self) -> tuple[object, ...]:
        """Returns everything that affects the result, in a fixed order, for the cache key."""
        raise NotImplementedError


class StepInput(NamedTuple):
    """The input of one flow step item."""

    input: TaskInput
    is_repeatable: bool = True
    """True if equal inputs produce equal results."""


class TaskResult(msgspec.Struct, omit_defaults=True):
    """The result of one item. Each task has one tagged subclass.

    The item is charged for the `tokens`, `pixel_steps` or `work` field.
    """

    def find_wrong_number(self) -> str:
        """Returns which of its numbers must not reach callers, such as NaN. Empty: all are valid.

        Results are checked once, when they leave the model (workers/runtime/execution.py). Pixels
        are checked before they become a file (workers/models/image/vae.py).
        """
        return ""

    @property
    def recorded_metrics(self) -> Mapping[str, Any]:
        """Returns metrics that the model recorded while computing the result."""
        return {}

    @property
    def blobs(self) -> Sequence[Blob]:
        """Data in the result that may be too large for a message."""
        return ()

    def with_blobs(self, blobs: Sequence[Blob]) -> Self:
        """Returns the same result with its `blobs` replaced."""
        raise NotImplementedError

    def blob_suffix(self, number: int) -> str:
        """Returns the suffix of a blob's key in the object store, by its number from 0.

        Must not be a path below the first, because a file can't contain files in a folder store.
        """
        return f".{number}" if number else ""

    def to_output(self, media_type: str, link_to: LinkTo) -> Any:
        """Returns the result as shown in a prediction, ready for JSON.

        Args:
            media_type: media type of the output format chosen by the caller.
            link_to: returns the URL of a result that is not inline.
        """
        raise NotImplementedError

    def step_value(self) -> Any:
        """Returns the result as seen by flow steps: plain values, and a Blob for each file."""
        raise NotImplementedError

    @classmethod
    def count_truncated(cls, results: Sequence[TaskResult], *, is_asked: bool) -> int | None:
        """Returns how many tokens were cut from a request. None if unknown or irrelevant.

        Args:
            is_asked: True if the caller chose a side to cut.
        """
        return (
            sum(getattr(result, "truncated_tokens", 0) for result in results) if is_asked else None
        )


@dataclass(frozen=True, kw_only=True)
class FirstGuesses:
    """Seconds to assume until something has been measured."""

    item_s: float = 0.01
    """Time that a worker takes for an item. Used by autoscaling."""
    gap_s: float = 0.002
    """Time between two items that leave an API instance under load. Used by admission.

    Too short is better than too long. A late answer is noticed and corrects admission, but a wrong
    rejection is not noticed.
    """
    batch_s: float = 0.02
    """Time that the model takes for an item, including the others in its batch.

    Used by admission.
    """


class Task(ABC):
    """The rules of a task. They are the same in every layer."""

    name: ClassVar[str]
    """Value of `task` in the catalog."""
    noun: ClassVar[str]
    """Noun for a model of this task, in error messages."""
    first_guesses: ClassVar[FirstGuesses]
    gen_ai_operation: ClassVar[str] = ""
    """Operation of its spans, from OpenTelemetry's GenAI conventions. Empty: its name."""
    unit: ClassVar[Unit]
    """Unit of its work: the field of its results that is charged for."""
    precisions: ClassVar[tuple[str, ...]] = ("auto", "fp32", "bf16", "fp16", "int8")
    """Precisions that its models can be computed in."""
    engines: ClassVar[tuple[str, ...]] = ("auto",)
    """Engines that can run its models, in addition to the libraries named by `backend`."""
    stores_blobs: ClassVar[bool] = False
    """True if large inputs and results are moved to the object store."""
    compares_texts: ClassVar[bool] = False
    """True if its models compare two texts, by one of the methods in `rerank`."""
    runs_graphs: ClassVar[bool] = False
    """True if its models can run as optimized ONNX graphs."""
    has_context: ClassVar[bool] = False
    """True if a prompt and its continuation share a context of `generation.context_tokens`."""
    is_compiled: ClassVar[bool] = False
    """True if GPU workers compile its models, and the kernels are worth keeping."""
    has_interface: ClassVar[bool] = False
    """True if each model has its own inputs and outputs, listed in a penstock.schema.json."""
    shares_weights: ClassVar[bool] = False
    """True if a step reads all weights once for all of its items, which takes most of its time.

    A model with a whole CPU then gets one process with all cores. Several processes would each read
    the weights.
    """

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns catalog entry fields whose defaults differ for this task.

        Args:
            fields: fields of the entry, not yet validated.
        """
        return {}

    @abstractmethod
    def check_entry(self, entry: CatalogEntry) -> None:
        """Validates a catalog entry.

        Raises:
            ValueError: the entry can't be served.
        """

    @abstractmethod
    def budget(self, entry: CatalogEntry) -> int:
        """Returns the maximum work per batch, in the unit of the task."""

    @abstractmethod
    def tolerance(self, entry: CatalogEntry) -> float:
        """Returns the maximum distance from results of the reference. Part of the cache key."""

    def result_bytes(self, entry: CatalogEntry) -> int:
        """Returns the maximum size of one result in a reply, in bytes."""
        return INLINE_LIMIT_BYTES

    def largest_job(self, entry: CatalogEntry) -> int:
        """Returns the maximum items per job, so that its reply stays below INLINE_LIMIT_BYTES."""
        return max(1, min(MAX_JOB_ITEMS, INLINE_LIMIT_BYTES // self.result_bytes(entry)))

    @abstractmethod
    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        """Returns the inputs and output of a model as a flow step."""

    @abstractmethod
    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        """Returns the input of a step item.

        Args:
            values: values by name: plain values, and a Blob for each file.

        Raises:
            BadInput: the model does not accept it.
        """

    @abstractmethod
    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """Returns the maximum work of a step item, whatever its input."""

    def runs_to_the_end(self, entry: CatalogEntry) -> bool:
        """Returns whether an item keeps its slot until it ends, once started.

        It may take minutes, and can't be interrupted for another tenant.
        """
        return False

    def least_work(self, entry: CatalogEntry) -> int:
        """Returns the work of a model's smallest item, in the unit of the task."""
        return 1
