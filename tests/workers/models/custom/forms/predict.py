"""A class for every form of input and output in Cog's documentation, to be called and served.

Each can run forever, so that tests can cancel it. Before running forever, it prints that it is
starting.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Dict, List, Optional, TypedDict, Union  # noqa: UP035

import pydantic
from cog import (
    AsyncConcatenateIterator,
    BaseModel,
    BasePredictor,
    BaseRunner,
    ConcatenateIterator,
    File,
    Input,
    Opaque,
    Path,
    Secret,
)
from cog.coder import Coder


def begin(forever: bool) -> None:
    print("begins", flush=True)
    while forever:
        time.sleep(0.01)


async def begin_async(forever: bool) -> None:
    print("begins", flush=True)
    if forever:
        await asyncio.Event().wait()


def written(text: str, name: str = "out.txt") -> Path:
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(text)
    return Path(path)


class Text(BaseRunner):
    def run(
        self,
        text: str = Input(min_length=2, max_length=20, regex="[a-z ]+", description="Any words."),
        forever: bool = False,
    ) -> str:
        begin(forever)
        return text.upper()


class Whole(BaseRunner):
    def run(self, number: int = Input(ge=1, le=9), forever: bool = False) -> int:
        begin(forever)
        return number * 10**15


class Number(BasePredictor):
    def predict(self, number: float = Input(ge=0.5), forever: bool = False) -> float:
        begin(forever)
        return number / 3


class Switch(BaseRunner):
    def run(self, on: bool, forever: bool = False) -> bool:
        begin(forever)
        return not on


class AnyObject(BaseRunner):
    def run(self, given: dict, forever: bool = False) -> dict:  # type: ignore[type-arg]
        begin(forever)
        return {"again": given, "keys": sorted(given)}


class Shape(TypedDict):
    width: int
    height: int


class Typed(BaseRunner):
    def run(
        self,
        shape: Shape,
        hidden: Annotated[Any, Opaque],
        forever: bool = False,
    ) -> Dict[str, int]:  # noqa: UP006
        begin(forever)
        return {"area": shape["width"] * shape["height"], "hidden": len(hidden)}


class OneFile(BasePredictor):
    def predict(self, file: Path, forever: bool = False) -> Path:
        begin(forever)
        return written(file.read_text()[::-1], f"reversed{file.suffix}")


class OpenFile(BasePredictor):
    def predict(self, file: File, forever: bool = False) -> File:
        begin(forever)
        return open(written(file.read().decode()[::-1]), "rb")


class Files(BaseRunner):
    def run(self, files: list[Path], forever: bool = False) -> list[Path]:
        begin(forever)
        return [written(file.read_text().upper(), f"{at}.txt") for at, file in enumerate(files)]


class Hidden(BaseRunner):
    def run(
        self, key: Secret, other: Secret | None = Input(default=None), forever: bool = False
    ) -> str:
        begin(forever)
        said = f"{key} {len(key.get_secret_value() or '')}"
        return said if other is None else f"{said} {(other.get_secret_value() or '')[0]}"


class Words(BaseRunner):
    def run(
        self,
        words: list[str] = Input(min_length=1, description="The bound is of each."),
        forever: bool = False,
    ) -> list[str]:
        begin(forever)
        return words[::-1]


class Lists(BasePredictor):
    def predict(
        self,
        whole: List[int] = Input(ge=0),  # noqa: UP006
        rates: list[float] = Input(default=[0.5]),
        flags: list[bool] = Input(default=[]),
        objects: list[dict] = Input(default=[]),  # type: ignore[type-arg]
        plain: list = Input(default=[]),  # type: ignore[type-arg]
        forever: bool = False,
    ) -> dict:  # type: ignore[type-arg]
        begin(forever)
        return {
            "whole": sum(whole),
            "rates": sum(rates),
            "flags": [not one for one in flags],
            "objects": [sorted(one) for one in objects],
            "plain": plain,
        }


class Optionals(BaseRunner):
    def run(
        self,
        text: Optional[str] = None,  # noqa: UP045
        number: int | None = Input(default=None, ge=1),
        rate: float | None = Input(default=None),
        flag: bool | None = None,
        file: Path | None = Input(default=None),
        words: Optional[List[str]] = Input(default=None),  # noqa: UP006, UP045
        given: dict | None = None,  # type: ignore[type-arg]
        forever: bool = False,
    ) -> dict:  # type: ignore[type-arg]
        begin(forever)
        values = {"text": text, "number": number, "rate": rate, "flag": flag, "words": words}
        return {**values, "given": given, "file": None if file is None else file.read_text()}


class Unions(BaseRunner):
    def run(
        self,
        one: int | str,
        several: Union[List[int], str],  # noqa: UP006, UP007
        maybe: float | bool | None = Input(default=None),
        forever: bool = False,
    ) -> dict:  # type: ignore[type-arg]
        begin(forever)
        values = {"one": one, "several": several, "maybe": maybe}
        return {name: [type(value).__name__, value] for name, value in values.items()}


class Color(str, enum.Enum):  # noqa: UP042
    RED = "red"
    BLUE = "blue"


class Choices(BaseRunner):
    def run(
        self,
        letter: str = Input(choices=["a", "b"]),
        number: int = Input(choices=[1, 2], default=2),
        color: str = Input(choices=[Color.RED, Color.BLUE], default=Color.BLUE),
        forever: bool = False,
    ) -> str:
        begin(forever)
        return f"{letter} {number} {color}"


class Defaults(BasePredictor):
    def predict(
        self,
        text: str = "plain",
        number: int = Input(default=3, le=3, description="At most 3."),
        words: list[str] = Input(default=["a", "b"]),
        old: str = Input(default="old", deprecated=True),
        forever: bool = False,
    ) -> str:
        begin(forever)
        return f"{text} {number} {words} {old}"


class Nothing(BaseRunner):
    def run(self, text: str, forever: bool = False) -> str:
        begin(forever)
        return None  # type: ignore[return-value]


@dataclass
class Point:
    x: int
    y: int


class Anything(BaseRunner):
    def run(self, text: str, forever: bool = False) -> Any:
        begin(forever)
        day = datetime.date(2026, 1, 2)
        return {"tuple": (1, "a"), "point": Point(1, 2), "day": day, "file": written(text)}


class PointCoder(Coder):
    """Converts a custom type to JSON and back, as in Cog's documentation."""

    @staticmethod
    def factory(tpe: Any) -> PointCoder | None:
        return PointCoder() if tpe is Point else None

    def encode(self, value: Point) -> dict[str, Any]:
        return {"x": value.x, "y": value.y}

    def decode(self, value: dict[str, Any]) -> Point:
        return Point(**value)


class Coded(BaseRunner):
    def run(self, x: int, forever: bool = False) -> Point:
        begin(forever)
        return Point(x, -x)


class Answer(BaseModel):
    score: float
    words: list[str]
    file: Path
    files: list[Path]
    note: str | None = None


class Answered(BasePredictor):
    def predict(self, text: str, forever: bool = False) -> Answer:
        begin(forever)
        large = written("large " * 20_000, "large.txt")
        return Answer(0.5, text.split(), written(text), [written("first"), large])


class PydanticAnswer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    word: str
    rate: float | None
    file: Path


class Pydantic(BaseRunner):
    def run(self, word: str, forever: bool = False) -> PydanticAnswer:
        begin(forever)
        return PydanticAnswer(word=word, rate=None, file=written(word, "word.txt"))


class Person(BaseModel):
    name: str
    image: Path


class Group(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    leader: Person
    others: list[Person]
    sizes: Dict[str, List[int]]  # noqa: UP006


class Nested(BaseRunner):
    def run(self, names: list[str], forever: bool = False) -> Group:
        begin(forever)
        first, *others = [Person(one, written(one, f"{one}.txt")) for one in names]
        return Group(leader=first, others=others, sizes={"all": [len(names)]})


class Models(BaseRunner):
    def run(self, names: list[str], forever: bool = False) -> List[Person]:  # noqa: UP006
        begin(forever)
        return [Person(one, written(one, f"{one}.txt")) for one in names]


class StreamedModels(BaseRunner):
    def run(self, names: list[str], forever: bool = False) -> Iterator[Person]:
        begin(forever)
        for one in names:
            yield Person(one, written(one, f"{one}.txt"))


class Matrix(BaseRunner):
    def run(self, size: int, forever: bool = False) -> List[List[float]]:  # noqa: UP006
        begin(forever)
        return [[row / (column + 1) for column in range(size)] for row in range(size)]


class Sheets(BaseRunner):
    def run(self, sizes: list[int], forever: bool = False) -> Iterator[List[Path]]:  # noqa: UP006
        begin(forever)
        for size in sizes:
            yield [written(str(number)) for number in range(size)]


class Maybe(BaseRunner):
    def run(self, text: str, forever: bool = False) -> str | List[str] | None:  # noqa: UP006
        begin(forever)
        return text.split() if " " in text else text or None


class Keywords(BaseRunner):
    def run(
        self,
        text: str,
        *,
        times: int,
        end: str = Input(default="."),
        forever: bool = False,
        **more: Any,
    ) -> str:
        begin(forever)
        return text * times + end


class Items(BaseRunner):
    def run(self, text: str, forever: bool = False) -> Iterator[str]:
        begin(forever)
        yield from text.split()


class Counts(BaseRunner):
    def run(self, n: int, forever: bool = False) -> Iterator[int]:
        begin(forever)
        yield from range(n)


class Objects(BaseRunner):
    def run(self, n: int, forever: bool = False) -> Iterator[dict]:  # type: ignore[type-arg]
        begin(forever)
        for number in range(n):
            yield {"number": number, "file": None}


class Pieces(BasePredictor):
    def predict(
        self, text: str = Input(min_length=1), forever: bool = False
    ) -> ConcatenateIterator[str]:
        begin(forever)
        if text == "fail":
            raise ValueError("it does not want to")
        for word in text.split():
            yield word[::-1] + " \n"


class Pages(BaseRunner):
    def run(self, sizes: list[int], forever: bool = False) -> Iterator[Path]:
        begin(forever)
        path = written("")
        # The same path again: each file is read as soon as it is written.
        for number, size in enumerate(sizes):
            path.write_text(str(number) * size)
            yield path


class AsyncText(BaseRunner):
    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.said = "said: "

    async def run(self, text: str, forever: bool = False) -> str:
        await begin_async(forever)
        return self.said + text


class AsyncAnswered(BaseRunner):
    async def run(self, file: Path, forever: bool = False) -> Answer:
        await begin_async(forever)
        return Answer(1.5, [], written(file.read_text()), [])


class AsyncItems(BaseRunner):
    async def run(self, text: str, forever: bool = False) -> AsyncIterator[str]:
        await begin_async(forever)
        for word in text.split():
            yield word


class AsyncPieces(BaseRunner):
    async def run(self, text: str, forever: bool = False) -> AsyncConcatenateIterator[str]:
        await begin_async(forever)
        for letter in text:
            yield letter


class AsyncPages(BaseRunner):
    async def run(self, sizes: list[int], forever: bool = False) -> AsyncIterator[Path]:
        await begin_async(forever)
        for number, size in enumerate(sizes):
            yield written(str(number) * size)


def say(text: str, times: int = Input(default=2, ge=1), forever: bool = False) -> str:
    """A function instead of a class."""
    begin(forever)
    return text * times


class Given(BaseModel):
    text: str = Input(min_length=1)
    file: Path | None = Input(default=None)
    forever: bool = Input(default=False)


class Batches(BasePredictor):
    def predict_batch(self, inputs: list[Given]) -> list[str]:
        begin(any(one.forever for one in inputs))
        return [one.text + (one.file.read_text() if one.file else "") for one in inputs]


class AsyncBatches(BasePredictor):
    async def predict_batch(self, inputs: list[Given]) -> list[Path]:
        await begin_async(any(one.forever for one in inputs))
        return [written(one.text) for one in inputs]
