"""The definition of a task: the inputs and results of its items, and the rules of its models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.catalog_entry import CatalogEntry, Tolerance
from shared.flow_types import StepSchema

MAX_JOB_ITEMS = 16
Unit: TypeAlias = Literal["tokens", "pixel_steps", "work"]


class LinkTo(Protocol):
    """Gives the URL of a result."""

    def __call__(self, key: str | None, media_type: str = "") -> str:
        """The URL.

        Args:
            key: of the object store. None: the result is in its record.
            media_type: of its bytes. Empty: that of the output format that the caller chose.
        """


class WorkBound(NamedTuple):
    """The most work that an item can take."""

    work: int
    """The work, in the unit of its task."""
    output_tokens: int = 0
    """The number of them that are tokens that the model writes."""


class TaskInput(msgspec.Struct, omit_defaults=True):
    """The input of one item. Each task has one or more subclasses, with a tag."""

    @property
    def sources(self) -> Sequence[Blob]:
        """The bytes in the input that can be too large for a message."""
        return ()

    def with_sources(self, sources: Sequence[Blob]) -> Self:
        """The same input with its `sources` in other places."""
        raise NotImplementedError

    def estimate_work(self, entry: CatalogEntry) -> int:
        """About how much work it will take, in the unit of its task. Limits reserve this amount.

        Args:
            entry: of the model, in the catalog.
        """
        raise NotImplementedError

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """The most work it can take. Budgets reserve its price.

        Args:
            entry: of the model, in the catalog.
        """
        return WorkBound(self.estimate_work(entry))

    def cache_form(self) -> tuple[object, ...]:
        """All that decides the result, as plain values in a fixed order, for the cache key."""
        raise NotImplementedError

    def for_comparison(self) -> Self | None:
        """The input as another revision gets it, so that the results can be compared.

        None: its result is a matter of chance.
        """
        return self


class StepInput(NamedTuple):
    """The input of an item of a step of a flow."""

    input: TaskInput
    is_repeatable: bool = True
    """True if equal inputs give equal results."""


class TaskResult(msgspec.Struct, omit_defaults=True):
    """The result of one item. Each task has one subclass, with a tag.

    A `tokens`, `pixel_steps` or `work` field is what the item is charged for.
    """

    def find_wrong_number(self) -> str:
        """Returns which of its numbers no caller may get, such as NaN. Empty: all are right.

        Results are checked once, where they leave the model (workers/runtime/execution.py). Pixels
        are checked before they become a file (workers/models/image/vae.py).
        """
        return ""

    @property
    def recorded_metrics(self) -> Mapping[str, Any]:
        """What the model recorded while it computed the result."""
        return {}

    @property
    def blobs(self) -> Sequence[Blob]:
        """The bytes in the result that can be too large for a message."""
        return ()

    def with_blobs(self, blobs: Sequence[Blob]) -> Self:
        """The same result with its `blobs` in other places."""
        raise NotImplementedError

    def blob_suffix(self, number: int) -> str:
        """Returns the end of the key of a blob in the object store, by its number from 0.

        Not below the first: in a folder, a file has no files below it.
        """
        return f".{number}" if number else ""

    def to_output(self, media_type: str, link_to: LinkTo) -> Any:
        """The result as a prediction shows it, ready for JSON.

        Args:
            media_type: of the output format that the caller chose.
            link_to: gives the URL of a result that is not inline.
        """
        raise NotImplementedError

    def step_value(self) -> Any:
        """The result as the steps of a flow see it: plain values, and a Blob for each file."""
        raise NotImplementedError

    @classmethod
    def count_truncated(cls, results: Sequence[TaskResult], *, is_asked: bool) -> int | None:
        """Returns how many tokens a request lost. None if unknown or irrelevant.

        Args:
            is_asked: True if the caller chose a side to cut.
        """
        return sum(getattr(one, "truncated_tokens", 0) for one in results) if is_asked else None


@dataclass(frozen=True, kw_only=True)
class FirstGuesses:
    """Seconds to assume until something has been measured."""

    item_s: float = 0.01
    """The time that a worker takes for an item. Autoscaling uses it."""
    gap_s: float = 0.002
    """Between two items that leave an API instance under load. Admission uses it.

    Too short is better than too long. A late answer is noticed and teaches admission, but a wrong
    refusal is not noticed.
    """
    batch_s: float = 0.02
    """The time that the model takes for an item, with the others of its batch. Admission uses
    it."""


@dataclass(frozen=True, kw_only=True)
class ExampleRequest:
    """A request that a caller could send, for smoke tests."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class Task(ABC):
    """The rules of a task. They are the same in every layer."""

    name: ClassVar[str]
    """The value of `task` in the catalog."""
    noun: ClassVar[str]
    """A model of this task, in error messages."""
    first_guesses: ClassVar[FirstGuesses]
    gen_ai_operation: ClassVar[str] = ""
    """The operation of its spans, from OpenTelemetry's GenAI conventions. Empty: its own name."""
    unit: ClassVar[Unit]
    """The unit of its work: the field of its results that is charged."""
    precisions: ClassVar[tuple[str, ...]] = ("auto", "fp32", "bf16", "fp16", "int8")
    """The precisions that its models can be computed in."""
    engines: ClassVar[tuple[str, ...]] = ("auto",)
    """What can compute its models, beside the libraries that `backend` names."""
    stores_blobs: ClassVar[bool] = False
    """True if large inputs and results go to the object store."""
    compares_images: ClassVar[bool] = False
    """True if two results are compared as images, by their peak signal-to-noise ratio."""
    compares_texts: ClassVar[bool] = False
    """True if its models compare two texts, each in one of the ways of `rerank`."""
    runs_graphs: ClassVar[bool] = False
    """True if its models can run as optimized ONNX graphs."""
    has_context: ClassVar[bool] = False
    """True if a prompt and what is generated share a context of `generation.context_tokens`."""
    is_compiled: ClassVar[bool] = False
    """True if GPU workers compile its models, whose kernels are worth keeping."""
    has_interface: ClassVar[bool] = False
    """True if each model has its own inputs and outputs, listed in a penstock.schema.json."""
    shares_weights: ClassVar[bool] = False
    """True if a step reads all weights once for all of its items, which is most of its time.

    Then a model that has a CPU for itself gets one process with all cores. Processes that divide
    the items would each read the weights.
    """

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields of a catalog entry that have another default for this task.

        Args:
            fields: those that the entry has, not checked yet.
        """
        return {}

    @abstractmethod
    def check_entry(self, entry: CatalogEntry) -> None:
        """Checks an entry of the catalog.

        Raises:
            ValueError: the entry can't be served.
        """

    @abstractmethod
    def budget(self, entry: CatalogEntry) -> int:
        """The most work that a batch may hold, in the unit of the task."""

    @abstractmethod
    def tolerance(self, entry: CatalogEntry) -> float:
        """Returns the maximum distance from results of the reference. Part of the cache key."""

    def compares(self, tolerance: Tolerance) -> bool:
        """Returns whether results of two revisions are compared at all."""
        return True

    def is_close(self, ours: TaskResult, theirs: TaskResult, tolerance: Tolerance) -> bool | None:
        """Returns whether two results of one input are within a tolerance. None if it unknown."""
        return None

    def result_bytes(self, entry: CatalogEntry) -> int:
        """Returns the maximum size of one result in a reply, in bytes."""
        return INLINE_LIMIT_BYTES

    def largest_job(self, entry: CatalogEntry) -> int:
        """Returns the maximum items of a job, so that its reply stays below INLINE_LIMIT_BYTES."""
        return max(1, min(MAX_JOB_ITEMS, INLINE_LIMIT_BYTES // self.result_bytes(entry)))

    @abstractmethod
    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        """Returns what a step of a flow may give to a model, and what it gets."""

    @abstractmethod
    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        """Returns the input of an item of a step.

        Args:
            values: by name: plain values, and a Blob for each file.

        Raises:
            BadInput: the model does not take it.
        """

    @abstractmethod
    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """Returns the most work that an item of a step can take, whatever its input is."""

    def runs_to_the_end(self, entry: CatalogEntry) -> bool:
        """Returns whether an item, once started, keeps its slot until it ends.

        It may take minutes, and can't be interrupted for another tenant.
        """
        return False

    def least_work(self, entry: CatalogEntry) -> int:
        """Returns the work of the smallest item that a model computes, in the unit of the task."""
        return 1

    @abstractmethod
    def example_request(self, entry: CatalogEntry, text: str) -> ExampleRequest:
        """A small request to a model. `text` makes it unique, so that no cache answers it."""

    @abstractmethod
    def describe_answer(self, entry: CatalogEntry, answer: Any) -> str:
        """Describes the response to the example in a few words.

        Raises:
            ValueError: the answer is wrong, and why.
            KeyError: it has another shape, as have IndexError and TypeError.
        """
