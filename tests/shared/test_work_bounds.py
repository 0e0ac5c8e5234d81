"""Maximum work per item: no tokenizer produces more tokens than the bound."""

import sys
import unicodedata
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadInput, ContextLengthExceeded
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.entry import Batch, EmbeddingLimits, Generation
from shared.models.tasks.base import WorkBound
from shared.models.tasks.embedding import TextInput, TokensInput, bound_tokens
from shared.models.tasks.image import ImageInput
from shared.models.tasks.similarity import SimilarityInput
from shared.models.tasks.text import GenerationInput
from workers.models.image.preprocessing import image_to_image_steps

WRITER = Model(
    name="writer",
    task="text",
    source="local:nowhere",
    batch=Batch(max_tokens=4096),
    generation=Generation(context_tokens=1000, default_tokens=16, longest_tokens=64),
)
ENCODER = Model(
    name="encoder",
    task="embedding",
    source="local:nowhere",
    batch=Batch(max_tokens=2048),
    dimensions=4,
    text=EmbeddingLimits(max_input_tokens=256),
)
FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def test_no_normal_form_of_a_character_has_more_bytes_than_the_bound() -> None:
    for number in range(sys.maxunicode + 1):
        text = chr(number)
        if not unicodedata.decomposition(text):
            continue
        forms = [unicodedata.normalize(form, text) for form in FORMS]  # type: ignore[arg-type]
        sizes = [len(form.encode("utf-8", "surrogatepass")) for form in forms]
        assert bound_tokens(text) >= max(sizes), text


@settings(max_examples=50)
@given(st.text(max_size=50))
def test_no_normal_form_of_a_text_has_more_bytes_than_the_bound(text: str) -> None:
    for form in FORMS:
        shown = unicodedata.normalize(form, text)  # type: ignore[arg-type]
        assert bound_tokens(text) >= len(shown.encode())


@pytest.mark.parametrize(
    ("prompt", "most"),
    [
        ("{}[]()", WorkBound(6 + 2 + 64, 64)),
        ([1, 2, 3], WorkBound(3 + 64, 64)),
        ("x" * 5000, WorkBound(1000, 64)),
    ],
)
def test_texts_are_bounded_by_bytes_and_by_the_context(
    prompt: str | list[int], most: WorkBound
) -> None:
    assert GenerationInput(64, 0, prompt=prompt).bound_work(WRITER) == most


def test_chats_are_bounded_with_what_their_template_writes() -> None:
    message = {"role": "user", "content": "?" * 100}
    assert 164 < GenerationInput(64, 0, messages=[message]).bound_work(WRITER).work <= 1000
    long = GenerationInput(64, 0, messages=[message] * 100)
    assert long.bound_work(WRITER) == WorkBound(1000, 64)


def test_variables_of_the_template_may_be_in_the_prompt() -> None:
    message = {"role": "user", "content": "?"}
    without = GenerationInput(64, 0, messages=[message])
    given = GenerationInput(64, 0, messages=[message], template_options={"date_string": "?" * 300})
    assert given.bound_work(WRITER).work - without.bound_work(WRITER).work >= 300
    assert given.estimate_work(WRITER) - without.estimate_work(WRITER) >= 75
    with pytest.raises(ContextLengthExceeded):
        GenerationInput(
            64, 0, messages=[message], template_options={"date_string": "?" * 40_000}
        ).check_length(1000)


@pytest.mark.parametrize("rounds_up", [False, True])
def test_no_image_has_more_steps_than_the_bound(rounds_up: bool) -> None:
    source = Blob("image/png", b"")
    for steps in range(1, 61):
        for percent in range(1, 101):
            strength = percent / 100
            with suppress(BadInput):  # no steps are left
                run = image_to_image_steps(steps, strength, rounds_up=rounds_up)
                given = ImageInput(
                    "a", 8, 8, steps, 1.0, 1, "default", image=source, strength=strength
                )
                assert given.bound_work(WRITER).work >= 64 * run, (steps, strength)


def test_texts_to_embed_are_bounded_by_the_window_of_their_model() -> None:
    long = "?" * 60_000
    assert TextInput(long).bound_work(ENCODER) == WorkBound(256)
    assert TextInput(long, max_tokens=100).bound_work(ENCODER) == WorkBound(102)
    assert TextInput("?" * 10).bound_work(ENCODER) == WorkBound(12)
    assert TokensInput([5] * 7000).bound_work(ENCODER) == WorkBound(256)
    assert SimilarityInput(long, "cde").bound_work(ENCODER) == WorkBound(256 + 5)
    assert ENCODER.definition.step_bound(ENCODER) == WorkBound(256)


def test_vectors_are_bounded_by_bytes() -> None:
    assert TextInput("?" * 10).bound_work(WRITER) == WorkBound(12)
    assert TextInput("ﷺ").bound_work(WRITER) == WorkBound(33 + 2)
    assert TokensInput([5] * 7).bound_work(WRITER) == WorkBound(9)
    assert SimilarityInput("ab", "cde").bound_work(WRITER) == WorkBound(9)
