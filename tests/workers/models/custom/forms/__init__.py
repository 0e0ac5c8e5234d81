"""Every form of input and output in Cog's documentation: each has a class, an input, and an output.

The classes are in predict.py. Tests serve them and compare the results with direct calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import inspect
import io
import json
import os
import shutil
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cog
from cog.input import FieldInfo

from shared.models.interface import ModelInterface
from tests.workers.models.custom.forms import predict
from workers.models.custom.checking import write_interface
from workers.models.custom.runner import loading
from workers.models.custom.sources import read_sources

SOURCE = Path(predict.__file__)


@dataclass(frozen=True)
class Form:
    """A class or function in predict.py with one input.

    Args:
        values: the input values, without the files.
        files: file contents, keyed by input name.
    """

    name: str
    values: dict[str, Any]
    files: dict[str, str | list[str]] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The name under which the form is served."""
        return f"form-{self.name.lower()}"

    def output(self, folder: Path) -> Any:
        """The output of calling the class directly, as JSON, with files as `{"file": text}`."""
        target = getattr(predict, self.name)
        if not inspect.isclass(target):
            return plain(target(**self._arguments(target, folder)))
        instance: Any = target()
        _awaited(instance.setup())
        if method := getattr(instance, "predict_batch", None):
            given = predict.Given(**self._arguments(predict.Given, folder))
            return plain(_awaited(method([given]))[0])
        method = instance.run if "run" in vars(target) else instance.predict
        return plain(_awaited(method(**self._arguments(method, folder))))

    def _arguments(self, method: Callable[..., Any], folder: Path) -> dict[str, Any]:
        given = dict(self.values)
        for name, texts in self.files.items():
            paths = [
                _file(folder, f"{self.name}-{name}-{at}.txt", text)
                for at, text in enumerate([texts] if isinstance(texts, str) else texts)
            ]
            given[name] = paths[0] if isinstance(texts, str) else paths
        hints = typing.get_type_hints(method)
        for name, parameter in inspect.signature(method).parameters.items():
            if name in given:
                given[name] = _typed(given[name], hints[name])
            elif isinstance(parameter.default, FieldInfo):
                given[name] = _default(parameter.default)
        return given


def _file(folder: Path, name: str, text: str) -> cog.Path:
    path = folder / name
    path.write_text(text)
    return cog.Path(path)


def _typed(value: Any, hint: Any) -> Any:
    if hint is cog.File:
        return io.BytesIO(Path(value).read_bytes())
    if hint is cog.Secret or cog.Secret in typing.get_args(hint):
        return cog.Secret(value)
    return value


def _default(info: FieldInfo) -> Any:
    default = info.default
    if isinstance(default, dataclasses.Field):
        factory = default.default_factory
        default = factory() if callable(factory) else default.default
    return default.value if isinstance(default, enum.Enum) else default


def _awaited(output: Any) -> Any:
    """A method's output, even if the method is asynchronous. Pieces are read as they arrive."""
    if inspect.isawaitable(output):
        return asyncio.run(_one(output))
    if inspect.isasyncgen(output):
        return asyncio.run(_all(output))
    return output


async def _one(output: Any) -> Any:
    return await output


async def _all(output: Any) -> list[Any]:
    return [plain(one) async for one in output]


def plain(value: Any) -> Any:
    """A value as represented in JSON, with files as `{"file": text}`."""
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return {"file": Path(value).read_text()}
    if isinstance(value, io.IOBase):
        with value:
            return {"file": value.read().decode()}
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    names = getattr(type(value), "model_fields", None)
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
    if names is not None:
        return {name: plain(getattr(value, name)) for name in names}
    return [plain(one) for one in value]


LARGE = "large " * 20_000
FORMS = (
    Form("Text", {"text": "any words"}),
    Form("Whole", {"number": 9}),
    Form("Number", {"number": 1}),
    Form("Number", {"number": 0.7}),
    Form("Switch", {"on": False}),
    Form("AnyObject", {"given": {"b": [1, {"c": None}], "a": "x"}}),
    Form("Typed", {"shape": {"width": 2, "height": 3}, "hidden": {"any": "thing"}}),
    Form("OneFile", {}, {"file": "a file"}),
    Form("OneFile", {}, {"file": LARGE}),
    Form("OpenFile", {}, {"file": "a file"}),
    Form("Files", {}, {"files": ["first", LARGE, "last"]}),
    Form("Hidden", {"key": "very secret"}),
    Form("Hidden", {"key": "very secret", "other": "more"}),
    Form("Words", {"words": ["x", "y"]}),
    Form("Lists", {"whole": [1, 2]}),
    Form(
        "Lists",
        {
            "whole": [],
            "rates": [0.25, 1],
            "flags": [True, False],
            "objects": [{"a": 1}, {}],
            "plain": [{"b": None}],  # Cog's inspector reports elements of any type as objects
        },
    ),
    Form("Optionals", {}),
    Form(
        "Optionals",
        {"text": "a", "number": 1, "rate": 2.5, "flag": False, "words": ["a"], "given": {"a": 1}},
        {"file": "optional"},
    ),
    Form("Unions", {"one": 3, "several": [1, 2]}),
    Form("Unions", {"one": "3", "several": "1, 2", "maybe": True}),
    Form("Choices", {"letter": "b"}),
    Form("Choices", {"letter": "a", "number": 1, "color": "red"}),
    Form("Defaults", {}),
    Form("Defaults", {"text": "", "number": -1, "words": [], "old": "new"}),
    Form("Nothing", {"text": "a"}),
    Form("Anything", {"text": "a"}),
    Form("Coded", {"x": 3}),
    Form("Answered", {"text": "a b"}),
    Form("Pydantic", {"word": "a"}),
    Form("Nested", {"names": ["a", "b", "c"]}),
    Form("Models", {"names": ["a", "b"]}),
    Form("StreamedModels", {"names": ["a", "b"]}),
    Form("Matrix", {"size": 3}),
    Form("Sheets", {"sizes": [2, 0, 1]}),
    Form("Maybe", {"text": ""}),
    Form("Maybe", {"text": "a b"}),
    Form("Keywords", {"text": "a", "times": 2}),
    Form("Items", {"text": "first second"}),
    Form("Counts", {"n": 3}),
    Form("Objects", {"n": 2}),
    Form("Pieces", {"text": "stressed mood"}),
    Form("Pages", {"sizes": [3, 70_000, 1]}),
    Form("AsyncText", {"text": "grün\u2028☃"}),
    Form("AsyncAnswered", {}, {"file": LARGE}),
    Form("AsyncItems", {"text": "first second"}),
    Form("AsyncPieces", {"text": "abc"}),
    Form("AsyncPages", {"sizes": [3, 70_000, 1]}),
    Form("say", {"text": "a"}),
    Form("Batches", {"text": "a"}, {"file": "b"}),
    Form("AsyncBatches", {"text": "a"}),
)


def write_form(folder: Path, name: str) -> Path:
    """Creates a folder for the class with this name, including its penstock.schema.json.

    The class is inspected in this process, because `penstock models check` would start one process
    per class, at 0.3 s of CPU time each. The process that serves the class inspects it again and
    rejects it if the schema does not match.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SOURCE, folder / "predict.py")
    (folder / "cog.yaml").write_text(f"run: predict.py:{name}\n")
    path = [*sys.path]
    try:
        found = json.loads(json.dumps(loading.interface_of(loading.load(folder))))
    finally:
        sys.path[:] = path
        sys.modules.pop(SOURCE.stem, None)
    interface = ModelInterface(**found, sources_sha256=read_sources(folder).sha256)
    write_interface(folder, interface)
    return folder


def write_forms(folder: Path) -> list[dict[str, Any]]:
    """Creates folders for all classes. Returns entries for a catalog that serves them."""
    names = {one.model: one.name for one in FORMS}
    return [
        {
            "name": model,
            "task": "custom",
            "source": f"local:{write_form(folder / model, name).resolve()}",
        }
        for model, name in names.items()
    ]


def write_expected(folder: Path) -> Path:
    """Writes a JSON file with each form's input and the output of calling its class directly."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "expected.json"
    forms = [
        {"model": one.model, "input": one.values, "files": one.files, "output": one.output(folder)}
        for one in FORMS
    ]
    path.write_text(json.dumps(forms))
    return path
