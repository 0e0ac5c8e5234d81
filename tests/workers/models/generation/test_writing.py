"""Texts as readers get them: resumed on a different worker, stopped, in chunks, in JSON."""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadInput, ModelFailed
from shared.models.tasks.text import GenerationResult, TokenChunk, TokenLogprob
from tests.workers.models.generation import tiny
from workers.models.base import PreparedPrompt
from workers.models.generation.model import GenerationModel
from workers.models.generation.vocabulary import Vocabulary
from workers.models.generation.writing import StopFinder, Writing

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
PROMPT = [5, 60, 61, 62, 63]
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
    "stopped": {"temperature": 1.3, "stop": ["e", "zq"], "seed": 5},
    "penalized": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "likely": {"logprobs": 2, "temperature": 0.9, "seed": 4},
    "json": {"json_schema": json.dumps(SCHEMA), "temperature": 1.0},
}


def write(
    model: GenerationModel, item: PreparedPrompt
) -> tuple[list[TokenChunk], GenerationResult]:
    """Returns all chunks of an item run by itself, collected after each step, and its result."""
    model.admit(0, item)
    chunks: list[TokenChunk] = []
    while True:
        end = model.step()
        if end.results:
            result = end.results[0]
            assert isinstance(result, GenerationResult), result
            return chunks, result
        if 0 in (taken := model.take_chunks()):
            chunks.append(taken[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_goes_on_from_any_point_as_if_never_interrupted(
    model: GenerationModel, variant: str
) -> None:
    fields = VARIANTS[variant] | {"is_streamed": True}
    chunks, whole = write(model, tiny.prompt(PROMPT, 40, **fields))
    assert chunks
    ids: list[int] = []
    text = ""
    logprobs: list[TokenLogprob] = []
    for chunk in chunks:
        assert chunk.first == len(ids)
        ids += chunk.ids
        text += chunk.text
        logprobs += chunk.logprobs
        assert whole.text.startswith(text)
        continued = tiny.prompt(
            PROMPT,
            40,
            **fields,
            written_ids=tiny.packed(ids),
            written_text=text,
            written_logprobs=list(logprobs),
        )
        rest, result = write(model, continued)
        assert (result.text, result.finish_reason) == (whole.text, whole.finish_reason)
        assert (result.input_tokens, result.output_tokens) == (len(PROMPT), whole.output_tokens)
        assert [one.token for one in result.logprobs] == [one.token for one in whole.logprobs]
        assert whole.text.startswith(text + "".join(one.text for one in rest))
        if rest:
            assert rest[0].first == len(ids)


def test_a_text_that_was_complete_already_ends_at_once(model: GenerationModel) -> None:
    (whole,) = tiny.run(model, tiny.prompt(PROMPT, 6))
    chunks, _ = write(model, tiny.prompt(PROMPT, 7, is_streamed=True))
    written = [token for chunk in chunks for token in chunk.ids][:6]
    (again,) = tiny.run(model, tiny.prompt(PROMPT, 6, written_ids=tiny.packed(written)))
    assert again == whole


def test_chunks_are_taken_of_streamed_texts_only(model: GenerationModel) -> None:
    model.admit(0, tiny.prompt(PROMPT, 20))
    model.admit(1, tiny.prompt(PROMPT, 20, is_streamed=True))
    for _ in range(4):
        model.step()
    assert list(model.take_chunks()) == [1]


def test_a_stop_sequence_over_several_tokens_is_never_shown(model: GenerationModel) -> None:
    (free,) = tiny.run(model, tiny.prompt(PROMPT, 40))
    stop = free.text[10:16]
    chunks, result = write(model, tiny.prompt(PROMPT, 40, stop=[stop], is_streamed=True))
    assert result.text == free.text[: free.text.index(stop)]
    assert (result.finish_reason, result.stop_sequence) == ("stop", stop)
    assert result.output_tokens < free.output_tokens
    assert free.stop_sequence == ""
    shown = "".join(chunk.text for chunk in chunks)
    assert shown
    assert result.text.startswith(shown)


def written(folder: Path, text: bytes, **fields: Any) -> tuple[list[str], Writing]:
    """The pieces a reader sees of a text that arrives byte by byte."""
    vocabulary = Vocabulary(folder)
    ids = [byte_token(vocabulary, one) for one in text]
    item = tiny.prompt([1], len(ids) + 1, is_streamed=True, **fields)
    writing = Writing(item, vocabulary)
    seen = []
    for token in ids:
        writing.add(token)
        chunk = writing.take_chunk()
        seen.append(chunk.text if chunk else "")
        if writing.finish is not None:
            break
    return seen, writing


def byte_token(vocabulary: Vocabulary, byte: int) -> int:
    return next(t for t in range(3, 300) if vocabulary.token_bytes(t) == bytes([byte]))


def test_a_character_is_shown_when_it_is_whole(folder: Path) -> None:
    seen, _ = written(folder, "aé漢🙂b".encode())
    assert seen == ["a", "", "é", "", "", "漢", "", "", "", "🙂", "b"]


def test_bytes_that_are_no_character_become_replacements(folder: Path) -> None:
    seen, _ = written(folder, b"a\xffb\xe6\xbcc")
    assert "".join(seen) == "a�b�c"


def test_a_control_token_has_no_text(folder: Path) -> None:
    vocabulary = Vocabulary(folder)
    assert [vocabulary.token_bytes(token) for token in range(3)] == [b"", b"", b""]


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stops_are_found_as_by_looking_at_the_whole_text(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    end = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    shown = 0
    for length in range(1, len(text) + 1):
        part = text[:length]
        found = finder.find(part, length - 1)
        if found is not None:
            at, stop = found
            assert shown <= at
            # The stop text that is completed first, which may not be the one that starts first.
            assert stop in stops
            assert part[at:] == stop
            return
        shown = finder.visible(part)
        rest = part[shown:]
        assert rest == "" or any(stop.startswith(rest) for stop in stops)
    assert end is None


@pytest.mark.parametrize("seed", range(6))
def test_json_matches_its_schema(model: GenerationModel, seed: int) -> None:
    fields = {"json_schema": json.dumps(SCHEMA), "temperature": 1.0, "seed": seed}
    (found,) = tiny.run(model, tiny.prompt(PROMPT, 120, **fields))
    if found.finish_reason == "stop":
        jsonschema.validate(json.loads(found.text), SCHEMA)
    else:
        assert found.output_tokens == 120


def test_a_schema_that_can_not_be_used_is_refused(model: GenerationModel) -> None:
    with pytest.raises(BadInput) as refused:
        model.admit(0, tiny.prompt(PROMPT, 5, json_schema='{"type": "nothing"}'))
    assert refused.value.field == "response_format"
    (fine,) = tiny.run(model, tiny.prompt(PROMPT, 5))
    assert fine.output_tokens == 5


def test_end_of_text_ends_it(model: GenerationModel, folder: Path) -> None:
    vocabulary = Vocabulary(folder)
    writing = Writing(tiny.prompt([1], 9), vocabulary)
    writing.add(byte_token(vocabulary, 97))
    writing.add(0)
    assert (writing.finish, writing.result(1, 0).text) == ("stop", "a")
    assert writing.result(1, 0).output_tokens == 2


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_bytes_become_the_same_text_in_pieces(folder: Path, data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=12))
    seen, writing = written(folder, raw)
    shown = "".join(seen)
    writing.add(0)
    assert writing.result(1, 0).text == raw.decode(errors="replace")
    assert raw.decode(errors="replace").startswith(shown)


ENDLESS = {
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "above 0": {"type": "number", "exclusiveMinimum": 0, "maximum": 9.5},
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    "object": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    | {"additionalProperties": False},
    "text of digits": {"type": "string", "minLength": 30, "maxLength": 30},
}


@pytest.mark.parametrize("liked", ["0", "7", "\n", " ", "\t", "-", "."])
@pytest.mark.parametrize("kind", ENDLESS)
def test_json_of_a_model_that_repeats_itself_ends(folder: Path, kind: str, liked: str) -> None:
    """Otherwise, the model could generate 0.000 or line after line until it runs out of tokens."""
    schema, vocabulary = ENDLESS[kind], Vocabulary(folder)
    writing = Writing(tiny.prompt(PROMPT, 400, json_schema=json.dumps(schema)), vocabulary)
    known = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
    logits = np.array([9.0 * one.startswith(liked.encode()) for one in known], np.float32)
    logits += vocabulary.digits + 0.5 * np.isin(known, [b"]", b"}", b",", b'"'])
    logits[[*vocabulary.ends]] = -9.0
    while writing.finish is None:
        writing.write(logits)
    assert writing.finish == "stop"
    jsonschema.validate(json.loads(writing.result(5, 0).text), schema)


def test_a_schema_that_needs_too_much_work_on_its_way_is_the_callers_error(
    model: GenerationModel,
) -> None:
    """The schema's third token would start one of 700 optional parts."""
    parts = {f"p{number}": {"type": "integer"} for number in range(700)}
    inner = {"type": "object", "properties": parts, "additionalProperties": False}
    schema = json.dumps({"type": "array", "items": inner, "minItems": 1})
    beside = tiny.prompt(PROMPT, 5)
    (alone,) = tiny.run(model, beside)
    failed, good = tiny.run(model, tiny.prompt(PROMPT, 40, json_schema=schema), beside)
    assert isinstance(failed, BadInput), failed
    assert failed.field == "response_format"
    assert failed.message.startswith("the JSON schema can't be followed: ")
    assert "\n" not in failed.message
    assert good == alone


def test_tokens_of_another_worker_that_do_not_match_the_schema_are_no_error_of_the_caller(
    model: GenerationModel,
) -> None:
    ids = tiny.packed(tiny.ids_of(model._folder, "no JSON"))
    item = tiny.prompt(PROMPT, 20, json_schema='{"type": "object"}', written_ids=ids)
    with pytest.raises(ModelFailed, match="can't be followed"):
        model.admit(0, item)


def test_log_probabilities_are_finite_or_the_text_fails(folder: Path) -> None:
    """JSON has neither NaN nor minus infinity, which a model may compute for tokens that it rules
    out.
    """
    vocabulary = Vocabulary(folder)
    token, excluded = byte_token(vocabulary, 97), byte_token(vocabulary, 98)
    writing = Writing(tiny.prompt([1], 9, logprobs=2), vocabulary)
    writing.add_chosen(token, {token: -0.5, excluded: -math.inf})
    (shown,) = writing._logprobs
    assert [one.logprob for one in (shown, *shown.top)] == [-0.5, -0.5, -9999.0]
    with pytest.raises(ModelFailed):
        writing.add_chosen(token, {token: math.nan})
