"""BERT and its kin, operator by operator, give what transformers' modules give; what is no BERT is
left alone.
"""

from typing import Any

import pytest
import torch
import transformers

from workers.models.device import computes_bf16
from workers.models.embedding.encoder_torch import bert_encoder

pytestmark = pytest.mark.slow

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "type_vocab_size": 2,
}


def model_of(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.AutoModel.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [
        ((7, 1, 12, 3), (23, 23)),
        ((7, 40, 1, 12, 37), (97, 112)),
        ((70,), (70, 80)),
        ((64, 32), (96, 96)),
    ],
    ids=["few tokens", "filled up", "one filled up", "full"],
)
@pytest.mark.parametrize("in_bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_types", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(**SIZES),
        transformers.BertConfig(**SIZES, hidden_act="relu"),
        transformers.RobertaConfig(**SIZES, pad_token_id=1),
        transformers.XLMRobertaConfig(**SIZES, pad_token_id=1),
    ],
    ids=["bert", "bert-relu", "roberta", "xlm-roberta"],
)
def test_states_are_those_of_the_modules(
    config: Any, has_types: bool, in_bf16: bool, lengths: tuple[int, ...], computed: tuple[int, int]
) -> None:
    if in_bf16 and not computes_bf16():
        pytest.skip("this CPU computes no bf16")
    model = model_of(config)
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(5, VOCABULARY, (sum(lengths),), generator=draw)
    types = torch.randint(0, 2, (sum(lengths),), generator=draw) if has_types else None
    with torch.inference_mode():
        encoder = bert_encoder(model, in_bf16=in_bf16)
        assert encoder is not None
        assert encoder.computed_tokens(lengths) == computed[in_bf16]
        together = encoder.states(ids, types, lengths)
        start = 0
        for length in lengths:
            text = slice(start, start + length)
            some_types = None if types is None else types[text]
            given = {} if some_types is None else {"token_type_ids": some_types[None]}
            wanted = model(input_ids=ids[text][None], **given).last_hidden_state[0]
            apart = float(wanted.abs().max()) * (0.03 if in_bf16 else 1e-5)
            assert (together[text] - wanted).abs().max() < apart
            assert (encoder.states(ids[text], some_types, [length]) - wanted).abs().max() < apart
            start += length


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(**SIZES, is_decoder=True),  # each token sees those before it only
        transformers.ElectraConfig(**SIZES, embedding_size=16),
        transformers.MPNetConfig(
            **{name: size for name, size in SIZES.items() if name != "type_vocab_size"}
        ),
    ],
    ids=["decoder", "electra", "mpnet"],
)
def test_what_computes_otherwise_is_left_alone(config: Any) -> None:
    with torch.inference_mode():
        assert bert_encoder(model_of(config), in_bf16=False) is None
