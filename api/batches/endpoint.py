"""The part of an endpoint that is independent of HTTP and that batch lines share with the route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from api.batches.documents import LineUsage
from api.bodies import Body
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import ImageCaller, SourceImages
from api.inputs.storage import StorageQuota
from api.predictions.creation import PredictionSnapshot
from shared.errors import PenstockError
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Flow, Model
from shared.models.tasks import Input
from shared.money.charge import ItemPrice
from shared.stores.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A validated batch line: the work to do, and the model to use."""

    body: Body
    model: Model
    inputs: Sequence[Input]
    is_repeatable: bool
    reply_bytes: int
    """Estimated size of the response in bytes."""

    @property
    def is_run(self) -> bool:
        return isinstance(self.model, Flow)


@dataclass(frozen=True, slots=True)
class LineCaller:
    """A line's sender, with the details needed for files the line references."""

    tenant: str
    storage_max_bytes: int
    """The tenant's storage quota."""
    base_url: str
    """The API's URL as seen by the caller, without a trailing slash."""
    deadline_s: float
    """Unix time at which to stop work on the line."""
    source_images: SourceImages

    def file_owner(self, field: str) -> ImageCaller:
        """Returns the owner of the files in the line's `field`. The files are not kept.

        Lines and the work on their files do not count toward per-minute limits.
        """
        return ImageCaller(
            self.tenant,
            StorageQuota(self.tenant, self.storage_max_bytes, field),
            self.base_url,
            self.deadline_s,
            keep_s=0,
            begin=_count_nothing,
        )


async def _count_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ReplyTools:
    """Dependencies for encoding responses."""

    objects: ObjectStore
    image_codec: ImageCodec
    deadline_s: float
    """Unix time at which to stop work on a response."""
    price: ItemPrice
    """The terms under which the line's items are charged."""
    run_metrics: Mapping[str, Any] | None = None
    """A flow run's time, cost, and steps. None if this is not a flow."""


class Endpoint(ABC):
    """An endpoint that batch lines may use."""

    @abstractmethod
    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Validates a line's body in the same way as this endpoint's route.

        Args:
            data: the body as JSON.
            default_seed: the seed for images whose body does not set one.

        Raises:
            pydantic.ValidationError: the body does not match its schema.
            BadInput: the model does not exist or can't process the line.
        """

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[Input]:
        """Returns a line's inputs, including the files it references.

        Raises:
            BadInput: a file can't be loaded.
            Overloaded: too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        return request.inputs

    def words(self, request: LineRequest) -> AbstractContextManager[None]:
        """Opens a context in which an item's errors use the same wording as in the route."""
        return nullcontext()

    def failure(self, request: LineRequest, snapshot: PredictionSnapshot) -> PenstockError:
        """Returns the reason a line's flow run failed."""
        return snapshot.failure

    def usage(
        self,
        request: LineRequest,
        outcomes: Sequence[ItemOutcome],
        answered: Sequence[ItemOutcome],
    ) -> LineUsage:
        """Returns the usage reported in a line's response.

        Args:
            outcomes: the items' outcomes. For a flow, the usage covers the outcomes of all steps.
            answered: the outcomes passed to `reply`.
        """
        receipts = [outcome.receipt for outcome in outcomes]
        written = sum(receipt.output_tokens or 0 for receipt in receipts)
        read = sum(receipt.tokens or 0 for receipt in receipts) - written
        cached = sum(receipt.cached_tokens or 0 for receipt in receipts)
        return LineUsage(read, written, cached)

    @abstractmethod
    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the response body as a single JSON line.

        Raises:
            Unavailable: the object store is unreachable.
            DeadlineExceeded: an image was not encoded in time.
            Overloaded: too many images are waiting to be encoded.
        """
