"""`setup` of a class: what it prints is shown meanwhile, and one that fails is tried again."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ConfigurationError, ModelFailed
from shared.tasks.custom import CustomResult
from tests.workers.models.custom.classes import compute, entry_of, output_of, prepared, write_class
from workers.models.base import StepEnd
from workers.models.custom import model as module
from workers.models.custom.batches import CustomBatchModel
from workers.models.custom.model import CustomModel
from workers.models.custom.process import (
    MAX_SHOWN_BYTES,
    SHOWN_BYTES_PER_S,
    BoundedShow,
    RunnerProcess,
)

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
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_class(tmp_path, LOADS)
    model = CustomModel(entry_of(folder), folder, "cpu", 1)
    try:
        model.setup()
        shown = capfd.readouterr().err
        assert "loading shard 1 of 2" in shown
        assert "loading shard 2 of 2" in shown
        end = compute(model, {"a": 1})
        assert end.logs[0].text == "computing\n"
        assert "loading" not in capfd.readouterr().err, "it is shown once"
    finally:
        model.close()


def test_setup_is_shown_while_it_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        LOADS
        + f"""
class Predictor(Predictor):
    def setup(self) -> None:
        print("downloading", flush=True)
        while not os.path.exists({str(tmp_path / "go-on")!r}):
            time.sleep(0.01)
"""
    )
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", body)
    runner = RunnerProcess(folder, shows=BoundedShow())
    try:
        shown = ""
        while "downloading" not in shown:
            assert runner.receive(0.01) == [], "it is not set up"
            shown += capfd.readouterr().err
    finally:
        runner.kill("the test is over")
        runner.close()


def test_shown_output_is_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    show = BoundedShow(lambda: now_s)
    for _ in range(100):
        show("x" * MAX_SHOWN_BYTES)
    assert capfd.readouterr().err == "x" * MAX_SHOWN_BYTES
    now_s = 1.0
    show("y" * MAX_SHOWN_BYTES)
    left_out = f"\n[{99 * MAX_SHOWN_BYTES} characters left out]\n"
    assert capfd.readouterr().err == left_out + "y" * SHOWN_BYTES_PER_S


PREDICT = """
    def predict(self, a: int) -> int:
        if a < 0:
            os._exit(3)
        return a
"""
PREDICT_BATCH = """
    def predict_batch(self, inputs: list[One]) -> list[int]:
        return [one.a for one in inputs]
"""


def breaks_later(folder: Path, predict: str = PREDICT) -> Path:
    """A class whose `setup` fails while `broken` is beside its folder, and hangs by `hangs`."""
    folder.mkdir()
    body = f"""
import dataclasses, pathlib

@dataclasses.dataclass
class One:
    a: int

class Predictor(BasePredictor):
    def setup(self) -> None:
        beside = pathlib.Path({str(folder.parent)!r})
        if (beside / "hangs").exists():
            time.sleep(600)
        if (beside / "broken").exists():
            raise RuntimeError("no weights just now")
{predict}"""
    return write_class(folder, body)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that a class sees, whatever its /tmp is."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def steps_until_one_ends(model: CustomModel) -> StepEnd:
    while not (end := model.step()).results:
        pass
    return end


def children() -> set[str]:
    """The processes that this one has started and that run."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {one for task in tasks for one in task.read_text().split()}


def fail_again(model: CustomModel, outside: Path) -> None:
    """Sets a class up, ends its process, and has it fail to be set up again."""
    model.setup()
    compute(model, {"a": -1})
    (outside / "broken").touch()
    model.admit(0, prepared({"a": 1}))
    error = steps_until_one_ends(model).results[0]
    assert isinstance(error, ModelFailed)
    assert "could not be set up again" in error.message
    assert "no weights just now" in error.message


def test_a_class_that_cant_be_set_up_again_is_not_started_at_once(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "backoff", lambda first_s, longest_s: itertools.repeat(600.0))
    folder = breaks_later(outside / "class")
    before = children()
    model = CustomModel(entry_of(folder), folder, "cpu", 1)
    try:
        fail_again(model, outside)
        model.admit(1, prepared({"a": 2}))
        for _ in range(5):
            assert not model.step().results, "it waits for the next try"
            assert children() <= before
        model.drop(1)
        assert not model.step().results
    finally:
        model.close()


def test_what_waits_for_the_next_try_is_computed_then(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "backoff", lambda first_s, longest_s: itertools.repeat(0.2))
    folder = breaks_later(outside / "class")
    model = CustomModel(entry_of(folder), folder, "cpu", 1)
    try:
        fail_again(model, outside)
        (outside / "broken").unlink()
        assert output_of(compute(model, {"a": 2})) == 2
    finally:
        model.close()


def test_a_later_setup_has_the_limit_of_its_entry(outside: Path) -> None:
    folder = breaks_later(outside / "class")
    model = CustomModel(entry_of(folder, startup_s=1.5), folder, "cpu", 1)
    try:
        model.setup()
        compute(model, {"a": -1})
        (outside / "hangs").touch()
        model.admit(0, prepared({"a": 1}))
        error = steps_until_one_ends(model).results[0]
        assert isinstance(error, ModelFailed)
        assert "setup took longer than 1.5 s" in error.message
    finally:
        model.close()


def test_batches_wait_for_the_next_try_as_well(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "backoff", lambda first_s, longest_s: itertools.repeat(0.2))
    folder = breaks_later(outside / "class", PREDICT_BATCH)
    model = CustomBatchModel(entry_of(folder), folder, "cpu", 1)
    looked: list[int] = []
    try:
        (outside / "broken").touch()
        with pytest.raises(ModelFailed, match="no weights just now"):
            model.predict([prepared({"a": 1})], lambda step, steps: None)
        (outside / "broken").unlink()
        (done,) = model.predict([prepared({"a": 5})], lambda step, steps: looked.append(step))
        assert isinstance(done, CustomResult)
        assert done.output == 5
        assert looked, "a caller may cancel meanwhile"
    finally:
        model.close()


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
        CustomModel(entry, folder, "cpu", 1).setup()
