"""Custom classes' canaries: outputs are compared for equality, or by the class itself."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.canary.store import CanaryStore
from shared.canary.verdict import COMPARISON_TENANT, CanaryCounts
from shared.models.catalog import Catalog
from shared.stores.objects import ObjectStore
from tests.api.fake_worker import FakeWorker
from tests.api.harness import running_api, settings_for
from tests.api.predicting import WAIT
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import entry_of, write_class
from tests.workers.worker_harness import running_worker
from workers.jobs.canary_comparison import RevisionComparison
from workers.jobs.canary_share import CanaryShare
from workers.models.custom.preparation import CustomPreparer
from workers.runtime.pool import HostedModel, ModelPool
from workers.tasks import WORKER_TASKS

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=40)]

NUMBER = """
class Predictor(BasePredictor):
    def predict(self, a: int) -> float:
        return a + {added}
{more}
"""
FILE = """
class Predictor(BasePredictor):
    def predict(self, a: int) -> Path:
        path = Path(os.environ["TMPDIR"]) / "out.bin"
        path.write_bytes(b"x" * 100_000 + b"{added}")
        return path
{more}
"""
WITHIN_A_HALF = "    def is_close(self, a: float, b: float) -> bool: return abs(a - b) < 0.5"
BY_SIZE = (
    "    def is_close(self, a: Path, b: Path) -> bool: return a.stat().st_size == b.stat().st_size"
)
RAISES = "    def is_close(self, a: float, b: float) -> bool: return {}['gone']"
LOOPS = "    def is_close(self, a: float, b: float) -> bool:\n        while True: time.sleep(0.01)"
EXITS = "    def is_close(self, a: float, b: float) -> bool: os._exit(3)"


async def counted(
    redis_url: str,
    tmp_path: Path,
    body: str,
    added: tuple[str, str],
    more: str,
    *,
    asks: int = 12,
    **fields: Any,
) -> tuple[CanaryCounts, list[Any]]:
    """After some predictions, the counts that contain `added` for two revisions, and the rows."""
    folders = []
    for number, one in enumerate(added):
        (tmp_path / str(number)).mkdir()
        folders.append(
            write_class(
                tmp_path / str(number), body.replace("{added}", one).replace("{more}", more)
            )
        )
    rules = {"revision": "2", "source": f"local:{folders[1]}", "share": 0.5, "compare_share": 1.0}
    stable = entry_of(folders[0], canary=rules, **fields)
    catalog, broker = Catalog((stable,)), InMemoryBroker()
    canary = catalog.canaries[stable.name]
    rows: list[Any] = []
    async with AsyncExitStack() as opened:
        store = await opened.enter_async_context(CanaryStore(redis_url, retry_s=0.01))
        for model, folder in zip((stable, canary), folders, strict=True):
            objects = ObjectStore(f"file://{tmp_path}/objects")
            pool = ModelPool([HostedModel(model, folder)], device="cpu", processes=1)
            is_close = WORKER_TASKS["custom"].comparer(model, folder)
            comparison = is_close and RevisionComparison(model, broker, objects, is_close)
            part = CanaryShare(model, canary, store, broker, comparison, refresh_s=0.05)
            harness = await opened.enter_async_context(
                running_worker(
                    redis_url,
                    tmp_path,
                    pool=await opened.enter_async_context(pool),
                    objects=objects,
                    broker=broker,
                    model=model,
                    preparer=CustomPreparer(model),
                    canary=part,
                )
            )
            rows.append(harness.rows)
        settings = settings_for(tmp_path, redis_url=redis_url, records_url=redis_url)
        nobody = FakeWorker(broker, ())
        api = await opened.enter_async_context(
            running_api(settings, broker, broker, catalog, worker=nobody)
        )
        router = api.dependencies.dispatcher.canaries
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not router.is_serving(canary):  # noqa: ASYNC110  (it looks by the clock)
                await asyncio.sleep(0.01)
        for number in range(asks):
            made = {"version": "mine", "input": {"a": number}}
            answer = await api.http.post("/v1/predictions", json=made, headers=WAIT)
            assert answer.json()["status"] == "succeeded", answer.text
        by_canary = sum(row.revision == "2" for row in rows[1])
        assert by_canary
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                shadows = [row for row in rows[0] if row.tenant == COMPARISON_TENANT]
                counts = await store.counts(canary)
                is_over = len(shadows) >= by_canary or not comparison
                if is_over and (counts.compared >= by_canary or not expects_all(more, comparison)):
                    return counts, [*rows[0], *rows[1]]
                await asyncio.sleep(0.05)


def expects_all(more: str, comparison: object) -> bool:
    return bool(comparison) and more not in (RAISES, LOOPS, EXITS)


@pytest.mark.parametrize(
    ("body", "added", "more", "is_outside"),
    [
        (NUMBER, ("1", "1"), "", False),
        (NUMBER, ("1", "1.25"), "", True),
        (NUMBER, ("1", "1.25"), WITHIN_A_HALF, False),
        (NUMBER, ("1", "1.75"), WITHIN_A_HALF, True),
        (FILE, ("a", "a"), "", False),
        (FILE, ("a", "b"), "", True),
        (FILE, ("a", "b"), BY_SIZE, False),
        (FILE, ("a", "bb"), BY_SIZE, True),
    ],
)
async def test_outputs_of_a_canary_are_compared(
    redis_url: str, tmp_path: Path, body: str, added: tuple[str, str], more: str, is_outside: bool
) -> None:
    counts, rows = await counted(redis_url, tmp_path, body, added, more, deterministic=not more)
    assert counts.compared > 0
    assert counts.outside == (counts.compared if is_outside else 0)
    own = [row for row in rows if row.tenant == COMPARISON_TENANT]
    assert {(row.status, row.cost_usd, row.priority) for row in own} == {
        ("succeeded", 0.0, "batch")
    }


@pytest.mark.parametrize("more", [RAISES, EXITS])
async def test_what_the_class_cant_compare_counts_as_nothing(
    redis_url: str, tmp_path: Path, more: str
) -> None:
    counts, _ = await counted(redis_url, tmp_path, NUMBER, ("1", "2"), more)
    assert (counts.compared, counts.outside) == (0, 0)
    assert counts.canary.failed == counts.stable.failed == 0


async def test_a_class_that_does_not_repeat_itself_is_not_compared_by_equality(
    redis_url: str, tmp_path: Path
) -> None:
    counts, rows = await counted(redis_url, tmp_path, NUMBER, ("1", "2"), "")
    assert counts.compared == 0
    assert not [row for row in rows if row.tenant == COMPARISON_TENANT]
