"""Paging in list methods: sorted by name, continued with an opaque token."""

import base64
import binascii
from collections.abc import Iterable
from typing import TypeVar

from pubsub_emulator.errors import InvalidArgument

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

Resource = TypeVar("Resource")


def page_of(
    named: Iterable[tuple[str, Resource]], page_size: int, page_token: str
) -> tuple[list[Resource], str]:
    """Return a page of `(name, resource)` pairs, sorted by name, and the next token or "".

    A token contains the name to resume after, so it does no harm to create or delete resources
    between pages.

    Raises:
        InvalidArgument: the size is negative, or the token was not returned by a list method.
    """
    if page_size < 0:
        raise InvalidArgument(
            f"The value for page_size is too small. You passed {page_size} in the request, but the "
            "minimum value is 0."
        )
    size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    after = _decode(page_token)
    rest = sorted((pair for pair in named if pair[0] > after), key=lambda pair: pair[0])
    page = rest[:size]
    token = base64.urlsafe_b64encode(page[-1][0].encode()).decode() if len(rest) > size else ""
    return [resource for _, resource in page], token


def _decode(page_token: str) -> str:
    try:
        return base64.b64decode(page_token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise InvalidArgument(f"Invalid page_token given (page_token={page_token}).") from None
