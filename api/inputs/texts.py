"""From texts and token lists to the inputs of embedding jobs, within the model's limits; for all routes that embed."""

from __future__ import annotations

from shared.catalog import Model
from shared.errors import BadInput, InputTooLarge
from shared.tasks.embedding import TextInput, TokensInput, Truncate

TOKEN_BYTES = 4
"""What a token id counts against the limit on an input; a token stands for about four bytes of text."""


def text_inputs(
    given: str | list[str] | list[int] | list[list[int]],
    model: Model,
    *,
    truncate: Truncate = "none",
    tokenizer: str | None = None,
) -> list[TextInput | TokensInput]:
    """One text or token list, or several, in their order.

    Args:
        given: the texts or token lists.
        model: that is to embed them.
        truncate: what becomes of those that are longer than the model takes.
        tokenizer: whose token ids these are, as the caller says.

    Raises:
        BadInput: there are more than the model takes, or token ids that are not surely its own.
        InputTooLarge: one is longer than the model takes.
    """
    listed = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len(listed) > model.text.max_items:
        raise BadInput(f"input: {len(listed)} items; at most {model.text.max_items} are allowed", field="input")
    if tokenizer is not None or not isinstance(listed[0], str):
        _check_tokenizer(tokenizer, model)
    inputs: list[TextInput | TokensInput] = []
    for index, one in enumerate(listed):
        is_text = isinstance(one, str)
        size_bytes = len(one.encode()) if isinstance(one, str) else TOKEN_BYTES * len(one)
        if size_bytes > model.text.max_input_bytes:
            limit = model.text.max_input_bytes if is_text else model.text.max_input_bytes // TOKEN_BYTES
            unit = "bytes" if is_text else "tokens"
            raise InputTooLarge(f"input[{index}]: longer than {limit} {unit}", field="input")
        inputs.append(TextInput(one, truncate) if isinstance(one, str) else TokensInput(one, truncate))
    return inputs


def _check_tokenizer(tokenizer: str | None, model: Model) -> None:
    """Ids of another tokenizer are other words here: they would give a vector, and a wrong one."""
    if tokenizer is None:
        raise BadInput(
            "input: token ids mean nothing without their tokenizer. Send texts (LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False)); or, if these are ids of this model's own tokenizer, "
            f'send "tokenizer": "{model.name}" with them',
            field="input",
        )
    if tokenizer not in (model.name, *model.aliases):
        reason = f'{model.name} takes token ids of its own tokenizer only; send "{model.name}"'
        raise BadInput(f"tokenizer: {reason}", field="tokenizer")
