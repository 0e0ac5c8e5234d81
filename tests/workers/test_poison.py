"""A job that kills its real model process every time is abandoned; others are not affected."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.workers.worker_harness import MODEL, running_worker
from workers.runtime.pool import HostedModel, ModelPool

pytestmark = pytest.mark.anyio

LETTERS = """
import os, signal, sys
from shared.models.tasks.embedding import EmbeddingResult
from workers.runtime import server as model_process

class Letters:
    device_name, pads = "letters", False
    def setup(self): pass
    def warmup(self): pass
    def groups(self, batch): return [list(range(len(batch)))]
    def computed_work(self, lengths): return sum(lengths)
    def predict(self, batch, on_step):
        texts = [item.ids.decode() for item in batch]
        if any("poison" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return [EmbeddingResult(4 * text.encode(), len(text)) for text in texts]

model_process.model_for = lambda *given, **named: Letters()
sys.exit(model_process.main())
"""


@pytest.mark.parametrize("processes", [1, 2])
async def test_neighbors_of_a_poison_job_finish_and_its_caller_gets_the_reason(
    redis_url: str, tmp_path: Path, processes: int
) -> None:
    command = (sys.executable, "-c", LETTERS)
    async with (
        ModelPool(
            [HostedModel(MODEL, tmp_path)], device="cpu", processes=processes, command=command
        ) as pool,
        running_worker(redis_url, tmp_path, pool=pool) as harness,
    ):
        pids = {process.pid for process in pool.processes}
        names = ["poison", *(f"n{letter}" for letter in "abcdefgh")]
        for name in names:
            await harness.send("poison" if name == "poison" else name * 3, request_id=name)
        outcomes = {
            (reply := await harness.reply()).request_id: reply.body.outcomes[0] for _ in names
        }
        assert {name for name, one in outcomes.items() if one.status == "succeeded"} == set(
            names
        ) - {"poison"}
        assert outcomes["poison"].error is not None
        assert re.match(
            r"\d model processes died while processing this item, [23] of them",
            outcomes["poison"].error.message,
        )
        assert await harness.ask("after", request_id="after") == [("succeeded", 4 * b"after")]
        assert {process.pid for process in pool.processes} != pids
        await harness.until(lambda: len(harness.rows) == len(names) + 1)
