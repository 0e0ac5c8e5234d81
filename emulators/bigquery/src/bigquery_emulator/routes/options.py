"""The types of the parameters of query strings, and of upload headers.

Source: the pages of the methods at https://cloud.google.com/bigquery/docs/reference/rest/v2.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request

from bigquery_emulator.tables.fields import NOT_SET, Fields, Natural, read_fields
from bigquery_emulator.tables.schema import Json


class PageOptions(Fields):
    """A page of a list. Its token is a number of entries."""

    page_token: Natural | msgspec.UnsetType = NOT_SET
    max_results: Natural | msgspec.UnsetType = NOT_SET


class RowOptions(PageOptions):
    """A page of rows, of a table or a query."""

    start_index: Natural | msgspec.UnsetType = NOT_SET
    timeout_ms: Natural | msgspec.UnsetType = NOT_SET
    selected_fields: str | msgspec.UnsetType = NOT_SET
    use_int64_timestamp: bool | msgspec.UnsetType = msgspec.field(
        default=NOT_SET, name="formatOptions.useInt64Timestamp"
    )


class DeleteOptions(Fields):
    """How a data set is removed."""

    delete_contents: bool | msgspec.UnsetType = NOT_SET


class UploadOptions(Fields):
    """Which kind of upload it is."""

    upload_type: Literal["multipart", "resumable"]


class SessionOptions(Fields):
    """Which upload a part belongs to."""

    upload_id: str | msgspec.UnsetType = msgspec.field(default=NOT_SET, name="upload_id")


def query_options(request: Request, fields: type[Fields]) -> Json:
    """Returns the known parameters of a request's query string. Integers are text.

    Raises:
        InvalidError: one is not of its type. The message names it.
    """
    # An empty parameter is one that is not set.
    given = {name: value for name, value in request.query_params.items() if value}
    return read_fields(given, fields)
