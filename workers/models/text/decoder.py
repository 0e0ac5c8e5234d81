"""A decoder of transformers on a device, with the keys and values of several texts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from shared.errors import ConfigurationError
from workers.models.cpu import BF16_FLAGS, this_cpu
from workers.models.cpu_threads import CpuThreads
from workers.models.device import DTYPES, Device, memory_errors
from workers.models.embedding.cpu_bf16 import computes_bf16, pack_linear_layers
from workers.models.text.cpu_int4 import round_linear_layers
from workers.models.text.llama import LlamaPass, is_llama, join_linear_layers
from workers.models.text.sampling import Row
from workers.models.text.slots import ATTENTION, Reading, SlotCache

_TRIAL_TOKENS = 12
_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""How far logits may lie from those of transformers' own attention, as a part of the largest.

A wrong attention gives other numbers altogether.
"""
_INT4 = "int4"


class Decoder:
    """Computes logits for rows of a cache.

    Args:
        folder: the model, as on the Hugging Face hub.
        device: where to compute.
        precision: as CatalogEntry.precision.
        rows: the most texts at a time.
        capacity: the most tokens of each.
    """

    def __init__(
        self, folder: Path, device: Device, precision: str, rows: int, capacity: int
    ) -> None:
        self._folder = folder
        self._wanted = device
        self._precision = precision
        self._rows = rows
        self._capacity = capacity
        self.device_name = ""

    def open(self) -> None:
        """Loads the weights, and compares a first pass with that of transformers.

        Raises:
            ConfigurationError: the folder is no such model, or it computes in another way.
        """
        self._device, self.device_name = self._wanted.open()
        self._computing = CpuThreads().computing if self._device.type == "cpu" else nullcontext
        self._dtype = self._choose_precision()
        try:
            with memory_errors():
                self._model: Any = self._load().to(self._device).eval().requires_grad_(False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{self._folder}: not a causal language model: {error}", field="source"
            ) from error
        positions = getattr(self._model.config, "max_position_embeddings", None)
        if positions is not None and positions < self._capacity:
            raise ConfigurationError(
                f"generation.context_tokens: {self._folder} has {positions} positions",
                field="generation",
            )
        self._check()
        self.slots = SlotCache(self._rows, self._capacity)

    def _load(self) -> Any:
        logging.disable_progress_bar()
        is_rounded = self._precision == _INT4
        model = AutoModelForCausalLM.from_pretrained(
            self._folder,
            dtype=torch.float32 if is_rounded else self._dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
        )
        self._joins = self._device.type == "cpu" and is_llama(model)
        if self._joins:
            join_linear_layers(model)
        if is_rounded:
            round_linear_layers(model)
            for weights in model.parameters():  # not the frequencies of positions
                weights.data = weights.data.to(self._dtype)
        return model

    def _choose_precision(self) -> torch.dtype:
        if self._precision == _INT4 and self._device.type != "cpu":
            raise ConfigurationError("a text model is in int4 on CPUs only", field="precision")
        if self._precision not in ("auto", _INT4):
            return DTYPES[self._precision]
        if self._device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        has_bf16 = bool(BF16_FLAGS & set(this_cpu()[1]))
        return torch.bfloat16 if has_bf16 and computes_bf16() else torch.float32

    def _check(self) -> None:
        """Compares the logits of a few tokens with those of transformers' own attention."""
        try:
            ids = torch.arange(1, _TRIAL_TOKENS + 1, device=self._device)
            with torch.inference_mode():
                right = self._model(ids[None], use_cache=False).logits[0, -1].float()
            in_bf16 = (self._device.type, self._dtype) == ("cpu", torch.bfloat16)
            if in_bf16 and computes_bf16():  # else torch computes it without oneDNN
                pack_linear_layers(self._model)
            self._model.set_attn_implementation(ATTENTION)
            self._compute = LlamaPass(self._model) if self._joins else self._compute_by_modules
            self.slots = SlotCache(2, _TRIAL_TOKENS)
            part = ids[:-1].cpu().numpy()
            self.read(1, 0, part[:5])
            self.read(1, 5, part[5:])
            self.slots.copy(1, 0, len(part))
            last = np.full(2, int(ids[-1]), np.int64)
            found = self.decode(last, np.full(2, len(part), np.int64))[0]
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise ConfigurationError(
                f"{self._folder}: {type(self._model).__name__} can't be computed step by step: "
                f"{error}",
                field="source",
            ) from error
        off = np.abs(found - right.cpu().numpy()).max() / right.abs().max().item()
        computed_in = torch.bfloat16 if self._precision == _INT4 else self._dtype
        if not off < _TRIAL_TOLERANCE[computed_in]:
            raise ConfigurationError(
                f"{self._folder}: {type(self._model).__name__} computes other logits step by step",
                field="source",
            )

    def read(self, row: int, start: int, ids: np.ndarray, *, ends: bool = True) -> Row | None:
        """Adds tokens of a prompt to a row that has `start` tokens.

        Returns:
            The logits after the last one, float32 [vocabulary]. None where not `ends`.

        Raises:
            OutOfMemory: the device has too little memory.
        """
        starts = torch.tensor([start], device=self._device)
        reading = Reading((row, row + 1), starts, len(ids), self._capacity_now)
        given = torch.as_tensor(ids.astype(np.int64), device=self._device)[None]
        logits = self._forward(given, reading, told=int(ends))
        return None if logits is None else logits[0, 0]

    def read_all(self, row: int, start: int, ids: np.ndarray) -> Any:
        """Adds tokens to a row that has `start` tokens.

        Returns:
            The logits after each of them, float32 [tokens, vocabulary].

        Raises:
            OutOfMemory: the device has too little memory.
        """
        starts = torch.tensor([start], device=self._device)
        reading = Reading((row, row + 1), starts, len(ids), self._capacity_now)
        given = torch.as_tensor(ids.astype(np.int64), device=self._device)[None]
        return self._forward(given, reading, told=len(ids))[0]

    def decode(self, tokens: np.ndarray, lengths: np.ndarray) -> Any:
        """Adds one token to each of the first rows, which have `lengths` tokens.

        Returns:
            Logits, float32 [rows, vocabulary].

        Raises:
            OutOfMemory: the device has too little memory.
        """
        starts = torch.as_tensor(lengths, device=self._device)
        reading = Reading((0, len(tokens)), starts, 1, self._capacity_now)
        given = torch.as_tensor(tokens.astype(np.int64), device=self._device)[:, None]
        return self._forward(given, reading, told=1)[:, 0]

    @property
    def _capacity_now(self) -> int:
        return self.slots.capacity

    def _forward(self, ids: torch.Tensor, reading: Reading, told: int) -> Any:
        """Logits after the last `told` tokens of each row. None: after none of them."""
        self.slots.reading = reading
        with memory_errors(), torch.inference_mode(), self._computing():
            logits = self._compute(ids, reading, self.slots, told)
            return None if logits is None else logits[:, -told:].float().cpu().numpy()

    def _compute_by_modules(
        self, ids: torch.Tensor, reading: Reading, slots: SlotCache, told: int
    ) -> torch.Tensor | None:
        """The pass by transformers' modules, whatever the architecture."""
        out = (self._model if told else self._model.base_model)(
            input_ids=ids,
            position_ids=reading.positions,
            past_key_values=slots,
            use_cache=True,
            slots=slots,
            **({"logits_to_keep": told} if told else {}),
        )
        return out.logits if told else None
