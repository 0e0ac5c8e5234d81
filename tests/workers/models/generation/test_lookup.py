"""Guesses based on earlier text: they produce the same text in fewer steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelFailed
from tests.tiers import examples
from tests.workers.models.generation import tiny
from workers.models.base import OutOfMemory, PreparedPrompt
from workers.models.generation.model import GenerationModel, PromptLookup

pytestmark = pytest.mark.slow

REPEATED = [5, 60, 61, 62, 63] * 4
SCHEMA = {"type": "array", "items": {"enum": ["cat", "dog"]}, "minItems": 5, "maxItems": 9}
REPEATING = {"frequency_penalty": -2.0, "presence_penalty": -2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repeating": REPEATING,
    "sampled": {"temperature": 0.3, "seed": 11, **REPEATING},
    "hot": {"temperature": 1.2, "seed": 7},
    "stopped": {"temperature": 0.4, "stop": ["ee", "zq"], "seed": 5},
    "penalized": {"frequency_penalty": 0.3},
    "likely": {"logprobs": 2},
    "json": {"json_schema": json.dumps(SCHEMA), "temperature": 1.0},
}


@pytest.fixture(scope="module")
def guessing(folder: Path) -> GenerationModel:
    return tiny.open_model(folder, lookup_tokens=8)


def _steps(model: GenerationModel, item: PreparedPrompt) -> tuple[Any, int, list[int]]:
    """The outcome of an item run by itself, its number of steps, and the ids in its chunks."""
    model.admit(0, item)
    ids: list[int] = []
    for number in range(1, 500):
        end = model.step()
        chunk = model.take_chunks().get(0)
        if chunk is not None:
            assert chunk.first == len(ids)
            ids += chunk.ids
        if end.results:
            return end.results[0], number, ids
    raise AssertionError("the text does not end")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 90])
def test_a_text_is_the_same_with_guesses(
    model: GenerationModel, guessing: GenerationModel, variant: str, max_tokens: int
) -> None:
    item = tiny.prompt(REPEATED, max_tokens, is_streamed=True, **VARIANTS[variant])
    right, steps, ids = _steps(model, item)
    found, fewer, found_ids = _steps(guessing, item)
    assert (found.text, found.finish_reason) == (right.text, right.finish_reason)
    assert found.output_tokens == right.output_tokens
    assert found_ids[: len(ids)] == ids[: len(found_ids)]
    assert [one.token for one in found.logprobs] == [one.token for one in right.logprobs]
    assert [one.logprob for one in found.logprobs] == pytest.approx(
        [one.logprob for one in right.logprobs], abs=1e-4
    )
    assert fewer <= steps


def test_a_text_that_repeats_takes_a_part_of_the_steps(
    model: GenerationModel, guessing: GenerationModel
) -> None:
    item = tiny.prompt(REPEATED, 90, **REPEATING)
    right, steps, _ = _steps(model, item)
    found, fewer, _ = _steps(guessing, item)
    assert found.text == right.text
    assert fewer < steps / 2


def test_it_ends_with_the_context(model: GenerationModel, guessing: GenerationModel) -> None:
    ids = (REPEATED * 10)[: tiny.CONTEXT_TOKENS - 30]
    item = tiny.prompt(ids, 30)
    assert tiny.run(guessing, item) == tiny.run(model, item)


def test_no_text_guesses_in_company(model: GenerationModel, guessing: GenerationModel) -> None:
    items = [tiny.prompt(REPEATED[n:], 40, **REPEATING) for n in range(2)]
    assert tiny.run(guessing, *items) == tiny.run(model, *items)
    for slot, item in enumerate(items):
        guessing.admit(slot, item)
    guessing.step()
    read = guessing._decoder.read_all
    guessing._decoder.read_all = None  # type: ignore[method-assign, assignment]
    try:
        for _ in range(20):
            assert not guessing.step().results
    finally:
        guessing._decoder.read_all = read  # type: ignore[method-assign]
        guessing.drop(0)
        guessing.drop(1)


def test_without_memory_for_a_guess_the_only_text_fails(
    guessing: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OutOfMemory("full")

    with monkeypatch.context() as patch:
        patch.setattr(guessing._decoder, "read_all", full)
        (failed,) = tiny.run(guessing, tiny.prompt(REPEATED, 90, **REPEATING))
    assert isinstance(failed, OutOfMemory)
    assert tiny.run(guessing, tiny.prompt(REPEATED, 5))[0].output_tokens == 5


def test_a_wrong_guess_without_numbers_spoils_nothing(folder: Path) -> None:
    """Attention multiplies masked values by 0, and NaN survives that."""
    model = tiny.open_model(folder, lookup_tokens=8, batch={"max_tokens": 320, "max_items": 2})
    ids = [5, 60, 61]
    right = tiny.run(model, tiny.prompt(ids, 20), tiny.prompt([9, 8, 7], 20))
    model.admit(0, tiny.prompt(ids, 9, is_streamed=True))
    model.step(), model.step()
    second = model.take_chunks()[0].ids[1]
    model.drop(0)
    bad_token = 77
    assert second != bad_token
    model._decoder._model.get_input_embeddings().weight[bad_token] = torch.nan
    lookup, guesses = PromptLookup.guess, iter([[second, bad_token]])
    try:
        PromptLookup.guess = lambda *_: next(guesses, [])  # type: ignore[method-assign]
        model.admit(0, tiny.prompt(ids, 20))
        model.step()
        model.step()
        model.admit(1, tiny.prompt([9, 8, 7], 20))
        assert tiny.finish(model, 2) == right
    finally:
        PromptLookup.guess = lookup  # type: ignore[method-assign]


def test_numbers_that_fail_in_a_guess_fail_the_text(folder: Path) -> None:
    model = tiny.open_model(folder, lookup_tokens=8)
    head = model._decoder._model.lm_head
    head.weight[:] = torch.nan
    (failed,) = tiny.run(model, tiny.prompt(REPEATED, 20))
    assert isinstance(failed, ModelFailed)


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60), max_size=5),
    room=st.integers(-1, 10),
    learned=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=4),
)
@settings(max_examples=examples(200), deadline=None)
def test_a_guess_is_how_the_same_three_tokens_went_on(
    ids: list[int], cuts: list[int], room: int, learned: list[tuple[int, int]]
) -> None:
    lookup = PromptLookup(8)
    for cut in sorted(cuts):
        lookup.guess(ids[:cut], 8)
    for guessed, right in learned:
        lookup.learn(guessed, min(guessed, right))
    found = lookup.guess(ids, room)
    assert len(found) <= max(0, min(8, room))
    before = [at for at in range(3, len(ids)) if ids[at - 3 : at] == ids[-3:]]
    if room > 0 and len(ids) >= 3:
        assert bool(found) == bool(before)
    if found:
        whole = ids + found
        assert found == whole[before[-1] : before[-1] + len(found)]
