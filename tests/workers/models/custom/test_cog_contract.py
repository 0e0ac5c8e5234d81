"""Private parts of Cog that the runner uses: the names, signatures, and behavior in one version."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import cog
import pytest
from cog import _adt as adt
from cog import _inspector as inspector
from cog import predictor as cog_predictor

ROOT = Path(__file__).parents[4]
RUNNER = ROOT / "workers" / "models" / "custom" / "runner"
VERSION = "0.23.1"
REMEDY = (
    f"custom classes use private parts of cog {VERSION}; either keep this version in "
    "pyproject.toml, or adapt workers/models/custom/runner and this file to the other one, run "
    "`python -m tests.cog_comparison`, and name the version in docs/reference/own-models.md"
)
SIGNATURES = {
    "cog._inspector.check_input": (
        "(inputs: Dict[str, cog._adt.InputField], values: Dict[str, Any]) -> Dict[str, Any]"
    ),
    "cog._inspector._create_input_field": (
        "(order: int, name: str, tpe: type, field_info: Any) -> cog._adt.InputField"
    ),
    "cog._inspector._find_coders": "(module: module) -> None",
    "cog._inspector._selected_predict_method": (
        "(cls: type[typing.Any], fullname: str, *, stacklevel: int = 3)"
        " -> tuple[str, typing.Callable[..., typing.Any]]"
    ),
    "cog._inspector._strip_non_opaque_annotated": "(tpe: Any) -> Any",
    "cog._inspector._unwrap": "(f: Callable[..., Any]) -> Callable[..., Any]",
    "cog._adt._is_dict_like": "(tpe: Any) -> bool",
    "cog._adt._unwrap_opaque": "(tpe: Any) -> tuple[typing.Any, bool]",
    "cog._adt.FieldType.from_type": "(tpe: type) -> 'FieldType'",
    "cog._adt.FieldType.json_type": "(self) -> Dict[str, Any]",
    "cog._adt.PrimitiveType.from_type": "(tpe: type | typing.Any) -> 'PrimitiveType'",
    "cog._adt.PrimitiveType.json_type": "(self) -> Dict[str, Any]",
    "cog.coder.Coder.encode": "(self, x: Any) -> Dict[str, Any]",
    "cog.coder.Coder.lookup": "(tpe: type | typing.Any) -> Optional[ForwardRef('Coder')]",
    "cog.predictor._user_method_owner": (
        "(cls: type[typing.Any], method_name: str) -> type[typing.Any] | None"
    ),
    "cog.predictor.extract_setup_weights": (
        "(predictor: cog.predictor.BaseRunner) -> Union[cog.types.Path, str, NoneType]"
    ),
    "cog.predictor.has_setup_weights": "(predictor: cog.predictor.BaseRunner) -> bool",
}
FIELDS = {
    "cog._adt.InputField": (
        "name order type default description ge le min_length max_length regex choices deprecated"
    ),
    "cog._adt.FieldType": "primitive repetition coder union_variants",
    "cog.input.FieldInfo": (
        "default description ge le min_length max_length regex choices deprecated accept"
    ),
}
MEMBERS = {
    "cog._adt.PrimitiveType": "BOOL FLOAT INTEGER STRING PATH FILE SECRET ANY CUSTOM",
    "cog._adt.Repetition": "REQUIRED OPTIONAL REPEATED OPTIONAL_REPEATED",
}
CHECKED_BELOW = {"coglet._sdk.current_scope"}
MODULES = {
    "adt": "cog._adt",
    "cog_predictor": "cog.predictor",
    "inspector()": "cog._inspector",
    "sdk": "coglet._sdk",
    "cog.coder": "cog.coder",
}
"""The names that the runner's modules use for Cog's modules."""


def find(name: str) -> Any:
    """Returns the object with a dotted name, resolved from its longest module prefix.

    Raises:
        AttributeError, ModuleNotFoundError: the object does not exist.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(".".join(parts[:2]))
    for part in parts[2:]:
        found = getattr(found, part)
    return found


def differences(installed: str, look: Callable[[str], Any] = find) -> list[str]:
    """Parts of Cog that differ from the ones the runner needs.

    Args:
        look: returns the object with a dotted name.
    """
    found = [f"cog {installed} is installed"] if installed != VERSION else []
    for name, signature in SIGNATURES.items():
        with_name = _differ(name, signature, lambda one: str(inspect.signature(one)), look)
        found.extend(with_name)
    for name, fields in FIELDS.items():
        found.extend(_differ(name, fields, _fields_of, look))
    for name, members in MEMBERS.items():
        found.extend(_differ(name, members, lambda one: " ".join(m.name for m in one), look))
    return found


def _differ(
    name: str, expected: str, describe: Callable[[Any], str], look: Callable[[str], Any]
) -> Iterator[str]:
    try:
        described = describe(look(name))
    except (AttributeError, ImportError):
        yield f"{name} does not exist"
        return
    if described != expected:
        yield f"{name} is {described}, not {expected}"


def _fields_of(kind: Any) -> str:
    return " ".join(field.name for field in dataclasses.fields(kind))


def test_private_parts_of_cog_are_as_the_runner_needs_them() -> None:
    assert differences(version("cog")) == [], REMEDY
    assert version("coglet") == VERSION, REMEDY
    assert cog.__version__ == VERSION, REMEDY


def test_the_version_is_pinned_and_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = chain(project["dependencies"], *project["optional-dependencies"].values())
    assert f"cog=={VERSION}" in needs, REMEDY
    constraints = (ROOT / "constraints.txt").read_text()
    for name in ("cog", "coglet"):
        assert re.search(rf"^{name}=={re.escape(VERSION)} ", constraints, re.M), REMEDY
    page = (ROOT / "docs" / "reference" / "own-models.md").read_text()
    assert set(re.findall(r"(?i)\bcog\S* (\d+\.\d+\.\d+)", page)) == {VERSION}, REMEDY


def test_another_version_fails_by_name() -> None:
    def look(name: str) -> Any:
        if name == "cog._adt.Repetition":
            raise AttributeError(name)
        return (lambda inputs: inputs) if name == "cog._inspector.check_input" else find(name)

    assert differences("0.24.0", look) == [
        "cog 0.24.0 is installed",
        "cog._inspector.check_input is (inputs), not " + SIGNATURES["cog._inspector.check_input"],
        "cog._adt.Repetition does not exist",
    ]


def test_the_runner_uses_nothing_else_that_is_private() -> None:
    known = {*SIGNATURES, *FIELDS, *MEMBERS, *CHECKED_BELOW}
    used = {name for file in RUNNER.glob("*.py") for name in _used_in(file)}
    assert "cog._inspector.check_input" in used
    unknown = {
        name for name in used if not any(name == one or name.startswith(f"{one}.") for one in known)
    }
    below = {one.rpartition(".")[0] for one in known}
    assert unknown <= below, "add it to SIGNATURES, FIELDS or MEMBERS"


def _used_in(file: Path) -> Iterator[str]:
    """Returns the dotted names from Cog's private modules that a runner module uses."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            written = ast.unparse(node)
            for ours, module in MODULES.items():
                if written.startswith(f"{ours}."):
                    yield module + written.removeprefix(ours)


class Color:
    """An output type known only to its coder."""


class ColorCoder(cog.coder.Coder):
    """Encodes `Color`."""

    @staticmethod
    def factory(tpe: type) -> cog.coder.Coder | None:
        """Returns the coder if the type is `Color`."""
        return ColorCoder() if tpe is Color else None

    def encode(self, value: Color) -> dict[str, Any]:
        """A color as JSON."""
        return {"name": "red"}


class Weighted(cog.BasePredictor):
    """A class whose `setup` takes weights."""

    def setup(self, weights: cog.Path) -> None:
        """Does nothing. Only its signature is used."""

    def predict(self, text: str) -> str:
        """Returns the text. Only its signature is used."""
        return text


def test_inputs_are_read_and_checked() -> None:
    info = cog.Input(default=2, ge=1, le=5, description="How often.")
    number = inspector._create_input_field(0, "number", int, info)
    assert (number.type.primitive, number.type.repetition) == (
        adt.PrimitiveType.INTEGER,
        adt.Repetition.REQUIRED,
    )
    assert (number.default, number.ge, number.le, number.description) == (2, 1, 5, "How often.")
    words = inspector._create_input_field(1, "words", list[str], None)
    maybe = inspector._create_input_field(2, "maybe", str | None, None)
    assert words.type.repetition is adt.Repetition.REPEATED
    assert maybe.type.repetition is adt.Repetition.OPTIONAL
    assert words.type.json_type() == {"type": "array", "items": {"type": "string"}}
    fields = {"number": number, "words": words, "maybe": maybe}
    checked = inspector.check_input(fields, {"words": ["a"]})
    assert checked == {"number": 2, "words": ["a"], "maybe": None}
    for wrong in ({"words": ["a"], "number": 6}, {"words": 1}, {}):
        with pytest.raises((ValueError, TypeError)):
            inspector.check_input(fields, wrong)


def test_files_and_secrets_are_types_of_their_own() -> None:
    kinds = {cog.Path: "PATH", cog.File: "FILE", cog.Secret: "SECRET", dict: "CUSTOM"}
    found = {kind: adt.PrimitiveType.from_type(kind).name for kind in kinds}
    assert found == kinds
    assert adt._is_dict_like(dict)
    assert not adt._is_dict_like(list)


def test_the_method_and_its_owner_are_found() -> None:
    with pytest.warns(DeprecationWarning, match="use run"):
        name, method = inspector._selected_predict_method(Weighted, "Weighted")
    assert (name, method) == ("predict", Weighted.predict)
    assert cog_predictor._user_method_owner(Weighted, "predict") is Weighted
    assert cog_predictor._user_method_owner(Weighted, "run") is None


def test_a_decorated_function_is_found() -> None:
    def predict(text: str) -> str:
        return text

    def decorate(function: Callable[[str], str]) -> Callable[[str], str]:
        return lambda text: function(text)

    assert inspector._unwrap(decorate(predict)) is predict


def test_weights_of_setup_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Weighted()
    assert cog_predictor.has_setup_weights(predictor)
    monkeypatch.setenv("COG_WEIGHTS", "/weights")
    assert str(cog_predictor.extract_setup_weights(predictor)) == "/weights"


def test_coders_of_a_module_are_found() -> None:
    inspector._find_coders(sys.modules[__name__])
    coder = cog.coder.Coder.lookup(Color)
    assert coder is not None
    assert coder.encode(Color()) == {"name": "red"}
    assert cog.coder.Coder.lookup(object) is None


def test_the_scope_of_a_prediction_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class's `current_scope()` and `record_metric` both use the replacement."""
    sdk: Any = importlib.import_module("coglet")._sdk
    recorded: list[tuple[str, Any]] = []

    class Scope:
        def record_metric(self, key: str, value: Any, mode: str | None = None) -> None:
            recorded.append((key, value))

    monkeypatch.setattr(sdk, "current_scope", Scope)
    assert isinstance(cog.current_scope(), Scope)
    Weighted().record_metric("a", 1)
    Weighted().record_metric("a", 2, mode="incr")
    assert recorded == [("a", 1), ("a", 2)]


def test_concurrency_is_a_mark_on_the_method() -> None:
    async def predict() -> None: ...

    assert vars(cog.concurrent(max=3)(predict))["__cog_concurrent_max__"] == 3
