"""Pages of the list methods: sorted by name, continued by an opaque token."""

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
    """Return one page of `(name, resource)` pairs, sorted by name, and the next page's token or "".

    A token says after which name to go on, so resources made or deleted meanwhile break nothing.

    Raises:
        InvalidArgument: a negative size, or a token that no list method gave out.
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
