"""A BigQuery table accessed over REST: reads its columns and adds rows.

The service uses the Storage Write API. insertAll has the same effect here and can reject individual
rows. Source: https://docs.cloud.google.com/bigquery/docs/reference/rest/v2/tabledata/insertAll
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from pubsub_emulator.bigquery.rows import Columns, Row, columns_of
from pubsub_emulator.http_connection import HttpAnswer, HttpConnection, HttpFailed
from pubsub_emulator.protos import BigQueryConfig

_HEADERS = [("Content-Type", "application/json"), ("Accept", "application/json")]
_PASSING_REASONS = frozenset({"rateLimitExceeded", "quotaExceeded"})
"""Reasons for temporary rejections with status 403."""


class TableUnavailable(Exception):
    """BigQuery did not accept the rows this time. The rows can be sent again."""


class TableUnusable(Exception):
    """Nothing can be written to the table until someone fixes the table or its permissions.

    `state` is the subscription's new state, as named in `BigQueryConfig.State`.
    """

    def __init__(
        self, state: Literal["NOT_FOUND", "PERMISSION_DENIED", "SCHEMA_MISMATCH"], why: str
    ) -> None:
        super().__init__(why)
        self.state = state


class BigQueryTable:
    """A subscription's table.

    Args:
        endpoint: URL of a BigQuery server that requires no credentials.
        config: the table's name, and how to handle unknown fields.
    """

    def __init__(self, endpoint: str, config: BigQueryConfig) -> None:
        project, dataset, table = (quote(part, safe=":") for part in config.table.rsplit(".", 2))
        prefix = urlsplit(endpoint).path.rstrip("/")
        self._path = f"{prefix}/bigquery/v2/projects/{project}/datasets/{dataset}/tables/{table}"
        self._drops_unknown: bool = config.use_table_schema and config.drop_unknown_fields
        self._connection = HttpConnection(endpoint)

    async def columns(self) -> Columns:
        """Return the table's columns.

        Raises:
            TableUnusable: the table does not exist, or access is denied.
            TableUnavailable: BigQuery did not respond.
        """
        answer = await self._send("GET", self._path, b"")
        return columns_of(self._json(answer).get("schema", {}))

    async def insert(self, rows: Sequence[Row]) -> dict[int, str]:
        """Add rows. Return the reasons why rows were rejected, keyed by index in `rows`.

        Raises:
            TableUnusable: the table does not exist, or write access is denied.
            TableUnavailable: BigQuery did not respond. BigQuery may have added the rows anyway.
        """
        body = {
            "skipInvalidRows": True,
            "ignoreUnknownValues": self._drops_unknown,
            "rows": [{"json": row} for row in rows],
        }
        answer = await self._send("POST", f"{self._path}/insertAll", json.dumps(body).encode())
        if answer.status not in (400, 413):
            return {
                error["index"]: _reason(error["errors"])
                for error in self._json(answer).get("insertErrors", ())
            }
        if len(rows) == 1:
            return {0: _message(answer)}
        half = len(rows) // 2  # The request is too large, or a single row causes it to fail.
        first, second = await self.insert(rows[:half]), await self.insert(rows[half:])
        return first | {half + place: why for place, why in second.items()}

    def close(self) -> None:
        """Close the connection if it is open."""
        self._connection.close()

    async def _send(self, method: str, target: str, body: bytes) -> HttpAnswer:
        try:
            answer = await self._connection.send(method, target, _HEADERS, body)
        except HttpFailed as error:
            raise TableUnavailable(str(error)) from error
        if answer.status == 404:
            raise TableUnusable("NOT_FOUND", _message(answer))
        if answer.status in (401, 403) and not _PASSING_REASONS & _reasons(answer):
            raise TableUnusable("PERMISSION_DENIED", _message(answer))
        if answer.status not in (200, 400, 413):
            raise TableUnavailable(f"status {answer.status}: {_message(answer)}")
        return answer

    def _json(self, answer: HttpAnswer) -> Mapping[str, Any]:
        document = _object(answer)
        if answer.status != 200 or document is None:
            raise TableUnavailable(f"status {answer.status}: {_message(answer)}")
        return document


def _object(answer: HttpAnswer) -> Mapping[str, Any] | None:
    try:
        document = json.loads(answer.body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _error(answer: HttpAnswer) -> Mapping[str, Any]:
    error = (_object(answer) or {}).get("error")
    return error if isinstance(error, dict) else {}


def _message(answer: HttpAnswer) -> str:
    return str(_error(answer).get("message") or answer.body[:200].decode(errors="replace"))


def _reasons(answer: HttpAnswer) -> set[str]:
    return {str(error.get("reason")) for error in _error(answer).get("errors", ())}


def _reason(errors: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(
        ": ".join(filter(None, (error.get("location"), error.get("message")))) for error in errors
    )
