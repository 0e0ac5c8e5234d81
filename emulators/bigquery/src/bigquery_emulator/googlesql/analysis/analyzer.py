"""Analyzes a GoogleSQL statement: returns the tables it names, and its resolved tree or error."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from zetasql.wasi._pb2.zetasql.local_service import local_service_pb2 as service
from zetasql.wasi._pb2.zetasql.proto.options_pb2 import AnalyzerOptionsProto
from zetasql.wasi._pb2.zetasql.proto.simple_catalog_pb2 import SimpleCatalogProto
from zetasql.wasi._pb2.zetasql.public import options_pb2 as options
from zetasql.wasi._pb2.zetasql.public.simple_table_pb2 import SimpleTableProto
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.errors import InvalidQueryError, UnsupportedError
from bigquery_emulator.googlesql.analysis.functions import is_not_here, own_functions
from bigquery_emulator.googlesql.analysis.language import language, rewrites
from bigquery_emulator.googlesql.analysis.module import (
    AnalyzerModule,
    AnalyzerRefusedError,
    AnalyzerTrappedError,
)
from bigquery_emulator.googlesql.analysis.tree import Node

MOST_CHARACTERS = 1024 * 1024
"""The service's limit on query length."""
_POSITION = re.compile(r"\s*\[at (\d+:\d+)\]$")
_STATUS = re.compile(r"^Code: (\d+), Message: ", re.DOTALL)
_UNKNOWN_FUNCTION = re.compile(r"(?:Table-valued function|Function) not found: ([\w.`]+)")
_NOT_IMPLEMENTED = "12"
_NOT_READ = "Statement not supported: "
_MOST_CATALOGS = 64

Path = tuple[str, ...]
"""A name split into parts as written: `dataset.table` has two, "`dataset.table`" one."""


@dataclass(frozen=True)
class NamedTable:
    """A table in a statement: its name there, its columns, and a key chosen by the caller.

    `key` becomes the table's name in the tree's TableScans.
    """

    path: Path
    key: str
    columns: Sequence[tuple[str, TypeProto]]
    pseudo_columns: Sequence[tuple[str, TypeProto]] = ()


@dataclass(frozen=True)
class ParameterTypes:
    """The types of a statement's parameters, keyed by lowercase name or by position."""

    named: Sequence[tuple[str, TypeProto]] = ()
    positional: Sequence[TypeProto] = ()


class Analyzer:
    """Google's analyzer. It is loaded on the first call and may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = threading.Lock()
        """A lock that is held from the time a catalog is registered until it is used, because
        another call in between might break the instance.
        """
        self._module: AnalyzerModule | None = None
        self._catalogs: OrderedDict[bytes, int] = OrderedDict()
        self._generation = 0
        self._language = language()
        self._functions = own_functions()

    def load(self) -> AnalyzerModule:
        """Loads the module if it isn't loaded yet."""
        with self._lock:
            if self._module is None:
                self._module = AnalyzerModule()
            return self._module

    def table_paths(self, sql: str) -> list[Path]:
        """Returns the names of the tables that a statement reads or writes, without duplicates.

        Raises:
            InvalidQueryError: the text has a syntax error or is too long.
        """
        if len(sql) > MOST_CHARACTERS:
            raise InvalidQueryError(
                "The query is too large. The maximum standard SQL query length is 1024.00K"
                " characters, including comments and white space characters."
            )
        request = service.ExtractTableNamesFromStatementRequest(
            sql_statement=sql, options=self._language
        )
        with self._calls:
            answer = self._call("ExtractTableNamesFromStatement", request)
        return [tuple(name.table_name_segment) for name in answer.table_name]

    def analyze(self, sql: str, tables: Sequence[NamedTable], parameters: ParameterTypes) -> Node:
        """Returns a statement's resolved tree.

        Args:
            tables: the tables that `table_paths` returned.

        Raises:
            InvalidQueryError: GoogleSQL rejects the statement.
            UnsupportedError: the analyzer does not support the statement.
        """
        wanted = AnalyzerOptionsProto(
            language_options=self._language,
            enabled_rewrites=rewrites(),
            error_message_mode=options.ERROR_MESSAGE_ONE_LINE,
            parse_location_record_type=options.PARSE_LOCATION_RECORD_CODE_SEARCH,
            prune_unused_columns=True,
            default_timezone="UTC",
        )
        if parameters.positional:
            wanted.parameter_mode = options.PARAMETER_POSITIONAL
            wanted.positional_query_parameters.extend(parameters.positional)
        for name, kind in parameters.named:
            wanted.query_parameters.add(name=name).type.CopyFrom(kind)
        with self._calls:
            request = service.AnalyzeRequest(
                options=wanted,
                registered_catalog_id=self._register(self._catalog(tables)),
                sql_statement=sql,
            )
            return Node(self._call("Analyze", request).resolved_statement)

    def _register(self, catalog: SimpleCatalogProto) -> int:
        """Returns a catalog's ID in the module.

        Registering a catalog takes three times as long as reading it.
        """
        generation = self.load().generation
        if generation != self._generation:
            self._catalogs.clear()
            self._generation = generation
        key = catalog.SerializeToString(deterministic=True)
        if key not in self._catalogs:
            request = service.RegisterCatalogRequest(simple_catalog=catalog)
            self._catalogs[key] = self._call("RegisterCatalog", request, "Register").registered_id
        self._catalogs.move_to_end(key)
        if len(self._catalogs) > _MOST_CATALOGS:
            _, oldest = self._catalogs.popitem(last=False)
            self._call("UnregisterCatalog", service.UnregisterRequest(registered_id=oldest), "")
        return self._catalogs[key]

    def _catalog(self, tables: Sequence[NamedTable]) -> SimpleCatalogProto:
        root = SimpleCatalogProto(name="root")
        root.builtin_function_options.language_options.CopyFrom(self._language)
        root.custom_function.extend(self._functions)
        for number, table in enumerate(tables, 1):
            place = root
            for part in table.path[:-1]:
                inner = next((catalog for catalog in place.catalog if catalog.name == part), None)
                place = inner if inner is not None else place.catalog.add(name=part)
            _fill(place.table.add(), table, number)
        return root

    def _call(self, method: str, request: Message, answers: str | None = None) -> Any:
        name = method if answers is None else answers
        answer = getattr(service, f"{name}Response") if name else Empty
        try:
            return self.load().call(method, request, answer)
        except AnalyzerRefusedError as error:
            raise _as_service_says(str(error)) from error
        except AnalyzerTrappedError as error:
            raise UnsupportedError(
                "The statement is nested too deeply or contains something that the analyzer "
                "can't handle: not supported by the embedded BigQuery",
                "query",
            ) from error


def _fill(made: SimpleTableProto, table: NamedTable, number: int) -> None:
    made.name = table.key
    made.name_in_catalog = table.path[-1]
    made.serialization_id = number
    for name, kind in table.columns:
        made.column.add(name=name, is_writable_column=True).type.CopyFrom(kind)
    for name, kind in table.pseudo_columns:
        made.column.add(name=name, is_pseudo_column=True).type.CopyFrom(kind)


def _as_service_says(message: str) -> InvalidQueryError | UnsupportedError:
    """Converts the analyzer's message to the format the service uses: `... at [1:8]`."""
    status = _STATUS.match(message)
    text = _POSITION.sub(r" at [\1]", _STATUS.sub("", message))
    if text.startswith(_NOT_READ) or (status is not None and status[1] == _NOT_IMPLEMENTED):
        text = text.removeprefix(_NOT_READ)
        return UnsupportedError(f"{text}: not supported by the embedded BigQuery", "query")
    unknown = _UNKNOWN_FUNCTION.match(text)
    if unknown is not None and is_not_here(unknown[1].replace("`", "")):
        name = unknown[1].replace("`", "").upper()
        return UnsupportedError(f"Function {name}: not supported by the embedded BigQuery", "query")
    return InvalidQueryError(text)
