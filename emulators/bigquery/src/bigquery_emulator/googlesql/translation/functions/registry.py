"""A function call, and the type of a translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.analysis.types import type_name
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.parameters import is_plain_zone, is_zone_parameter
from bigquery_emulator.googlesql.translation.literals import date_part


@dataclass(frozen=True)
class Call:
    """A function call.

    Attributes:
        name: the ZetaSQL name in lowercase, such as `date_trunc` or `$add`.
        sql: the arguments as DuckDB SQL. Empty for an argument that is a name, such as a date part.
    """

    name: str
    nodes: list[Node]
    sql: list[str]
    type: TypeProto

    def kind(self, place: int = 0) -> int:
        return int(self.nodes[place].type.type_kind)

    def part(self, place: int) -> str:
        """Returns the date part named by an argument."""
        return date_part(self.nodes[place].value.value)

    def text(self, place: int) -> str | None:
        """Returns the text of a literal argument, or None for any other argument."""
        node = self.nodes[place]
        if node.kind != "Literal" or not node.value.value.HasField("string_value"):
            return None
        return str(node.value.value.string_value)

    def integer(self, place: int) -> int | None:
        """Returns the number in an INT64 literal argument, or None for any other argument."""
        node = self.nodes[place]
        if node.kind != "Literal" or not node.value.value.HasField("int64_value"):
            return None
        return int(node.value.value.int64_value)

    def zone(self, place: int) -> str:
        """Returns the DuckDB SQL for an argument that names a time zone."""
        name, sql = self.text(place), self.sql[place]
        # Most are names such as `Europe/Berlin`, which a macro does not need to validate.
        is_plain = is_zone_parameter(sql) if name is None else is_plain_zone(name)
        return sql if is_plain else f"bq.zone({sql})"

    @property
    def is_constant(self) -> bool:
        """True if no argument contains a column."""
        inner = (part for node in self.nodes for part in node.walk())
        return not any(part.kind == "ColumnRef" or part.kind.endswith("Scan") for part in inner)

    def put(self, form: str) -> str:
        """Replaces {0}, {1}, and so on in a form with the arguments."""
        return form.format(*self.sql)

    def refused(self) -> Exception:
        kinds = ", ".join(type_name(node.type) for node in self.nodes)
        return unsupported(f"{self.name.strip('$').upper()}({kinds})")


def is_name(node: Node) -> bool:
    """True if an argument is a name, such as a date part, rather than a value."""
    return node.kind == "Literal" and node.type.HasField("enum_type")


def tried(nodes: Sequence[Node], sql: Sequence[str], write: Callable[[list[str]], str]) -> str:
    """Returns SQL that yields NULL if a function fails for some arguments.

    Errors in the arguments themselves must still be raised, so TRY contains only columns. Other
    arguments are passed as list elements. Constants need this too, because DuckDB evaluates their
    conditions in advance, at a point where TRY does not catch errors.

    Args:
        write: returns the function's SQL for the given arguments.
    """
    handed = {
        place: f"a{place} := {sql[place]}"
        for place, node in enumerate(nodes)
        if node.kind != "ColumnRef" and not is_name(node)
    }
    attempt = write(
        [f"safe.a{at}" if at in handed else argument for at, argument in enumerate(sql)]
    )
    if not handed:
        return f"TRY({attempt})"
    packed = f"struct_pack({', '.join(handed.values())})"
    return f"list_extract(list_transform([{packed}], lambda safe: TRY({attempt})), 1)"


Translate = Callable[[Call], str]
Functions = Mapping[str, Translate | str]
"""Translations by function name.

Each is either DuckDB SQL with {0}, {1}, and so on for the arguments, all of which are required, or
a function that returns the SQL.
"""


def fill(found: Translate | str, call: Call) -> str:
    """Inserts a call's arguments into its translation."""
    if not isinstance(found, str):
        return found(call)
    if found.count("{") and f"{{{len(call.sql) - 1}}}" not in found:
        raise call.refused()
    return call.put(found)
