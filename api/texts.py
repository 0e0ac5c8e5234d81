"""From texts and token lists to the inputs of embedding jobs, within the model's limits; for all routes that embed."""

from __future__ import annotations

from shared.catalogue import Model
from shared.errors import BadInput, InputTooLarge
from shared.messages import TextInput, TokensInput

TOKEN_BYTES = 4
"""What a token id counts against the limit on an input; a token stands for about four bytes of text."""


def text_inputs(given: str | list[str] | list[int] | list[list[int]], model: Model) -> list[TextInput | TokensInput]:
    """One text or token list, or several, in their order.

    Raises:
        BadInput: there are more than the model takes.
        InputTooLarge: one is longer than the model takes.
    """
    listed = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len(listed) > model.text.max_items:
        raise BadInput(f"input: {len(listed)} items, and {model.text.max_items} is the most", field="input")
    inputs: list[TextInput | TokensInput] = []
    for index, one in enumerate(listed):
        is_text = isinstance(one, str)
        size_bytes = len(one.encode()) if isinstance(one, str) else TOKEN_BYTES * len(one)
        if size_bytes > model.text.max_input_bytes:
            limit = model.text.max_input_bytes if is_text else model.text.max_input_bytes // TOKEN_BYTES
            unit = "bytes" if is_text else "tokens"
            raise InputTooLarge(f"input[{index}]: longer than {limit} {unit}", field="input")
        inputs.append(TextInput(one) if isinstance(one, str) else TokensInput(one))
    return inputs
