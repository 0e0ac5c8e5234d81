"""Makes a canary the revision of its model, in the text of models.yaml. Comments and order stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

from shared.catalog import read_catalog
from shared.errors import ConfigurationError


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def promote(path: Path, name: str) -> None:
    """Gives a model the revision and the source of its canary, and removes the canary.

    Raises:
        ConfigurationError: the file has no such model, or it has no canary, or its entry stands in
            one line.
    """
    text = path.read_text(encoding="utf-8")
    edited = _promoted(text, _entry(path, text, name), path)
    with TemporaryDirectory() as folder:
        tried = Path(folder) / path.name
        tried.write_text(edited, encoding="utf-8")
        read_catalog(tried)
    path.write_text(edited, encoding="utf-8")


def _entry(path: Path, text: str, name: str) -> yaml.MappingNode:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    entries = _fields(root)["models"][1].value if isinstance(root, yaml.MappingNode) else []
    for entry in entries:
        if _fields(entry)["name"][1].value != name:
            continue
        if entry.flow_style:
            raise ConfigurationError(
                f"{path}:{entry.start_mark.line + 1}: the entry is on one line; edit it manually"
            )
        return entry  # type: ignore[no-any-return]
    raise ConfigurationError(f"{path}: model {name!r} not found", field="model")


def _promoted(text: str, entry: yaml.MappingNode, path: Path) -> str:
    fields = _fields(entry)
    if "canary" not in fields:
        raise ConfigurationError(
            f"{path}:{entry.start_mark.line + 1}: the model has no canary", field="canary"
        )
    key, canary = fields["canary"]
    start = text.rindex("\n", 0, key.start_mark.index) + 1
    end = text.find("\n", max(_ends(canary)))
    edits = [_Edit(start, len(text) if end < 0 else end + 1, "")]
    for field in ("revision", "source"):
        if field not in (known := _fields(canary)):
            continue
        node = known[field][1]
        value = text[node.start_mark.index : node.end_mark.index]
        if field in fields:
            old = fields[field][1]
            edits.append(_Edit(old.start_mark.index, old.end_mark.index, value))
        else:
            line = " " * key.start_mark.column + f"{field}: {value}\n"
            edits[0] = edits[0]._replace(text=edits[0].text + line)
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _fields(node: yaml.Node) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """The keys and values of a mapping, by the keys."""
    return {key.value: (key, value) for key, value in node.value}


def _ends(node: yaml.Node) -> Iterator[int]:
    """Returns the line where the parts of a node end. A block itself ends where the next begins."""
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode) and not node.flow_style:
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                yield from _ends(part)
    else:
        yield node.end_mark.index
