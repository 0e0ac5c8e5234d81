"""Embeddings in torch, in the model process: any transformer of a sentence-transformers folder, pooled as it says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from shared.catalogue import Model as Entry
from shared.errors import ConfigurationError, PenstockError
from shared.messages import EmbeddingResult, Result
from workers.models.base import OnStep, PreparedItem, PreparedText
from workers.models.device import DTYPES, Device, memory_errors
from workers.models.grouping import cut_by_length
from workers.models.sentence_folder import SentenceFolder

# What one call costs besides its tokens, in tokens: measured with MiniLM on one core, where reading the weights for
# 20 tokens takes about as long as computing them. On a GPU a call is bound by launches up to thousands of tokens.
_CALL_TOKENS = {"cpu": 20, "cuda": 4096}
_WARMUP_LENGTHS = (8, 64)


class EmbeddingModel:
    """A transformer with the pooling and normalisation of its folder; the other half is TextPreparer."""

    device_name = ""

    def __init__(self, entry: Entry, settings: SentenceFolder, device: Device) -> None:
        self._entry = entry
        self._settings = settings
        self._place = device

    def setup(self) -> None:
        """Loads the weights.

        Raises:
            ConfigurationError: the folder can't be loaded, or its vectors have not the catalogue's dimensions.
        """
        self._device, self.device_name = self._place.open()
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModel.from_pretrained(
                self._settings.transformer, dtype=DTYPES[self._entry.precision], local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"{self._settings.transformer}: {error}", field="source") from error
        self._model = model.eval().requires_grad_(False).to(self._device)
        dimensions = model.config.hidden_size * len(self._settings.pooling)
        if dimensions != self._entry.dimensions:
            raise ConfigurationError(
                f"{self._entry.name}: vectors have {dimensions} dimensions, not {self._entry.dimensions}",
                field="dimensions",
            )

    def warmup(self) -> None:
        """Runs a short and a longer text, alone and padded."""
        for length in _WARMUP_LENGTHS:
            ids = np.zeros(length, "<u4").tobytes()
            short = np.zeros(length // 2, "<u4").tobytes()
            batch = [PreparedText(key="", length=len(text) // 4, work=0, ids=text) for text in (ids, short)]
            self.predict(batch[:1], _ignore_step)
            self.predict(batch, _ignore_step)

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Texts of like length together, so that little padding is computed."""
        return cut_by_length([item.length for item in batch], _CALL_TOKENS[self._device.type])

    def predict(self, batch: Sequence[PreparedItem], on_step: OnStep) -> list[Result | PenstockError]:
        """One EmbeddingResult per text, in order, computed padded to the longest of the batch."""
        texts = [item for item in batch if isinstance(item, PreparedText)]
        longest = max(text.length for text in texts)
        ids = np.zeros((len(texts), longest), np.int64)
        types = np.zeros_like(ids) if any(text.type_ids for text in texts) else None
        lengths = np.array([text.length for text in texts])
        for row, text in enumerate(texts):
            ids[row, : text.length] = np.frombuffer(text.ids, "<u4")
            if types is not None and text.type_ids:
                types[row, : text.length] = np.frombuffer(text.type_ids, "<u4")
        with torch.inference_mode(), memory_errors():
            vectors = self._embed(ids, types, lengths)
        on_step(1, 1)
        width = vectors.shape[1] * 4
        packed = vectors.astype("<f4", copy=False).tobytes()
        return [
            EmbeddingResult(vector=packed[row * width : (row + 1) * width], tokens=text.length)
            for row, text in enumerate(texts)
        ]

    def _embed(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        """[items, longest] token ids to [items, dimensions] vectors in fp32."""
        mask = None
        if (lengths < ids.shape[1]).any():
            mask = torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None]).to(self._device)
        given = {"input_ids": torch.from_numpy(ids).to(self._device)}
        if types is not None:
            given["token_type_ids"] = torch.from_numpy(types).to(self._device)
        states = self._model(**given, attention_mask=None if mask is None else mask.long()).last_hidden_state
        vectors = torch.cat([_pool(mode, states.float(), mask) for mode in self._settings.pooling], dim=1)
        if self._settings.normalize:
            vectors = torch.nn.functional.normalize(vectors, p=2.0, dim=1)
        return vectors.cpu().numpy()


def _pool(mode: str, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[items, tokens, width] states to [items, width]; no mask means that every item has every token."""
    if mode == "cls":
        return states[:, 0]
    if mode == "max":
        return (states if mask is None else states.masked_fill(~mask[:, :, None], float("-inf"))).amax(1)
    counts = states.new_full((len(states), 1), states.shape[1]) if mask is None else mask.sum(1, keepdim=True)
    sums = states.sum(1) if mask is None else torch.einsum("itw,it->iw", states, mask.float())
    return sums / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)


def _ignore_step(step: int, steps: int) -> None:
    """Warm-up has nobody to tell."""
