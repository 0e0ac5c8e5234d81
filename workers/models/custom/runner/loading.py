"""Finds and loads a folder's class, and describes its inputs and output.

The inputs are described as JSON Schema, in Cog's format (https://cog.run/http/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from workers.models.custom.runner.batch_form import METHOD, BatchForm, has_batches, read_batch_form
from workers.models.custom.runner.cog_import import adt, cog, cog_predictor, import_all, inspector
from workers.models.custom.runner.signatures import Signature, read_signature

USUAL_FILES = ("run.py", "predict.py")
USUAL_CLASSES = ("Runner", "Predictor")
_FORMS = {
    "work": "work(self, input) -> int, so each input weighs 1",
    "is_close": "is_close(self, a, b) -> bool, so equal outputs are close",
}
_NAMES = sys.stdlib_module_names | {"requests"}


class Loaded(NamedTuple):
    """A class or function that has been loaded and inspected, but not set up."""

    predictor: Any
    """The instance, or the function itself."""
    compute: Callable[..., Any]
    """The class's `predict_batch`, `run`, or `predict` method, bound."""
    signature: Signature
    concurrency: int
    notes: list[str]
    """Methods that are not called here, each with the reason."""
    element: Callable[..., Any] | None = None
    """Creates an element of the list that `predict_batch` takes.

    None if the class doesn't have `predict_batch`.
    """
    weigh: Callable[[Any], Any] | None = None
    """The class's `work` method, bound, or None if it doesn't have one."""
    is_close: Callable[[Any, Any], Any] | None = None
    """The class's `is_close` method, bound, or None if it doesn't have one."""


class NotLoadable(Exception):
    """The folder does not contain a class that can be served. The message includes the reason."""


def load(folder: Path) -> Loaded:
    """Imports a folder's class. Runs the class's module, but not `setup`.

    Args:
        folder: contains cog.yaml, run.py, or predict.py.

    Raises:
        NotLoadable: there is no class, or its signature can't be served.
        Exception: any exception that the module raises.
    """
    settings = _settings(folder)
    reference = settings.get("run") or settings.get("predict") or _usual_file(folder)
    if not isinstance(reference, str):
        raise NotLoadable(
            f"cog.yaml: predict: must have the form predict.py:Name, got {reference!r}"
        )
    name, _, wanted = reference.partition(":")
    module = _module(folder, name)
    wanted = wanted or next(
        (usual_class for usual_class in USUAL_CLASSES if hasattr(module, usual_class)), ""
    )
    if not wanted or not hasattr(module, wanted):
        raise NotLoadable(
            f"{name} has no {wanted or 'class Runner or Predictor'}; set predict: FILE.py:NAME in "
            "cog.yaml to use another name"
        )
    return _load_target(getattr(module, wanted), wanted, module, settings)


def _load_target(target: Any, name: str, module: ModuleType, settings: dict[str, Any]) -> Loaded:
    notes: list[str] = []
    inspector()._find_coders(module)
    form = _find_batch_form(target, notes)
    if form is not None:
        predictor = target()
        compute, signature = getattr(predictor, METHOD), form.signature
    else:
        method, function = _select(target, name)
        with _report_as_not_loadable():
            signature = read_signature(function, method)
        predictor = target() if inspect.isclass(target) else target
        compute = getattr(predictor, method) if inspect.isclass(target) else target
    concurrency = _concurrency(settings, compute)
    if form is not None and concurrency > 1:
        raise NotLoadable(
            f"cog.yaml: concurrency.max: {METHOD} processes one batch at a time; omit it"
        )
    if callable(getattr(target, "healthcheck", None)):
        notes.append(
            "healthcheck is not called because nothing reads its result; a class that exits "
            "is set up again"
        )
    weigh = _method(predictor, "work", 1, int, notes)
    is_close = _method(predictor, "is_close", 2, bool, notes)
    element = form.element if form is not None else None
    return Loaded(predictor, compute, signature, concurrency, notes, element, weigh, is_close)


def _find_batch_form(target: Any, notes: list[str]) -> BatchForm | None:
    """Returns the form of `predict_batch`.

    None if the class doesn't have one, or has one with a different form alongside `predict`. In
    that case, adds a note with the reason.

    Raises:
        NotLoadable: it has a different form, and there is nothing else to call.
    """
    if not has_batches(target):
        return None
    try:
        return read_batch_form(target)
    except (ValueError, TypeError, NameError) as error:
        if not any(
            cog_predictor._user_method_owner(target, method) for method in ("run", "predict")
        ):
            raise NotLoadable(str(error)) from error
        notes.append(f"{METHOD} is not called: {error}")
        return None


def _select(target: Any, name: str) -> tuple[str, Callable[..., Any]]:
    """Returns the name of the function that computes a prediction, and the function itself.

    Raises:
        NotLoadable: there is no such function, or it is ambiguous.
    """
    if inspect.isclass(target):
        with _report_as_not_loadable():
            selected: tuple[str, Callable[..., Any]]
            selected = inspector()._selected_predict_method(target, name)
        return selected
    if not inspect.isfunction(target):
        raise NotLoadable(f"{name} is neither a class nor a function")
    return name, target


@contextlib.contextmanager
def _report_as_not_loadable() -> Iterator[None]:
    """Converts exceptions from Cog's inspector to the reason a class can't be served."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except (ValueError, TypeError) as error:
        raise NotLoadable(str(error)) from error


def _method(
    predictor: Any, name: str, count: int, returns: type, notes: list[str]
) -> Callable[..., Any] | None:
    """Returns a method if it has the form used here.

    A class written for Cog may have a different method with the same name; in that case, returns
    None and adds a line to `notes`.
    """
    kind = type(predictor)
    if inspect.isfunction(predictor) or not hasattr(kind, name):
        return None
    written = inspect.getattr_static(kind, name)
    is_static = isinstance(written, staticmethod)
    function = written.__func__ if isinstance(written, staticmethod | classmethod) else written
    if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
        spec = inspect.getfullargspec(function)
        has_more = spec.varargs or spec.varkw or spec.kwonlyargs
        is_typed = spec.annotations.get("return") in (returns, returns.__name__)
        if len(spec.args) == count + (not is_static) and is_typed and not has_more:
            return cast("Callable[..., Any]", getattr(predictor, name))
    notes.append(f"{name} is not called because its signature is not {_FORMS[name]}")
    return None


def set_up(loaded: Loaded) -> Any:
    """Calls `setup`, passing it the weights specified by COG_WEIGHTS if it accepts them.

    Returns its return value: a coroutine if it is asynchronous.
    """
    setup = getattr(loaded.predictor, "setup", None)
    if setup is None:
        return None
    if cog_predictor.has_setup_weights(loaded.predictor):
        return setup(weights=cog_predictor.extract_setup_weights(loaded.predictor))
    return setup()


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the settings in cog.yaml. Empty if there is no such file.

    Raises:
        NotLoadable: the file is not a YAML mapping.
    """
    file = folder / "cog.yaml"
    if not file.is_file():
        return {}
    import yaml  # takes a tenth of the startup time, so it is skipped for classes without cog.yaml

    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or invalid UTF-8
        raise NotLoadable(f"cog.yaml: {error}") from error
    if not isinstance(settings, dict):
        raise NotLoadable("cog.yaml: must be a mapping")
    return settings


def _usual_file(folder: Path) -> str:
    for name in USUAL_FILES:
        if (folder / name).is_file():
            return name
    raise NotLoadable(f"the folder has neither {' nor '.join(USUAL_FILES)} nor a cog.yaml")


def _module(folder: Path, name: str) -> ModuleType:
    file = Path(os.path.normpath(folder / name))
    if file.suffix != ".py" or not file.is_file() or folder not in file.parents:
        raise NotLoadable(f"cog.yaml: {name} is not a Python file in the folder")
    folders = dict.fromkeys([str(folder), str(file.parent)])
    if any(_hides_a_module(Path(place)) for place in folders):
        import_all()
    sys.path[:0] = folders
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "a file that ends in .py has a loader; this is a bug"
    assert spec.loader is not None, "as above"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _hides_a_module(folder: Path) -> bool:
    """Returns whether a file or package shadows a standard library module or Cog's HTTP client."""
    return any(
        path.stem in _NAMES and (path.suffix == ".py" or path.is_dir()) for path in folder.iterdir()
    )


def is_async(compute: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(compute) or inspect.isasyncgenfunction(compute)


def _concurrency(settings: dict[str, Any], compute: Callable[..., Any]) -> int:
    """Returns the number of concurrent predictions, from `@cog.concurrent(max=…)` or cog.yaml.

    Raises:
        NotLoadable: the number is invalid, or `compute` can't run concurrently.
    """
    concurrency = settings.get("concurrency") or {}
    if not isinstance(concurrency, dict):
        raise NotLoadable("cog.yaml: concurrency: must be a mapping, such as {max: 2}")
    maximum = getattr(compute, "__cog_concurrent_max__", None) or concurrency.get("max", 1)
    if isinstance(maximum, bool) or not isinstance(maximum, int) or maximum < 1:
        raise NotLoadable(
            f"cog.yaml: concurrency.max: must be a whole number of at least 1, got {maximum!r}"
        )
    if maximum > 1 and not is_async(compute):
        raise NotLoadable("cog.yaml: concurrency.max above 1 requires an async predict")
    return maximum


def interface_of(loaded: Loaded) -> dict[str, Any]:
    """Returns a class's inputs and outputs: penstock.schema.json without the digest."""
    fields = loaded.signature.inputs.values()
    output = loaded.signature.output
    return {
        "inputs": {
            "type": "object",
            "properties": {field.name: _property(field) for field in fields},
            "required": [field.name for field in fields if _is_required(field)],
        },
        "output": output.schema,
        "streams": output.streams,
        "concurrency": loaded.concurrency,
        "batches": loaded.element is not None,
        "weighs": loaded.weigh is not None,
        "compares": loaded.is_close is not None,
        "cog_version": cog.__version__,
    }


def _is_required(field: adt.InputField) -> bool:
    optional = {adt.Repetition.OPTIONAL, adt.Repetition.OPTIONAL_REPEATED}
    return field.default is None and field.type.repetition not in optional


def _property(field: adt.InputField) -> dict[str, Any]:
    """Returns one input as JSON Schema. A list's constraints apply to its elements."""
    shape: dict[str, Any] = field.type.json_type()
    optional = {adt.Repetition.OPTIONAL, adt.Repetition.OPTIONAL_REPEATED}
    element = shape["items"] if shape.get("type") == "array" else shape
    element |= {
        keyword: value
        for keyword, value in (
            ("minimum", _whole(field.ge)),
            ("maximum", _whole(field.le)),
            ("minLength", field.min_length),
            ("maxLength", field.max_length),
            ("pattern", field.regex),
            ("enum", field.choices),
        )
        if value is not None
    }
    shape |= {"title": field.name.replace("_", " ").title(), "x-order": field.order}
    if field.type.repetition in optional:
        shape["nullable"] = True
    if field.description:
        shape["description"] = field.description
    if field.deprecated:
        shape["deprecated"] = True
    default = _plain_default(field.default)
    if default is not None:
        shape["default"] = default
    return shape


def _whole(bound: float | None) -> float | None:
    """Returns a bound the way JSON displays it, because Cog converts all bounds to floats."""
    return int(bound) if bound is not None and float(bound).is_integer() else bound


def _plain_default(default: Any) -> Any:
    """Returns a default as shown in JSON. Secrets' defaults are not shown."""
    if isinstance(default, dataclasses.Field):
        factory = default.default_factory
        default = factory() if callable(factory) else default.default
    if isinstance(default, cog.Secret):
        return None
    return os.fspath(default) if isinstance(default, os.PathLike) else default
