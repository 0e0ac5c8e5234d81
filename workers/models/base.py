"""The model contract: a Preparer in the I/O process (no torch) and an InferenceModel in the model process.

What goes from one to the other is `Prepared`: an item checked and made ready, with the numbers that batching needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from shared.errors import BadInput, ModelFailed, PenstockError
from shared.tasks import Input, Result


class Prepared(msgspec.Struct, kw_only=True):
    """An item that a model can run.

    `key`: only items with equal keys may share a batch. `length`: the item's work, in tokens or pixel-steps, which is
    what it takes of the batch budget. Where a model pads, every item of a call takes the room of the longest.
    """

    key: str
    length: int


class PreparedText(Prepared, tag="text"):
    """One text as token ids: `length` little-endian uint32, special tokens included.

    `type_ids` has the same form and is empty where all are 0, as for single texts nearly everywhere. `truncated_tokens`
    are those that were left out.
    """

    ids: bytes
    type_ids: bytes = b""
    truncated_tokens: int = 0


class PreparedImage(Prepared, tag="image", omit_defaults=True):
    """One image to draw. `source`: the image to start from, width x height RGB pixels of 3 bytes, row by row."""

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


class PreparedPair(Prepared, tag="pair"):
    """Two texts to compare. `length` is that of both together."""

    text: PreparedText
    query: PreparedText


PreparedItem = PreparedText | PreparedImage | PreparedPair
OnStep = Callable[[int, int], None]
"""Called as on_step(step, steps) after each step of a batch, from 1."""


class Preparer(Protocol):
    """Checks inputs and makes them ready; runs in the I/O process, so it never imports a model library."""

    def prepare(self, inputs: Sequence[Input]) -> Sequence[PreparedItem | BadInput]:
        """One outcome per input, in order. A bad input gives a BadInput that names its field, and harms no other."""


class InferenceModel(Protocol):
    """Runs batches; lives in a model process, synchronous, on one thread."""

    device_name: str
    """What computes: the GPU's name, or `cpu`. Known after setup."""
    pads: bool
    """Whether an item costs as much as the longest that it is computed with. Known after setup."""

    def setup(self) -> None:
        """Loads the model.

        Raises:
            ConfigurationError: the folder is not a model of this task, or not what the catalog says.
        """

    def warmup(self) -> None:
        """Runs what the first batch would otherwise pay for."""

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """How the batch is best cut and ordered: each group (places in the batch) is one call of predict."""

    def computed_work(self, lengths: Sequence[int]) -> int:
        """What is computed for one call of items of these lengths, in units of length, padding and all."""

    def predict(self, batch: Sequence[PreparedItem], on_step: OnStep) -> Sequence[Result | PenstockError]:
        """One outcome per item, in order.

        Raises:
            OutOfMemory: the batch is too large for the device; a smaller one may pass.
        """


class OutOfMemory(ModelFailed):
    """The device has too little memory for this batch."""
