"""Downloading an image model's weights while its libraries are imported, as at a cold start.

The store's rate is limited in total and per connection (bench/slow_store.py), so that a download
takes about as long as the imports.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from obstore.store import S3Store

from bench.report import Figure, Outcome
from bench.slow_store import SlowStore
from shared.models.catalog_file import read_catalog
from workers.models.source import resolve
from workers.runtime.pool import HostedModel, ModelPool, early_template
from workers.runtime.template import EarlyTemplate

STORE_BYTES_PER_S = 20e6
CONNECTION_BYTES_PER_S = 5e6
FILES, FILE_BYTES = 4, 100_000_000
START_LIMIT_S = 600.0
MIN_SHARE_OF_RATE = 0.8


def run() -> Outcome:
    """Measures the download alone, the imports alone, and both as a worker does them."""
    content = os.urandom(FILE_BYTES)
    objects = {f"model/{number}.safetensors": content for number in range(FILES)}
    store = SlowStore(objects, STORE_BYTES_PER_S, CONNECTION_BYTES_PER_S)
    entry = read_catalog(Path("models.yaml")).default("image")
    hosted = HostedModel(entry, resolve(entry.source, entry.revision, Path("unused")))
    with store.running() as client:
        download_s = asyncio.run(_time(lambda: _download(client)))
        start_s = asyncio.run(_time(lambda: _start(hosted, None)))
        both_s = asyncio.run(_time(lambda: _download_and_start(client, hosted)))
    share = FILES * FILE_BYTES / download_s / STORE_BYTES_PER_S
    return Outcome(
        [
            Figure("share of the store's rate", share, "", ">=", MIN_SHARE_OF_RATE),
            Figure("download", download_s, "s"),
            Figure("imports and loading", start_s, "s"),
            Figure("both", both_s, "s"),
            Figure("both, of the longer one", both_s / max(download_s, start_s), ""),
        ]
    )


async def _time(work: Callable[[], Awaitable[None]]) -> float:
    began_s = time.monotonic()
    await work()
    return time.monotonic() - began_s


async def _download(client: S3Store) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(
            resolve, "gs://weights/model", "1", Path(folder), open_bucket=lambda name: client
        )


async def _start(hosted: HostedModel, early: EarlyTemplate | None) -> None:
    async with ModelPool(
        [hosted], device="cpu", processes=1, start_timeout_s=START_LIMIT_S, early=early
    ):
        pass


async def _download_and_start(client: S3Store, hosted: HostedModel) -> None:
    early = early_template([hosted.entry], 1)
    assert early is not None, "this system can't fork"
    async with early:
        await _download(client)
        await _start(hosted, early)
