"""Packed texts get the same vectors as texts run individually, and a GPU never waits for the host.

`varlen_attn` needs a GPU and a 16-bit dtype. On a CPU, `attend` below replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.models.packed_attention import attend
from workers.models.embedding.bert_weights import BertWeights, LoadedBert
from workers.models.embedding.encoder_torch import find_bert
from workers.models.embedding.packed_bert import PackedBert
from workers.models.embedding.packed_encoder import pack_texts

pytestmark = pytest.mark.slow(about_s=15)

VOCABULARY, LONGEST, WIDTH = 40, 32, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "type_vocab_size": 2,
    "max_position_embeddings": LONGEST + 2,
}
FAMILIES = {
    "bert": transformers.BertConfig(**SIZES),
    "relu": transformers.BertConfig(**SIZES, hidden_act="relu"),
    "roberta": transformers.RobertaConfig(**SIZES, pad_token_id=1),
}
CPU = torch.device("cpu")
MAX_OPERATORS = 90


def model_of(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModel.from_config(config).eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # they start at 0, which would hide that they are moved
                weight.normal_(std=0.5)
    return model


MODELS = {name: model_of(config) for name, config in FAMILIES.items()}


def bert_of(name: str) -> LoadedBert:
    with torch.inference_mode():
        bert = find_bert(MODELS[name], in_bf16=False)
    assert bert is not None
    return bert


BERTS = {name: bert_of(name) for name in FAMILIES}


def packed(name: str, *pooling: str, normalize: bool = False) -> PackedBert:
    return PackedBert(
        *BERTS[name],
        pooling or ("mean",),
        normalize=normalize,
        device=CPU,
        dtype=torch.float32,
        attend=attend,
    )


PACKED = {name: packed(name) for name in FAMILIES}


def texts_of(lengths: Sequence[int], seed: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token IDs and types, [items, longest], and the lengths. Values beyond a length are noise."""
    draw = np.random.default_rng(seed)
    shape = len(lengths), max(lengths)
    ids = draw.integers(5, VOCABULARY, shape)
    return ids, draw.integers(0, 2, shape), np.array(lengths)


def join(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All items' values, concatenated."""
    joined: np.ndarray = values[np.arange(values.shape[1]) < lengths[:, None]]
    return joined


def pool(mode: str, states: torch.Tensor) -> torch.Tensor:
    pooled = {
        "cls": states[0],
        "max": states.amax(0),
        "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0).div(len(states) ** 0.5),
    }
    return pooled[mode]


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("has_types", [False, True])
@pytest.mark.parametrize("name", ["bert", "relu"])
def test_vectors_are_those_of_the_modules(name: str, has_types: bool, mode: str) -> None:
    ids, types, lengths = texts_of([7, 1, LONGEST, 3, 2])
    vectors = packed(name, mode).encode(
        join(ids, lengths), join(types, lengths) if has_types else None, lengths
    )
    for row, length in enumerate(lengths):
        arguments = {"input_ids": torch.from_numpy(ids[row : row + 1, :length])}
        if has_types:
            arguments["token_type_ids"] = torch.from_numpy(types[row : row + 1, :length])
        with torch.inference_mode():
            states: torch.Tensor = MODELS[name](**arguments).last_hidden_state[0]
        wanted = pool(mode, states)
        assert np.allclose(vectors[row], wanted, atol=1e-5)


def test_positions_that_begin_later_and_several_poolings() -> None:
    ids, _, lengths = texts_of([4, 9])
    both = packed("roberta", "cls", "mean", normalize=True)
    vectors = both.encode(join(ids, lengths), None, lengths)
    assert both.dimensions == vectors.shape[1] == 2 * WIDTH
    for row, length in enumerate(lengths):
        given_ids = torch.from_numpy(ids[row : row + 1, :length])
        with torch.inference_mode():
            states = MODELS["roberta"](given_ids).last_hidden_state[0]
        wanted = torch.cat([pool("cls", states), pool("mean", states)])
        assert np.allclose(vectors[row], wanted / wanted.norm(), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=12),
    name=st.sampled_from(sorted(FAMILIES)),
    has_types=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_text_has_the_same_vector_in_any_company(
    lengths: list[int], name: str, has_types: bool, seed: int
) -> None:
    ids, types, counts = texts_of(lengths, seed)
    has_types &= name != "roberta"
    vectors = PACKED[name].encode(
        join(ids, counts), join(types, counts) if has_types else None, counts
    )
    for row, length in enumerate(lengths):
        alone = PACKED[name].encode(
            ids[row, :length],
            types[row, :length] if has_types else None,
            counts[row : row + 1],
        )
        assert np.allclose(vectors[row], alone[0], atol=1e-5)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators called, except those inside attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        if "addmm" in str(func) or "varlen" in str(func):
            self.dtypes |= {tensor.dtype for tensor in args[:3]}
        return func(*args, **kwargs or {})


def nothing_but_values(
    query: torch.Tensor, key: torch.Tensor, value: Any, *_: Any, **__: Any
) -> Any:
    return torch.ops.aten.mul.Tensor(query, value)


def six_layers() -> LoadedBert:
    with torch.inference_mode():
        bert = find_bert(
            model_of(transformers.BertConfig(**SIZES | {"num_hidden_layers": 6})), in_bf16=False
        )
    assert bert is not None
    return bert


def test_the_number_of_operators_does_not_depend_on_the_texts() -> None:
    bert = PackedBert(
        *six_layers(),
        ("mean",),
        normalize=True,
        device=CPU,
        dtype=torch.float32,
        attend=nothing_but_values,
    )
    counts = []
    for lengths in ([LONGEST], [3, 1], [5, 17, 2] * 40):
        ids, _, given_lengths = texts_of(lengths)
        with Operators() as operators:
            bert.encode(join(ids, given_lengths), None, given_lengths)
        counts.append(len(operators.names))
    assert len(set(counts)) == 1, counts
    assert counts[0] <= MAX_OPERATORS, counts


@pytest.mark.parametrize("has_types", [False, True])
@pytest.mark.parametrize("mode", ["cls", "mean", "max", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_never_waits_for_the_host(dtype: torch.dtype, mode: str, has_types: bool) -> None:
    """With fake tensors, reading a number from the device is an error."""
    bert = six_layers()
    ids, types, lengths = texts_of([5, LONGEST, 1])
    texts = pack_texts(join(ids, lengths), join(types, lengths) if has_types else None, lengths)
    device = torch.device("cuda", 0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        tensors = {name: torch.empty(weight.shape) for name, weight in bert.weights.tensors.items()}
        fake = BertWeights(tensors, *bert.weights[1:])
        encoder = PackedBert(
            fake, bert.first_position, (mode,), normalize=True, device=device, dtype=dtype
        )
        buffer = torch.empty(len(texts), dtype=torch.int32, device=device)
        with Operators() as operators:
            vectors = encoder.vectors(
                buffer, int(lengths.sum()), int(lengths.max()), has_types=has_types
            )
    assert (vectors.device.type, vectors.dtype) == ("cuda", torch.float32)
    assert vectors.shape == (3, WIDTH)
    assert operators.dtypes == {dtype}, "products and attention have 16 bits"
    assert sum("_varlen_attn" in name for name in operators.names) == 6
    conversions = [name for name in operators.names if re.search(r"copy|\.to\.|float", name)]
    assert len(conversions) == 1, "only the states are converted, for pooling"
