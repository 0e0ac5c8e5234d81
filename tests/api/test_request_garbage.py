"""A request leaves nothing behind that only the garbage collector could free.

Cycles keep all of a request's objects alive until a collection. If that collection has to examine
thousands of requests' objects, it blocks the event loop, and with it every request, for a fifth of
a second.
"""

import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio
REQUESTS = 20


@contextmanager
def garbage_kept() -> Iterator[list[object]]:
    """Collects the objects that the block leaves in cycles."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
        gc.collect()
    finally:
        gc.set_debug(0)
        gc.enable()


def ours(garbage: list[object]) -> set[str]:
    """The names of the API's own functions and types in the garbage."""
    kinds = (one if isinstance(one, types.FunctionType) else type(one) for one in garbage)
    return {
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if kind.__module__.partition(".")[0] in ("api", "shared")
    }


async def ask(api: ApiUnderTest, text: str) -> None:
    body = {"model": TEXT_MODEL.name, "input": [text, f"{text} again"]}
    answer = await api.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200


async def test_a_request_leaves_no_cycles(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        await ask(api, "the first")
        with garbage_kept() as garbage:
            for number in range(REQUESTS):
                await ask(api, f"text {number % (REQUESTS // 2)}")  # half of them are cache hits
        found = ours(garbage)
        garbage.clear()
        assert not found
