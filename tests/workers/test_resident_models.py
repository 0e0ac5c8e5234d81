"""Models under a memory budget: which ones stay, which are unloaded, and which events are reported.

The models only count calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.models.tasks import Result
from shared.models.tasks.embedding import EmbeddingResult
from workers.models.base import OnStep, PreparedItem
from workers.runtime.resident_models import ResidentModels, weights_bytes

BYTES = 100_000_000
"""Each model's file size, which far exceeds the amount this process grows when it loads a model
that only counts.
"""


class CountingModel:
    def __init__(self, number: int, log: list[str], failures: list[Exception]) -> None:
        self._number, self._log, self._failures = number, log, failures
        self.device_name, self.pads = "", True

    def setup(self) -> None:
        if self._failures:
            raise self._failures.pop()
        self.device_name = "cpu"
        self._log.append(f"load {self._number}")

    def warmup(self) -> None:
        return None

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        return [[index] for index in range(len(batch))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        return [EmbeddingResult(b"", 1) for _ in batch]

    def __del__(self) -> None:
        if self.device_name:
            self._log.append(f"free {self._number}")


class Bench:
    """Three models with files of BYTES each, and their events."""

    def __init__(self, folder: Path, room: float) -> None:
        self.log: list[str] = []
        self.failures: list[Exception] = []
        files = [folder / f"{number}.safetensors" for number in range(3)]
        for file in files:
            with file.open("wb") as sparse:
                sparse.truncate(BYTES)
        self.resident_models = ResidentModels(
            [self._maker(number) for number in range(3)], files, int(room * BYTES)
        )

    def _maker(self, number: int) -> Callable[[], CountingModel]:
        return lambda: CountingModel(number, self.log, self.failures)

    def resident(self) -> list[int]:
        changes = self.resident_models.changes()
        assert changes is not None
        return sorted(changes.resident)


def test_everything_stays_without_a_budget(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=0)
    bench.resident_models.open()
    assert bench.log == ["load 0", "load 1", "load 2"]
    assert bench.resident() == [0, 1, 2]
    assert bench.resident_models.changes() is None


def test_each_is_loaded_at_the_start_and_the_first_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=2.5)
    bench.resident_models.open()
    assert {"load 0", "load 1", "load 2"} < set(bench.log)
    changes = bench.resident_models.changes()
    assert changes is not None
    assert 0 in changes.resident
    assert len(changes.resident) == 2
    assert set(changes.load_s) == {0, 1, 2}
    assert changes.loads - changes.evictions == 2


def test_the_least_recently_used_goes_and_is_really_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=2.5)
    bench.resident_models.use(0)
    bench.resident_models.use(1)
    bench.resident_models.use(0)
    bench.resident_models.use(2)
    assert bench.log == ["load 0", "load 1", "free 1", "load 2"], (
        "room is made before the load, not after it"
    )
    assert bench.resident() == [0, 2]


def test_weights_besides_its_own_count_before_a_model_is_loaded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=2.5)
    (more := tmp_path / "control").mkdir()
    (more / "a.safetensors").symlink_to(tmp_path / "0.safetensors")
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    makers = [bench._maker(number) for number in range(3)]
    models = ResidentModels(makers, files, int(2.5 * BYTES), more_weights={1: [more]})
    for number in (0, 1):
        models.use(number)
    assert bench.log == ["load 0", "free 0", "load 1"]


def test_a_model_above_the_budget_is_resident_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=0.5)
    bench.resident_models.use(0)
    bench.resident_models.use(1)
    assert bench.log == ["load 0", "free 0", "load 1"]
    assert bench.resident() == [1]


def test_what_changed_is_told_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=1.5)
    bench.resident_models.open()
    bench.resident_models.changes()
    bench.resident_models.use(0)
    assert bench.resident_models.changes() is None
    bench.resident_models.use(2)
    changes = bench.resident_models.changes()
    assert changes is not None
    assert (changes.resident, changes.loads, changes.evictions) == ([2], 1, 1)
    assert changes.size_bytes[2] >= BYTES
    assert changes.switch_s >= changes.load_s[2] > 0


def test_a_device_that_is_full_before_the_budget_is_makes_room(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=0)
    bench.resident_models.use(0)
    bench.failures.append(RuntimeError("CUDA out of memory"))
    bench.resident_models.use(1)
    assert bench.log == ["load 0", "free 0", "load 1"]


def test_a_wrong_model_is_refused_without_harm_to_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=0)
    bench.resident_models.use(0)
    bench.failures.append(ConfigurationError("no such model"))
    with pytest.raises(ConfigurationError):
        bench.resident_models.use(1)
    assert bench.resident() == [0]
    bench.resident_models.use(1)
    assert bench.resident() == [0, 1]


def test_a_model_that_cannot_be_loaded_even_alone_fails(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=0)
    bench.resident_models.use(0)
    bench.failures.extend([ModelFailed("broken"), ModelFailed("broken")])
    with pytest.raises(ModelFailed):
        bench.resident_models.use(1)


def test_evict_others_keeps_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=0)
    bench.resident_models.open()
    bench.resident_models.evict_others(keep=1)
    assert bench.resident() == [1]


def test_weights_are_counted_in_one_format(tmp_path: Path) -> None:
    for name, size in (
        ("model.safetensors", 7),
        ("unet/part.safetensors", 5),
        ("model.bin", 9),
        ("README.md", 3),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert weights_bytes(tmp_path) == 12
    assert weights_bytes(tmp_path / "model.bin") == 9
    assert weights_bytes(tmp_path / "unet") == 5
    assert weights_bytes(tmp_path / "nowhere") == 0
