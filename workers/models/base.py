"""The model interface: a Preparer in the I/O process, and an InferenceModel in the model process.

The I/O process sends the model process a `Prepared`: a validated and prepared item, with the
numbers needed for batching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from shared.errors import BadInput, ModelFailed, PenstockError
from shared.models.tasks import Input, Result
from shared.models.tasks.custom import CustomResult
from shared.models.tasks.embedding import TextTokens
from shared.models.tasks.text import RESPONSE_FORMAT, TokenChunk, TokenCount, TokenLogprob

GPU_LOST_STATUS = 87
"""Exit status of a model process that has lost its GPU."""
WithoutModel = TokenCount | TextTokens
"""Results for inputs that don't need a model."""
OnStep = Callable[[int, int], None]
"""Called as on_step(step, steps) after each step of a batch, counting from 1.

A model without known steps calls on_step(0, 0) only to check whether the batch is canceled.
"""
OpenGguf = Callable[[Path, Path], Path]
"""Called with a GGUF file and the cache folder.

Returns the model's folder, which the call may have to create first.
"""
IsClose = Callable[[CustomResult, CustomResult], bool]
"""Returns whether two outputs for one input are close. It may block or raise PenstockError."""


class Prepared(msgspec.Struct, kw_only=True):
    """An item that a model can run.

    `key`: only items with equal keys may share a batch. `length`: the item's work, in its task's
    unit, which counts toward the batch budget. If a model pads, every item in a call costs as much
    as the longest one. `room`: the part of the budget that the item takes if items join and leave
    between steps. 0 means the same as `length`.
    """

    key: str
    length: int
    room: int = 0


class PreparedText(Prepared, tag="text", omit_defaults=True):
    """One text as token IDs: `length` little-endian uint32, including special tokens.

    `type_ids` has the same format, and is empty if all of them are 0, as is nearly always the case.
    `truncated_tokens` is the number of tokens that were cut off.
    """

    ids: bytes
    type_ids: bytes = b""
    truncated_tokens: int = 0


class PreparedControl(msgspec.Struct, array_like=True):
    """An image's ControlNet, by its name in the catalog.

    `map`: width x height RGB pixels of 3 bytes each, row by row. `scale` multiplies its
        contribution between `start` and `end`, which are given as fractions of the steps.
    """

    name: str
    map: bytes
    scale: float
    start: float
    end: float


class PreparedImage(Prepared, tag="image", omit_defaults=True):
    """One image to draw.

    `source`: the image to start from, width x height RGB pixels of 3 bytes each, row by row.
    `mask`: width x height bytes that set how strongly each pixel is redrawn, from 0 (the source's
    pixel) to 255 (a new pixel). `adapter`: name of an adapter in the catalog, with `adapter_scale`
    as its strength. Empty if there is none. For an adapter specified by URL, the name is its
    digest, `adapter_key` is its key in the object store, and `adapter_owner` is its tenant's
    digest.
    `ip_adapter`: name of an IP-Adapter, with its scale and its image, as RGB pixels of the square
    that its image encoder reads.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    scheduler: str
    strength: float | None = None
    source: bytes | None = None
    mask: bytes | None = None
    adapter: str = ""
    adapter_scale: float = 1.0
    adapter_key: str = ""
    adapter_owner: str = ""
    clip_skip: int | None = None
    guidance_rescale: float = 0.0
    controls: list[PreparedControl] = []
    ip_adapter: str = ""
    ip_adapter_pixels: bytes = b""
    ip_adapter_scale: float = 1.0


class PreparedPair(Prepared, tag="pair"):
    """Two texts to compare. `length` is their total length."""

    text: PreparedText
    query: PreparedText


class PreparedPrompt(Prepared, tag="prompt", omit_defaults=True):
    """A prompt to continue.

    `length` is the maximum number of tokens for which the prompt stores keys and values.

    `ids` and `written_ids` are token IDs as little-endian uint32. `written_ids` were generated
    before another worker died, or before the text was preempted. The model continues from there.
    `written_text` is the part of their text that readers have seen, and `written_cached_tokens` is
    the number of cached prompt tokens reported to those readers. `json_schema` constrains the
    tokens, and `checked_schema`, if any, must match the whole text. The other fields have the same
    meaning as in GenerationInput.

    `owner`: only prompts with the same owner share the keys and values of identical prefixes,
    because `cached_tokens` reveals sharing. If it is empty, nothing is shared. `adapter`: name of
    the adapter to use. Empty for the model itself.
    """

    ids: bytes
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    is_echoed: bool = False
    stop: list[str] = []
    logprobs: int = -1
    json_schema: str = ""
    checked_schema: str = ""
    schema_field: str = RESPONSE_FORMAT
    is_streamed: bool = False
    owner: str = ""
    adapter: str = ""
    written_ids: bytes = b""
    written_cached_tokens: int = 0
    written_text: str = ""
    written_logprobs: list[TokenLogprob] = []

    @property
    def cache_owner(self) -> str:
        """Only prompts for which this is the same share keys and values. Empty if none may."""
        return f"{self.owner}\0{self.adapter}" if self.owner and self.adapter else self.owner


class PreparedFile(msgspec.Struct, array_like=True):
    """An input file: where it belongs, its name, and its bytes.

    `is_json`: True if the file is a JSON value that is too large for a message.
    """

    at: list[str | int]
    name: str
    data: bytes
    is_json: bool = False


class PreparedCustom(Prepared, tag="custom", omit_defaults=True):
    """A custom class's input. `length` is its work.

    Each file is represented by a null in `values`. `written_pieces` and `written_text`: the number
    and text of the pieces that another process has already streamed. The class yields these pieces
    again, but they are not streamed again.
    """

    values: dict[str, Any]
    files: list[PreparedFile] = []
    is_streamed: bool = False
    written_pieces: int = 0
    written_text: str = ""
    context: dict[str, str] = {}


PreparedItem = PreparedText | PreparedImage | PreparedPair | PreparedPrompt | PreparedCustom
PreparedOutcome = PreparedItem | WithoutModel | BadInput | ModelFailed


class RgbImage(msgspec.Struct, array_like=True):
    """RGB pixels of 3 bytes each, row by row."""

    width: int
    height: int
    pixels: bytes


class Preparer(Protocol):
    """Validates and prepares inputs.

    The preparer runs in the I/O process, so it never imports a model library.
    """

    def prepare(self, inputs: Sequence[Input]) -> Sequence[PreparedOutcome]:
        """Returns one outcome per input, in order.

        An invalid input results in a BadInput that names the invalid field.

        For an input that doesn't need a model, the outcome is its result.
        """


class LoadedModel(Protocol):
    """A model in a model process, used by a single thread."""

    device_name: str
    """The GPU's name, or `cpu`. Known after setup."""

    def setup(self) -> None:
        """Loads the model.

        Raises:
            ConfigurationError: the folder is not a model for this task, or does not match the
                catalog.
        """

    def warmup(self) -> None:
        """Does up-front work that would otherwise slow down the first batch or step."""


class InferenceModel(LoadedModel, Protocol):
    """Runs batches."""

    pads: bool
    """True if each item costs as much as the longest item in its call. Known after setup."""

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Splits a batch into groups of indices. Each group is one call to `predict`."""

    def computed_work(self, lengths: Sequence[int]) -> int:
        """Returns the work for one call with items of these lengths, including padding."""

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> Sequence[Result | PenstockError]:
        """Returns one outcome per item, in order.

        Raises:
            OutOfMemory: the batch is too large for the device. A smaller batch may fit.
        """


@runtime_checkable
class OverlappingModel(Protocol):
    """An InferenceModel whose device can compute while the interpreter does other work."""

    overlaps: bool
    """True if `predict` may be called on two threads at once, because the device can compute one
    call while the other is being prepared or read. Known after setup.
    """


class StepEnd(msgspec.Struct):
    """The items that finished in a SteppedModel's step, by slot.

    `results`: finished items. `preempted`: items that have to wait and start over, because the
    device had too little memory for all of them. `work`: the step's total work across all items, in
    tokens or pixels, or 0 if unknown. `waiting`: admitted items that the step did not compute
    because they are waiting for something other than the device.
    """

    results: dict[int, Result | PenstockError] = {}
    preempted: list[int] = []
    work: int = 0
    waiting: list[int] = []


@runtime_checkable
class CompiledModel(Protocol):
    """A model that is compiled for a fixed set of inputs, which it has met during warm-up."""

    def take_eager_calls(self) -> int:
        """Returns how many calls should have run compiled code but didn't, since the last call."""


@runtime_checkable
class SteppedModel(LoadedModel, Protocol):
    """Computes items step by step.

    Continuous batching: items are admitted between two steps and leave one by one. A slot is an
    item's number, chosen by the caller.
    """

    def admit(self, slot: int, item: PreparedItem) -> None:
        """Admits an item, which the next steps compute.

        Raises:
            PenstockError: the item can't be computed. OutOfMemory: there is no room for the item
                right now.
        """

    def step(self) -> StepEnd:
        """Computes one step for all admitted items.

        Raises:
            Exception: the model failed. OutOfMemory: all admitted items are dropped.
        """

    def take_chunks(self) -> dict[int, TokenChunk]:
        """Returns each streamed item's output since the last call. Empty if there is none."""

    def drop(self, slot: int) -> None:
        """Removes an item if it is still there."""


@runtime_checkable
class Resumable(Protocol):
    """A SteppedModel whose items can be interrupted, and resume when they are admitted again.

    A text keeps its generated tokens. An image resumes if its process still has it; otherwise, it
    starts over.
    """

    def interrupt(self, slot: int) -> TokenChunk | None:
        """Removes an admitted item. Returns the item's output since its last report.

        None if there is none.
        """


@runtime_checkable
class ProgressReporter(Protocol):
    """A SteppedModel whose items have a known number of steps and can be drawn between steps."""

    def progress(self) -> dict[int, tuple[int, int]]:
        """Returns the completed and total steps of each item, by slot."""

    def image(self, slot: int) -> RgbImage | None:
        """Returns a small image of an item, or None if it can't be drawn."""


@runtime_checkable
class Previewer(Protocol):
    """A model that can draw its unfinished items between two steps."""

    def preview(self, indices: Sequence[int]) -> Sequence[RgbImage | None]:
        """Returns small images of the items at these indices in the call.

        None if the model can't draw them.

        May only be called within `on_step`.
        """


class OutOfMemory(ModelFailed):
    """The device has too little memory for this batch."""


class GpuLost(BaseException):
    """The process can no longer use its GPU. The items are not at fault and can run elsewhere.

    Not an Exception, because at the boundary with the model libraries, an Exception fails the
    items. This exception makes the process exit, so the items are retried.
    """
