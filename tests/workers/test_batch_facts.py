"""Facts about an item's batch in its row: padding, and whether it waited for the model."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.errors import PenstockError
from shared.models.tasks import Result
from shared.models.tasks.embedding import EmbeddingResult
from tests.workers.worker_harness import running_worker
from workers.models.base import OnStep, PreparedItem, PreparedText
from workers.models.processors import gpu_type_of
from workers.runtime.execution import run_batch
from workers.runtime.protocol import RunBatch
from workers.runtime.resident_models import ResidentModels

pytestmark = pytest.mark.anyio


class Counting:
    """A model that does no work, with two groups: texts of up to 4 tokens, and longer ones."""

    device_name = "cpu"

    def __init__(self, *, pads: bool) -> None:
        self.pads = pads

    def setup(self) -> None: ...

    def warmup(self) -> None: ...

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        short = [index for index, item in enumerate(batch) if item.length <= 4]
        return [short, [index for index in range(len(batch)) if index not in short]]

    def computed_work(self, lengths: Sequence[int]) -> int:
        # Without per-item padding, the sum is rounded up to 10.
        return max(lengths) * len(lengths) if self.pads else -(-sum(lengths) // 10) * 10

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        return [EmbeddingResult(b"", item.length) for item in batch]


@pytest.mark.parametrize(
    ("pads", "lengths", "computed"),
    [
        (True, [4, 9, 1, 6], [4, 9, 4, 9]),
        (True, [3, 9], []),
        (False, [4, 10, 1, 30], [8, 10, 2, 30]),
    ],
)
def test_padding_is_told_of_each_item(
    pads: bool, lengths: list[int], computed: list[int], tmp_path: Path
) -> None:
    (tmp_path / "weights").write_bytes(b"w")
    models = ResidentModels([lambda: Counting(pads=pads)], [tmp_path / "weights"])
    before_s = time.time()
    models.open()
    items: list[PreparedItem] = [PreparedText(key="", length=n, ids=b"") for n in lengths]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = run_batch(models, RunBatch(1, items), ours)
    assert done.computed_work == computed
    assert before_s <= done.loaded_at_s <= done.started_at_s
    assert done.padded_work == sum(computed or lengths)


class Poisoned(Counting):
    """A model that pads, has one group, and fails if a batch contains the last item."""

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        return [list(range(len(batch)))]

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        if any(item.key == "poison" for item in batch):
            raise ValueError("poison")
        return super().predict(batch, on_step)


def test_padding_of_a_failed_batch_does_not_count_for_its_halves(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w")
    models = ResidentModels([lambda: Poisoned(pads=True)], [tmp_path / "weights"])
    models.open()
    items: list[PreparedItem] = [PreparedText(key="", length=n, ids=b"") for n in (1, 1, 9)]
    items.append(PreparedText(key="poison", length=9, ids=b""))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = run_batch(models, RunBatch(1, items), ours)
    assert (done.computed_work or [1, 1, 9, 9]) == [1, 1, 9, 9]


async def test_row_tells_of_padding_and_of_a_cold_start(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.computed_work = [7]
        await harness.send("warm", request_id="warm")
        await harness.reply()
        harness.process.loaded_at_s = time.time() + 60
        await harness.send("cold", request_id="cold")
        await harness.reply()
        await harness.until(lambda: len(harness.rows) == 2)
        found = {row.request_id: row for row in harness.rows}
    assert [found[name].cold_start for name in ("warm", "cold")] == [False, True]
    assert {row.padded_tokens for row in found.values()} == {7}
    assert {row.tokens for row in found.values()} == {4}


@pytest.mark.parametrize(
    ("device", "gpu_type"),
    [
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_gpu_types_are_known_by_their_drivers_names(device: str, gpu_type: str | None) -> None:
    assert gpu_type_of(device) == gpu_type
