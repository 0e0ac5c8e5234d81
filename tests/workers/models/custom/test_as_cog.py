"""Inputs and outputs compared with Cog's own server, by running each case in both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ModelFailed
from shared.models.tasks.custom import CustomResult
from tests.workers.models.custom.classes import (
    compute,
    entry_of,
    output_of,
    prepared,
    write_class,
)
from tests.workers.models.custom.cog_server import CogServer, serve_by_cog
from tests.workers.models.custom.started import StartedClass
from workers.models.custom.checking import inspect_folder

pytestmark = pytest.mark.slow(about_s=10)

Both = tuple[StartedClass, CogServer]


def serve(folder: Path, body: str) -> Iterator[Both]:
    """Serves a class through a worker's model and through Cog."""
    write_class(folder, body)
    with (
        StartedClass(entry_of(folder), folder) as model,
        serve_by_cog(folder, inspect_folder(folder).interface) as server,
    ):
        yield model, server


RETURNS = """
import collections, dataclasses, datetime, decimal, enum, json
import numpy, pydantic

class Inner(BaseModel):
    word: str

class Outer(BaseModel):
    inner: Inner
    inners: List[Inner]

class Checked(pydantic.BaseModel):
    rate: float
    child: "Optional[Checked]" = None

    @pydantic.computed_field
    @property
    def double(self) -> float:
        return 2 * self.rate

@dataclasses.dataclass
class Point:
    x: int
    of: list

class Color(enum.Enum):
    RED = "red"

class Size(int, enum.Enum):
    SMALL = 1

def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value

VALUES = {
    "object for a text": lambda: {"a": 1, "b": None},
    "integer for a text": lambda: 3,
    "boolean": lambda: True,
    "float without a fraction": lambda: 3.0,
    "tuple": lambda: (1, "a", None),
    "set": lambda: {3},
    "frozen set": lambda: frozenset(["a"]),
    "array": lambda: numpy.arange(6).reshape(2, 3),
    "array of halves": lambda: numpy.array([0.5, 1.5], dtype=numpy.float32),
    "numbers of numpy": lambda: [numpy.int64(3), numpy.float32(0.5)],
    "None in a list": lambda: ["a", None],
    "nothing": lambda: None,
    "models in a model": lambda: Outer(Inner("a"), [Inner("b")]),
    "list of models": lambda: [Inner("a"), Inner("b")],
    "object for a model": lambda: {"word": "a", "more": 1},
    "model of pydantic": lambda: Checked(rate=0.5, child=Checked(rate=1)),
    "dataclass": lambda: Point(1, [Point(2, [])]),
    "enumeration": lambda: {"color": Color.RED},
    "keys that are no texts": lambda: {1: "a", 1.5: "b", True: "c", None: "d"},
    "keys that are members": lambda: {Size.SMALL: "a"},
    "time": lambda: [datetime.datetime(2026, 1, 2, 3, 4, 5)],
    "generator in an object": lambda: {"all": (one for one in [1, 2])},
    "ordered object": lambda: collections.OrderedDict(b=1, a=2),
    "matrix": lambda: [[0.5, 1.0], [], [2.0]],
    "text": lambda: "gr\\u00fcn \\u2603",
    "nested": lambda: deep(100),
    "instance without fields": lambda: object(),
    "not a number": lambda: [0.5, float("nan")],
    "infinite": lambda: {"rate": float("inf")},
    "half of a pair": lambda: {"text": "\\ud83d"},
    "bytes": lambda: b"bytes",
    "complex number": lambda: 1j,
    "key that is a tuple": lambda: {(1, 2): "a"},
    "nested too deeply": lambda: deep(200),
    "contains itself": lambda: (lambda one: one.append(one) or one)([]),
}

class Predictor(BasePredictor):
    def predict(self, name: str) -> {output}:
        return VALUES[name]()
"""
PASSED = (
    "object for a text",
    "integer for a text",
    "boolean",
    "float without a fraction",
    "tuple",
    "set",
    "frozen set",
    "array",
    "array of halves",
    "numbers of numpy",
    "None in a list",
    "nothing",
    "models in a model",
    "list of models",
    "object for a model",
    "model of pydantic",
    "dataclass",
    "enumeration",
    "keys that are no texts",
    "keys that are members",
    "time",
    "generator in an object",
    "ordered object",
    "matrix",
    "text",
    "nested",
)
REFUSED = {
    "instance without fields": "output: a value of type object can't be sent as JSON",
    "not a number": "output[1]: NaN",
    "infinite": "output.rate: NaN",
    "half of a pair": "output.text: lone surrogate",
    "bytes": "output: a value of type bytes can't be sent as JSON",
    "complex number": "output: a value of type complex can't be sent as JSON",
    "key that is a tuple": "output: a value of type tuple can't be a field name",
    "nested too deeply": "must not be nested more than",
    "contains itself": "must not be nested more than",
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A class that declares a text output but returns anything."""
    yield from serve(tmp_path_factory.mktemp("returns"), RETURNS.replace("{output}", "str"))


@pytest.mark.parametrize("name", PASSED)
def test_outputs_pass_whatever_the_class_declares(both: Both, name: str) -> None:
    model, server = both
    (result,) = compute(model, {"name": name}).results.values()
    assert isinstance(result, CustomResult), result
    theirs = server.predict({"name": name})
    assert (result.output, theirs.error) == (theirs.output, "")


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_json_cannot_carry_fail_with_their_place(both: Both, name: str) -> None:
    model, server = both
    (result,) = compute(model, {"name": name}).results.values()
    assert isinstance(result, ModelFailed)
    assert REFUSED[name] in result.message
    assert server.predict({"name": name}).error


STREAMS = """
PIECES = {
    "several kinds": ["a", None, {"a": [1]}, 2, [None]],
    "nothing": [],
    "one": ["a"],
}
RETURNED = {
    "a list": [1, None],
    "a tuple": ("a",),
    "a text": "several words",
    "an object": {"a": 1},
    "None": None,
}

class Predictor(BasePredictor):
    def predict(self, name: str) -> Iterator[str]:
        return (one for one in PIECES[name]) if name in PIECES else RETURNED[name]
"""


@pytest.fixture(scope="module")
def both_streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A class that declares an iterator of texts but returns or yields anything."""
    yield from serve(tmp_path_factory.mktemp("streams"), STREAMS)


@pytest.mark.parametrize("name", ["several kinds", "nothing", "one", "a list", "a tuple"])
def test_streamed_outputs_have_each_piece(both_streams: Both, name: str) -> None:
    model, server = both_streams
    (result,) = compute(model, {"name": name}).results.values()
    assert isinstance(result, CustomResult), result
    assert result.output == server.predict({"name": name}).output
    assert len(result.text.splitlines()) == len(result.output)


@pytest.mark.parametrize("name", ["a text", "an object"])
def test_a_single_value_is_one_piece_of_a_declared_stream(both_streams: Both, name: str) -> None:
    model, server = both_streams
    (result,) = compute(model, {"name": name}).results.values()
    assert isinstance(result, CustomResult), result
    assert result.output == server.predict({"name": name}).output


TAKES = """
class Predictor(BasePredictor):
    def predict(
        self,
        either: str | float,
        *,
        keyword: int,
        credential: Secret = Input(default=None, description="None: the service has its own."),
        maybe: Optional[str] = Input(default=None),
        several: Union[List[int], str, None] = None,
        plain: str = "plain",
        **more: Any,
    ) -> dict:
        secret = None if credential is None else credential.get_secret_value()
        context = current_scope().context
        values = {"either": either, "keyword": keyword, "secret": secret, "maybe": maybe}
        return {**values, "several": several, "plain": plain, "context": context, "more": more}
"""


@pytest.fixture(scope="module")
def both_inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A class with unusual kinds of inputs."""
    yield from serve(tmp_path_factory.mktemp("takes"), TAKES)


@pytest.mark.parametrize(
    "given",
    [
        {"either": "a", "keyword": 1},
        {"either": 2.5, "keyword": 1},
        {"either": 3, "keyword": 1},
        {"either": "3", "keyword": 1},
        {"either": "a", "keyword": 1, "credential": "own", "maybe": "b", "several": [1]},
        {"either": "a", "keyword": 1, "several": "1", "plain": ""},
    ],
)
def test_unusual_inputs_are_passed_on(both_inputs: Both, given: dict[str, Any]) -> None:
    model, server = both_inputs
    (result,) = compute(model, given).results.values()
    assert isinstance(result, CustomResult), result
    assert result.output == server.predict(given).output


PLAIN = """
import enum

class Mode(enum.Enum):
    ONE = "one"
    TWO = "two"

class Predictor(BasePredictor):
    def predict(
        self,
        speed: Literal["fast", "slow"],
        ratio: float,
        ratios: List[float] = [1],
        count: int | float = 1,
        share: Union[float, str] = 1,
        scale: float = Input(default=1, ge=0, le=2),
        level: Literal[1, 2] = Input(default=2, description="how many"),
        either: Literal["auto", 1] = "auto",
        both: Union[Literal["auto"], Literal[1]] = 1,
        open: Union[Literal["auto"], int] = 3,
        maybe: Optional[Literal["a", "b"]] = None,
        only: Literal["a", None] = None,
        several: List[Literal["a", "b"]] = ["a"],
        mode: Mode = "two",
        seed: int = Input(default=None, ge=0),
        word: str = None,
        words: List[str] = Input(None),
        picked: str = Input(default=None, choices=["a", "b"]),
        file: Path = Input(default=None),
    ):
        return {name: repr(value) for name, value in locals().items() if name != "self"}
"""


@pytest.fixture(scope="module")
def both_plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A class with plain inputs and no return type."""
    yield from serve(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"ratio": 2.0, "ratios": [2, 0.5], "count": 2, "share": 2, "scale": 2, "open": 4},
        {"ratio": 0.5, "ratios": [], "count": 2.5, "share": "2", "scale": 0.5, "open": "auto"},
        {"level": 1, "either": 1, "both": "auto", "maybe": "b", "only": "a", "several": ["b"]},
        {"mode": "one", "seed": 3, "word": "w", "words": ["w"], "picked": "a"},
    ],
)
def test_plain_values_and_defaults_reach_the_class_unchanged(
    both_plain: Both, given: dict[str, Any]
) -> None:
    model, server = both_plain
    given = {"speed": "fast", "ratio": 2} | given
    (result,) = compute(model, given).results.values()
    assert isinstance(result, CustomResult), result
    assert result.output == server.predict(given).output


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speed", "other"),
        ("level", 3),
        ("either", 2),
        ("both", "other"),
        ("maybe", "c"),
        ("several", ["c"]),
        ("mode", "three"),
        ("seed", -1),
        ("picked", "c"),
    ],
)
def test_values_that_a_type_does_not_list_are_refused(
    both_plain: Both, field: str, value: Any
) -> None:
    model, server = both_plain
    given = {"speed": "fast", "ratio": 2, field: value}
    (result,) = compute(model, given).results.values()
    assert isinstance(result, BadInput), result
    assert result.field == field
    assert server.predict(given).error


CONCATENATES = """
class Predictor(BasePredictor):
    def predict(self) -> ConcatenateIterator[str]:
        yield from ["a", None, 3, 1.5, True, {"a": [None, "gr\u00fcn"]}, [1], "", "b"]
"""


def test_pieces_of_a_concatenation_stay_as_they_are(tmp_path: Path) -> None:
    for model, server in serve(tmp_path, CONCATENATES):
        (result,) = compute(model, {}).results.values()
        assert isinstance(result, CustomResult), result
        assert result.output == server.predict({}).output
        assert result.text == 'a31.5true{"a": [null, "gr\u00fcn"]}[1]b'


@pytest.mark.parametrize("given", [{"either": "a"}, {"keyword": 1}])
def test_inputs_without_a_default_are_required(both_inputs: Both, given: dict[str, Any]) -> None:
    model, server = both_inputs
    (result,) = compute(model, given).results.values()
    assert isinstance(result, BadInput), result
    assert result.field not in given
    assert server.predict(given).error


def test_context_of_a_prediction_is_in_its_scope(both_inputs: Both) -> None:
    model, server = both_inputs
    given, context = {"either": "a", "keyword": 1}, {"trace": "1", "user": "grün"}
    item = prepared(given)
    item.context = context
    model.admit(0, item)
    (result,) = model.steps_until(0).results.values()
    assert isinstance(result, CustomResult), result
    assert result.output["context"] == context
    assert server.predict(given, context=context).output["context"] == context
    assert output_of(compute(model, given))["context"] == {}, "that of the one before"
