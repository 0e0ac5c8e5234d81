"""Messages about batches and individual items that a model process sends to the I/O process.

Our model processes send them as frames (workers/runtime/protocol.py). Messages from any other
process, such as a custom class's, are created by its client (workers/models/client.py).
"""

from __future__ import annotations

import msgspec

from shared.errors import ModelFailed, PenstockError, error_for_code
from shared.messages import PrintedLogs
from shared.models.tasks import Result
from shared.models.tasks.custom import PieceChunk, StreamedFile
from shared.models.tasks.text import TokenChunk
from workers.models.base import RgbImage


class ResidencyReport(msgspec.Struct):
    """The models loaded in a process, and its loads and evictions since the last report.

    `load_s`: duration of each model's last load, in seconds. `size_bytes`: each model's memory use,
    first estimated, then measured. `switch_s`: seconds spent on loads and evictions.
    """

    resident: list[int]
    load_s: dict[int, float] = {}
    size_bytes: dict[int, int] = {}
    loads: int = 0
    evictions: int = 0
    switch_s: float = 0.0


class Ready(msgspec.Struct, tag="ready"):
    """Each model has been loaded once. Models that fit the budget are resident and warm."""

    device_name: str
    load_s: float
    warmup_s: float
    memory_bytes: int
    residency: ResidencyReport | None = None
    overlapping: list[int] = []
    """Models whose next batch the process accepts before it finishes the previous one."""


class StepDone(msgspec.Struct, tag="progress"):
    """Batch `number` has completed `step` of `steps`."""

    number: int
    step: int
    steps: int


class Previews(msgspec.Struct, tag="previews"):
    """Previews for some slots of batch `number` after `step` of `steps`."""

    number: int
    step: int
    steps: int
    images: dict[int, RgbImage]


class Failure(msgspec.Struct, tag="failure"):
    """The reason that an item has no result. `code` is defined in shared.errors."""

    code: str
    message: str
    field: str | None = None

    @classmethod
    def from_error(cls, error: Exception) -> Failure:
        """Returns the failure that represents `error` on the socket.

        An error from a model library is a ModelFailed.
        """
        if not isinstance(error, PenstockError):
            error = ModelFailed(f"{type(error).__name__}: {error}")
        return cls(error.code, error.message, error.field)

    def to_error(self) -> PenstockError:
        return error_for_code(self.code, self.message, self.field)


class Call(msgspec.Struct, array_like=True):
    """One call to a model: how long it took, and the number of items."""

    inference_ms: float
    items: int


class BatchResult(msgspec.Struct, tag="done", kw_only=True):
    """A batch that ran: one result or failure per item, in order, and the resources it used.

    Times are Unix seconds.
    """

    number: int = 0
    """The batch's number, as in RunBatch."""
    results: list[Result | Failure]
    started_at_s: float
    finished_at_s: float
    inference_ms: float
    real_work: int
    """The items' work, in their task's unit."""
    padded_work: int
    """The work that was computed, including padding."""
    out_of_memory: bool = False
    """True if the device had too little memory for the whole batch, which then ran in parts."""
    memory_bytes: int = 0
    """Resident memory of the process."""
    switched: ResidencyReport | None = None
    """The models loaded and evicted for this batch. None if there were none."""
    steps_saved: int | None = None
    """Steps that were skipped because the batch was canceled."""
    loaded_at_s: float = 0.0
    """When the process loaded the model."""
    computed_work: list[int] = []
    """Each item's tokens or pixel-steps, including its share of any padding. Empty if there is no
    padding.
    """
    spare_s: float = 0.0
    """The item's share of the spare seconds in its steps, if it was added to a running batch."""
    average_items: int = 0
    """The average number of items computed at a time, if items join between steps. 0 means all of
    them.
    """
    calls: dict[int, Call] = {}
    """The calls that computed items again after other items had failed, by item index. An item does
    not pay for calls that failed because of a different item.
    """
    eager_calls: int = 0
    """Calls that should have run compiled code but didn't, since the last batch or item."""
    logs: dict[int, PrintedLogs] = {}
    """The model's printed output, keyed by the index of the item it was computing alone."""

    @property
    def batch_items(self) -> int:
        """The number of items that shared the device's time."""
        return self.average_items or len(self.results)

    @property
    def outcomes(self) -> list[Result | PenstockError]:
        return [
            result.to_error() if isinstance(result, Failure) else result for result in self.results
        ]

    @property
    def has_failed(self) -> bool:
        """True if the model failed on every item."""
        return all(
            isinstance(result, Failure) and result.code == ModelFailed.code
            for result in self.results
        )


class FileOfPiece(msgspec.Struct, array_like=True):
    """A file that belongs to one piece of the output, with its bytes."""

    file: StreamedFile
    data: bytes


class Chunks(msgspec.Struct, tag="chunks"):
    """Tokens for some slots of batch `number` since the last such message."""

    number: int
    chunks: dict[int, TokenChunk]


class Pieces(msgspec.Struct, tag="pieces"):
    """Pieces yielded by a custom class for slots of batch `number` since the last such message.

    `files`: files that are too large to include in the pieces.
    """

    number: int
    chunks: dict[int, PieceChunk]
    files: dict[int, list[FileOfPiece]]


class ItemsProgress(msgspec.Struct, tag="items_progress"):
    """Completed and total steps for each slot of batch `number`."""

    number: int
    progress: dict[int, tuple[int, int]]


class ItemLogs(msgspec.Struct, tag="item_logs"):
    """Output printed so far by the model for a slot of batch `number`."""

    number: int
    slot: int
    logs: PrintedLogs


class ItemPreview(msgspec.Struct, tag="item_preview"):
    """The preview for one slot of batch `number` after `step` of `steps`."""

    number: int
    slot: int
    step: int
    steps: int
    image: RgbImage


class ItemEnded(msgspec.Struct, tag="ended"):
    """One slot of batch `number` has finished. `done` describes just this item."""

    number: int
    slot: int
    done: BatchResult


class Spare(msgspec.Struct, tag="spare"):
    """Spare seconds in the steps of batch `number` since the last such message.

    More items could have been computed in that time at no extra cost
    (shared/models/service_rate.py).
    """

    number: int
    seconds: float


class Preempted(msgspec.Struct, tag="preempted"):
    """These slots of batch `number` must wait.

    The device had too little memory for these slots, or they were preempted. In the latter case,
    `chunks` contains the tokens generated since the last Chunks. An item that isn't streamed never
    sent Chunks.
    """

    number: int
    slots: list[int]
    chunks: dict[int, TokenChunk] = {}


class StepsEnded(msgspec.Struct, tag="steps_ended"):
    """Batch `number` has no items left.

    `failure`: the reason that the model failed on the remaining items, which did not finish. None
        if the model did not fail.
    """

    number: int
    failure: Failure | None = None
    switched: ResidencyReport | None = None
    """The models loaded and evicted for this batch. None if there were none."""


StepMessage = (
    Chunks
    | Pieces
    | ItemsProgress
    | ItemLogs
    | ItemPreview
    | ItemEnded
    | Spare
    | Preempted
    | StepsEnded
)


def check_result(result: Result | Exception) -> Result | Failure:
    """Returns a result if all of its numbers are valid, or else the reason they aren't.

    Every model's results pass through here, so no invalid result is returned, charged, or cached.
    """
    if isinstance(result, Exception):
        return Failure.from_error(result)
    wrong = result.find_wrong_number()
    if not wrong:
        return result
    return Failure.from_error(
        ModelFailed(f"the model produced {wrong}; its precision may be too low for this input")
    )
