"""A compiled model's calls without compiled code, from the model process to the metric."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import REGISTRY

from tests.workers.test_spare_steps import Process, TimedModel, ends, text
from workers.metrics import BatchMetrics
from workers.models.base import StepEnd


class HalfCompiledModel(TimedModel):
    """Runs each step with more than one text eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self._eager_calls = 0

    def step(self) -> StepEnd:
        end = super().step()
        self._eager_calls += end.work > 1
        return end

    def take_eager_calls(self) -> int:
        count, self._eager_calls = self._eager_calls, 0
        return count


def test_eager_calls_reach_the_metric(tmp_path: Path) -> None:
    process = Process(tmp_path, HalfCompiledModel())
    metrics = BatchMetrics("half-compiled")
    for done in ends(process.run(text(30), text(20), text(10))):
        metrics.observe(done)
    labels = {"model": "half-compiled"}
    assert REGISTRY.get_sample_value("penstock_worker_eager_calls_total", labels) == 20
