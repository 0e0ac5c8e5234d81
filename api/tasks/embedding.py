"""Predictions of embedding models: one text or several, and a vector for each.

Also builds the inputs of embedding jobs from texts or token lists, within the model's limits.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from api.bodies import Body, Text
from api.chat_bodies import text_or_list
from api.inputs.source_images import ImageCaller, SourceImages
from api.tasks.base import ApiTask, Inputs
from shared.catalog import Model
from shared.errors import BadInput, InputTooLarge
from shared.tasks.embedding import TextInput, TokensInput, Truncate

TOKEN_BYTES = 4
"""Bytes that a token id counts toward the input limit: a token is about four bytes of text."""


def text_inputs(
    texts_or_tokens: str | list[str] | list[int] | list[list[int]],
    model: Model,
    *,
    truncate: Truncate = "none",
    tokenizer: str | None = None,
) -> list[TextInput | TokensInput]:
    """Returns the inputs in the order of the texts or token lists.

    Args:
        texts_or_tokens: one text or token list, or several.
        model: the model that embeds them.
        truncate: the side of a too long text that is cut.
        tokenizer: the model whose tokenizer produced the token ids, according to the caller.

    Raises:
        BadInput: there are too many, or token ids without the name of the tokenizer of the model.
        InputTooLarge: one is too long for the model.
    """
    listed = (
        [texts_or_tokens]
        if isinstance(texts_or_tokens, str) or isinstance(texts_or_tokens[0], int)
        else texts_or_tokens
    )
    if len(listed) > model.text.max_items:
        raise BadInput(
            f"input: {len(listed)} items; at most {model.text.max_items} are allowed", field="input"
        )
    if tokenizer is not None or not isinstance(listed[0], str):
        _check_tokenizer(tokenizer, model)
    inputs: list[TextInput | TokensInput] = []
    for index, one in enumerate(listed):
        is_text = isinstance(one, str)
        size_bytes = len(one.encode()) if isinstance(one, str) else TOKEN_BYTES * len(one)
        if size_bytes > model.text.max_input_bytes:
            limit = (
                model.text.max_input_bytes if is_text else model.text.max_input_bytes // TOKEN_BYTES
            )
            unit = "bytes" if is_text else "tokens"
            raise InputTooLarge(f"input[{index}]: longer than {limit} {unit}", field="input")
        inputs.append(
            TextInput(one, truncate) if isinstance(one, str) else TokensInput(one, truncate)
        )
    return inputs


def _check_tokenizer(tokenizer: str | None, model: Model) -> None:
    """Refuses ids of other tokenizers: they mean other words here, so the vector would be wrong."""
    if tokenizer is None:
        raise BadInput(
            "input: token ids mean nothing without their tokenizer. Send texts (LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False)); "
            "or, if these are ids of this model's own tokenizer, "
            f'send "tokenizer": "{model.name}" with them',
            field="input",
        )
    if tokenizer not in (model.name, *model.aliases):
        reason = f'{model.name} takes token ids of its own tokenizer only; send "{model.name}"'
        raise BadInput(f"tokenizer: {reason}", field="tokenizer")


MAX_TEXTS = 128
"""A prediction is one message, its answer another: both are to stay far below Pub/Sub's 10 MB."""
MAX_TEXT_BYTES = 1024 * 1024
_VECTOR = {"type": "array", "items": {"type": "number"}}


TextOrTexts = Annotated[
    Annotated[Text, Tag("text:")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("list:")],
    Discriminator(text_or_list),
]


class TextsInput(Body):
    """The input of embedding models: exactly one of `text`, `texts` and `input`."""

    text: Text | None = Field(None, description="One text. The output is its vector.")
    texts: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Several texts. The output is a list of vectors."
    )
    input: TextOrTexts | None = Field(None, description="One text or several.")
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
        value = self.text or self.texts or self.input
        assert value is not None, "checked when the body was read; this is a bug"
        return value


class EmbeddingApi(ApiTask):
    """The output is a vector, or a list of them."""

    input_schema = TextsInput
    output_schema: ClassVar = {"anyOf": [_VECTOR, {"type": "array", "items": _VECTOR}]}

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one item for each text."""
        parsed = TextsInput.model_validate(raw_input, strict=True)
        inputs = text_inputs(parsed.given, model, truncate=parsed.truncate or "none")
        check_texts([parsed.given] if isinstance(parsed.given, str) else parsed.given)
        return Inputs(inputs, raw_input, not isinstance(parsed.given, str), is_repeatable=True)


def check_texts(texts: list[str]) -> None:
    """Lets texts pass that fit into one prediction.

    Raises:
        BadInput: there are too many.
        InputTooLarge: they are too long.
    """
    if len(texts) > MAX_TEXTS:
        raise BadInput(
            f"texts: {len(texts)} texts; at most {MAX_TEXTS} are allowed in a prediction",
            field="texts",
        )
    if sum(len(text.encode()) for text in texts) > MAX_TEXT_BYTES:
        raise InputTooLarge(f"texts: together longer than {MAX_TEXT_BYTES} bytes", field="texts")


TASK = EmbeddingApi()
