"""Types of query string parameters and upload headers.

Source: the method pages at https://cloud.google.com/bigquery/docs/reference/rest/v2.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request

from bigquery_emulator.tables.fields import NOT_SET, Fields, Natural, read_fields
from bigquery_emulator.tables.schema import Json


class PageOptions(Fields):
    """A page of a list. Its token is the number of entries to skip."""

    page_token: Natural | msgspec.UnsetType = NOT_SET
    max_results: Natural | msgspec.UnsetType = NOT_SET


class RowOptions(PageOptions):
    """A page of rows from a table or a query."""

    start_index: Natural | msgspec.UnsetType = NOT_SET
    timeout_ms: Natural | msgspec.UnsetType = NOT_SET
    selected_fields: str | msgspec.UnsetType = NOT_SET
    use_int64_timestamp: bool | msgspec.UnsetType = msgspec.field(
        default=NOT_SET, name="formatOptions.useInt64Timestamp"
    )


class DeleteOptions(Fields):
    """Options for deleting a dataset."""

    delete_contents: bool | msgspec.UnsetType = NOT_SET


class UploadOptions(Fields):
    """The kind of upload."""

    upload_type: Literal["multipart", "resumable"]


class SessionOptions(Fields):
    """The upload that a part belongs to."""

    upload_id: str | msgspec.UnsetType = msgspec.field(default=NOT_SET, name="upload_id")


def query_options(request: Request, fields: type[Fields]) -> Json:
    """Returns the known parameters in a request's query string. Integers are strings.

    Raises:
        InvalidError: a parameter has the wrong type. The message names it.
    """
    # An empty parameter is treated as not set.
    parameters = {name: value for name, value in request.query_params.items() if value}
    return read_fields(parameters, fields)
