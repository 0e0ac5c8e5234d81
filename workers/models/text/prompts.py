"""From messages or a prompt to token ids, in the I/O process: imports no model library.

The chat template of a model folder is rendered as transformers renders it
(https://huggingface.co/docs/transformers/chat_templating): Jinja in a sandbox, with the same
filters and functions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from shared.catalog import Model
from shared.errors import BadInput, ContextLengthExceeded
from shared.tasks import Input
from shared.tasks.text import GenerationInput
from workers.models.base import PreparedPrompt
from workers.models.text.model_folder import (
    TOKENIZER,
    chat_template,
    check_text_folder,
    tokenizer_config,
)

_MARK = "\ue0f0{}\ue0f1"
"""Stands for a control token in a caller's text while the template is rendered."""


class PromptPreparer:
    """Makes PreparedPrompt of GenerationInput."""

    def __init__(self, entry: Model, folder: Path) -> None:
        check_text_folder(folder)
        self._context = entry.generation.context_tokens
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._control = [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]
        config = tokenizer_config(folder)
        self._tokens = {
            name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        }
        source = chat_template(folder)
        self._template = _environment().from_string(source) if source else None

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedPrompt | BadInput]:
        """One outcome per input, in order."""
        return [self._prepare(given) for given in inputs]

    def _prepare(self, given: Input) -> PreparedPrompt | BadInput:
        if not isinstance(given, GenerationInput):
            return BadInput("a text model takes messages or a prompt", field="input")
        field = "messages" if given.messages else "prompt"
        try:
            ids = self._ids_of(given)
        except TemplateError as error:
            return BadInput(f"{field}: the model's template: {error}", field=field)
        except BadInput as error:
            return error
        except UnicodeEncodeError:
            return BadInput(f"{field}: half of a surrogate pair is no character", field=field)
        if not ids:
            return BadInput(f"{field}: no tokens", field=field)
        if len(ids) >= self._context:
            return ContextLengthExceeded(
                f"{field}: {len(ids)} tokens; this model's maximum context length is "
                f"{self._context} tokens, with those that it writes",
                field=field,
            )
        max_tokens = min(given.max_tokens, self._context - len(ids))
        return PreparedPrompt(
            key="",
            length=len(ids) + max_tokens,
            ids=np.array(ids, "<u4").tobytes(),
            max_tokens=max_tokens,
            seed=given.seed,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            stop=given.stop,
            logprobs=given.logprobs,
            json_schema=given.json_schema,
            is_streamed=given.is_streamed,
        )

    def _ids_of(self, given: GenerationInput) -> list[int]:
        if given.messages:
            return self._ids_of_chat(given)
        if isinstance(given.prompt, str):
            found: list[int] = self._tokenizer.encode(given.prompt).ids
            return found
        if any(not 0 <= one < self._vocabulary for one in given.prompt):
            raise BadInput(
                f"prompt: token ids of this model are from 0 to {self._vocabulary - 1}",
                field="prompt",
            )
        return given.prompt

    def _ids_of_chat(self, given: GenerationInput) -> list[int]:
        """The ids of a rendered template.

        A control token in a caller's text stays text. Otherwise a text could end its own message
        and begin one of the system.
        """
        if self._template is None:
            raise BadInput(
                "messages: this model has no chat template; use prompt", field="messages"
            )
        marks: list[str] = []
        messages = [self._without_control(one, marks) for one in given.messages]
        tools = [self._without_control(one, marks) for one in given.tools] or None
        rendered = self._template.render(
            messages=messages, tools=tools, add_generation_prompt=True, **self._tokens
        )
        ids: list[int] = []
        for number, text in enumerate(marks):
            before, _, rendered = rendered.partition(_MARK.format(number))
            ids += self._tokenizer.encode(before, add_special_tokens=False).ids
            ids += self._as_text(text)
        ids += self._tokenizer.encode(rendered, add_special_tokens=False).ids
        return ids

    def _without_control(self, given: Any, marks: list[str]) -> Any:
        """The same value with marks in place of control tokens."""
        if isinstance(given, dict):
            return {name: self._without_control(one, marks) for name, one in given.items()}
        if isinstance(given, list):
            return [self._without_control(one, marks) for one in given]
        if not isinstance(given, str):
            return given
        while found := [(at, one) for one in self._control if (at := given.find(one)) >= 0]:
            at, token = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            given = given[:at] + _MARK.format(len(marks)) + given[at + len(token) :]
            marks.append(token)
        return given

    def _as_text(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = True
        try:
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = False
        return found


def _content(token: Any) -> str:
    """A token of tokenizer_config.json: a text, or an object with its text."""
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token or ""


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = _now
    return made


def _to_json(given: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(given, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(reason: str) -> None:
    raise TemplateError(reason)


def _now(form: str) -> str:
    return datetime.fromtimestamp(time.time()).strftime(form)
