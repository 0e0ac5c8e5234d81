"""Before its process is killed, a canceled prediction may run for as long as `setup` took."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.models.custom.classes import compute, output_of, prepared, write_class
from tests.workers.models.custom.started import StartClass

pytestmark = pytest.mark.slow(about_s=30)
LONG_SETUP = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        time.sleep(8)

    def predict(self, how: str) -> int:
        if how == "stubborn":
            print("begin")
            until_s = time.monotonic() + 4  # after the cancellation
            while time.monotonic() < until_s:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass
        if how == "loop":
            print("begin")
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass
        return os.getpid()
"""


def test_a_canceled_prediction_may_run_as_long_as_setup_took(
    tmp_path: Path, start_class: StartClass
) -> None:
    """Otherwise, a caller that keeps canceling could keep a class in `setup` at no cost."""
    model = start_class(write_class(tmp_path, LONG_SETUP))
    before = output_of(compute(model, {"how": ""}))
    model.admit(1, prepared({"how": "stubborn"}))
    model.wait_for_logs(1)
    model.drop(1)
    assert output_of(compute(model, {"how": ""})) == before, "it need not be set up again"


def test_one_that_never_stops_is_killed_then(tmp_path: Path, start_class: StartClass) -> None:
    model = start_class(write_class(tmp_path, LONG_SETUP))
    before = output_of(compute(model, {"how": ""}))
    model.admit(1, prepared({"how": "loop"}))
    model.wait_for_logs(1)
    model.drop(1)
    assert output_of(compute(model, {"how": ""})) != before
