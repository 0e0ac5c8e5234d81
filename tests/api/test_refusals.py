"""Requests that are rejected before any work is done for them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import IMAGE_MODEL, running_api, settings_for

pytestmark = pytest.mark.anyio


async def test_edit_is_refused_before_its_image_is_looked_at(tmp_path: Path) -> None:
    async with running_api(settings_for(tmp_path, max_in_flight=1)) as api:
        api.worker.go.clear()
        drawing = {"model": IMAGE_MODEL.name, "prompt": "a cat"}
        asked = asyncio.create_task(api.http.post("/v1/images/generations", json=drawing))
        await api.worker.until_taken(1)
        edit: dict[str, Any] = {"data": drawing, "files": {"image": b"no image"}}
        full = await api.http.post("/v1/images/edits", **edit)
        api.worker.go.set()
        assert (await asked).status_code == 200
        room = await api.http.post("/v1/images/edits", **edit)
        assert (full.status_code, room.status_code) == (429, 400)
