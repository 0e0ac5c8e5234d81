"""Checks each field of an incoming JSON object against the schema, by name and mode.

Used by insertAll and load jobs. Single values are checked in the `values` module.
"""

from typing import Any

from bigquery_emulator.tables.schema import Field, Json, Schema
from bigquery_emulator.tables.values import (
    BadValueError,
    canonical_json,
    canonical_scalar,
    shown,
)


class RowReader:
    """Reads rows using a schema.

    Args:
        ignores_unknown: True to drop fields that are not in the schema.
        takes_json: True if a JSON column accepts any JSON value (as in a load), False if it accepts
            only strings (as in insertAll).
        path: the RECORD that contains the fields, with a period at the end.
    """

    def __init__(
        self, schema: Schema, ignores_unknown: bool, takes_json: bool = False, path: str = ""
    ) -> None:
        self._path = path
        self._ignores_unknown = ignores_unknown
        self._takes_json = takes_json
        self._fields = {field.name.lower(): field for field in schema}
        self._records = {
            field.name: RowReader(field.fields, ignores_unknown, takes_json, f"{path}{field.name}.")
            for field in schema
            if field.type == "RECORD"
        }

    def canonical(self, row: Json) -> Json:
        """Returns a row's canonical values under the names in the schema, with every field present.

        Args:
            row: a JSON object. Names are not case-sensitive.

        Raises:
            BadValueError: a field does not match.
        """
        values: Json = {}
        for name, value in row.items():
            field = self._fields.get(name) or self._fields.get(name.lower())
            if field is not None:
                values[field.name] = None if value is None else self._value(field, value)
            elif not self._ignores_unknown:
                raise BadValueError(f"{self._path}{name}", f"no such field: {self._path}{name}.")
        for field in self._fields.values():
            if values.get(field.name) is None:
                values[field.name] = self._missing(field)
        return values

    def _missing(self, field: Field) -> Any:
        if field.mode == "REQUIRED":
            message = f"Missing required field: Msg_0_CLOUD_QUERY_TABLE.{self._path}{field.name}."
            raise BadValueError("", message)
        return [] if field.mode == "REPEATED" else None

    def _value(self, field: Field, value: Any) -> Any:
        if field.mode != "REPEATED":
            return self._single(field, value)
        path = self._path + field.name
        if not isinstance(value, list):
            raise BadValueError(
                path, f"Repeated field must be imported as a JSON array. Field: {path}."
            )
        if any(item is None for item in value):
            raise BadValueError(
                path, f"Only optional fields can be set to NULL. Field: {path}; Value: NULL"
            )
        return [self._single(field, item) for item in value]

    def _single(self, field: Field, value: Any) -> Any:
        if field.type == "RECORD":
            if not isinstance(value, dict):
                message = f"Cannot convert value to record (bad value): {shown(value)}"
                raise BadValueError(self._path + field.name, message)
            return self._records[field.name].canonical(value)
        if field.type == "JSON" and self._takes_json:
            return canonical_json(value)
        path = self._path + field.name
        if isinstance(value, list):
            raise BadValueError(path, f"Array specified for non-repeated field: {path}.")
        if isinstance(value, dict):
            raise BadValueError(path, f"This field: {path} is not a record.")
        return field.limits.fitted(field.type, canonical_scalar(field.type, value, path), path)
