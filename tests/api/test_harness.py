"""Tests of the harness itself."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from api.app import create_app
from shared.broker.in_memory import InMemoryBroker
from shared.usage.row_list import RowList
from tests.api.harness import ACCEPT_TURNS, CATALOG, already_open, serving, settings_for


@pytest.mark.anyio
@pytest.mark.parametrize("turns", range(ACCEPT_TURNS))
async def test_end_closes_a_connection_that_is_just_being_accepted(
    tmp_path: Path, turns: int
) -> None:
    settings, broker = settings_for(tmp_path), InMemoryBroker()
    app = create_app(settings, CATALOG, already_open(broker), already_open(broker), RowList())
    async with serving(app, settings) as url:
        port = int(url.rsplit(":", 1)[1])
        caller = socket.create_connection(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
    caller.setblocking(False)
    with caller:
        assert caller.recv(1) == b""  # would raise if the file were still open
