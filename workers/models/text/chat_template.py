"""Renders the chat template of a model folder: code by strangers, so bounded and in a sandbox.

The environment is that of transformers' apply_chat_template, without its import of 60 MB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

LONGEST_TEXT = 4 * 1024 * 1024
"""Characters of a rendered conversation, and of any text that a template makes on its way."""
LONGEST_S = 2.0
"""Seconds for one conversation. Usual ones take less than a millisecond."""
_OPERATORS = frozenset({"+", "*", "**", "%"})


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template, as in chat_template.jinja.
        tokens: texts of tokens that templates name, such as `bos_token`.
        clock: gives seconds.

    Raises:
        ValueError: it is no template.
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

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The prompt for the next message of the assistant.

        Raises:
            ValueError: the template refuses the messages, fails, or does too much.
        """
        self._environment.restart()
        parts, length = [], 0
        try:
            for part in self._template.generate(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            ):
                length += len(part)
                self._environment.check(length)
                parts.append(part)
        except _Refused as error:
            raise ValueError(str(error)) from error
        except Exception as error:  # a template can raise whatever Python raises
            raise ValueError(f"the chat template failed: {error}") from error
        return "".join(parts)


class _Refused(TemplateError):
    """The template said why it does not take the messages."""


class _Generation(Extension):
    """The tag around what the assistant said, which matters in training only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Checks the time in each loop and call, and the length of each text that is put together."""

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
        """Begins a conversation."""
        self._until_s = self._clock() + LONGEST_S

    def check(self, length: int) -> None:
        """Fails if a text is too long, or the time is over."""
        if length > LONGEST_TEXT:
            raise SecurityError(f"it makes more than {LONGEST_TEXT} characters")
        if self._clock() > self._until_s:
            raise SecurityError(f"it takes more than {LONGEST_S:g} s")

    def _tick(self) -> str:
        self.check(0)
        return ""

    def _concat(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator that could make a large text or number."""
        self.check(_product_length(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check(0)
        return super().call(__context, __obj, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_bounded(source), *args, **kwargs)


def _product_length(operator: str, left: Any, right: Any) -> int:
    """How long the result may be, roughly."""
    sizes = [len(one) if isinstance(one, str | list | tuple) else 0 for one in (left, right)]
    numbers = [int(one) for one in (left, right) if isinstance(one, int | float)]
    if operator == "+":
        return sum(sizes)
    if operator == "*" and any(sizes):
        return max(sizes) * max(numbers, default=1)
    if operator == "**" and len(numbers) == 2:
        return abs(numbers[0]).bit_length() * max(numbers[1], 0)
    if operator == "%" and isinstance(left, str):
        return LONGEST_TEXT + 1  # a width in the format makes any length
    return 0


class _Bounds(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = [self.visit(part) for part in node.nodes]
        return _call("_concat", parts, node.lineno)


def _bounded(tree: nodes.Template) -> nodes.Template:
    """The template with a check of the time in each loop and macro, and of texts put together."""
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
