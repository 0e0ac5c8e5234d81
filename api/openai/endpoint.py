"""An endpoint of OpenAI's API that runs a model, apart from HTTP. Routes and batches share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from api.batches.documents import LineUsage
from api.bodies import Body
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import ImageCaller, SourceImages
from api.inputs.storage import StorageQuota
from api.predictions.creation import PredictionSnapshot
from shared.catalog import Catalog, Model
from shared.charge import ItemPrice
from shared.errors import PenstockError
from shared.messages import ItemOutcome
from shared.stores.objects import ObjectStore
from shared.tasks import Input


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A validated line of a batch: what is to be computed, and by which model."""

    body: Body
    model: Model
    inputs: Sequence[Input]
    is_repeatable: bool
    reply_bytes: int
    """An estimate of the size of its answer."""


@dataclass(frozen=True, slots=True)
class LineCaller:
    """Whose line it is, for the files that it names."""

    tenant: str
    storage_max_bytes: int
    """The storage quota of the tenant."""
    base_url: str
    """The URL of the API for the caller, without a slash at the end."""
    deadline_s: float
    """Unix time at which work on the line is stopped."""
    source_images: SourceImages

    def file_owner(self, field: str) -> ImageCaller:
        """Returns who owns the files that `field` of the line names. They are not kept.

        Lines count toward no limit of a minute, so neither does the work on their files.
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
    """Dependencies for encoding answers."""

    objects: ObjectStore
    image_codec: ImageCodec
    deadline_s: float
    """Unix time at which work on an answer is stopped."""
    price: ItemPrice
    """The terms on which its items are charged."""
    run_metrics: Mapping[str, Any] | None = None
    """What a run of a flow took and cost, with its steps. None: it is a model."""


class Endpoint(ABC):
    """One endpoint that lines of a batch may name."""

    path: ClassVar[str]

    @abstractmethod
    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Validates the body of a line as the route of this endpoint does.

        Args:
            data: the body as JSON.
            default_seed: the seed of images whose body has none.

        Raises:
            pydantic.ValidationError: the body does not match its schema.
            BadInput: the model can't compute it, or does not exist.
        """

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[Input]:
        """Returns what is computed of a line, with the files that it names.

        Raises:
            BadInput: a file can't be had.
            Overloaded: too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        return request.inputs

    def words(self, request: LineRequest) -> AbstractContextManager[None]:
        """Opens a block in which errors of an item get the words of the route."""
        return nullcontext()

    def failure(self, request: LineRequest, snapshot: PredictionSnapshot) -> PenstockError:
        """Returns why the run of a flow failed that was to answer a line."""
        return snapshot.failure

    def usage(
        self,
        request: LineRequest,
        outcomes: Sequence[ItemOutcome],
        answered: Sequence[ItemOutcome],
    ) -> LineUsage:
        """Returns the usage of an answered line, as its answer reports it.

        Args:
            outcomes: how its items ended. For a flow, those of all steps.
            answered: the outcomes that `reply` got.
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
        """Returns the body of the answer, as JSON in one line.

        Raises:
            Unavailable: the object store is unreachable.
            DeadlineExceeded: an image was not encoded in time.
            Overloaded: too many images wait to be encoded.
        """
