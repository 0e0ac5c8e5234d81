"""Cross-encoders in the model process, which score a text's relevance to a query."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.similarity import SimilarityResult
from workers.models.base import OnStep, PreparedItem, PreparedText
from workers.models.device import (
    DTYPES,
    Device,
    attention_without_plans,
    computes_bf16,
    memory_errors,
)
from workers.models.embedding.model import USUAL_CALL_TOKENS, cut_by_length
from workers.models.loading import folder_errors

_WARMUP_LENGTHS = (16, 128)


class CrossEncoderModel:
    """Runs batches of pairs, each already joined into one text. Scores range from 0 to 1.

    The model's only label is a logit. Its sigmoid is the score, as in sentence-transformers'
    CrossEncoder.
    """

    device_name = ""
    pads = True

    def __init__(self, entry: Model, folder: Path, device: Device) -> None:
        self._entry = entry
        self._folder = folder
        self._requested_device = device

    def setup(self) -> None:
        """Loads the weights.

        Raises:
            ConfigurationError: the folder has no model with a single label, or the device does not
                support this precision.
        """
        self._device, self.device_name = self._requested_device.open()
        precision = "fp32" if self._entry.precision == "auto" else self._entry.precision
        on_cpu = self._device.type == "cpu"
        if on_cpu and (precision == "fp16" or (precision == "bf16" and not computes_bf16())):
            raise ConfigurationError(
                f"{self._entry.name}: this CPU does not support {precision}", field="precision"
            )
        transformers_logging.disable_progress_bar()
        with folder_errors(self._folder):
            model, problems = AutoModelForSequenceClassification.from_pretrained(
                self._folder,
                dtype=DTYPES[precision],
                local_files_only=True,
                output_loading_info=True,
            )
        if problems["missing_keys"] or model.config.num_labels != 1:
            reason = "it must have the weights of a sequence classification model with one label"
            raise ConfigurationError(
                f"{self._folder}: not a cross-encoder: {reason}", field="source"
            )
        self._model = model.eval().requires_grad_(False).to(self._device)

    def warmup(self) -> None:
        """Runs a short and a longer pair, individually and padded."""
        ids = [np.zeros(length, "<u4").tobytes() for length in _WARMUP_LENGTHS]
        batch = [
            PreparedText(key="", length=len(token_ids) // 4, ids=token_ids) for token_ids in ids
        ]
        self.predict(batch[:1], _ignore_step)
        self.predict(batch, _ignore_step)

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Groups pairs of similar length to reduce padding."""
        call_tokens = USUAL_CALL_TOKENS["cpu" if self.device_name == "cpu" else "gpu"]
        return cut_by_length([item.length for item in batch], call_tokens, self._entry.budget)

    def computed_work(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens, including padding."""
        return max(lengths) * len(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        """Returns one SimilarityResult per pair, in order."""
        pairs = [item for item in batch if isinstance(item, PreparedText)]
        lengths = torch.tensor([pair.length for pair in pairs])
        ids = torch.zeros((len(pairs), int(lengths.max())), dtype=torch.long)
        types = torch.zeros_like(ids)
        for row, pair in enumerate(pairs):
            ids[row, : pair.length] = _numbers(pair.ids)
            if pair.type_ids:
                types[row, : pair.length] = _numbers(pair.type_ids)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        inputs = {"input_ids": ids, "attention_mask": mask}
        if getattr(self._model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = types
        with torch.inference_mode(), memory_errors():
            on_device = {name: tensor.to(self._device) for name, tensor in inputs.items()}
            with attention_without_plans(self._device):
                logits = self._model(**on_device).logits[:, 0].float()
            # An overflow would look like the best or the worst score.
            checked = logits.masked_fill(~logits.isfinite(), torch.nan)
            scores = checked.sigmoid().cpu().tolist()
        on_step(1, 1)
        return [
            SimilarityResult(score, pair.length, pair.truncated_tokens)
            for score, pair in zip(scores, pairs, strict=True)
        ]


def _numbers(ids: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(ids, "<u4").astype(np.int64))


def _ignore_step(step: int, steps: int) -> None:
    """Ignores the steps of a warm-up."""
