"""Helpers shared by the prediction tests."""

import asyncio
import base64
from typing import Any

from prometheus_client import REGISTRY

from tests.api.harness import TEXT_MODEL, ApiUnderTest
from tests.limits import WAIT_LIMIT_S

TEXT = {"version": TEXT_MODEL.name, "input": {"text": "a cat"}}
WAIT = {"prefer": "wait=60"}
"""The longest possible wait, because decoding an image is slow when the machine is busy."""
OVER = {"succeeded", "failed", "canceled"}


async def until_over(api: ApiUnderTest, prediction: dict[str, Any]) -> dict[str, Any]:
    """The finished prediction, as returned by GET."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            found: dict[str, Any] = (
                await api.http.get(f"/v1/predictions/{prediction['id']}")
            ).json()
            if found["status"] in OVER:
                return found
            await asyncio.sleep(0.02)


async def until_processing(api: ApiUnderTest, headers: dict[str, str] | None = None) -> None:
    """Waits until a worker has the caller's newest prediction."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            listed = (await api.http.get("/v1/predictions", headers=headers)).json()["results"]
            if listed and listed[0]["status"] == "processing":
                return
            await asyncio.sleep(0.02)


def admitted() -> float:
    """Items in flight according to /metrics."""
    labels = {"model": TEXT_MODEL.name, "lane": "interactive"}
    return REGISTRY.get_sample_value("penstock_api_items_in_flight", labels) or 0.0


def data_of(uri: str) -> bytes:
    assert uri.startswith("data:image/png;base64,")
    return base64.b64decode(uri.partition(",")[2])
