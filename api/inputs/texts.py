"""Builds the inputs of embedding jobs from texts or token lists, within the limits of the model."""

from __future__ import annotations

from shared.catalog import Model
from shared.errors import BadInput, InputTooLarge
from shared.tasks.embedding import TextInput, TokensInput, Truncate

TOKEN_BYTES = 4
"""How many bytes a token id counts against the input limit: a token is about four bytes of text."""


def text_inputs(
    given: str | list[str] | list[int] | list[list[int]],
    model: Model,
    *,
    truncate: Truncate = "none",
    tokenizer: str | None = None,
) -> list[TextInput | TokensInput]:
    """Returns the inputs in the order of the texts or token lists.

    Args:
        given: one text or token list, or several.
        model: the model that embeds them.
        truncate: which side of a too long text is cut.
        tokenizer: the model whose tokenizer made the token ids, according to the caller.

    Raises:
        BadInput: there are too many, or token ids without the name of the tokenizer of the model.
        InputTooLarge: one is too long for the model.
    """
    listed = [given] if isinstance(given, str) or isinstance(given[0], int) else given
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
