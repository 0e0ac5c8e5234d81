"""Embeddings in the model process: joins a batch's texts, then an Encoder computes the vectors.

The encoders are encoder_torch.py and encoder_onnx.py. This module imports neither torch nor ONNX
Runtime. A batch is split by length, to reduce the cost of padding and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.embedding import EmbeddingResult
from workers.models.base import OnStep, PreparedItem, PreparedText

UNBOUNDED = 2**62

USUAL_CALL_TOKENS = {"cpu": 20, "gpu": 4096}
"""Default fixed cost of one call, in tokens.

On one core, reading MiniLM's weights takes as long as computing 20 tokens. On a GPU, kernel
launches dominate the cost up to thousands of tokens.
"""
_WARMUP_LENGTHS = (8, 64)


def cut_by_length(
    lengths: Sequence[int], call_cost: int, budget: int = UNBOUNDED
) -> list[list[int]]:
    """Groups indices into `lengths`, shortest first, to minimize the cost of padding and calls.

    A group has at most `budget` padded tokens, unless it is a single longer text.

    In the best split, every group is a run of the sorted lengths, so this is a shortest-path
    problem. It takes O(n^2) steps, of which numpy does n at a time, so a batch of 1,024 texts takes
    3 ms.
    """
    ordered = np.array(lengths, np.int64)
    order = ordered.argsort(kind="stable")
    ordered = ordered[order]
    count = len(ordered)
    positions = np.arange(count + 1)
    firsts = np.maximum(0, positions[1:] - np.maximum(1, budget // ordered)).tolist()
    cost = np.zeros(count + 1, np.int64)
    start = [0]
    for end, (longest, first) in enumerate(zip(ordered.tolist(), firsts, strict=True), 1):
        saved = cost[first:end] - positions[first:end] * longest
        at = int(saved.argmin())
        cost[end] = saved[at] + end * longest + call_cost
        start.append(first + at)
    groups = []
    end = count
    while end:
        groups.append(order[start[end] : end].tolist())
        end = start[end]
    return groups[::-1]


class Encoder(Protocol):
    """A transformer, with the pooling and normalization that its folder specifies."""

    device_name: str
    """The GPU's name, or `cpu`. Known after `open`."""
    pads: bool
    """True if a text costs as much as the longest one in its batch. Known after `open`."""
    overlaps: bool
    """True if `encode` may be called on two threads at once, because its device computes one call
    while the other is being prepared or read. Known after `open`.
    """

    def open(self) -> int:
        """Loads the model. Returns its vectors' dimensions.

        Raises:
            ConfigurationError: the files can't be loaded, or the device does not support this
                precision.
        """

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Returns how many tokens are computed for texts of these lengths, including padding."""

    def encode(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        """Returns the vectors of texts: float32 [items, dimensions].

        Args:
            ids: token IDs of all items, one after another, uint32 [tokens].
            types: token type IDs in the same form. None means all 0.
            lengths: number of tokens in each item, int64 [items], at least 1.

        Raises:
            OutOfMemory: the device has too little memory for this batch.
        """


class EmbeddingModel:
    """Runs batches of texts prepared by TextPreparer on an Encoder.

    `call_tokens` has the same meaning as in Backend.
    """

    device_name = ""
    pads = True
    overlaps = False

    def __init__(self, entry: Model, encoder: Encoder, call_tokens: int = 0) -> None:
        self._entry = entry
        self._encoder = encoder
        self._call_tokens = call_tokens

    def setup(self) -> None:
        """Loads the weights.

        Raises:
            ConfigurationError: the folder can't be loaded, or its dimensions differ from the
                catalog's.
        """
        dimensions = self._encoder.open()
        self.device_name, self.pads = self._encoder.device_name, self._encoder.pads
        self.overlaps = self._encoder.overlaps
        if dimensions != self._entry.dimensions:
            raise ConfigurationError(
                f"{self._entry.name}: vectors have {dimensions} dimensions; expected "
                f"{self._entry.dimensions}",
                field="dimensions",
            )

    def warmup(self) -> None:
        """Runs a short and a longer text, individually and padded."""
        for length in _WARMUP_LENGTHS:
            ids = np.zeros(length, "<u4").tobytes()
            short = np.zeros(length // 2, "<u4").tobytes()
            batch = [PreparedText(key="", length=len(text) // 4, ids=text) for text in (ids, short)]
            self.predict(batch[:1], _ignore_step)
            self.predict(batch, _ignore_step)

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Groups texts of similar length to reduce padding.

        Returns a single group if the encoder doesn't pad.
        """
        if not self.pads:
            return [list(range(len(batch)))]
        usual = USUAL_CALL_TOKENS["cpu" if self.device_name == "cpu" else "gpu"]
        return cut_by_length(
            [item.length for item in batch], self._call_tokens or usual, self._entry.budget
        )

    def computed_work(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens. See workers.models.base.InferenceModel."""
        return self._encoder.computed_tokens(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        """Returns one EmbeddingResult per text, in order."""
        texts = [item for item in batch if isinstance(item, PreparedText)]
        lengths = np.array([text.length for text in texts])
        ids = np.frombuffer(b"".join([text.ids for text in texts]), "<u4")
        types = None
        if any(text.type_ids for text in texts):
            joined = b"".join([text.type_ids or bytes(len(text.ids)) for text in texts])
            types = np.frombuffer(joined, "<u4")
        vectors = self._encoder.encode(ids, types, lengths)
        on_step(1, 1)
        width = vectors.shape[1] * 4
        packed = vectors.astype("<f4", copy=False).tobytes()
        return [
            EmbeddingResult(
                packed[row * width : (row + 1) * width], text.length, text.truncated_tokens
            )
            for row, text in enumerate(texts)
        ]


def pad_texts(values: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pads joined texts with zeros.

    Returns:
        The values, int64 [items, longest], and a mask of the same shape that is true for actual
        values.
    """
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(mask.shape, np.int64)
    padded[mask] = values
    return padded, mask


def _ignore_step(step: int, steps: int) -> None:
    """Ignores the steps of a warm-up."""
