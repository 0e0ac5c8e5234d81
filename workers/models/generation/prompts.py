"""Converts conversations and prompts to token ids, in the I/O process.

A model folder's chat template is untrusted code, so it is limited and runs in a sandbox. Its
environment is the same as in transformers' apply_chat_template, without the 60 MB import.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from shared.errors import BadInput, ConfigurationError
from shared.models.catalog import Model
from shared.models.tasks import Input
from shared.models.tasks.text import RESPONSE_FORMAT, GenerationInput, PromptToCount, TokenCount
from workers.models.base import PreparedOutcome, PreparedPrompt
from workers.models.generation.schemas import NO_SCHEMA, GrammarSchema, read_schema
from workers.models.generation.vocabulary import Vocabulary

MAX_TEXT_CHARS = 4 * 1024 * 1024
"""Maximum characters in a rendered conversation, and in any text that a template creates along the
way.
"""
MAX_S = 2.0
"""Time limit for one conversation. Typical ones take less than a millisecond."""
_OPERATORS = frozenset({"+", "*", "**", "%"})

_IDS = np.dtype("<u4")
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_SCHEMAS_KEPT = 64


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template, as in chat_template.jinja. tokens: texts of the tokens that templates
            refer to, such as `bos_token`.

    Raises:
        ValueError: it is not a template.
    """

    def __init__(
        self, source: str, tokens: dict[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._environment = _Environment(clock)
        try:
            self._template: Template = self._environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is broken: {error}") from error
        self._tokens = tokens
        self.takes_tools = "tools" in find_undeclared_variables(self._environment.parse(source))
        """False if it omits tools, so that the model would not see them."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: dict[str, Any] | None = None,
        *,
        is_open: bool = False,
    ) -> str:
        """Returns the prompt for the assistant's next message.

        Args:
            options: other variables for the template. is_open: True if the assistant continues the
                last message.

        Raises:
            ValueError: the template rejects the messages, fails, or does too much work.
        """
        self._environment.restart()
        parts, length = [], 0
        try:
            variables = {
                **(options or {}),
                "messages": messages,
                "tools": tools or None,
                "add_generation_prompt": not is_open,
                **self._tokens,
            }
            for part in self._template.generate({"documents": None} | variables):
                length += len(part)
                self._environment.check(length)
                parts.append(part)
        except _Refused as error:
            raise ValueError(str(error)) from error
        except Exception as error:  # a template can raise any exception
            raise ValueError(f"the chat template failed: {error}") from error
        return "".join(parts)


class _Refused(TemplateError):
    """The template reported why it does not accept the messages."""


class _Generation(Extension):
    """The tag around text written by the assistant, which matters only for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Checks the time in each loop and call, and the length of each assembled text."""

    intercepted_binops = _OPERATORS

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self._clock = clock
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_refuse,
            strftime_now=lambda form: datetime.now(UTC).strftime(form),
            _tick=self._tick,
            _concat=self._concat,
        )
        self.restart()

    def restart(self) -> None:
        self._until_s = self._clock() + MAX_S

    def check(self, length: int) -> None:
        """Fails if a text is too long or the time limit has passed."""
        if length > MAX_TEXT_CHARS:
            raise SecurityError(f"it produces more than the maximum of {MAX_TEXT_CHARS} characters")
        if self._clock() > self._until_s:
            raise SecurityError(f"it takes more than the maximum of {MAX_S:g} s")

    def _tick(self) -> str:
        self.check(0)
        return ""

    def _concat(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluates an operator that could create a large text or number."""
        self.check(_product_length(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check(0)
        return super().call(__context, __obj, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_bound_time(source), *args, **kwargs)


def _product_length(operator: str, left: Any, right: Any) -> int:
    """Returns roughly how long the result may be."""
    sizes = [
        len(operand) if isinstance(operand, str | list | tuple) else 0 for operand in (left, right)
    ]
    numbers = [int(operand) for operand in (left, right) if isinstance(operand, int | float)]
    if operator == "+":
        return sum(sizes)
    if operator == "*" and any(sizes):
        return max(sizes) * max(numbers, default=1)
    if operator == "**" and len(numbers) == 2:
        return abs(numbers[0]).bit_length() * max(numbers[1], 0)
    if operator == "%" and isinstance(left, str):
        return MAX_TEXT_CHARS + 1  # a width in the format can produce any length
    return 0


class _Bounds(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = [self.visit(part) for part in node.nodes]
        return _call("_concat", parts, node.lineno)


def _bound_time(tree: nodes.Template) -> nodes.Template:
    """Adds checks of the time in each loop and macro, and of assembled texts."""
    tree = _Bounds().visit(tree)
    kinds: tuple[type[Any], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
    for block in tree.find_all(kinds):
        tick = nodes.Output([_call("_tick", [], block.lineno)]).set_lineno(block.lineno)
        block.body.insert(0, tick)
    return tree


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    called = nodes.Name(name, "load", lineno=line)
    return nodes.Call(called, arguments, [], None, None, lineno=line)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class PromptPreparer:
    """Prepares GenerationInputs.

    A caller's text never becomes a control token. `<|im_end|>` in a message is read as plain
    characters.

    Raises:
        ConfigurationError: the folder is not a text model.
    """

    def __init__(self, entry: Model, folder: Path) -> None:
        self._context_tokens = entry.generation.context_tokens
        self._engine = entry.engine
        self._vocabulary = Vocabulary(folder)
        self._template = _read_template(self._vocabulary)
        self._read: dict[tuple[str, bool], GrammarSchema | str] = {}

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedOutcome]:
        """One outcome per input, in order."""
        outcomes: list[PreparedOutcome] = []
        for value in inputs:
            try:
                outcomes.append(
                    self._count(value) if isinstance(value, PromptToCount) else self._prepare(value)
                )
            except BadInput as error:
                outcomes.append(error)
        return outcomes

    def _prepare(self, value: Input) -> PreparedPrompt:
        if not isinstance(value, GenerationInput):
            raise BadInput(
                "the input of a text model must be messages or a prompt", field="messages"
            )
        ids = self._read_messages(value) if value.messages else self._read_prompt(value.prompt)
        if not ids:
            raise BadInput("the prompt must have at least one token", field=value.field)
        max_tokens = value.room(len(ids), self._context_tokens)
        schema = self._read_schema(value)
        self._check_options(value)
        return PreparedPrompt(
            key="",
            length=len(ids) + max_tokens,
            ids=np.array(ids, _IDS).tobytes(),
            max_tokens=max_tokens,
            seed=value.seed,
            temperature=value.temperature,
            top_p=value.top_p,
            top_k=value.top_k,
            frequency_penalty=value.frequency_penalty,
            presence_penalty=value.presence_penalty,
            min_p=value.min_p,
            repetition_penalty=value.repetition_penalty,
            logit_bias=value.logit_bias,
            is_echoed=value.is_echoed,
            stop=value.stop,
            logprobs=value.logprobs,
            json_schema=schema.followed,
            checked_schema=schema.checked,
            schema_field=value.schema_field,
            is_streamed=value.is_streamed,
        )

    def _check_options(self, value: GenerationInput) -> None:
        if value.json_schema and value.messages and value.messages[-1].get("role") == "assistant":
            raise BadInput(
                f"{value.schema_field}: a prefilled assistant message can't be continued as JSON "
                "that follows a schema; end with a user message",
                field=value.schema_field,
            )
        self._check_vocabulary(value.logit_bias, "logit_bias")
        if value.is_echoed and value.logprobs >= 0 and self._engine == "llama.cpp":
            raise BadInput(
                f"echo: engine {self._engine} of this model does not return log probabilities of "
                "prompts; leave out echo or logprobs",
                field="echo",
            )

    def _count(self, value: PromptToCount) -> TokenCount:
        ids = self._read_messages(value) if value.messages else self._read_prompt(value.prompt)
        return TokenCount(len(ids), np.array(ids, _IDS).tobytes() if value.wants_ids else b"")

    def _read_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encode_plain(prompt, "prompt", special=True)
        self._check_vocabulary(prompt, "prompt")
        return prompt

    def _check_vocabulary(self, ids: Iterable[int], field: str) -> None:
        last = self._vocabulary.size - 1
        for position, token in enumerate(ids):
            if not 0 <= token <= last:
                reason = f"token ID {token}, at position {position}, is not in the vocabulary"
                raise BadInput(f"{field}: {reason}, which ends at {last}", field=field)

    def _read_messages(self, value: GenerationInput | PromptToCount) -> list[int]:
        if self._template is None:
            raise BadInput(
                "this model does not have a chat template; send a prompt", field="messages"
            )
        if value.tools and not self._template.takes_tools:
            raise BadInput(
                "tools: this model's chat template does not support tools; leave them out, or "
                "use a model that was trained to use tools",
                field="tools",
            )
        marks = _Marks(list(self._vocabulary.special.values()))
        try:
            options = value.template_options if isinstance(value, GenerationInput) else {}
            arguments = [
                marks.hide(argument) for argument in (value.messages, value.tools, options)
            ]
            text = self._render(self._template, marks, *arguments)
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

    def _render(
        self,
        template: ChatTemplate,
        marks: _Marks,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
    ) -> str:
        """Renders a conversation. If its last message is the assistant's, the text ends within it.

        Raises:
            ValueError: the template rejects the messages, or can't leave the last one open.
        """
        *before, last = messages
        if last.get("role") != "assistant":
            return template.render(messages, tools, options)
        if last.get("tool_calls"):
            raise ValueError(
                "messages: the last message calls tools; send the results of its calls after it"
            )
        opened = last | {"content": f"{last.get('content') or ''}{marks.end}"}
        text = template.render([*before, opened], tools, options, is_open=True)
        start, *others = text.split(marks.end)
        if len(others) != 1:
            raise ValueError(
                "messages: this model's chat template can't continue an assistant message; end "
                "with a user message"
            )
        return start

    def _encode(self, text: str, field: str) -> list[int]:
        """Encodes a template's text, including its control tokens."""
        try:
            ids: list[int] = self._vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError, ValueError) as error:
            raise BadInput(f"the text can't be tokenized: {error}", field=field) from error
        return ids

    def _encode_plain(self, text: str, field: str, *, special: bool) -> list[int]:
        """Encodes text without control tokens, except tokens that the model adds around it."""
        try:
            ids: list[int] = self._vocabulary.plain_tokenizer.encode(
                text, add_special_tokens=special
            ).ids
        except (TypeError, UnicodeError, ValueError) as error:  # lone surrogates
            raise BadInput(f"the text can't be tokenized: {error}", field=field) from error
        return ids

    def _read_schema(self, value: GenerationInput) -> GrammarSchema:
        """Raises BadInput for a schema that can't be used. Caches results, because this is slow."""
        schema = value.json_schema
        if not schema:
            return NO_SCHEMA
        is_call = value.schema_field != RESPONSE_FORMAT
        if (schema, is_call) not in self._read:
            if len(self._read) >= _SCHEMAS_KEPT:
                self._read.pop(next(iter(self._read)))
            try:
                self._read[schema, is_call] = read_schema(schema, self._vocabulary, is_call=is_call)
            except ValueError as error:
                self._read[schema, is_call] = str(error)
        grammar = self._read[schema, is_call]
        if isinstance(grammar, str):
            raise BadInput(f"the JSON schema can't be used: {grammar}", field=value.schema_field)
        return grammar


class _Marks:
    """Hides control tokens' texts in messages from the template's tokenizer."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = sorted(texts, key=len, reverse=True)
        self._nonce = secrets.token_hex(8)
        """Prevents callers from forging these marks."""
        self.end = f"\ue000{self._nonce}\ue001"
        """Marks the end of a message that is continued."""

    def hide(self, value: Any) -> Any:
        """Returns the same messages, with marks in place of text that spells control tokens."""
        if isinstance(value, str):
            for number, text in enumerate(self._texts):
                if text in value:
                    value = value.replace(text, f"\ue000{self._nonce}:{number}\ue001")
            return value
        if isinstance(value, list):
            return [self.hide(element) for element in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(element) for key, element in value.items()}
        return value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Returns the parts of a rendered text, each with whether it was hidden."""
        first, *others = text.split(f"\ue000{self._nonce}:")
        parts = [(first, False)]
        for other in others:
            number, _, rest = other.partition("\ue001")
            parts += [(self._texts[int(number)], True), (rest, False)]
        return [part for part in parts if part[0]]


def _read_template(vocabulary: Vocabulary) -> ChatTemplate | None:
    """Returns the template from chat_template.jinja, or else from tokenizer_config.json, if any."""
    config = vocabulary.read("tokenizer_config.json")
    path = vocabulary.folder / "chat_template.jinja"
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {template["name"]: template["template"] for template in source}.get("default")
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
