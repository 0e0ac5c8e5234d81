"""The changes that a revision of an Avro definition may make.

Source: https://avro.apache.org/docs/1.12.0/specification/#schema-resolution. A revision must
satisfy these rules as both reader and writer
(https://cloud.google.com/pubsub/docs/commit-schema-revision).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pubsub_emulator.schemas.mismatch import Malformed

_NAMED = ("record", "enum", "fixed")
_READ_BY = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
"""For each primitive reader type, the types that can be promoted to it."""

Schema = Any
"""An `avro.schema.Schema`. The library does not document each kind's attributes."""
Pair = tuple[Schema, Schema, str]
"""A reader, a writer, and their location in the definitions."""
Branches = Mapping[tuple[str, str], Schema]
"""A union's branches keyed by type, name and alias; the first branch wins."""


def check_changes(latest: Schema, revised: Schema) -> None:
    """Reject a revision that can't read data written with the latest one, or vice versa.

    Raises:
        Malformed: the data can't be read; the message names the affected part.
    """
    _Reading("the revision can't read data written by the previous one").check(revised, latest)
    _Reading("the previous one can't read data written by the revision").check(latest, revised)


class _Reading:
    """Checks whether one definition can read data written with another.

    The time it takes grows with the length of both definitions.
    """

    def __init__(self, told: str) -> None:
        self._told = told
        self._unions: dict[int, Branches] = {}

    def check(self, reader: Schema, writer: Schema) -> None:
        """Check that a writer's data can be read. Raises `Malformed` otherwise."""
        compared = set()
        pairs: list[Pair] = [(reader, writer, "")]
        while pairs:
            reader, writer, path = pairs.pop()
            if (id(reader), id(writer)) in compared:
                continue
            compared.add((id(reader), id(writer)))
            try:
                pairs += self._inner(reader, writer, path)
            except Malformed as error:
                where = path.removeprefix(".") or "it"
                raise Malformed(f"{self._told}: {where} {error}") from None

    def _inner(self, reader: Schema, writer: Schema, path: str) -> Iterator[Pair]:
        """Check a pair, and yield the inner pairs that must also match. Raises `Malformed`."""
        if writer.type == "union":
            for branch in writer.schemas:
                yield reader, branch, path
        elif reader.type == "union":
            yield self._branch(reader, writer), writer, path
        elif not _is_alike(reader, writer):
            raise Malformed(f"is {_shown(writer)} but must be read as {_shown(reader)}")
        elif reader.type == "array":
            yield reader.items, writer.items, f"{path}[]"
        elif reader.type == "map":
            yield reader.values, writer.values, f"{path}[]"
        elif reader.type == "record":
            yield from _fields(reader, writer, path)
        elif reader.type == "enum":
            _check_symbols(reader, writer)
        elif reader.type == "fixed" and reader.size != writer.size:
            raise Malformed(f"is {writer.size} bytes but must be read as {reader.size}")

    def _branch(self, union: Schema, writer: Schema) -> Schema:
        """Return the union branch that can read a writer's data."""
        branches = self._unions.get(id(union))
        if branches is None:
            branches = self._unions[id(union)] = _by_name(union)
        if writer.type in _NAMED:
            keys = [(writer.type, writer.fullname), (writer.type, writer.name)]
        else:
            keys = [(kind, "") for kind in (writer.type, *_READ_BY.get(writer.type, ()))]
        branch = next((branches[key] for key in keys if key in branches), None)
        if branch is None:
            raise Malformed(f"may be {_shown(writer)}, which no type in the union can read")
        return branch


def _by_name(union: Schema) -> Branches:
    branches: dict[tuple[str, str], Schema] = {}
    for branch in union.schemas:
        names = [""]
        if branch.type in _NAMED:
            names = [branch.fullname, branch.name, *_aliases(branch)]
        for name in names:
            branches.setdefault((branch.type, name), branch)
    return branches


def _fields(reader: Schema, writer: Schema, path: str) -> Iterator[Pair]:
    written = {field.name: field for field in writer.fields}
    for field in reader.fields:
        names = (field.name, *_aliases(field))
        writer_field = next((written[name] for name in names if name in written), None)
        if writer_field is not None:
            yield field.type, writer_field.type, f"{path}.{field.name}"
        elif not field.has_default:
            raise Malformed(f"has no {field.name}, which has no default")


def _check_symbols(reader: Schema, writer: Schema) -> None:
    missing = sorted(set(writer.symbols) - set(reader.symbols))
    if missing and reader.props.get("default") not in reader.symbols:
        raise Malformed(f"may be {missing[0]}, for which there is no default")


def _is_alike(reader: Schema, writer: Schema) -> bool:
    """True if the types match, regardless of their contents."""
    if reader.type != writer.type:
        return reader.type in _READ_BY.get(writer.type, ())
    if reader.type not in _NAMED:
        return True
    return bool(reader.name == writer.name or writer.fullname in _aliases(reader))


def _aliases(named: Any) -> list[str]:
    aliases = named.props.get("aliases")
    return (
        [alias for alias in aliases if isinstance(alias, str)] if isinstance(aliases, list) else []
    )


def _shown(schema: Schema) -> str:
    return str(schema.fullname if schema.type in _NAMED else schema.type)
