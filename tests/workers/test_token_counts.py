"""A worker counts tokens immediately, without running a model."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.messages import Item
from shared.models.tasks import Input
from shared.models.tasks.text import PromptToCount, TokenCount
from tests.workers.worker_harness import LetterPreparer, running_worker
from workers.models.base import PreparedOutcome

pytestmark = pytest.mark.anyio


class CountingPreparer:
    """Counts letters, and prepares other texts the way the fake model expects them."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedOutcome]:
        return [self._prepare(given) for given in inputs]

    def _prepare(self, given: Input) -> PreparedOutcome:
        if isinstance(given, PromptToCount):
            return TokenCount(len(given.prompt))
        return LetterPreparer().prepare([given])[0]


async def test_a_count_is_answered_while_the_model_is_busy(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path, preparer=CountingPreparer()) as worker:
        worker.process.gate.clear()
        await worker.send("busy", request_id="busy")
        await worker.process.started.wait()
        items = [Item(0, PromptToCount(prompt="four")), Item(1, PromptToCount(prompt="fifth"))]
        await worker.send_items(items, request_id="counts")
        reply = await worker.reply()
        assert reply.request_id == "counts"
        results = [one.result for one in reply.body.outcomes]
        assert results == [TokenCount(4), TokenCount(5)]
        assert all(one.receipt.tokens is None for one in reply.body.outcomes)
        assert worker.process.batches == [["busy"]]
        worker.process.gate.set()
        await worker.reply()
