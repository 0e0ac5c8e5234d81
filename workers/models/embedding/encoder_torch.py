"""The torch encoder for embedding models: fp32 anywhere, bf16 on CPU and GPU, fp16 on GPU.

On a CPU, BERT and related models are computed operator by operator, without transformers' modules.
The overhead of modules, keyword arguments, and three casts of the same rows took 40% of the CPU
time for a single text of 12 tokens in bf16. For bf16 linear layers, oneDNN lays out the weights
only once, while F.linear does so on every call.

On a CPU, texts are concatenated so that no padding is computed. Every part of an encoder except
attention works token by token, so a batch's texts pass through as one row of tokens, each with its
position in its own text, and attention is computed text by text. transformers lets us replace
attention by name, and passes the model call's keyword arguments to it. A trial run determines
whether a model supports this (see `runs_unpadded`).

Importing transformers takes two seconds and 170 MiB, so a plain BERT is read without it (see
bert_weights.py).

On a GPU, 16-bit encoders process packed texts: BERT and related models operator by operator (see
packed_bert.py), and others through transformers (see packed_model.py). Models that support neither,
and fp32, process padded batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding, linear, pad

from shared.errors import ConfigurationError
from workers.models.device import (
    DTYPES,
    Device,
    Product,
    attention_without_plans,
    computes_bf16,
    memory_errors,
    pack_linear_layers,
    pack_product,
)
from workers.models.embedding.bert_weights import (
    FAMILIES,
    BertWeights,
    LoadedBert,
    read_bert_folder,
)
from workers.models.embedding.model import pad_texts
from workers.models.embedding.model_folder import SentenceFolder
from workers.models.embedding.trial import Trial
from workers.models.loading import folder_errors

if TYPE_CHECKING:
    from workers.models.embedding.packed_encoder import PackedEncoder

ATTENTION = "penstock_text_by_text"
"""The name of our attention in transformers' registry."""
_LENGTHS = "penstock_lengths"
"""The keyword argument that passes the texts' lengths to it."""
_PRODUCTS_FROM_TOKENS = 128
"""From this length on, two matrix products are faster than torch's flash attention in bf16.

With MiniLM's heads, which are 32 wide, 230 tokens take 1.2 ms per layer instead of 1.6 ms.
"""
_STEP_TOKENS = 16
"""In bf16, the number of rows is padded to a multiple of this.

oneDNN compiles a product for each row count, which takes a millisecond and about 100 KiB, and
concatenated texts can have any row count. With MiniLM over thousands of batches, this took 3 to 6%
less time, and a process grew by 0.3 GiB instead of 0.6.
"""
_ANY_COUNT_TOKENS = 64
"""Up to this number of rows, no padding is added.

With seven extra rows, a single nine-token text took 4.2 ms instead of 3.4 ms.
"""


def runs_unpadded(model: Any) -> int | None:
    """Sets up `model` for `run_unpadded`, if that produces the same results as padding.

    Args:
        model: a transformers model on a CPU. Its results with padding do not change.

    Returns:
        The first token's position, which `run_unpadded` needs. Returns None if the model needs
        padding.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if model.config._attn_implementation != "sdpa":
        return None
    with torch.inference_mode():
        trial = Trial(model)
        AttentionInterface.register(ATTENTION, _attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)
        for first in trial.first_positions:
            try:
                states = run_unpadded(model, trial.ids, None, trial.lengths, first)
            except (TypeError, ValueError, RuntimeError, IndexError):
                continue  # it doesn't support positions, or keyword arguments for its attention
            if trial.is_right(states):
                return first
    model.set_attn_implementation("sdpa")
    return None


def run_unpadded(
    model: Any,
    ids: torch.Tensor,
    types: torch.Tensor | None,
    lengths: Sequence[int],
    first_position: int,
) -> torch.Tensor:
    """Returns the last hidden states of concatenated texts, [tokens, width].

    Args:
        model: a model set up by `runs_unpadded`.
        ids: token IDs of all texts in one row, int64 [tokens].
        types: token type IDs in the same form. None means all 0.
        lengths: number of tokens in each text.
        first_position: value returned by `runs_unpadded`.
    """
    positions = torch.cat(
        [torch.arange(first_position, first_position + length) for length in lengths]
    )
    arguments = {"input_ids": ids[None], "position_ids": positions[None], _LENGTHS: tuple(lengths)}
    if types is not None:
        arguments["token_type_ids"] = types[None]
    states: torch.Tensor = model(**arguments).last_hidden_state
    return states[0]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers, [1, heads, tokens, width] to [1, tokens, heads, width].

    Calls torch's attention if there are no lengths.
    """
    lengths = rest.pop(_LENGTHS, None)
    if lengths is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return out, None
    narrowing = (attention_mask, rest.get("position_bias"), rest.get("sliding_window"))
    if (
        key.shape != query.shape
        or getattr(module, "is_causal", False)
        or any(option is not None for option in narrowing)
    ):
        raise ValueError(
            "only models in which every token attends to the whole text can be run one text "
            "at a time"
        )
    return attend_text_by_text(query, key, value, lengths, scaling).transpose(1, 2), None


def attend_text_by_text(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scaling: float | None = None,
) -> torch.Tensor:
    """Computes attention over concatenated texts, [1, heads, tokens, width].

    `scaling` defaults to 1 / sqrt(width).

    For filler tokens after the last text, returns their values unchanged.
    """
    filler = query.shape[2] - sum(lengths)
    if len(lengths) == 1 and not filler:
        return _attend_one(query, key, value, scaling)
    queries, keys, values = (
        torch.split(tensor, [*lengths, filler], dim=2) for tensor in (query, key, value)
    )
    texts = zip(queries[:-1], keys[:-1], values[:-1], strict=True)
    return torch.cat([*(_attend_one(q, k, v, scaling) for q, k, v in texts), values[-1]], dim=2)


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Computes attention over one text, [1, heads, tokens, width]."""
    if query.dtype != torch.bfloat16 or query.shape[2] < _PRODUCTS_FROM_TOKENS:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = torch.baddbmm(query.new_empty(1, 1, 1), query[0], key[0].mT, beta=0, alpha=scale)
    return torch.bmm(scores.softmax(-1), value[0])[None]


class _Layer(NamedTuple):
    heads: Product
    """Query, key, and value in one product."""
    mix: Product
    mix_norm: Product
    widen: Product
    activate: Product
    narrow: Product
    norm: Product


class BertEncoder:
    """The encoder for any model in FAMILIES.

    Args:
        weights: the model's weights, which can be dropped afterwards.
        first_position: position of a text's first token.
        in_bf16: True to compute products and attention in bf16. The rest is fp32.
    """

    def __init__(self, weights: BertWeights, first_position: int, *, in_bf16: bool) -> None:
        words, types, positions = (
            weights.tensors[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "token_type", "position")
        )
        self._words = words
        self._types = types
        self._positions = positions[first_position:]
        self._untyped_positions = self._positions + self._types[0]
        self._norm = weights.norm("embeddings.LayerNorm")
        self._heads = weights.heads
        self._dtype = torch.bfloat16 if in_bf16 else torch.float32
        make = pack_product if in_bf16 else _product
        self._layers = [
            _layer(weights, f"encoder.layer.{number}", make) for number in range(weights.layers)
        ]

    @property
    def width(self) -> int:
        return self._words.shape[1]

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Returns how many rows are computed for texts of these lengths, including filler."""
        tokens = sum(lengths)
        steps = self._dtype == torch.bfloat16 and tokens > _ANY_COUNT_TOKENS
        return -(-tokens // _STEP_TOKENS) * _STEP_TOKENS if steps else tokens

    def states(
        self, ids: torch.Tensor, types: torch.Tensor | None, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Returns the last hidden states of concatenated texts, float32 [tokens, width].

        Same arguments as run_unpadded.
        """
        tokens = len(ids)
        filler = self.computed_tokens(lengths) - tokens
        if filler:
            ids = pad(ids, (0, filler))
            types = None if types is None else pad(types, (0, filler))
        table = self._untyped_positions if types is None else self._positions
        positions = torch.cat(
            [*(table[:length] for length in lengths), table[:1].expand(filler, -1)]
        )
        rows = embedding(ids, self._words) + positions
        if types is not None:
            rows = rows + embedding(types, self._types)
        rows = self._norm(rows)
        for layer in self._layers:
            heads = layer.heads(rows.to(self._dtype)).view(1, len(ids), 3, self._heads, -1)
            query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = (
                attend_text_by_text(query, key, value, lengths)
                .transpose(1, 2)
                .reshape(len(ids), -1)
            )
            rows = layer.mix_norm(layer.mix(mixed) + rows)
            rows = layer.norm(
                layer.narrow(layer.activate(layer.widen(rows.to(self._dtype)))) + rows
            )
        return rows[:tokens]


def find_bert(model: Any, *, in_bf16: bool) -> LoadedBert | None:
    """Reads the weights of `model` (a transformers model, fp32, on a CPU).

    Returns None if it isn't in these families, or if a trial shows that its results differ.
    """
    if model.config.model_type not in FAMILIES:
        return None
    weights = BertWeights(
        dict(model.state_dict()),
        model.config.num_hidden_layers,
        model.config.num_attention_heads,
        model.config.layer_norm_eps,
        model.encoder.layer[0].intermediate.intermediate_act_fn,
    )
    trial = Trial(model)
    for first_position in trial.first_positions:
        try:
            encoder = BertEncoder(weights, first_position, in_bf16=in_bf16)
            states = encoder.states(trial.ids, None, trial.lengths)
        except (KeyError, RuntimeError, IndexError):
            continue  # unexpected weights, or too few positions
        if trial.is_right(states):
            return LoadedBert(weights, first_position)
    return None


def _layer(
    weights: BertWeights, name: str, make: Callable[[torch.Tensor, torch.Tensor], Product]
) -> _Layer:
    own = f"{name}.attention.self"
    return _Layer(
        heads=make(*weights.dense(f"{own}.query", f"{own}.key", f"{own}.value")),
        mix=make(*weights.dense(f"{name}.attention.output.dense")),
        mix_norm=weights.norm(f"{name}.attention.output.LayerNorm"),
        widen=make(*weights.dense(f"{name}.intermediate.dense")),
        activate=weights.activate,
        narrow=make(*weights.dense(f"{name}.output.dense")),
        norm=weights.norm(f"{name}.output.LayerNorm"),
    )


def _product(weight: torch.Tensor, bias: torch.Tensor) -> Product:
    return partial(linear, weight=weight, bias=bias)


class TorchEncoder:
    """Any transformer from a sentence-transformers folder, with its pooling.

    In bf16 and fp16, only the Linear layers and attention use that precision. The residual stream,
    norms, and pooling stay in fp32. Compared to bf16 everywhere, this reduces the mean distance
    from fp32 from 7e-5 to 2e-5 (cosine, MiniLM). It has almost no effect on speed, because nearly
    all of the work is in those layers.

    Args:
        precision: `fp32`, `bf16`, or `fp16`.
    """

    device_name = ""
    pads = True
    overlaps = False

    def __init__(self, settings: SentenceFolder, device: Device, precision: str) -> None:
        self._settings = settings
        self._requested_device = device
        self._precision = precision
        self._bert: BertEncoder | None = None
        self._packed: PackedEncoder | None = None
        self._first_position: int | None = None

    def open(self) -> int:
        """Loads the weights. Returns the vectors' dimensions.

        Raises:
            ConfigurationError: the folder can't be loaded, or the device does not support this
                precision.
        """
        self._device, self.device_name = self._requested_device.open()
        self._check_precision()
        in_bf16 = (self._precision, self._device.type) == ("bf16", "cpu") and computes_bf16()
        on_cpu = self._device.type == "cpu"
        # Packed texts on a GPU require 16-bit precision.
        reads_bert = in_bf16 or (self._precision == "fp32") == on_cpu
        bert = read_bert_folder(self._settings.transformer) if reads_bert else None
        if bert is not None and self._take(bert, in_bf16=in_bf16):
            return bert.width * len(self._settings.pooling)
        model = _load_model(self._settings.transformer)
        if reads_bert and bert is None:
            with torch.inference_mode():
                bert = find_bert(model, in_bf16=in_bf16)
            if bert is not None and self._take(bert, in_bf16=in_bf16):
                return bert.width * len(self._settings.pooling)
        self._keep_model(model, in_bf16=in_bf16)
        return int(model.config.hidden_size) * len(self._settings.pooling)

    def _take(self, bert: LoadedBert, *, in_bf16: bool) -> bool:
        """Sets up an encoder that bypasses transformers' modules, if this device has one."""
        if self._device.type == "cpu":
            self._bert = BertEncoder(*bert, in_bf16=in_bf16)
        else:
            # A CPU doesn't need packed-text attention, which is slow to import.
            from workers.models.embedding.packed_bert import PackedBert, can_pack

            if not can_pack(bert.weights, self._device):
                return False
            self._packed = PackedBert(
                *bert,
                self._settings.pooling,
                normalize=self._settings.normalize,
                device=self._device,
                dtype=DTYPES[self._precision],
            )
            self.overlaps = True
        self.pads = False
        return True

    def _keep_model(self, model: torch.nn.Module, *, in_bf16: bool) -> None:
        """Sets up transformers' modules, for models other than BERT and on GPUs."""
        if in_bf16:
            pack_linear_layers(model)
        elif self._precision != "fp32":
            _narrow_linear_layers(model, DTYPES[self._precision])
        self._model = model.to(self._device)
        if self._device.type == "cpu":
            self._first_position = runs_unpadded(self._model)
            self.pads = self._first_position is None
        elif self._precision != "fp32":
            self._pack_model()

    def _pack_model(self) -> None:
        """Sets up packed texts for transformers' modules, if the GPU and the model support them."""
        from workers.models.embedding.packed_encoder import has_packed_attention
        from workers.models.embedding.packed_model import pack_model

        if not has_packed_attention(self._device):
            return
        with memory_errors():
            self._packed = pack_model(
                self._model,
                self._settings.pooling,
                normalize=self._settings.normalize,
                device=self._device,
            )
        self.overlaps = self._packed is not None
        self.pads = self._packed is None

    def _check_precision(self) -> None:
        if self._precision not in DTYPES:
            raise ConfigurationError(
                f"torch embedding models do not support {self._precision}", field="precision"
            )
        if self._precision == "fp16" and self._device.type == "cpu":
            raise ConfigurationError(
                "fp16 requires a GPU; use bf16 or fp32 on a CPU", field="precision"
            )
        if self._precision == "bf16" and self._device.type == "cuda":
            with torch.cuda.device(self._device):
                if not torch.cuda.is_bf16_supported(including_emulation=False):
                    raise ConfigurationError(
                        f"{self.device_name} does not support bf16; use fp16 or fp32",
                        field="precision",
                    )

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        if self.pads:
            return max(lengths) * len(lengths)
        return sum(lengths) if self._bert is None else self._bert.computed_tokens(lengths)

    def encode(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        """Encodes the token IDs of joined texts to float32 [items, dimensions].

        See Encoder in model.py.
        """
        with torch.inference_mode(), memory_errors():
            if self._packed is not None:
                return self._packed.encode(ids, types, lengths)
            vectors = (self._encode_padded if self.pads else self._encode_unpadded)(
                ids, types, lengths
            )
            if self._settings.normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2.0, dim=1)
            return vectors.cpu().numpy()

    def _encode_padded(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray
    ) -> torch.Tensor:
        padded, is_real = pad_texts(ids, lengths)
        mask = None if is_real.all() else torch.from_numpy(is_real).to(self._device)
        arguments = {"input_ids": torch.from_numpy(padded).to(self._device)}
        if types is not None:
            padded_types, _ = pad_texts(types, lengths)
            arguments["token_type_ids"] = torch.from_numpy(padded_types).to(self._device)
        with attention_without_plans(self._device):
            states = self._model(
                **arguments, attention_mask=None if mask is None else mask.long()
            ).last_hidden_state
        return self._pool_states(states.float(), mask)

    def _encode_unpadded(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray
    ) -> torch.Tensor:
        row = torch.from_numpy(ids.astype(np.int64))
        row_types = None if types is None else torch.from_numpy(types.astype(np.int64))
        counts = lengths.tolist()
        if self._bert is not None:
            states = self._bert.states(row, row_types, counts)
        else:
            assert self._first_position is not None, (
                "the position of the first token is unknown; this is a bug"
            )
            states = run_unpadded(self._model, row, row_types, counts, self._first_position)
        return torch.cat(
            [self._pool_states(text[None], None) for text in torch.split(states.float(), counts)]
        )

    def _pool_states(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return torch.cat([_pool(mode, states, mask) for mode in self._settings.pooling], dim=1)


def _load_model(folder: Path) -> Any:
    """Returns the transformers model, in fp32.

    Raises:
        ConfigurationError: the folder does not contain a model, or its files are damaged.
    """
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    with folder_errors(folder):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval().requires_grad_(False)


def _narrow_linear_layers(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Converts every Linear's weights once, and its inputs on each call.

    Autocast computes the same numbers, but converts the weights on each call.
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
    """Pools states [items, tokens, width] to [items, width].

    Without a mask, all tokens of every item are used.
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
