"""transformers' modules get the same vectors from packed texts as from texts run individually.

`varlen_attn` needs a GPU and a 16-bit dtype. On a CPU, `attend` replaces it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.workers.models.packed_attention import attend
from tests.workers.models.test_packed_bert import (
    Operators,
    join,
    model_of,
    nothing_but_values,
    pool,
    texts_of,
)
from workers.models.embedding.packed_encoder import pack_texts
from workers.models.embedding.packed_model import PackedModel, pack_model

pytestmark = pytest.mark.slow(about_s=15)

VOCABULARY, LONGEST, WIDTH, WINDOW = 40, 40, 32, 8
CPU = torch.device("cpu")
MODERN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "max_position_embeddings": LONGEST,
    "local_attention": WINDOW,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
}
CONFIGS = {
    "modernbert": transformers.ModernBertConfig(**MODERN),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        n_layers=2,
        n_heads=2,
        hidden_dim=64,
        initializer_range=0.2,
        max_position_embeddings=LONGEST,
    ),
}
UNSUPPORTED = {
    "position biases": transformers.MPNetConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
        max_position_embeddings=LONGEST + 2,
    ),
    "earlier tokens only": transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        initializer_range=0.2,
    ),
    "a wide window": transformers.ModernBertConfig(**MODERN | {"local_attention": 4096}),
}


def fresh(config: Any) -> Any:
    """A model with a separate config, because the config names its attention."""
    return model_of(copy.deepcopy(config))


def packed(config: Any, mode: str = "mean", attend: Any = attend) -> PackedModel | None:
    return pack_model(fresh(config), (mode,), normalize=False, device=CPU, attend=attend)


def known(name: str, mode: str = "mean") -> PackedModel:
    encoder = packed(CONFIGS[name], mode)
    assert encoder is not None, "the trial's results were different"
    return encoder


PACKED = {name: known(name) for name in CONFIGS}


def states_alone(name: str, ids: np.ndarray) -> torch.Tensor:
    """The states of one text, by the model with its own attention."""
    with torch.inference_mode():
        states: torch.Tensor = model_of(CONFIGS[name])(
            torch.from_numpy(ids[None])
        ).last_hidden_state
    return states[0]


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_vectors_are_those_of_the_modules(name: str, mode: str) -> None:
    """Some texts are longer than the window that ModernBERT's local attention covers."""
    ids, _, lengths = texts_of([7, 1, LONGEST, 3, 2 * WINDOW])
    vectors = known(name, mode).encode(join(ids, lengths), None, lengths)
    for row, length in enumerate(lengths):
        wanted = pool(mode, states_alone(name, ids[row, :length]))
        assert np.allclose(vectors[row], wanted, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=12),
    name=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 1000),
)
def test_a_text_has_the_same_vector_in_any_company(
    lengths: Sequence[int], name: str, seed: int
) -> None:
    ids, _, counts = texts_of(lengths, seed)
    vectors = PACKED[name].encode(join(ids, counts), None, counts)
    for row, length in enumerate(lengths):
        alone = PACKED[name].encode(ids[row, :length], None, counts[row : row + 1])
        assert np.allclose(vectors[row], alone[0], atol=1e-5)


def ignore_window(*texts: Any, window: tuple[int, int], **more: Any) -> torch.Tensor:
    return attend(*texts, **more)


def ignore_borders(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
    borders = torch.tensor([0, len(query)], dtype=torch.int32)
    return attend(query, key, value, borders, len(query))


@pytest.mark.parametrize("wrong", [ignore_window, ignore_borders])
def test_trial_finds_attention_that_differs(wrong: Any) -> None:
    assert packed(CONFIGS["modernbert"], attend=wrong) is None


@pytest.mark.parametrize("reason", list(UNSUPPORTED))
def test_other_attention_stays_padded(reason: str) -> None:
    model = fresh(UNSUPPORTED[reason])
    before = model.config._attn_implementation
    assert pack_model(model, ("mean",), normalize=False, device=CPU, attend=attend) is None
    assert model.config._attn_implementation == before
    ids = torch.from_numpy(texts_of([5])[0])
    with torch.inference_mode():
        states = model(ids).last_hidden_state
        assert torch.equal(states, fresh(UNSUPPORTED[reason])(ids).last_hidden_state)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_number_of_operators_does_not_depend_on_the_texts(name: str) -> None:
    encoder = known(name)
    encoder._attend = nothing_but_values
    counts = []
    for lengths in ([LONGEST], [3, 1], [5, 17, 2] * 40):
        ids, _, given_lengths = texts_of(lengths)
        with Operators() as operators:
            encoder.encode(join(ids, given_lengths), None, given_lengths)
        counts.append(len(operators.names))
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_gpu_never_waits_for_the_host(name: str) -> None:
    """With fake tensors, reading a number from the device is an error.

    A fake GPU isn't possible here, because transformers indexes tensors, which needs the driver.
    """
    encoder = known(name)
    encoder._attend = nothing_but_values
    ids, _, lengths = texts_of([5, LONGEST, 1])
    texts = pack_texts(join(ids, lengths), None, lengths)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        vectors = encoder.vectors(
            mode.from_tensor(torch.from_numpy(texts)), int(lengths.sum()), int(lengths.max())
        )
    assert (vectors.dtype, tuple(vectors.shape)) == (torch.float32, (3, WIDTH))
