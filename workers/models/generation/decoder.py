"""A transformers decoder on a device, with the keys and values of several generations.

On a CPU, linear layers may have 4-bit weights, in groups with one scale and one offset each. The
speed of a single text is limited by how fast weights are read from memory, so it pays to read only
a third as many bytes as in bf16. Many concurrent generations share each read of the weights, so
they are faster in bf16.

The groups are the same as in GGUF's Q4_1, whose weights are reproduced exactly, except that the
scales are in bf16. A layer whose shape does not allow such groups keeps its weights, and so do
embeddings. The output layer gets 8-bit weights, with one scale per row, because its errors are
errors in the logits.

On a CPU, a Llama's forward pass uses few operators. A small operator takes at least a microsecond
no matter how little it does, and transformers' own modules use about two thousand of them for one
token. Here, one product computes queries, keys, and values, and another computes both halves of the
MLP.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging

from shared.errors import ConfigurationError
from workers.models.device import (
    DTYPES,
    CpuThreads,
    Device,
    computes_bf16,
    memory_errors,
    pack_linear_layers,
)
from workers.models.generation.slots import ATTENTION, ForwardPass, SlotCache, attend
from workers.models.generation.writing import Row
from workers.models.loading import folder_errors
from workers.models.processors import BF16_FLAGS, detect_cpu

_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj")
_MLP_PARTS = ("gate_proj", "up_proj")
_JOINT = "joint"

GROUP = 32
_BLOCK_ROWS = 16
"""torch's kernel requires a multiple of this number."""
_STEPS = 15
_MIDDLE = 8
"""The offset that torch's kernel subtracts from a 4-bit number before scaling it."""
_LARGEST = 127
_TINY = 1e-9

_TRIAL_TOKENS = 12
_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""Maximum difference from the logits computed with transformers' own attention, relative to the
largest logit.

An incorrect attention implementation produces completely different logits.
"""
_INT4 = "int4"


def is_llama(model: torch.nn.Module) -> bool:
    """Returns whether LlamaPass can run the model. Subclasses may behave differently."""
    return type(model) is LlamaForCausalLM


def fuse_linear_layers(model: Any) -> None:
    """Fuses layers that have the same input, without changing transformers' results."""
    for layer in model.model.layers:
        _fuse(layer.self_attn, _ATTENTION_PARTS)
        _fuse(layer.mlp, _MLP_PARTS)


def _fuse(owner: torch.nn.Module, names: tuple[str, ...]) -> None:
    parts: list[Any] = [owner.get_submodule(name) for name in names]
    weights = torch.cat([part.weight.detach() for part in parts])
    has_bias = parts[0].bias is not None
    outputs, inputs = weights.shape
    joint = torch.nn.Linear(inputs, outputs, bias=has_bias, device="meta")
    joint.weight = torch.nn.Parameter(weights, requires_grad=False)
    if has_bias:
        biases = torch.cat([part.bias.detach() for part in parts])
        joint.bias = torch.nn.Parameter(biases, requires_grad=False)
    setattr(owner, _JOINT, joint)
    start = 0
    for name, part in zip(names, parts, strict=True):
        setattr(owner, name, _Part(owner, slice(start, start + part.out_features)))
        start += part.out_features


class _Part(torch.nn.Module):
    """Part of the outputs from the joint layer in `owner`, for transformers.

    It does not contain any weights.
    """

    def __init__(self, owner: torch.nn.Module, outputs: slice) -> None:
        super().__init__()
        # The joint layer may have been replaced by a quantized one. Wrapping the module in a tuple
        # hides it from torch.
        self._owner = (owner,)
        self._outputs = outputs

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._owner[0].get_submodule(_JOINT)(hidden)
        return out[..., self._outputs]


class LlamaPass:
    """Runs a model whose layers are fused.

    Args:
        model: result of fuse_linear_layers, whose Linears may have been replaced since then.
    """

    def __init__(self, model: Any) -> None:
        self._embed = model.model.embed_tokens
        self._positions = model.model.rotary_emb
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._norm = _Norm(model.model.norm)
        self._output = model.lm_head

    def __call__(
        self, ids: torch.Tensor, reading: ForwardPass, slots: SlotCache, logit_count: int
    ) -> torch.Tensor | None:
        """Adds tokens [rows, tokens] to the generations in one pass.

        Returns the logits after each generation's last `logit_count` tokens, or None if that is 0.
        """
        hidden = self._embed(ids)
        cos, sin = self._positions(hidden, reading.positions)
        half = cos.shape[-1] // 2
        # The sines already include the signs, so all that remains is a rotation by half a head.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        turns = cos[:, :, None], sin[:, :, None], half
        for layer in self._layers:
            hidden = layer.add_attention(hidden, turns, slots)
            hidden = layer.add_mlp(hidden)
        if not logit_count:
            return None
        logits: torch.Tensor = self._output(self._norm(hidden[:, -logit_count:]))
        return logits


class _Norm:
    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight
        self._shape = norm.weight.shape
        self._width = norm.weight.numel()
        self._epsilon = norm.variance_epsilon

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.numel() > self._width:
            return rms_norm(hidden, self._shape, self._weight, self._epsilon)
        # For a single token, computing the square root as a Python number saves five of eight
        # operators.
        length = vector_norm(hidden, dtype=torch.float32).item()
        scale = (length * length / self._width + self._epsilon) ** -0.5
        out: torch.Tensor = (hidden * scale).mul_(self._weight)
        return out


class _Layer:
    def __init__(self, layer: Any) -> None:
        self._attention = layer.self_attn
        self._mlp = layer.mlp
        self._norm_attention = _Norm(layer.input_layernorm)
        self._norm_mlp = _Norm(layer.post_attention_layernorm)
        self._head = self._attention.head_dim
        self._key_heads = self._attention.config.num_key_value_heads
        self._query_heads = self._attention.config.num_attention_heads
        self._turned_heads = self._query_heads + self._key_heads

    def add_attention(
        self,
        hidden: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor, int],
        slots: SlotCache,
    ) -> torch.Tensor:
        """Returns `hidden` [rows, tokens, width] plus the attention over the generations so far."""
        rows, tokens, _ = hidden.shape
        cos, sin, half = turns
        attention = self._attention
        joint = attention.joint(self._norm_attention(hidden)).view(rows, tokens, -1, self._head)
        both = joint[:, :, : self._turned_heads]
        both = torch.addcmul(both * cos, both.roll(half, -1), sin).transpose(1, 2)
        keys, values = slots.update(
            both[:, self._query_heads :],
            joint[:, :, self._turned_heads :].transpose(1, 2),
            attention.layer_idx,
        )
        queries = both[:, : self._query_heads]
        mixed, _ = attend(
            attention, queries, keys, values, None, scaling=attention.scaling, slots=slots
        )
        added: torch.Tensor = attention.o_proj(mixed.reshape(rows, tokens, -1))
        return hidden + added

    def add_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden` plus its MLP output."""
        mlp = self._mlp
        gate, up = mlp.joint(self._norm_mlp(hidden)).chunk(2, -1)
        added: torch.Tensor = mlp.down_proj(mlp.act_fn(gate) * up)
        return hidden + added


def round_linear_layers(model: torch.nn.Module) -> None:
    """Replaces Linears in a transformers causal language model with 4-bit or 8-bit layers.

    Raises:
        ConfigurationError: none of its layers can be replaced.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, torch.nn.Linear) or child.out_features % _BLOCK_ROWS:
                continue
            if child is output:
                setattr(parent, name, _Linear8(child))
            elif child.in_features % GROUP == 0:
                setattr(parent, name, _Linear4(child))
                replaced += 1
    if not replaced:
        raise ConfigurationError(
            f"precision int4: {type(model).__name__} has no layers with groups of {GROUP} weights",
            field="precision",
        )


class _RoundedLinear(torch.nn.Module):
    """A Linear for any input, whose products are computed in bf16."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._out_features = linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).to(torch.bfloat16)
        out = self._product(rows)
        if self._bias is not None:
            out = out + self._bias
        return out.to(hidden.dtype).view(*hidden.shape[:-1], self._out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Linear4(_RoundedLinear):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        groups = weight.view(len(weight), -1, GROUP)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scale = (high - low) / _STEPS
        numbers = ((groups - low) / scale.clamp(min=_TINY)).round().clamp(0, _STEPS)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            numbers.to(torch.int32).view(weight.shape), 1
        )
        # [groups, out, 2]: the scale and the middle value.
        scales = torch.cat([scale, low + _MIDDLE * scale], dim=-1)
        self._scales = scales.transpose(0, 1).contiguous().to(torch.bfloat16)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._packed, GROUP, self._scales
        )
        return out


class _Linear8(_RoundedLinear):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1) / _LARGEST
        self._numbers = (weight / scale.clamp(min=_TINY)[:, None]).round().to(torch.int8)
        self._scales = scale.to(torch.bfloat16)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows, self._numbers, self._scales)
        return out


def choose_dtype(precision: str, device_type: str) -> torch.dtype:
    """Returns the data type for activations, keys and values.

    Args:
        precision: the catalog entry's precision, which may be `auto`.
        device_type: `cpu` or `cuda`.

    Raises:
        ConfigurationError: the device does not support this precision.
    """
    if precision == _INT4 and device_type != "cpu":
        raise ConfigurationError("text models only support int4 on CPUs", field="precision")
    if precision not in ("auto", _INT4):
        return DTYPES[precision]
    if device_type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    has_bf16 = bool(BF16_FLAGS & set(detect_cpu().flags))
    return torch.bfloat16 if has_bf16 and computes_bf16() else torch.float32


class Decoder:
    """Computes logits for rows of a cache.

    Args:
        rows: maximum number of generations at a time.
        capacity: maximum number of tokens per generation.
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
        """Loads the weights, and compares a first pass with transformers' own result.

        Raises:
            ConfigurationError: the folder does not contain such a model, or the results differ.
            OutOfMemory: the device has too little memory.
        """
        self._device, self.device_name = self._wanted.open()
        self._computing = CpuThreads().computing if self._device.type == "cpu" else nullcontext
        self._dtype = choose_dtype(self._precision, self._device.type)
        with folder_errors(f"{self._folder}: not a causal language model"):
            self._model: Any = self._load().to(self._device).eval().requires_grad_(False)
        positions = getattr(self._model.config, "max_position_embeddings", None)
        if positions is not None and positions < self._capacity:
            raise ConfigurationError(
                f"generation.context_tokens: must be at most {positions}, the number of "
                f"positions in {self._folder}",
                field="generation",
            )
        name = type(self._model).__name__
        with folder_errors(f"{self._folder}: {name} can't be run step by step"):
            trial_ids = torch.arange(1, _TRIAL_TOKENS + 1, device=self._device)
            with torch.inference_mode():
                right = self._model(trial_ids[None], use_cache=False).logits[0, -1].float()
            self._prepare()
            self._check(trial_ids.cpu().numpy(), right.cpu().numpy())
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
        self._is_fused = self._device.type == "cpu" and is_llama(model)
        if self._is_fused:
            fuse_linear_layers(model)
        if is_rounded:
            round_linear_layers(model)
            for weights in model.parameters():  # not the positions' frequencies
                weights.data = weights.data.to(self._dtype)
        return model

    def _prepare(self) -> None:
        """Sets up the weights, the attention, and the function that computes a pass."""
        in_bf16 = (self._device.type, self._dtype) == ("cpu", torch.bfloat16)
        if in_bf16 and computes_bf16():  # otherwise torch computes it without oneDNN
            pack_linear_layers(self._model)
        self._model.set_attn_implementation(ATTENTION)
        self._compute = LlamaPass(self._model) if self._is_fused else self._compute_by_modules

    def _check(self, ids: np.ndarray, right: np.ndarray) -> None:
        """Computes the logits after a few tokens in a trial cache, and compares them.

        Args:
            ids: the tokens.
            right: the correct logits after the last token, computed with transformers' own
                attention.

        Raises:
            ConfigurationError: the logits differ.
        """
        self.slots = SlotCache(2, len(ids))
        part = ids[:-1]
        self.read(1, 0, part[:5])
        self.read(1, 5, part[5:])
        self.slots.copy(1, 0, len(part))
        last = np.full(2, ids[-1], np.int64)
        logits = self.decode(last, np.full(2, len(part), np.int64))[0]
        off = np.abs(logits - right).max() / np.abs(right).max()
        computed_in = torch.bfloat16 if self._precision == _INT4 else self._dtype
        if not off < _TRIAL_TOLERANCE[computed_in]:
            raise ConfigurationError(
                f"{self._folder}: {type(self._model).__name__} produces different logits when "
                "run step by step",
                field="source",
            )

    def read(self, row: int, start: int, ids: np.ndarray, *, ends: bool = True) -> Row | None:
        """Adds prompt tokens to a row that already has `start` tokens.

        Returns:
            The logits after the last token, float32 [vocabulary]. None unless `ends`.

        Raises:
            OutOfMemory: the device has too little memory.
        """
        starts = torch.tensor([start], device=self._device)
        reading = ForwardPass((row, row + 1), starts, len(ids), self._capacity_now)
        tensor = torch.as_tensor(ids.astype(np.int64), device=self._device)[None]
        logits = self._forward(tensor, reading, logit_count=int(ends))
        return None if logits is None else logits[0, 0]

    def read_all(self, row: int, start: int, ids: np.ndarray) -> Any:
        """Adds tokens to a row that already has `start` tokens.

        Returns:
            The logits after each token, float32 [tokens, vocabulary].

        Raises:
            OutOfMemory: the device has too little memory.
        """
        starts = torch.tensor([start], device=self._device)
        reading = ForwardPass((row, row + 1), starts, len(ids), self._capacity_now)
        tensor = torch.as_tensor(ids.astype(np.int64), device=self._device)[None]
        return self._forward(tensor, reading, logit_count=len(ids))[0]

    def decode(self, tokens: np.ndarray, lengths: np.ndarray) -> Any:
        """Adds one token to each of the first rows, which already have `lengths` tokens.

        Returns:
            Logits, float32 [rows, vocabulary].

        Raises:
            OutOfMemory: the device has too little memory.
        """
        starts = torch.as_tensor(lengths, device=self._device)
        reading = ForwardPass((0, len(tokens)), starts, 1, self._capacity_now)
        tensor = torch.as_tensor(tokens.astype(np.int64), device=self._device)[:, None]
        return self._forward(tensor, reading, logit_count=1)[:, 0]

    @property
    def _capacity_now(self) -> int:
        return self.slots.capacity

    def _forward(self, ids: torch.Tensor, reading: ForwardPass, logit_count: int) -> Any:
        """Returns the logits after each row's last `logit_count` tokens, or None if that is 0."""
        self.slots.reading = reading
        with memory_errors(), torch.inference_mode(), self._computing():
            logits = self._compute(ids, reading, self.slots, logit_count)
            return None if logits is None else logits[:, -logit_count:].float().cpu().numpy()

    def _compute_by_modules(
        self, ids: torch.Tensor, reading: ForwardPass, slots: SlotCache, logit_count: int
    ) -> torch.Tensor | None:
        """Runs the pass with transformers' modules, for any architecture."""
        out = (self._model if logit_count else self._model.base_model)(
            input_ids=ids,
            position_ids=reading.positions,
            past_key_values=slots,
            use_cache=True,
            slots=slots,
            **({"logits_to_keep": logit_count} if logit_count else {}),
        )
        return out.logits if logit_count else None
