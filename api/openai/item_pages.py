"""Pages of lists, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query

from shared.errors import BadInput

Limit = Annotated[int, Query(ge=1, le=100, description="Items per page.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By position: `asc` or `desc`.")]
After = Annotated[str, Query(description="Only items after the one with this ID.")]


class ItemsPage(msgspec.Struct):
    """One page of a list, with the IDs of its first and last items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def page_of(items: list[dict[str, Any]], limit: int, order: str, after: str) -> ItemsPage:
    """Returns a page of `items`, which must be oldest first.

    Raises:
        BadInput: the item `after` does not exist.
    """
    ordered = items if order == "asc" else items[::-1]
    if after:
        index = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if index is None:
            raise no_such_item()
        ordered = ordered[index + 1 :]
    return first_page_of(ordered, limit)


def no_such_item() -> BadInput:
    """Returns the error for an `after` item that does not exist."""
    return BadInput("after: must be the ID of an item in this list", field="after")


def first_page_of(ordered: list[dict[str, Any]], limit: int) -> ItemsPage:
    """Returns the first page of `ordered`."""
    page = ordered[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemsPage(page, first, last, has_more=len(ordered) > limit)
