"""A text model in vLLM, or in a stand-in for its engine if it is not installed."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ConfigurationError, ModelFailed
from tests.workers.models.generation import tiny
from workers.models.base import OutOfMemory
from workers.models.device import Device
from workers.models.generation.vllm_model import VllmModel

pytestmark = pytest.mark.slow

IS_INSTALLED = importlib.util.find_spec("vllm") is not None
STAND_IN = Path(__file__).parent / "stand_in"
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""On a CPU, vLLM's attention does not support smaller heads."""


LOOKUP = tiny.entry().generation.model_copy(update={"lookup_tokens": 4})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.tiny_config(400)
    config.update(WIDE)
    return tiny.write_folder(tmp_path_factory.mktemp("tiny-vllm"), config)


@pytest.fixture(scope="module")
def shared_model(folder: Path) -> Iterator[VllmModel]:
    if not IS_INSTALLED:
        sys.path.insert(0, str(STAND_IN))
    try:
        made = VllmModel(tiny.entry(backend="vllm"), folder, Device("cpu", 1, 1.0))
        made.setup()
        made.warmup()
        yield made
    finally:
        if not IS_INSTALLED:
            sys.path.remove(str(STAND_IN))
            for name in [*sys.modules]:
                if name.split(".")[0] == "vllm":
                    del sys.modules[name]


@pytest.fixture
def model(shared_model: VllmModel) -> VllmModel:
    for slot in range(100):
        shared_model.drop(slot)
    return shared_model


PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 20, 40)]


def test_greedy_texts_are_those_of_the_torch_model(model: VllmModel, folder: Path) -> None:
    items = [tiny.prompt(ids, 12, logprobs=2) for ids in PROMPTS]
    expected = tiny.run(tiny.open_model(folder), *items)
    found = tiny.run(model, *items)
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        for told, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert told.token == wanted.token
            assert told.logprob == pytest.approx(wanted.logprob, abs=1e-3)
            assert [top.token for top in told.top] == [top.token for top in wanted.top]


def test_sampling_options_and_echo_are_those_of_the_torch_model(
    model: VllmModel, folder: Path
) -> None:
    plain = tiny.run(model, *(tiny.prompt(ids, 12) for ids in PROMPTS))
    options = {"repetition_penalty": 1.4, "logit_bias": {9: -3.0, 7: 8.0}, "min_p": 0.3}
    items = [tiny.prompt(ids, 12, logprobs=2, is_echoed=True, **options) for ids in PROMPTS]
    expected = tiny.run(tiny.open_model(folder), *items)
    found = tiny.run(model, *items)
    assert [one.text for one in found] != [one.text for one in plain]
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.prompt_text) == (other.text, other.prompt_text)
        for told, wanted in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert told.token == wanted.token
            assert told.logprob == pytest.approx(wanted.logprob, abs=1e-3)
            assert [top.token for top in told.top] == [top.token for top in wanted.top]


def test_a_text_joins_between_steps_and_leaves_when_it_is_done(model: VllmModel) -> None:
    alone = tiny.run(model, tiny.prompt([9, 9], 4))[0]
    model.admit(0, tiny.prompt([5, 6, 7], 60, stop=["never"]))
    for _ in range(3):
        model.step()
    model.admit(1, tiny.prompt([9, 9], 4))
    results: dict[int, Any] = {}
    while 1 not in results:
        results |= model.step().results
    assert 0 not in results
    assert results[1].text == alone.text


def test_a_step_tells_the_tokens_that_it_computed(model: VllmModel) -> None:
    model.admit(0, tiny.prompt(PROMPTS[2], 20))
    assert model.step().work == len(PROMPTS[2]) + 1
    model.admit(1, tiny.prompt(PROMPTS[1], 20))
    assert model.step().work == 1 + len(PROMPTS[1]) + 1
    assert model.step().work == 2


def test_a_stop_ends_a_text_before_it(model: VllmModel) -> None:
    whole = tiny.run(model, tiny.prompt([9, 9], 12))[0].text
    stop = whole[4:6]
    found = tiny.run(model, tiny.prompt([9, 9], 12, stop=[stop]))[0]
    assert found.text == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"


def test_a_stream_is_told_each_token_once(model: VllmModel) -> None:
    model.admit(0, tiny.prompt([4, 5], 10, is_streamed=True))
    ids: list[int] = []
    text, results = "", dict[int, Any]()
    while not results:
        results = model.step().results
        for chunk in model.take_chunks().values():
            assert chunk.first == len(ids)
            ids += chunk.ids
            text += chunk.text
    assert results[0].text.startswith(text)
    assert len(ids) < results[0].output_tokens  # the last part of a text comes with its result


def test_a_text_goes_on_where_another_worker_stopped(model: VllmModel, folder: Path) -> None:
    whole = tiny.run(tiny.open_model(folder), tiny.prompt([4, 5], 10, is_streamed=True))[0]
    model.admit(0, tiny.prompt([4, 5], 10, is_streamed=True))
    for _ in range(5):
        model.step()
    chunk = model.take_chunks()[0]
    model.drop(0)
    later = tiny.prompt(
        [4, 5],
        10,
        is_streamed=True,
        written_ids=tiny.packed(chunk.ids),
        written_text=chunk.text,
    )
    assert tiny.run(model, later)[0].text == whole.text


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_text_that_is_interrupted_goes_on_later(model: VllmModel, is_streamed: bool) -> None:
    item = tiny.prompt([4, 5], 12, is_streamed=is_streamed)
    whole = tiny.run(model, item)[0]
    assert tiny.interrupted(model, item, after_steps=5).text == whole.text


def test_a_seed_gives_the_same_text_in_company(model: VllmModel) -> None:
    one = tiny.prompt([4, 5], 10, temperature=1.0, seed=-5)
    alone = tiny.run(model, one)[0].text
    other = tiny.prompt([4, 5], 10, temperature=1.0, seed=6)
    together = [found.text for found in tiny.run(model, one, other)]
    assert together[0] == alone
    assert together[1] != alone


def test_only_an_owner_s_own_prompts_share_their_beginning(model: VllmModel) -> None:
    ids = list(range(50, 90))
    cached = [
        tiny.run(model, tiny.prompt(ids, 2, owner=owner))[0].cached_tokens
        for owner in ("a", "a", "b", "", "")
    ]
    assert cached[1] > 0
    assert [cached[0], *cached[2:]] == [0, 0, 0, 0]


def test_no_more_than_the_budget_is_admitted(model: VllmModel) -> None:
    for slot in range(4):
        model.admit(slot, tiny.prompt([3], 159))
    with pytest.raises(OutOfMemory, match="640 of 640 tokens are taken"):
        model.admit(4, tiny.prompt([3], 10))
    model.drop(2)
    model.admit(4, tiny.prompt([3], 10))
    assert tiny.finish(model, 4)


def test_a_canceled_text_is_gone(model: VllmModel) -> None:
    model.admit(0, tiny.prompt([4, 5], 90))
    model.step()
    model.drop(0)
    assert model.step().results == {}


FLAG = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}, "text": {"type": "string", "maxLength": 5}},
    "required": ["flag", "text"],
    "additionalProperties": False,
}


def test_a_schema_is_followed(model: VllmModel) -> None:
    found = tiny.run(model, tiny.prompt([4, 5], 60, json_schema=json.dumps(FLAG)))[0]
    assert set(json.loads(found.text)) == {"flag", "text"}


def test_a_stream_of_json_goes_on_where_another_worker_stopped(model: VllmModel) -> None:
    asked = {"json_schema": json.dumps(FLAG), "is_streamed": True}
    model.admit(0, tiny.prompt([4, 5], 60, **asked))
    ids, text, results = list[int](), [""], dict[int, Any]()
    while not results:
        results = model.step().results
        for chunk in model.take_chunks().values():
            ids += chunk.ids
            text.append(text[-1] + chunk.text)
    assert len(ids) > 5
    for count in range(1, len(ids) + 1, 3):
        later = tiny.prompt(
            [4, 5],
            60,
            written_ids=tiny.packed(ids[:count]),
            written_text=text[count],
            **asked,
        )
        assert tiny.run(model, later)[0].text == results[0].text


def test_what_a_schema_does_not_allow_is_not_gone_on_with(model: VllmModel) -> None:
    item = tiny.prompt([4], json_schema=json.dumps(FLAG), written_ids=tiny.packed([5]))
    with pytest.raises(ModelFailed, match="does not allow the text written by another worker"):
        model.admit(0, item)
    assert model.step().results == {}


def test_a_schema_that_can_t_be_used_is_the_caller_s_error(model: VllmModel) -> None:
    item = tiny.prompt([4], json_schema='{"type": "no such type"}')
    with pytest.raises(BadInput, match="JSON schema can't be used"):
        model.admit(0, item)
    assert model.step().results == {}


@pytest.mark.skipif(IS_INSTALLED, reason="vLLM is here")
def test_a_missing_vllm_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(STAND_IN)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    model = VllmModel(tiny.entry(backend="vllm"), folder, Device("cpu", 1, 1.0))
    with pytest.raises(ConfigurationError, match="backend vllm requires vLLM"):
        model.setup()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "int4"}, "int4 requires backend torch"),
        ({"generation": LOOKUP}, "lookup_tokens requires backend torch"),
    ],
)
def test_what_vllm_has_not_is_refused_with_the_catalog(
    changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        tiny.entry(backend="vllm", **changes)
