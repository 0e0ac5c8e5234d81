"""The filter against a second implementation: a printed tree must evaluate the same as the tree."""

from contextlib import suppress
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.state.filter import parse_filter

KEYS = ("a", "b-c", "d_9", "NOT", "with space", "み", 'quo"te', "back\\slash", "new\nline")
VALUES = ("", "x", "xy", "xyz", "み", '"', "\\", "\x00\x7f")
BARE = frozenset({"a", "b-c", "d_9", "NOT"})

attribute_maps = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=4)


@dataclass(frozen=True)
class Expression:
    """A filter as text, and as the set of conditions from which that text was printed."""

    text: str
    truth: tuple[object, ...]

    def is_true(self, attributes: dict[str, str]) -> bool:
        return evaluate(self.truth, attributes)


def evaluate(truth: tuple[object, ...], attributes: dict[str, str]) -> bool:
    kind, *parts = truth
    if kind == "not":
        return not evaluate(parts[0], attributes)  # type: ignore[arg-type]  # the tree's shape follows its kind
    if kind == "and":
        return False not in [evaluate(part, attributes) for part in parts]  # type: ignore[arg-type]
    if kind == "or":
        return True in [evaluate(part, attributes) for part in parts]  # type: ignore[arg-type]
    key, value = str(parts[0]), str(parts[1])
    if key not in attributes:
        return kind == "!="
    actual = attributes[key]
    return {
        "has": True,
        "=": actual == value,
        "!=": actual != value,
        "prefix": actual[: len(value)] == value,
    }[str(kind)]


@st.composite
def literals(draw: st.DrawFn, text: str) -> str:
    """Print a string literal, with each character either plain or in one of its escaped forms."""
    printed = []
    for character in text:
        encoded = character.encode()
        forms = [
            f"\\U{ord(character):08x}",
            "".join(f"\\x{byte:02X}" for byte in encoded),
            "".join(f"\\{byte:03o}" for byte in encoded),
        ]
        forms += {'"': ['\\"'], "\\": ["\\\\"], "\n": ["\\n"]}.get(character, [character])
        printed.append(draw(st.sampled_from(forms)))
    return '"' + "".join(printed) + '"'


@st.composite
def conditions(draw: st.DrawFn) -> Expression:
    key, value = draw(st.sampled_from(KEYS)), draw(st.sampled_from(VALUES))
    key_text = key if key in BARE and draw(st.booleans()) else draw(literals(key))
    value_text = draw(literals(value))
    space = draw(st.sampled_from(["", " ", "\n\t "]))
    kind = draw(st.sampled_from(["has", "=", "!=", "prefix"]))
    text = {
        "has": f"attributes{space}:{space}{key_text}",
        "=": f"attributes.{key_text}{space}={space}{value_text}",
        "!=": f"attributes.{key_text}{space}!={space}{value_text}",
        "prefix": f"hasPrefix({space}attributes.{key_text}{space},{space}{value_text})",
    }[kind]
    return Expression(text, (kind, key, value))


def parenthesised(expression: Expression) -> str:
    return (
        expression.text
        if expression.truth[0] in ("has", "=", "!=", "prefix")
        else f"({expression.text})"
    )


@st.composite
def compounds(draw: st.DrawFn, parts: st.SearchStrategy[Expression]) -> Expression:
    kind = draw(st.sampled_from(["not", "and", "or"]))
    if kind == "not":
        part = draw(parts)
        return Expression(
            draw(st.sampled_from(["NOT ", "-"])) + parenthesised(part), ("not", part.truth)
        )
    operands = draw(st.lists(parts, min_size=2, max_size=3))
    text = f" {kind.upper()} ".join(
        # Negation binds more tightly than AND and OR, so it needs no parentheses there.
        operand.text
        if operand.truth[0] == "not" and draw(st.booleans())
        else parenthesised(operand)
        for operand in operands
    )
    return Expression(text, (kind, *(operand.truth for operand in operands)))


expressions = st.recursive(conditions(), compounds, max_leaves=5).filter(
    lambda expression: len(expression.text.encode()) <= 256
)


@settings(deadline=None)
@given(expressions, attribute_maps)
def test_printed_filter_evaluates_as_its_tree(
    expression: Expression, attributes: dict[str, str]
) -> None:
    tree = parse_filter(expression.text)
    assert tree is not None
    assert tree.matches(attributes) == expression.is_true(attributes)


@settings(deadline=None)
@given(expressions, attribute_maps)
def test_redundant_parentheses_change_nothing(
    expression: Expression, attributes: dict[str, str]
) -> None:
    text = f"(({expression.text}))"
    if len(text.encode()) <= 256:
        tree = parse_filter(text)
        assert tree is not None
        assert tree.matches(attributes) == expression.is_true(attributes)


@settings(deadline=None)
@given(expressions, st.data())
def test_mutated_filter_parses_or_is_refused(expression: Expression, data: st.DataObject) -> None:
    text = expression.text
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 3))
        piece = data.draw(
            st.sampled_from(
                ["", "(", ")", '"', "\\", "AND", " OR ", "-", ".", ":", "=", "é", "\x00"]
            )
        )
        text = text[:at] + piece + text[at + cut :]
    with suppress(InvalidArgument):
        tree = parse_filter(text)
        if tree is not None:
            tree.matches({})


@settings(deadline=None)
@given(st.text(max_size=80))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with suppress(InvalidArgument):
        parse_filter(text)
