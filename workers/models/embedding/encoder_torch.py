"""The torch encoder of an embedding model: fp32 anywhere, bf16 on CPU and GPU, fp16 on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from shared.errors import ConfigurationError
from workers.models.device import DTYPES, Device, memory_errors
from workers.models.embedding.bert import BertEncoder, bert_encoder
from workers.models.embedding.cpu_bf16 import computes_bf16, pack_linear_layers
from workers.models.embedding.model_folder import SentenceFolder
from workers.models.embedding.varlen import run_unpadded, runs_unpadded


class TorchEncoder:
    """Any transformer of a sentence-transformers folder, with its pooling.

    In bf16 and fp16 only the Linear layers and attention use that precision. The residual stream,
    norms and pooling stay fp32. Compared with bf16 everywhere, this reduces the mean distance to
    fp32 from 7e-5 to 2e-5 (cosine, MiniLM). It costs almost no speed, because nearly all work is in
    those layers.

    Args:
        settings: the folder.
        device: where to compute.
        precision: `fp32`, `bf16` or `fp16`.
    """

    device_name = ""
    pads = True

    def __init__(self, settings: SentenceFolder, device: Device, precision: str) -> None:
        self._settings = settings
        self._place = device
        self._precision = precision
        self._bert: BertEncoder | None = None
        self._first_position: int | None = None

    def open(self) -> int:
        """Loads the weights. Returns the dimensions of the vectors.

        Raises:
            ConfigurationError: the folder can't be loaded, or the device does not support this
                precision.
        """
        self._device, self.device_name = self._place.open()
        self._check_precision()
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModel.from_pretrained(
                self._settings.transformer, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(
                f"{self._settings.transformer}: {error}", field="source"
            ) from error
        model.eval().requires_grad_(False)
        in_bf16 = (self._precision, self._device.type) == ("bf16", "cpu") and computes_bf16()
        if self._device.type == "cpu" and (in_bf16 or self._precision == "fp32"):
            with torch.inference_mode():
                self._bert = bert_encoder(model, in_bf16=in_bf16)
        if self._bert is None:
            self._keep_model(model, in_bf16=in_bf16)
        self.pads = self._bert is None and self._first_position is None
        return int(model.config.hidden_size) * len(self._settings.pooling)

    def _keep_model(self, model: torch.nn.Module, *, in_bf16: bool) -> None:
        """Sets up the modules of transformers, for models other than BERT and on GPUs."""
        if in_bf16:
            pack_linear_layers(model)
        elif self._precision != "fp32":
            _narrow_linear_layers(model, DTYPES[self._precision])
        self._model = model.to(self._device)
        # On a GPU a padded batch is one kernel. Separate texts are many.
        self._first_position = runs_unpadded(self._model) if self._device.type == "cpu" else None

    def _check_precision(self) -> None:
        if self._precision not in DTYPES:
            raise ConfigurationError(
                f"torch computes no embeddings in {self._precision}", field="precision"
            )
        if self._precision == "fp16" and self._device.type == "cpu":
            raise ConfigurationError(
                "fp16 needs a GPU; on a CPU take bf16 or fp32", field="precision"
            )
        if self._precision == "bf16" and self._device.type == "cuda":
            with torch.cuda.device(self._device):
                if not torch.cuda.is_bf16_supported(including_emulation=False):
                    raise ConfigurationError(
                        f"{self.device_name} has no bf16; take fp16 or fp32", field="precision"
                    )

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """As workers.models.embedding.model.Encoder."""
        if self.pads:
            return max(lengths) * len(lengths)
        return sum(lengths) if self._bert is None else self._bert.computed_tokens(lengths)

    def encode(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        """Token ids [items, longest] to float32 [items, dimensions]. As Encoder in model.py."""
        with torch.inference_mode(), memory_errors():
            vectors = (self._padded if self.pads else self._unpadded)(ids, types, lengths)
            if self._settings.normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2.0, dim=1)
            return vectors.cpu().numpy()

    def _padded(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray
    ) -> torch.Tensor:
        mask = None
        if (lengths < ids.shape[1]).any():
            mask = torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None]).to(self._device)
        given = {"input_ids": torch.from_numpy(ids).to(self._device)}
        if types is not None:
            given["token_type_ids"] = torch.from_numpy(types).to(self._device)
        states = self._model(
            **given, attention_mask=None if mask is None else mask.long()
        ).last_hidden_state
        return self._pooled(states.float(), mask)

    def _unpadded(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray
    ) -> torch.Tensor:
        is_real = np.arange(ids.shape[1]) < lengths[:, None]
        real_ids = torch.from_numpy(ids[is_real])
        real_types = None if types is None else torch.from_numpy(types[is_real])
        counts = lengths.tolist()
        if self._bert is not None:
            states = self._bert.states(real_ids, real_types, counts)
        else:
            assert self._first_position is not None, (
                "found when it was opened, else it pads; this is a bug"
            )
            states = run_unpadded(self._model, real_ids, real_types, counts, self._first_position)
        return torch.cat(
            [self._pooled(text[None], None) for text in torch.split(states.float(), counts)]
        )

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return torch.cat([_pool(mode, states, mask) for mode in self._settings.pooling], dim=1)


def _narrow_linear_layers(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Converts the weights of every Linear once, and its inputs at each call.

    Autocast computes the same numbers, but converts the weights at each call.
    """

    def convert(
        module: torch.nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return (args[0].to(dtype), *args[1:])

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(dtype)
            module.register_forward_pre_hook(convert)


def _pool(mode: str, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """States [items, tokens, width] to [items, width].

    Without a mask every item has every token.
    """
    if mode == "cls":
        return states[:, 0]
    if mode == "mean" and mask is None:
        return states.mean(1)
    if mode == "max":
        return (
            states if mask is None else states.masked_fill(~mask[:, :, None], float("-inf"))
        ).amax(1)
    counts = (
        states.new_full((len(states), 1), states.shape[1])
        if mask is None
        else mask.sum(1, keepdim=True)
    )
    sums = states.sum(1) if mask is None else torch.einsum("itw,it->iw", states, mask.float())
    return sums / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)
