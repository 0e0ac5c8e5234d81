"""Conversations and prompts to token ids, in the I/O process."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.catalog import Model
from shared.errors import BadInput, ConfigurationError, ContextLengthExceeded
from shared.tasks import Input
from shared.tasks.text import GenerationInput
from workers.models.base import PreparedItem, PreparedPrompt
from workers.models.text.chat_template import ChatTemplate
from workers.models.text.schema_size import check_size
from workers.models.text.vocabulary import Vocabulary

_IDS = np.dtype("<u4")
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_SCHEMAS_KEPT = 64


class PromptPreparer:
    """Prepares GenerationInputs.

    A text of a caller never becomes a control token: `<|im_end|>` within a message is read as
    the characters that it has.

    Args:
        entry: the catalog's.
        folder: the model's files, as on the Hugging Face hub.

    Raises:
        ConfigurationError: the folder is not a text model.
    """

    def __init__(self, entry: Model, folder: Path) -> None:
        self._context_tokens = entry.generation.context_tokens
        self._vocabulary = Vocabulary(folder)
        self._template = _read_template(self._vocabulary)
        self._checked: dict[str, str] = {}

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedItem | BadInput]:
        """One outcome per input, in order."""
        outcomes: list[PreparedItem | BadInput] = []
        for value in inputs:
            try:
                outcomes.append(self._prepare(value))
            except BadInput as error:
                outcomes.append(error)
        return outcomes

    def _prepare(self, value: Input) -> PreparedPrompt:
        if not isinstance(value, GenerationInput):
            raise BadInput("a text model takes messages or a prompt", field="messages")
        field = "messages" if value.messages else "prompt"
        ids = self._read_messages(value) if value.messages else self._read_prompt(value.prompt)
        if not ids:
            raise BadInput("the prompt has no tokens", field=field)
        length = len(ids) + value.max_tokens
        if length > self._context_tokens:
            raise _too_long(len(ids), value.max_tokens, self._context_tokens, field)
        self._check_schema(value.json_schema)
        return PreparedPrompt(
            key="",
            length=length,
            ids=np.array(ids, _IDS).tobytes(),
            max_tokens=value.max_tokens,
            seed=value.seed,
            temperature=value.temperature,
            top_p=value.top_p,
            top_k=value.top_k,
            frequency_penalty=value.frequency_penalty,
            presence_penalty=value.presence_penalty,
            stop=value.stop,
            logprobs=value.logprobs,
            json_schema=value.json_schema,
            is_streamed=value.is_streamed,
        )

    def _read_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encode_plain(prompt, "prompt", special=True)
        last = self._vocabulary.size - 1
        for position, token in enumerate(prompt):
            if not 0 <= token <= last:
                reason = f"token id {token}, at position {position}, is not in the vocabulary"
                raise BadInput(f"{reason}, which ends at {last}", field="prompt")
        return prompt

    def _read_messages(self, value: GenerationInput) -> list[int]:
        if self._template is None:
            raise BadInput("this model has no chat template; send a prompt", field="messages")
        marks = _Marks(list(self._vocabulary.special.values()))
        try:
            text = self._template.render(marks.hide(value.messages), marks.hide(value.tools))
        except RecursionError as error:
            raise BadInput("the messages are nested too deeply", field="messages") from error
        except ValueError as error:
            raise BadInput(str(error), field="messages") from error
        ids: list[int] = []
        for part, is_hidden in marks.split(text):
            if is_hidden:
                ids += self._encode_plain(part, "messages", special=False)
            else:
                ids += self._encode(part, "messages")
        return ids

    def _encode(self, text: str, field: str) -> list[int]:
        """The text of a template, whose control tokens count."""
        try:
            found: list[int] = self._vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError, ValueError) as error:
            raise BadInput(f"the text can't be tokenized: {error}", field=field) from error
        return found

    def _encode_plain(self, text: str, field: str, *, special: bool) -> list[int]:
        """A text without control tokens, but for those that the model puts around each text."""
        try:
            found: list[int] = self._vocabulary.plain_tokenizer.encode(
                text, add_special_tokens=special
            ).ids
        except (TypeError, UnicodeError, ValueError) as error:  # lone surrogates
            raise BadInput(f"the text can't be tokenized: {error}", field=field) from error
        return found

    def _check_schema(self, schema: str) -> None:
        """Raises BadInput for a schema that can't be used. Answers are kept, because it is slow."""
        if not schema:
            return
        if schema not in self._checked:
            try:
                check_size(schema)
                self._vocabulary.matcher(schema)
                reason = ""
            except ValueError as error:
                reason = str(error)
            if len(self._checked) >= _SCHEMAS_KEPT:
                self._checked.pop(next(iter(self._checked)))
            self._checked[schema] = reason
        if reason := self._checked[schema]:
            raise BadInput(f"the JSON schema can't be used: {reason}", field="response_format")


class _Marks:
    """Hides the texts of control tokens in messages from the tokenizer of the template."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = sorted(texts, key=len, reverse=True)
        self._nonce = secrets.token_hex(8)
        """Nobody can write marks of their own."""

    def hide(self, value: Any) -> Any:
        """The same messages with marks in place of texts of control tokens."""
        if isinstance(value, str):
            for number, text in enumerate(self._texts):
                if text in value:
                    value = value.replace(text, f"\ue000{self._nonce}:{number}\ue001")
            return value
        if isinstance(value, list):
            return [self.hide(one) for one in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(one) for key, one in value.items()}
        return value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a rendered text, and of each whether it was hidden."""
        first, *others = text.split(f"\ue000{self._nonce}:")
        parts = [(first, False)]
        for other in others:
            number, _, rest = other.partition("\ue001")
            parts += [(self._texts[int(number)], True), (rest, False)]
        return [part for part in parts if part[0]]


def _too_long(prompt: int, written: int, limit: int, field: str) -> ContextLengthExceeded:
    """Starts like OpenAI's message, because clients and proxies look for it."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + written} tokens ({prompt} in the {field}, {written} in the completion). "
        f"Please reduce the length of the {field} or completion.",
        field=field,
    )


def _read_template(vocabulary: Vocabulary) -> ChatTemplate | None:
    """The template of chat_template.jinja, or else of tokenizer_config.json, if there is one."""
    config = vocabulary.read("tokenizer_config.json")
    path = vocabulary.folder / "chat_template.jinja"
    source = config.get("chat_template")
    if isinstance(source, list):  # several, with names
        source = {one["name"]: one["template"] for one in source}.get("default")
    try:
        if path.is_file():
            source = path.read_text(encoding="utf-8")
        if source is None:
            return None
        tokens = {name: config.get(name) for name in _TOKEN_NAMES}
        texts = {
            name: str(token["content"] if isinstance(token, dict) else token)
            for name, token in tokens.items()
            if token is not None
        }
        return ChatTemplate(str(source), texts)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{path}: {error}", field="source") from error
