"""The definition of a task: its items' inputs and results, and the rules for its models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.models.entry import Batch, CatalogEntry
from shared.models.flow_types import StepSchema

MAX_JOB_ITEMS = 16
MAX_STEP_SEED = 2**53 - 11
"""Maximum seed for a prediction (`MAX_SEED` in api/bodies.py). A test compares the two."""
Unit: TypeAlias = Literal["tokens", "pixel_steps", "work"]


class LinkTo(Protocol):
    """Returns a result's URL."""

    def __call__(self, key: str | None, media_type: str = "") -> str:
        """Returns the URL.

        Args:
            key: key in the object store. None if the result is in its record.
            media_type: the data's media type. Empty means the output format chosen by the caller.
        """


class WorkBound(NamedTuple):
    """Maximum work for an item."""

    work: int
    """Work in the task's unit."""
    output_tokens: int = 0
    """How many of these units are generated tokens."""


class TaskInput(msgspec.Struct, omit_defaults=True):
    """One item's input. Each task has one or more tagged subclasses."""

    @property
    def sources(self) -> Sequence[Blob]:
        """Data in the input that may be too large for a message."""
        return ()

    def with_sources(self, sources: Sequence[Blob]) -> Self:
        """Returns the same input with its `sources` replaced."""
        raise NotImplementedError

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns the approximate work in the task's unit. Limits reserve this amount."""
        raise NotImplementedError

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns the maximum work. Budgets reserve the price of that work."""
        return WorkBound(self.estimate_work(entry))

    def cache_form(self) -> tuple[object, ...]:
        """Returns everything that affects the result, in a fixed order, for the cache key."""
        raise NotImplementedError


class StepInput(NamedTuple):
    """The input for one item in a flow step."""

    input: TaskInput
    is_repeatable: bool = True
    """True if equal inputs produce equal results."""


class TaskResult(msgspec.Struct, omit_defaults=True):
    """One item's result. Each task has one or more tagged subclasses.

    The item is charged for the `tokens`, `pixel_steps`, or `work` field.
    """

    def find_wrong_number(self) -> str:
        """Describes a number in the result that must not reach callers, such as NaN.

        Empty if all are valid.

        Results are checked once, when they leave the model (workers/runtime/execution.py). Pixels
        are checked before they become a file (workers/models/image/vae.py).
        """
        return ""

    @property
    def recorded_metrics(self) -> Mapping[str, Any]:
        """Returns the metrics the model recorded while computing the result."""
        return {}

    @property
    def blobs(self) -> Sequence[Blob]:
        """Data in the result that may be too large for a message."""
        return ()

    def with_blobs(self, blobs: Sequence[Blob]) -> Self:
        """Returns the same result with its `blobs` replaced."""
        raise NotImplementedError

    def blob_suffix(self, number: int) -> str:
        """Returns the suffix for a blob's key in the object store, given the blob's number from 0.

        The suffix must not form a path below the first blob's, because in a folder store, a file
        can't contain files.
        """
        return f".{number}" if number else ""

    def to_output(self, media_type: str, link_to: LinkTo) -> Any:
        """Returns the result as it appears in a prediction, ready for JSON.

        Args:
            media_type: media type of the output format chosen by the caller.
            link_to: returns a result's URL if it is not inline.
        """
        raise NotImplementedError

    def step_value(self) -> Any:
        """Returns the result as flow steps see it: plain values, and a Blob for each file."""
        raise NotImplementedError

    @classmethod
    def count_truncated(cls, results: Sequence[TaskResult], *, is_asked: bool) -> int | None:
        """Returns how many tokens were cut from a request. None if unknown or irrelevant.

        Args:
            is_asked: True if the caller chose which side to cut.
        """
        return (
            sum(getattr(result, "truncated_tokens", 0) for result in results) if is_asked else None
        )


@dataclass(frozen=True, kw_only=True)
class FirstGuesses:
    """Seconds to assume until something has been measured."""

    item_s: float = 0.01
    """How long a worker takes per item. Used by autoscaling."""
    gap_s: float = 0.002
    """Time between two items leaving an API instance under load. Used by admission.

    A value that is too short is better than one that is too long, because a late response is
    noticed and corrects admission, but an unnecessary rejection goes unnoticed.
    """
    batch_s: float = 0.02
    """How long the model takes for an item and the rest of its batch.

    Used by admission.
    """


class Task(ABC):
    """A task's rules, which are the same in every layer."""

    name: ClassVar[str]
    """Value of `task` in the catalog."""
    noun: ClassVar[str]
    """Noun that error messages use for one of this task's models."""
    first_guesses: ClassVar[FirstGuesses]
    gen_ai_operation: ClassVar[str] = ""
    """Operation name for spans, from OpenTelemetry's GenAI conventions. Empty means the task's
    name.
    """
    unit: ClassVar[Unit]
    """Unit of work: the result field that determines the charge."""
    precisions: ClassVar[tuple[str, ...]] = ("auto", "fp32", "bf16", "fp16", "int8")
    """Precisions supported for the task's models."""
    engines: ClassVar[tuple[str, ...]] = ("auto",)
    """Engines that can run the task's models, in addition to the libraries named by `backend`."""
    stores_blobs: ClassVar[bool] = False
    """True if large inputs and results are moved to the object store."""
    compares_texts: ClassVar[bool] = False
    """True if the task's models compare two texts, by one of the methods in `rerank`."""
    runs_graphs: ClassVar[bool] = False
    """True if the task's models can run as optimized ONNX graphs."""
    has_context: ClassVar[bool] = False
    """True if a prompt and its continuation share a context of `generation.context_tokens`."""
    is_compiled: ClassVar[bool] = False
    """True if GPU workers compile the task's models, and the kernels are worth keeping."""
    has_interface: ClassVar[bool] = False
    """True if inputs and outputs differ from model to model and are listed in a
    penstock.schema.json.
    """
    shares_weights: ClassVar[bool] = False
    """True if a step reads all weights once for all of its items, and spends most of its time doing
    so. In that case, a model with a CPU to itself gets one process that uses all cores, because
    several processes would each read the weights.
    """

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns catalog entry fields whose defaults differ for this task.

        Args:
            fields: the entry's fields, not yet validated.
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
        """Returns the maximum work per batch, in the task's unit."""

    def usual_batch(self, entry: CatalogEntry) -> Batch:
        """Returns the batch limits for a device without measurements. Default: the entry's."""
        return entry.batch

    @abstractmethod
    def tolerance(self, entry: CatalogEntry) -> float:
        """Returns the maximum distance from the reference's results. Part of the cache key."""

    def result_bytes(self, entry: CatalogEntry) -> int:
        """Returns the maximum size of one result in a reply, in bytes."""
        return INLINE_LIMIT_BYTES

    def largest_job(self, entry: CatalogEntry, item_work: float = inf) -> int:
        """Returns the maximum number of items that keeps a job's reply below INLINE_LIMIT_BYTES.

        Args:
            item_work: the average work per item. Infinite if not known.
        """
        return max(1, min(MAX_JOB_ITEMS, INLINE_LIMIT_BYTES // self.result_bytes(entry)))

    @abstractmethod
    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        """Returns the inputs and output that a model has as a flow step."""

    @abstractmethod
    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        """Returns a step item's input.

        Args:
            values: plain values without nulls, plus a Blob for each file, keyed by name, as
                returned by `check_values`.

        Raises:
            BadInput: the model does not accept the input.
        """

    @abstractmethod
    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """Returns a step item's maximum work, regardless of its input."""

    def runs_to_the_end(self, entry: CatalogEntry) -> bool:
        """Returns whether an item, once started, keeps its slot until it finishes.

        It may take minutes and can't be interrupted for another tenant.
        """
        return False

    def least_work(self, entry: CatalogEntry) -> int:
        """Returns the work for a model's smallest item, in the task's unit."""
        return 1
