"""Reads the catalog file. Errors include the file, the line, and the location within the entry."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from shared.errors import ConfigurationError
from shared.models.catalog import OF_CATALOG, Catalog, Flow, Model, flow_of
from shared.models.entry import FlowEntry, Gpu, WorkersEntry
from shared.models.flow_types import FlowError
from shared.models.image_flow import check_steps
from shared.models.image_interface import ImageInterface, read_image_interface
from shared.models.interface import INTERFACE_FILE, ModelInterface, read_interface
from shared.models.kubernetes_names import slug
from shared.models.tasks import TASKS

log = logging.getLogger(__name__)

LOCAL = "local:"
"""The scheme for sources on this machine."""


def read_catalog(path: Path) -> Catalog:
    """Reads and validates a catalog file.

    Raises:
        ConfigurationError: the file can't be read or an entry is invalid. The message includes the
            file, line, and reason.
    """
    root = _compose(path)
    entries = _entries(path, root, "models")
    models = tuple(_read_entry(path, node) for node in entries)
    of_flows, of_workers = _entries(path, root, "flows"), _entries(path, root, "workers")
    workers = _read_workers(path, of_workers, models)
    models = _with_replicas(models, workers)
    catalog = Catalog(models)
    for model, node in zip(models, entries, strict=True):
        with _open_located_loader(path, node):
            check_steps(model, catalog.step_schema)
    flows = tuple(_read_flow(path, node, catalog) for node in of_flows)
    nodes = [*entries, *of_flows, *of_workers]
    names = [(model.name, *model.aliases, *model.generation.adapters) for model in models] + [
        (flow.name, *flow.aliases) for flow in flows
    ]
    names += [(worker.name,) for worker in workers]
    _check_names(path, names, nodes)
    deployed = [
        (model.name, canary.name if (canary := model.as_canary()) else "") for model in models
    ]
    deployed += [(worker.name, "") for worker in workers]
    _check_slugs(path, deployed, [*entries, *of_workers])
    return Catalog(models, flows, workers)


def _compose(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _check_names(path: Path, names: Sequence[tuple[str, ...]], nodes: Sequence[yaml.Node]) -> None:
    """Checks that no two entries share a name or alias.

    Raises:
        ConfigurationError: two entries share a name or alias.
    """
    seen: dict[str, int] = {}
    for own, node in zip(names, nodes, strict=True):
        for name in own:
            if name in seen:
                raise ConfigurationError(
                    f"{path}:{_line(node)}: the name {name!r} is already used on line {seen[name]}"
                )
            seen[name] = _line(node)


def _check_slugs(
    path: Path, deployed: Sequence[tuple[str, ...]], nodes: Sequence[yaml.Node]
) -> None:
    """Checks that models and worker groups with Kubernetes objects have distinct Kubernetes names.

    Raises:
        ConfigurationError: two of them have the same name.
    """
    slugs: dict[str, str] = {}
    for own, node in zip(deployed, nodes, strict=True):
        for name in filter(None, own):
            if (other := slugs.setdefault(slug(name), name)) != name:
                raise ConfigurationError(
                    f"{path}:{_line(node)}: {other!r} and {name!r} both become {slug(name)!r} in "
                    "Kubernetes; rename one of them"
                )


def _read_workers(
    path: Path, nodes: list[yaml.Node], models: tuple[Model, ...]
) -> tuple[WorkersEntry, ...]:
    """Returns the entries in `workers` after checking that their models can share a worker."""
    entries: list[WorkersEntry] = []
    for node in nodes:
        with _open_located_loader(path, node) as constructor:
            entry = WorkersEntry.model_validate(constructor.construct_document(node))
        for number in range(len(entry.models)):
            if reason := _unshareable(entry, number, models, entries):
                raise _locate_error(path, node, ("models", number), reason)
        entries.append(entry)
    return tuple(entries)


def _unshareable(
    entry: WorkersEntry, number: int, models: tuple[Model, ...], others: list[WorkersEntry]
) -> str:
    """Returns the reason one of the listed models can't share these workers. Empty if it can."""
    by_name = {model.name: model for model in models}
    name = entry.models[number]
    if name not in by_name:
        return f"model {name!r} does not exist; the catalog contains: {', '.join(by_name)}"
    if name in entry.models[:number]:
        return f"{name!r} appears twice in this list"
    for other in others:
        if name in other.models:
            return f"{name!r} is already assigned to workers {other.name!r}"
    model, first = by_name[name], by_name[entry.models[0]]
    if model.gpu != first.gpu:
        return (
            f"{name!r} has GPU {_gpu_words(model.gpu)}, but {first.name!r} has "
            f"{_gpu_words(first.gpu)}; models that share workers must have the same GPU"
        )
    if model.engine == "vllm" and model.gpu.type != "none":
        return f"{name!r} has engine vllm, which reserves its GPU's memory; remove it from the list"
    if "replicas" in model.model_fields_set:
        return (
            f"{name!r} must not set replicas because its shared workers set them; remove "
            "replicas from the model"
        )
    return ""


def _with_replicas(
    models: tuple[Model, ...], workers: tuple[WorkersEntry, ...]
) -> tuple[Model, ...]:
    """Returns the models, each with the replicas of the workers it shares."""
    replicas = {name: entry.replicas for entry in workers for name in entry.models}
    return tuple(
        model.model_copy(update={"replicas": replicas[model.name]})
        if model.name in replicas
        else model
        for model in models
    )


def _gpu_words(gpu: Gpu) -> str:
    fields = ", ".join(f"{key}: {value}" for key, value in gpu.model_dump().items())
    return f"{{{fields}}}"


def inline_interfaces(path: Path) -> dict[str, Any]:
    """Returns a valid catalog file with each interface file's path replaced by its contents.

    Pods and Cloud Run mount only the catalog, not the files next to it.

    Raises:
        ConfigurationError: an interface file is missing or invalid.
    """
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for entry, node in zip(
        document["models"], _entries(path, _compose(path), "models"), strict=True
    ):
        with _open_located_loader(path, node):
            read = _with_interface(path, entry) if "interface" in entry else entry
            entry |= _with_image_interface(path, read)
        for part in (entry, entry.get("image") or {}):
            if isinstance(interface := part.get("interface"), ModelInterface | ImageInterface):
                part["interface"] = interface.model_dump(mode="json")
    return document


def reread_interfaces(catalog: Catalog, path: Path) -> None:
    """Updates interfaces from the catalog file, and logs any changes.

    `penstock up` makes the API and the batch runner do this when a class has changed.
    """
    try:
        changed = catalog.take_interfaces(read_catalog(path))
    except ConfigurationError as error:
        log.error("the catalog can't be reread", extra={"reason": error.message})
    else:
        log.info("catalog reread", extra={"models": changed})


def _entries(path: Path, root: yaml.Node | None, kind: str) -> list[yaml.Node]:
    """Returns the entries in `models` (at least one), `flows`, or `workers`."""
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == kind and isinstance(value, yaml.SequenceNode) and value.value:
            return list(value.value)
        if key.value == kind != "models":
            raise ConfigurationError(f"{path}:{_line(key)}: {kind}: must be a list")
    if kind != "models":
        return []
    raise ConfigurationError(
        f"{path}:1: the catalog must be a mapping with a non-empty list `models`"
    )


def _read_entry(path: Path, node: yaml.Node) -> Model:
    with _open_located_loader(path, node) as constructor:
        entry = constructor.construct_document(node)
        if isinstance(entry, dict):
            entry = _with_image_interface(path, _with_interface(path, entry))
        return Model.model_validate(entry, context=OF_CATALOG)


def _read_flow(path: Path, node: yaml.Node, catalog: Catalog) -> Flow:
    with _open_located_loader(path, node) as constructor:
        return flow_of(FlowEntry.model_validate(constructor.construct_document(node)), catalog)


@contextmanager
def _open_located_loader(path: Path, node: yaml.Node) -> Iterator[yaml.SafeLoader]:
    """Reads an entry. Errors name the file, the line, and the location within the entry."""
    constructor = yaml.SafeLoader("")
    try:
        yield constructor
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}:{_line(node)}: {error.message}", field=error.field) from (
            error
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise _locate_error(path, node, first["loc"], first["msg"]) from error
    except FlowError as error:
        raise _locate_error(path, node, error.place, str(error)) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        raise ConfigurationError(f"{path}:{_line(node)}: {error}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}:{_line(node)}: must not contain itself") from error
    finally:
        constructor.dispose()


def _locate_error(
    path: Path, node: yaml.Node, place: tuple[int | str, ...], reason: str
) -> ConfigurationError:
    where = ".".join(str(part) for part in place) or "entry"
    line = _line(_descend(node, place))
    return ConfigurationError(f"{path}:{line}: {where}: {reason}", field=where)


def _with_interface(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry in which the file's path is replaced by the interface.

    Raises:
        ConfigurationError: the file is missing or invalid.
    """
    name, source = entry.get("task"), entry.get("source")
    task = TASKS.get(name) if isinstance(name, str) else None
    if task is None or not task.has_interface or not isinstance(source, str):
        return entry
    if isinstance(entry.get("interface"), dict):
        return entry
    if "interface" in entry:
        file = path.parent / str(entry["interface"])
    elif source.startswith(LOCAL):
        # Unlike Path's method, this one accepts a user who doesn't exist.
        file = INTERFACE_FILE.find(Path(os.path.expanduser(source.removeprefix(LOCAL))))
    else:
        raise ConfigurationError(
            f"interface: {source} is not on this machine; set interface to the path of a "
            f"copy of its {INTERFACE_FILE.name}, relative to the catalog's folder, or to the "
            "file's content",
            field="interface",
        )
    return {**entry, "interface": read_interface(file)}


def _with_image_interface(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Same as `_with_interface`, for `image.interface`."""
    image = entry.get("image")
    if not isinstance(image, dict) or not isinstance(image.get("interface"), str):
        return entry
    file = path.parent / image["interface"]
    interface = read_image_interface(file, str(entry.get("name")))
    return {**entry, "image": {**image, "interface": interface}}


class ImageEntry(NamedTuple):
    """An entry without its interface, which may not exist yet."""

    fields: dict[str, Any]
    interface_file: Path | None
    """None if the entry doesn't specify one."""

    def as_model(self, interface: ImageInterface | None = None) -> Model:
        """Returns the entry as a model with an interface.

        Raises:
            ConfigurationError: a field is invalid.
        """
        image = self.fields["image"] | ({} if interface is None else {"interface": interface})
        try:
            return Model.model_validate({**self.fields, "image": image}, context=OF_CATALOG)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "entry"
            raise ConfigurationError(f"{where}: {first['msg']}", field=where) from error


def read_image_entry(path: Path, name: str) -> ImageEntry:
    """Reads an image model's entry.

    Raises:
        ConfigurationError: there is no such image model, or the file can't be read.
    """
    entry = _find_fields(path, name)
    if entry.get("task") != "image":
        raise ConfigurationError(f"{name}: not a folder, and not an image or text model in {path}")
    image = dict(entry.get("image") or {})
    file = image.pop("interface", None)
    place = path.parent / file if isinstance(file, str) else None
    return ImageEntry({**entry, "image": image}, place)


def is_text_entry(path: Path, name: str) -> bool:
    """Returns whether the catalog has a text model with this name. The entry is not validated.

    Raises:
        ConfigurationError: the file can't be read.
    """
    return _find_fields(path, name).get("task") == "text"


def _find_fields(path: Path, name: str) -> dict[str, Any]:
    """Returns the fields of a model's entry, as written. Empty if there is no such model."""
    for node in _entries(path, _compose(path), "models"):
        with _open_located_loader(path, node) as constructor:
            entry = constructor.construct_document(node)
        if isinstance(entry, dict) and entry.get("name") == name:
            return entry
    return {}


def _descend(node: yaml.Node, location: tuple[int | str, ...]) -> yaml.Node:
    """Returns the node at `location`, or its nearest ancestor."""
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pairs = [pair for pair in node.value if pair[0].value == part]
            if not pairs:
                return node
            node = pairs[0][1]
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
        ):
            node = node.value[part]
    return node


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
