"""The messages between the I/O process and a model process: frames of MessagePack on a socket.

A frame is its length in bytes (unsigned 32-bit, little-endian), then one of the structs below. The
model process gets RunBatch, Watch and Cancel. It sends Ready or Refused once, then
StepDone, Previews and BatchResult.

Items of a model that computes in steps are admitted by Admit and leave with Drop or Preempt while
their batch runs.
The process sends Chunks, ItemsProgress, ItemPreview, ItemEnded, Spare and Preempted, and StepsEnded
when no item is left. An Admit can cross with that. So the process ignores one for a batch that is
over, and the I/O process queues the items again that StepsEnded left without an end.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from shared.errors import ModelFailed, PenstockError, error_for_code
from shared.messages import PrintedLogs
from shared.tasks import Result
from shared.tasks.custom import StreamedFile
from shared.tasks.text import TokenChunk
from workers.models.base import Prepared, PreparedItem, RgbImage

HEADER = struct.Struct("<I")
FRAME_MAX_BYTES = 512 * 1024 * 1024


class RunBatch(msgspec.Struct, tag="run"):
    """Run these items on model number `model`. `number` counts the batches of this process."""

    number: int
    items: list[PreparedItem]
    model: int = 0
    in_steps: bool = False
    """Whether the model is a SteppedModel."""


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop batch `number`, which may be over already."""

    number: int


class Admit(msgspec.Struct, tag="admit"):
    """Add items to batch `number`, which may be over already. Slots count on from `first`."""

    number: int
    first: int
    items: list[PreparedItem]


class Drop(msgspec.Struct, tag="drop"):
    """Stop these slots of batch `number`, which may have ended already."""

    number: int
    slots: list[int]


class Preempt(msgspec.Struct, tag="preempt"):
    """Interrupt these slots of batch `number`, which may have ended already. They go on later."""

    number: int
    slots: list[int]


class Watch(msgspec.Struct, tag="watch"):
    """Somebody watches these slots of batch `number`, which may be over already."""

    number: int
    slots: list[int]


class ResidencyReport(msgspec.Struct):
    """The models that a process holds, and the loads and evictions since the last report.

    `load_s`: seconds that the last load of each model took. `size_bytes`: the memory of each model,
    first estimated, then measured. `switch_s`: seconds spent on loads and evictions.
    """

    resident: list[int]
    load_s: dict[int, float] = {}
    size_bytes: dict[int, int] = {}
    loads: int = 0
    evictions: int = 0
    switch_s: float = 0.0


class Ready(msgspec.Struct, tag="ready"):
    """Each model was loaded once. Those that fit the budget are resident and warm."""

    device_name: str
    load_s: float
    warmup_s: float
    memory_bytes: int
    residency: ResidencyReport | None = None


class Refused(msgspec.Struct, tag="refused"):
    """A model can't be loaded. `code` is one of shared.errors."""

    code: str
    message: str
    field: str | None = None


class StepDone(msgspec.Struct, tag="progress"):
    """Step `step` of `steps` of batch `number` is done."""

    number: int
    step: int
    steps: int


class Previews(msgspec.Struct, tag="previews"):
    """Previews of some slots of batch `number` after step `step` of `steps`."""

    number: int
    step: int
    steps: int
    images: dict[int, RgbImage]


class Failure(msgspec.Struct, tag="failure"):
    """The reason that an item has no result. `code` is one of shared.errors."""

    code: str
    message: str
    field: str | None = None

    @classmethod
    def from_error(cls, error: Exception) -> Failure:
        """The failure that `error` becomes on the socket. A model library's is ModelFailed."""
        if not isinstance(error, PenstockError):
            error = ModelFailed(f"{type(error).__name__}: {error}")
        return cls(error.code, error.message, error.field)

    def to_error(self) -> PenstockError:
        """The error it was made from."""
        return error_for_code(self.code, self.message, self.field)


class Call(msgspec.Struct, array_like=True):
    """One call of a model: how long it took, and for how many items."""

    inference_ms: float
    items: int


class BatchResult(msgspec.Struct, tag="done", kw_only=True):
    """A batch that ran: one result or failure per item, in order, and what the batch took.

    Times are unix seconds.
    """

    number: int = 0
    """Number of the batch, as in RunBatch."""
    results: list[Result | Failure]
    started_at_s: float
    finished_at_s: float
    inference_ms: float
    real_work: int
    """Of the items, in the unit of their task."""
    padded_work: int
    """The same with padding, as computed."""
    out_of_memory: bool = False
    """Whether the device had too little memory for the whole batch, which was then run in parts."""
    memory_bytes: int = 0
    """Resident memory of the process."""
    switched: ResidencyReport | None = None
    """The models that were loaded and evicted for this batch. None if there were none."""
    steps_saved: int | None = None
    """Steps that were left out because the batch was canceled."""
    cpu_s: float = 0.0
    """CPU seconds of the process."""
    loaded_at_s: float = 0.0
    """When the process loaded the model."""
    computed_work: list[int] = []
    """Each item's tokens or pixel-steps, with its part of the padding. Empty: no padding."""
    spare_s: float = 0.0
    """The spare seconds of its steps that belong to it, if it was admitted to others."""
    average_items: int = 0
    """The average number of items computed at a time, if items join between steps. 0: all."""
    calls: dict[int, Call] = {}
    """The calls that computed items after others had failed, by the index of the item. An item does
    not pay for calls that another one made fail."""
    logs: dict[int, PrintedLogs] = {}
    """What the model printed, by the index of the item that it computed alone meanwhile."""

    @property
    def batch_items(self) -> int:
        """The number of items that shared the time of the device."""
        return self.average_items or len(self.results)

    @property
    def outcomes(self) -> list[Result | PenstockError]:
        """The results, with failures as errors."""
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


class FileOfChunk(msgspec.Struct, array_like=True):
    """A file whose place is in a chunk, and its bytes."""

    file: StreamedFile
    data: bytes


class Chunks(msgspec.Struct, tag="chunks"):
    """The output of slots of batch `number` since the last message of this kind.

    `files`: those of a model of one's own that are too large for the chunks.
    """

    number: int
    chunks: dict[int, TokenChunk]
    files: dict[int, list[FileOfChunk]] = {}


class ItemsProgress(msgspec.Struct, tag="items_progress"):
    """The completed and total steps of the slots of batch `number`."""

    number: int
    progress: dict[int, tuple[int, int]]


class ItemLogs(msgspec.Struct, tag="item_logs"):
    """What the model has printed so far for a slot of batch `number`."""

    number: int
    slot: int
    logs: PrintedLogs


class ItemPreview(msgspec.Struct, tag="item_preview"):
    """The preview of a slot of batch `number` after step `step` of `steps`."""

    number: int
    slot: int
    step: int
    steps: int
    image: RgbImage


class ItemEnded(msgspec.Struct, tag="ended"):
    """One slot of batch `number` has ended. `done` is about this item alone."""

    number: int
    slot: int
    done: BatchResult


class Spare(msgspec.Struct, tag="spare"):
    """The spare seconds of the steps of batch `number` since the last message of this kind.

    More items could have been computed in them for nothing (shared/service_rate.py).
    """

    number: int
    seconds: float


class Preempted(msgspec.Struct, tag="preempted"):
    """These slots of batch `number` are to wait.

    The device had too little memory for them, or they were preempted. Then `chunks` has what
    they have written since the last Chunks. One that is not streamed had none before.
    """

    number: int
    slots: list[int]
    chunks: dict[int, TokenChunk] = {}


class StepsEnded(msgspec.Struct, tag="steps_ended"):
    """Batch `number` has no items any more.

    `failure`: why the model failed on those that were in, which have no end. None: it did not.
    """

    number: int
    failure: Failure | None = None
    switched: ResidencyReport | None = None
    """The models that were loaded and evicted for this batch. None if there were none."""


StepMessage = (
    Chunks | ItemsProgress | ItemLogs | ItemPreview | ItemEnded | Spare | Preempted | StepsEnded
)
ServerMessage = Ready | Refused | StepDone | Previews | BatchResult | StepMessage
ClientMessage = RunBatch | Cancel | Watch | Admit | Drop | Preempt

_encoder = msgspec.msgpack.Encoder()
_client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    ClientMessage
)
_server_message_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(
    ServerMessage
)


def encode_run(
    number: int, items: list[Prepared], model: int = 0, *, in_steps: bool = False
) -> bytes:
    """The frame that runs a batch on model number `model`."""
    run = {"type": "run", "number": number, "items": items, "model": model, "in_steps": in_steps}
    return _frame(_encoder.encode(run))


def encode_admit(number: int, first: int, items: list[Prepared]) -> bytes:
    """The frame that adds items to a batch."""
    return _frame(
        _encoder.encode({"type": "admit", "number": number, "first": first, "items": items})
    )


def encode_preempt(number: int, slots: list[int]) -> bytes:
    """A Preempt as bytes."""
    return _frame(_encoder.encode(Preempt(number, slots)))


def encode_drop(number: int, slots: list[int]) -> bytes:
    """The frame that stops some items of a batch."""
    return _frame(_encoder.encode(Drop(number, slots)))


def encode_cancel(number: int) -> bytes:
    """The frame that stops a batch."""
    return _frame(_encoder.encode(Cancel(number)))


def encode_watch(number: int, slots: list[int]) -> bytes:
    """The frame that asks for previews."""
    return _frame(_encoder.encode(Watch(number, slots)))


def encode_server_message(message: ServerMessage) -> bytes:
    """The frame of a message from a model process."""
    return _frame(_encoder.encode(message))


def _frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def decode_server_message(body: bytes) -> ServerMessage:
    """Decodes the body of a frame from a model process.

    Raises:
        msgspec.MsgspecError: the body is malformed.
    """
    return _server_message_decoder.decode(body)


def read_client_message(connection: socket.socket) -> ClientMessage | None:
    """The next message, or None at the end of the connection. Reads nothing beyond it."""
    header = _read(connection, HEADER.size)
    if header is None:
        return None
    body = _read(connection, HEADER.unpack(header)[0])
    return None if body is None else _client_message_decoder.decode(body)


def _read(connection: socket.socket, size_bytes: int) -> bytearray | None:
    body = bytearray(size_bytes)
    view, got_bytes = memoryview(body), 0
    while got_bytes < size_bytes:
        got = connection.recv_into(view[got_bytes:])
        if not got:
            return None
        got_bytes += got
    return body
