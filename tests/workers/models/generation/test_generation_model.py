"""The step-by-step model, compared with transformers' generate()."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    GPT2Config,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from shared.errors import ConfigurationError, ModelFailed
from tests.workers.models.generation import tiny
from tests.workers.models.generation.tiny import Generate
from workers.models.base import OutOfMemory, SteppedModel
from workers.models.device import Device
from workers.models.generation import decoder
from workers.models.generation.model import GenerationModel
from workers.models.generation.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

PROMPTS = [
    list(range(5 + number, 5 + number + length)) for number, length in enumerate([3, 40, 1, 17, 60])
]


def test_it_is_a_stepped_model(model: GenerationModel) -> None:
    assert isinstance(model, SteppedModel)
    assert model.device_name == "cpu"
    model.warmup()


@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_greedy_text_and_its_likelihoods_are_those_of_generate(
    model: GenerationModel, reference: Generate, folder: Path, ids: list[int]
) -> None:
    tokens, likelihoods = reference(ids, 20)
    (found,) = tiny.run(model, tiny.prompt(ids, 20, logprobs=3))
    assert found.output_tokens == len(tokens)
    assert found.text == Vocabulary(folder).tokenizer.decode(tokens)
    assert found.input_tokens == len(ids)
    for token, row, told in zip(tokens, likelihoods, found.logprobs, strict=False):
        assert told.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert len(told.top) == 3
        assert [one.logprob for one in told.top] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-3
        )


def test_bias_and_repetition_penalty_are_those_of_generate(
    model: GenerationModel, reference: Generate, folder: Path
) -> None:
    plain, _ = reference(PROMPTS[1], 20)
    bias = {plain[0]: -5.0, plain[1]: -100.0, 7: 2.5}
    options = {
        "sequence_bias": [[[token], value] for token, value in bias.items()],
        "repetition_penalty": 1.4,
    }
    tokens, _ = reference(PROMPTS[1], 20, **options)
    item = tiny.prompt(PROMPTS[1], 20, logit_bias=bias, repetition_penalty=1.4)
    (found,) = tiny.run(model, item)
    assert tokens != plain
    assert found.text == Vocabulary(folder).tokenizer.decode(tokens)
    assert tiny.interrupted(model, item, 5) == found


@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(
    model: GenerationModel, folder: Path, ids: list[int]
) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        chances = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)
    item = tiny.prompt(ids, 1, logprobs=2, is_echoed=True, owner="t")
    tiny.run(model, tiny.prompt(ids, 1, owner="t"))  # whose keys and values could have been shared
    beside = tiny.prompt(PROMPTS[1], 9)
    found, other = tiny.run(model, item, beside)
    assert other == tiny.run(model, beside)[0]
    vocabulary = Vocabulary(folder)
    assert found.prompt_text.encode() == b"".join(map(vocabulary.read_shown_bytes, ids))
    assert found.cached_tokens == 0
    assert [one.data for one in found.prompt_logprobs] == list(
        map(vocabulary.read_shown_bytes, ids)
    )
    assert found.prompt_logprobs[0].top == []
    for token, row, told in zip(ids[1:], chances, found.prompt_logprobs[1:], strict=False):
        assert told.logprob == pytest.approx(row[token].item(), abs=1e-3)
        best = row.topk(2).values.tolist()
        assert [one.logprob for one in told.top] == pytest.approx(best, abs=1e-3)
    assert len(found.logprobs) <= 1


def test_an_echo_without_log_probabilities_is_the_text_alone(model: GenerationModel) -> None:
    ids = PROMPTS[1]
    (found,) = tiny.run(model, tiny.prompt(ids, 4, is_echoed=True))
    (plain,) = tiny.run(model, tiny.prompt(ids, 4))
    assert (found.text, found.prompt_logprobs) == (plain.text, [])
    assert found.prompt_text
    assert not plain.prompt_text


def test_texts_in_company_are_those_alone(model: GenerationModel) -> None:
    items = [
        tiny.prompt(ids, 20, temperature=t, seed=n)
        for n, (ids, t) in enumerate(zip(PROMPTS, [0, 0.8, 1.0, 0, 1.2], strict=True))
    ]
    alone = [tiny.run(model, item)[0] for item in items]
    assert tiny.run(model, *items) == alone


def test_a_step_tells_the_tokens_that_it_computed(model: GenerationModel) -> None:
    model.admit(0, tiny.prompt(PROMPTS[3], 20))
    assert model.step().work == len(PROMPTS[3])
    assert [model.step().work for _ in range(3)] == [1, 1, 1]
    model.admit(1, tiny.prompt(PROMPTS[1], 20))
    # Its 40 tokens are read 16 at a time, along with one token of the first text. The first text
    # has to wait out the step that yields the second text's first token.
    assert [model.step().work for _ in range(5)] == [17, 17, 8, 2, 2]
    model.drop(0)
    model.drop(1)


def test_texts_that_join_and_leave_change_no_other(model: GenerationModel) -> None:
    alone = [tiny.run(model, tiny.prompt(ids, 24))[0] for ids in PROMPTS]
    found: dict[int, Any] = {}
    model.admit(0, tiny.prompt(PROMPTS[0], 24))
    for slot in range(1, 5):
        for _ in range(3):
            found |= model.step().results
        model.admit(slot, tiny.prompt(PROMPTS[slot], 24))
        if slot == 3:
            model.drop(1)
    while len(found) < 4:
        found |= model.step().results
    assert found == {slot: alone[slot] for slot in (0, 2, 3, 4)}


def test_a_long_prompt_lets_others_write(model: GenerationModel) -> None:
    model.admit(0, tiny.prompt([5, 6], 40, is_streamed=True))
    model.step()
    model.take_chunks()
    model.admit(1, tiny.prompt(list(range(5, 105)), 4, is_streamed=True))
    for _ in range(6):  # 100 tokens, 16 at a time
        model.step()
        assert set(model.take_chunks()) == {0}
    model.step()
    assert set(model.take_chunks()) == {1}  # its first token is reported immediately
    model.step()
    assert set(model.take_chunks()) == {0, 1}


def test_a_short_prompt_does_not_wait_for_all_the_long_ones_of_another_owner(
    model: GenerationModel,
) -> None:
    for slot in range(3):
        model.admit(slot, tiny.prompt([20 + slot] * 130, owner="a", is_streamed=True))
    model.step()
    model.admit(3, tiny.prompt([30, 31], owner="b", is_streamed=True))
    model.step()
    model.step()
    assert set(model.take_chunks()) == {3}
    for _ in range(9):
        model.step()
    assert 0 in model.take_chunks(), "the owner's own are read as they came"


def test_prompts_that_keep_coming_starve_no_text(model: GenerationModel) -> None:
    model.admit(0, tiny.prompt([5, 6], 40, is_streamed=True))
    model.step()
    model.take_chunks()
    for slot in range(1, 9):
        model.admit(slot, tiny.prompt([7, slot], 1))
        assert slot in model.step().results
    assert len(model.take_chunks()[0].ids) >= 4


def test_a_budget_that_is_spent_takes_no_more(model: GenerationModel) -> None:
    for slot in range(4):
        model.admit(slot, tiny.prompt([5] * 60, 100))
    with pytest.raises(OutOfMemory):
        model.admit(4, tiny.prompt([5], 1))
    model.drop(2)
    model.admit(4, tiny.prompt([5], 1))


def test_no_more_texts_than_rows(model: GenerationModel) -> None:
    for slot in range(5):
        model.admit(slot, tiny.prompt([5], 4))
    with pytest.raises(OutOfMemory):
        model.admit(5, tiny.prompt([5], 4))


@pytest.mark.parametrize("scope", ["tenant", "global"])
def test_equal_beginnings_are_read_once(folder: Path, scope: str) -> None:
    model = tiny.open_model(folder, cache={"scope": scope})
    first, second = [5, *range(30, 60)], [5, *range(30, 50), 7, 8]
    plain = [tiny.run(model, tiny.prompt(ids))[0] for ids in ([9, 9], [9, 8])]
    assert [one.cached_tokens for one in plain] == [0, 0]
    tiny.run(model, tiny.prompt(first, owner="a"))
    (mine,) = tiny.run(model, tiny.prompt(second, owner="a"))
    assert mine.cached_tokens == 21
    (theirs,) = tiny.run(model, tiny.prompt(second, owner="b"))
    assert theirs.cached_tokens == (22 if scope == "global" else 0)
    assert mine.text == theirs.text
    # While the first one is still in the batch.
    model.admit(0, tiny.prompt(first, 30, owner="a"))
    model.step(), model.step(), model.step()
    model.admit(1, tiny.prompt(second, 30, owner="a"))
    _, other = tiny.finish(model, 2)
    assert other.cached_tokens >= 21
    assert other.text == tiny.run(tiny.open_model(folder), tiny.prompt(second, 30))[0].text


def test_prompts_without_an_owner_share_nothing(model: GenerationModel) -> None:
    ids = list(range(5, 45))
    first, second = (tiny.run(model, tiny.prompt(ids))[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)


def test_a_text_without_numbers_fails_alone(folder: Path) -> None:
    """Its row is cleaned, because attention multiplies masked values by 0, and NaN survives
    that.
    """
    model = tiny.open_model(folder, batch={"max_tokens": 320, "max_items": 2})
    good = tiny.run(model, tiny.prompt([5, 6, 7], 20))[0]
    bad_token = 77
    model._decoder._model.get_input_embeddings().weight[bad_token] = torch.nan
    broken = tiny.prompt([*range(5, 35), bad_token], 20)
    bad, beside = tiny.run(model, broken, tiny.prompt([5, 6, 7], 20))
    assert isinstance(bad, ModelFailed)
    assert beside == good
    for _ in range(2):
        assert tiny.run(model, *[tiny.prompt([5, 6, 7], 20)] * 2) == [good, good]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_is_interrupted_goes_on_later(
    model: GenerationModel, is_streamed: bool, temperature: float
) -> None:
    prefix = list(range(3, 33))
    tiny.run(model, tiny.prompt([*prefix, 50], 2, owner="a"))
    item = tiny.prompt(
        [*prefix, 60], 12, is_streamed=is_streamed, temperature=temperature, owner="a"
    )
    whole = tiny.run(model, item)[0]
    tiny.run(model, *(tiny.prompt([70 + slot] * 40, 2, owner="b") for slot in range(5)))
    tiny.run(model, tiny.prompt([*prefix, 50], 2, owner="a"))
    found = tiny.interrupted(model, item, after_steps=6)
    assert found.text == whole.text
    # The reported number of cached tokens stays the same, although the row is still there when the
    # item resumes.
    assert 0 < found.cached_tokens < len(prefix) + 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_interrupted_text_keeps_its_prompt_and_its_schema(
    model: GenerationModel, is_streamed: bool
) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
    item = tiny.prompt([4, 5], 60, is_streamed=is_streamed, json_schema=schema)
    assert tiny.interrupted(model, item, 4).text == tiny.run(model, item)[0].text


def test_without_memory_the_youngest_waits(
    model: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [tiny.prompt(ids, 20) for ids in PROMPTS[:3]]
    alone = [tiny.run(model, item)[0] for item in items]
    for slot, item in enumerate(items):
        model.admit(slot, item)
    for _ in range(5):
        model.step()
    decode = model._decoder.decode
    failing = iter([True])

    def once(*given: Any) -> Any:
        if next(failing, False):
            raise OutOfMemory
        return decode(*given)

    monkeypatch.setattr(model._decoder, "decode", once)
    end = model.step()
    assert (end.results, end.preempted) == ({}, [2])
    assert tiny.finish(model, 2) == alone[:2]


def test_a_failed_step_leaves_nothing_in(
    model: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.admit(0, tiny.prompt([5, 6], 20))
    with monkeypatch.context() as patch:
        patch.setattr(model._decoder, "read", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.step()
    assert tiny.run(model, tiny.prompt([5, 6], 3))[0].output_tokens == 3


@pytest.mark.parametrize("precision", ["bf16", "auto"])
def test_other_precisions_write_the_same_alone_and_again(folder: Path, precision: str) -> None:
    """In a batch, bf16 may round differently (docs/decisions/0062), so that case is not
    compared.
    """
    model = tiny.open_model(folder, precision=precision)
    first, again = (tiny.run(model, tiny.prompt(PROMPTS[1], 20))[0] for _ in range(2))
    assert first == again
    assert len(tiny.run(model, *(tiny.prompt(ids, 20) for ids in PROMPTS))) == 5


def test_bf16_is_computed_on_a_cpu_whose_onednn_has_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "computes_bf16", lambda: False)  # as on a CPU with only AVX2
    model = tiny.open_model(folder, precision="bf16")
    first, again = (tiny.run(model, tiny.prompt(PROMPTS[1], 20))[0] for _ in range(2))
    assert first == again
    assert first.output_tokens == 20


FAMILIES: dict[str, Any] = {
    "qwen2": Qwen2Config(),
    "qwen3": Qwen3Config(head_dim=8),
    "mistral": MistralConfig(sliding_window=12),
    "gemma2": Gemma2Config(head_dim=8, sliding_window=12, query_pre_attn_scalar=8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_compute_as_generate_does(family: str, tmp_path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family]
    small = tiny.tiny_config(Vocabulary(folder).size).to_dict()
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
    ):
        setattr(config, name, small[name])
    config.pad_token_id = 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    tiny.write_folder(tmp_path, config)
    ids = list(range(5, 45))
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    wanted = loaded.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    model = tiny.open_model(tmp_path)
    found, _ = tiny.run(model, tiny.prompt(ids, 20), tiny.prompt(ids[3:], 20))
    new = wanted[0, len(ids) :].tolist()
    assert found.text == Vocabulary(tmp_path).tokenizer.decode(new)


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=400, hidden_size=16, num_hidden_layers=1, state_size=4),
        GPT2Config(vocab_size=400, n_embd=16, n_layer=1, n_head=2, n_positions=64),
    ],
    ids=["no attention", "too few positions"],
)
def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, config: Any) -> None:
    tiny.write_folder(tmp_path, config)
    with pytest.raises(ConfigurationError):
        tiny.open_model(tmp_path)


@pytest.mark.parametrize("passes", [0, 1], ids=["transformers' attention", "ours"])
def test_too_little_memory_for_the_first_pass_is_no_fault_of_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    embed, remaining = torch.nn.Embedding.forward, [passes]

    def embed_until_full(layer: Any, ids: torch.Tensor) -> torch.Tensor:
        if not remaining[0]:
            raise torch.OutOfMemoryError("out of memory")
        remaining[0] -= 1
        return embed(layer, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", embed_until_full)
    with pytest.raises(OutOfMemory):
        tiny.open_model(folder)


def test_no_row_takes_more_tokens_than_it_has_room_for(folder: Path) -> None:
    small = decoder.Decoder(folder, Device("cpu", 1, 1.0), "fp32", rows=2, capacity=12)
    small.open()
    small.read(0, 0, np.arange(10))
    with pytest.raises(AssertionError, match="a row is full"):
        small.read(0, 10, np.arange(5))
    with pytest.raises(AssertionError, match="a row is full"):
        small.decode(np.zeros(2, np.int64), np.array([10, 12]))
    assert small.decode(np.zeros(2, np.int64), np.array([10, 11])).shape[0] == 2


def test_a_folder_without_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ConfigurationError):
        tiny.open_model(tmp_path)
