"""Predictions of embedding models: one text or several, and a vector for each."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.inputs.source_pictures import PictureCaller, SourcePictures
from api.inputs.texts import text_inputs
from api.schemas.openai import Body, Text
from api.tasks.base import ApiTask, Inputs
from shared.catalog import Model
from shared.errors import BadInput, InputTooLarge

MOST_TEXTS = 128
"""A prediction is one message, its answer another: both are to stay far below Pub/Sub's 10 MB."""
MOST_TEXT_BYTES = 1024 * 1024
_VECTOR = {"type": "array", "items": {"type": "number"}}


class TextsInput(Body):
    """The input of embedding models: exactly one of `text`, `texts` and `input`."""

    text: Text | None = Field(None, description="One text. The output is its vector.")
    texts: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Several texts. The output is a list of vectors."
    )
    input: Text | Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="One text or several."
    )
    truncate: Literal["end", "start"] | None = Field(
        None, description="Which side of a too long text is cut. Without it the prediction fails."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> TextsInput:
        if sum(one is not None for one in (self.text, self.texts, self.input)) != 1:
            raise ValueError("give exactly one of text, texts and input")
        return self

    @property
    def given(self) -> str | list[str]:
        """The text, or the texts."""
        given = self.text or self.texts or self.input
        assert given is not None, "checked when the body was read; this is a bug"
        return given


class EmbeddingApi(ApiTask):
    """The output is a vector, or a list of them."""

    input_schema = TextsInput
    output_schema: ClassVar = {"anyOf": [_VECTOR, {"type": "array", "items": _VECTOR}]}

    async def read(
        self, given: dict[str, Any], model: Model, caller: PictureCaller, pictures: SourcePictures
    ) -> Inputs:
        """One item for each text."""
        parsed = TextsInput.model_validate(given, strict=True)
        inputs = text_inputs(parsed.given, model, truncate=parsed.truncate or "none")
        check_texts([parsed.given] if isinstance(parsed.given, str) else parsed.given)
        return Inputs(inputs, given, not isinstance(parsed.given, str), is_repeatable=True)


def check_texts(texts: list[str]) -> None:
    """Lets texts pass that fit into one prediction.

    Raises:
        BadInput: there are too many.
        InputTooLarge: they are too long.
    """
    if len(texts) > MOST_TEXTS:
        raise BadInput(
            f"texts: {len(texts)} texts; at most {MOST_TEXTS} are allowed in a prediction",
            field="texts",
        )
    if sum(len(text.encode()) for text in texts) > MOST_TEXT_BYTES:
        raise InputTooLarge(f"texts: together longer than {MOST_TEXT_BYTES} bytes", field="texts")


TASK = EmbeddingApi()
