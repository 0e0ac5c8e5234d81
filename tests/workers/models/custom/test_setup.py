"""A class's `setup`: its output is shown while it runs, and a failed `setup` is retried."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.errors import Canceled, ConfigurationError, ModelFailed
from shared.models.tasks.custom import CustomResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import compute, entry_of, output_of, prepared, write_class
from tests.workers.models.custom.started import OperatorsLog, StartClass, StartedClass
from workers.models.custom.class_process import FIRST_PAUSE_S

LOADS = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        print("loading shard 1 of 2")
        print("loading shard 2 of 2", file=sys.stderr)

    def predict(self, a: int) -> int:
        print("computing")
        return a
"""


def test_what_setup_prints_is_shown_and_is_in_no_prediction(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_class(write_class(tmp_path, LOADS))
    operators_log.wait_for("loading shard 1 of 2")
    operators_log.wait_for("loading shard 2 of 2")
    assert compute(model, {"a": 1}).logs[0].text == "computing\n"
    model.close()
    assert operators_log.look().count("loading shard") == 2, "each line is shown once"


def test_setup_is_shown_while_it_runs(tmp_path: Path, operators_log: OperatorsLog) -> None:
    go = tmp_path / "class" / "go-on"
    body = (
        LOADS
        + f"""
class Predictor(Predictor):
    def setup(self) -> None:
        print("downloading", flush=True)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
"""
    )
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", body)
    entry = entry_of(folder)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(StartedClass, entry, folder)
        try:
            operators_log.wait_for("downloading")
            assert not starting.done(), "it is not set up"
        finally:
            go.touch()
        with starting.result(WAIT_LIMIT_S) as model:
            assert output_of(compute(model, {"a": 3})) == 3


def test_output_of_setup_is_bounded(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    body = """
    class Predictor(BasePredictor):
        def setup(self) -> None:
            for number in range(100):
                print("x" * 65535)

        def predict(self, a: int) -> int:
            return a
    """
    began_s = time.monotonic()
    model = start_class(write_class(tmp_path, body))
    assert output_of(compute(model, {"a": 3})) == 3
    model.close()
    most = 64 * 1024 + 16 * 1024 * (time.monotonic() - began_s)
    assert 60_000 < operators_log.look().count("x" * 100) * 100 <= most


PREDICT = """
    def predict(self, a: int) -> int:
        if a < 0:
            os._exit(3)
        return a
"""
PREDICT_BATCH = """
    def predict_batch(self, inputs: list[One]) -> list[int]:
        if inputs[0].a < 0:
            os._exit(3)
        return [one.a for one in inputs]
"""


def breaks_later(folder: Path, predict: str = PREDICT) -> Path:
    """A class whose `setup` fails while a file named `broken` exists in the parent folder, and
    hangs while `hangs` exists there.
    """
    folder.mkdir()
    body = f"""
import dataclasses, pathlib

@dataclasses.dataclass
class One:
    a: int

class Predictor(BasePredictor):
    def setup(self) -> None:
        beside = pathlib.Path({str(folder.parent)!r})
        print("setting up at", time.monotonic())
        if (beside / "hangs").exists():
            time.sleep(600)
        if (beside / "broken").exists():
            raise RuntimeError("no weights just now")
{predict}"""
    return write_class(folder, body)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that a class can see, even if the class has its own /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def fail_again(model: StartedClass, outside: Path) -> None:
    """Stops a class's process and makes its next `setup` fail."""
    compute(model, {"a": -1})
    (outside / "broken").touch()
    error = compute(model, {"a": 1}).results[0]
    assert isinstance(error, ModelFailed)
    assert "could not be set up again" in error.message
    assert "no weights just now" in error.message


@pytest.mark.slow(about_s=5)
def test_a_class_that_cant_be_set_up_again_is_tried_until_it_can(
    outside: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_class(breaks_later(outside / "class"))
    fail_again(model, outside)
    assert isinstance(compute(model, {"a": 1}).results[0], ModelFailed)
    (outside / "broken").unlink()
    assert output_of(compute(model, {"a": 2})) == 2
    assert output_of(compute(model, {"a": 3})) == 3
    model.close()
    _, failed_s, again_s, done_s = set_up_at_s(operators_log)
    assert again_s - failed_s >= FIRST_PAUSE_S * 0.9
    assert done_s - again_s >= 2 * FIRST_PAUSE_S * 0.9


def set_up_at_s(log: OperatorsLog) -> list[float]:
    """When each `setup` in `breaks_later` started."""
    return [float(found) for found in re.findall(r"setting up at ([\d.]+)\n", log.look())]


@pytest.mark.slow(about_s=5)
def test_what_waits_for_the_next_try_can_be_canceled(
    outside: Path, start_class: StartClass
) -> None:
    model = start_class(breaks_later(outside / "class"))
    fail_again(model, outside)
    model.admit(1, prepared({"a": 2}))
    model.drop(1)
    assert isinstance(model.steps_until(1).results[1], Canceled | ModelFailed)
    (outside / "broken").unlink()
    assert output_of(compute(model, {"a": 2})) == 2


def test_a_later_setup_has_the_limit_of_its_entry(outside: Path, start_class: StartClass) -> None:
    model = start_class(breaks_later(outside / "class"), startup_s=1.5)
    compute(model, {"a": -1})
    (outside / "hangs").touch()
    error = compute(model, {"a": 1}).results[0]
    assert isinstance(error, ModelFailed)
    assert "setup took longer than 1.5 s" in error.message


@pytest.mark.slow(about_s=5)
def test_batches_wait_for_the_next_try_as_well(
    outside: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_class(breaks_later(outside / "class", PREDICT_BATCH))
    (ended,) = model.run(prepared({"a": -1})).outcomes
    assert isinstance(ended, ModelFailed)
    (outside / "broken").touch()
    failures = model.run(*[prepared({"a": number}) for number in range(4)]).outcomes
    for failed in failures:
        assert isinstance(failed, ModelFailed)
        assert "no weights just now" in failed.message
    assert len(set_up_at_s(operators_log)) == 2, "one try for the whole batch"
    (outside / "broken").unlink()
    (done,) = model.run(prepared({"a": 5})).outcomes
    assert isinstance(done, CustomResult)
    assert done.output == 5


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("class Other: pass", ConfigurationError),
        ("class Predictor(BasePredictor): pass", ConfigurationError),
        (LOADS + "\n    def setup(self) -> None: raise OSError('no network')", ModelFailed),
        (LOADS + "\n    def setup(self) -> None: os._exit(4)", ModelFailed),
    ],
)
def test_only_what_may_be_mended_from_outside_is_tried_again(
    tmp_path: Path, body: str, kind: type[Exception]
) -> None:
    entry = entry_of(write_class(tmp_path, LOADS))
    folder = write_class(tmp_path, body)
    with pytest.raises(kind):
        StartedClass(entry, folder)
