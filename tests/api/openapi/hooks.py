"""Hooks that teach schemathesis facts about this API that OpenAPI can't express."""

from typing import Any

import schemathesis


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: Any) -> bool:
    """An unknown header is not an error: HTTP requires servers to ignore it."""
    return not any("schemathesis-unknown" in name.lower() for name in case.headers or {})


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """In JSON Schema, 1.0 is an integer.

    This API and its clients don't treat it as one: they write 1.
    """
    return _whole(body)


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(one) for one in value]
        case dict():
            return {name: _whole(one) for name, one in value.items()}
    return value
