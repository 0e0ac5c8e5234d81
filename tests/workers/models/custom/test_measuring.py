"""`penstock models measure`: the values it writes for a class, and the classes it rejects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ModelFailed
from shared.models.interface import ModelInterface
from shared.models.measurement import ModelMeasurement, read_measurement
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import write_class
from workers.models.base import PreparedCustom
from workers.models.custom.checking import inspect_folder
from workers.models.custom.measuring import Conditions, measure, read_inputs

pytestmark = pytest.mark.slow(about_s=10)

ONCE = Conditions(repeats=1)
SLEEPS = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        self.kept = bytearray(os.urandom(1)) * (200 * 2**20)
        time.sleep(0.3)

    def predict(self, seconds: float, image: Path | None = None) -> str:
        time.sleep(seconds)
        return "x" * 1000
"""
WEIGHS = """
class Predictor(BasePredictor):
    def predict(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def work(self, input: Any) -> int:
        return round(input.seconds * 100)
"""
SAYS = """
class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        return text
"""
TOGETHER = """
class Predictor(BasePredictor):
    async def predict(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"
"""


def found(
    folder: Path, *assignments: str, conditions: Conditions = ONCE, lines: Path | None = None
) -> tuple[ModelInterface, ModelMeasurement]:
    interface = inspect_folder(folder).interface
    inputs = read_inputs(interface, assignments, lines)
    return interface, measure(folder, interface, inputs, conditions)


def test_setup_items_memory_and_bytes_are_measured(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"c" * 500)
    (tmp_path / "inputs.jsonl").write_text(
        '{"seconds": 0.05}\n{"seconds": 0.25, "image": "@cat.png"}\n'
    )
    interface, measured = found(
        write_class(tmp_path, SLEEPS),
        conditions=Conditions(repeats=3, uses_gpu=False),
        lines=tmp_path / "inputs.jsonl",
    )
    assert measured.setup_s >= 0.3
    assert measured.batches.keys() == {1}
    # The mean of both inputs, which is higher on a busy machine.
    assert 0.15 <= measured.seconds_per_item(1) < 0.15 + WAIT_LIMIT_S / 100
    assert 200 * 2**20 < measured.peak_memory_bytes < 400 * 2**20
    assert measured.input_bytes == pytest.approx((17 + 17 + 15 + 500) / 2, abs=10)
    assert measured.output_bytes == 1002
    assert measured.device == "cpu"
    assert "inputs: 2, repeats: 3" in measured.measured
    assert measured.sources_sha256 == interface.sources_sha256


def test_work_of_inputs_is_measured(tmp_path: Path) -> None:
    (tmp_path / "inputs.jsonl").write_text('{"seconds": 0.02}\n{"seconds": 0.06}\n')
    folder = write_class(tmp_path, WEIGHS)
    _, measured = found(folder, lines=tmp_path / "inputs.jsonl")
    assert measured.work_per_item == 4
    _, measured = found(write_class(tmp_path, SLEEPS), "seconds=0.01")
    assert measured.work_per_item is None


def test_what_a_class_computes_together_is_measured_together(tmp_path: Path) -> None:
    folder = write_class(tmp_path, TOGETHER, "concurrency: {max: 6}")
    _, measured = found(folder, "seconds=1")
    assert measured.batches.keys() == {1, 2, 4, 6}
    assert measured.seconds_per_item(6) < 0.9, "one after another takes 1 s each"
    assert measured.seconds_per_item(5) == pytest.approx(measured.batches[4] / 4)
    assert measured.seconds_per_item(1) >= 1


BATCHES = """
import pydantic


class Given(pydantic.BaseModel):
    seconds: float


class Predictor(BasePredictor):
    def predict_batch(self, inputs: list[Given]) -> list[str | Exception]:
        time.sleep(max(one.seconds for one in inputs))
        return [ValueError("no time") if one.seconds < 0.05 else "done" for one in inputs]
"""


def test_batches_of_a_class_are_measured(tmp_path: Path) -> None:
    folder = write_class(tmp_path, BATCHES)
    _, measured = found(folder, "seconds=0.1")
    assert measured.batches.keys() == {1, 2, 4, 8, 16, 32, 64}
    assert measured.seconds_per_item(64) < 0.1 / 2
    assert measured.seconds_per_item(1) >= 0.1
    with pytest.raises(ModelFailed, match="input 1: ValueError: no time"):
        found(folder, "seconds=0")


def test_the_command_writes_the_file_that_the_plan_reads(tmp_path: Path) -> None:
    write_class(
        tmp_path, "def predict(text: str) -> str: return text", "predict: predict.py:predict"
    )
    command = [sys.executable, "-m", "infra.cli.main", "models", "measure", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 at a time" in done.stdout
    assert read_measurement(tmp_path / "penstock.measured.json").batches[1] > 0


def test_a_failure_names_the_input_and_shows_the_traceback(tmp_path: Path) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> int:
            return 6 // a
    """
    (tmp_path / "inputs.jsonl").write_text('{"a": 1}\n{"a": 0}\n')
    with pytest.raises(ModelFailed, match=r"(?s)input 2: .*division.*Traceback"):
        found(write_class(tmp_path, body), lines=tmp_path / "inputs.jsonl")


def test_lines_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    (tmp_path / "inputs.jsonl").write_text("[" * 100_000)
    interface = ModelInterface(inputs={}, output={}, cog_version="0", sources_sha256="0" * 64)
    with pytest.raises(BadInput, match=r"--inputs .*inputs\.jsonl: "):
        read_inputs(interface, (), tmp_path / "inputs.jsonl")


@pytest.mark.parametrize(
    ("assignments", "line", "reason"),
    [
        ((), None, "image: must be a file; set it with -i image=@PATH"),
        (("text=a",), None, "image: is required; set it with -i image=VALUE"),
        (("size=1",), None, "must be NAME=VALUE, where NAME is one of the inputs: image, text"),
        (("image=@none.png",), None, "-i image: none.png: No such file or directory"),
        (("image=@~nobody!/a",), None, "-i image: ~nobody!/a: Could not determine home directory."),
        ((), {"image": "none.png"}, "image: a file must be written as @PATH"),
        ((), {"image": "@none.png"}, "image: {folder}/none.png: No such file or directory"),
        ((), {"image": "@~nobody!/a"}, "image: {folder}/~nobody!/a: Could not determine home"),
        ((), {"image": "@a\0"}, "image: {folder}/a\0: embedded null byte"),
        ((), {"size": 1}, "size is not an input; use one of image, text"),
        ((), [1], "each line must be a JSON object of inputs"),
    ],
)
def test_inputs_that_are_wrong_are_refused(
    tmp_path: Path, assignments: tuple[str, ...], line: Any, reason: str
) -> None:
    lines = None
    if line is not None:
        lines = tmp_path / "inputs.jsonl"
        lines.write_text(json.dumps(line))
    interface = ModelInterface(
        inputs={
            "properties": {
                "image": {"type": "string", "format": "uri"},
                "text": {"type": "string"},
            },
            "required": ["image"],
        },
        output={},
        cog_version="0",
        sources_sha256="0" * 64,
    )
    with pytest.raises(BadInput) as refused:
        read_inputs(interface, assignments, lines)
    source = "" if lines is None or not reason.startswith("image: ") else f"--inputs {lines}: "
    assert source + reason.format(folder=tmp_path) in refused.value.message


def test_files_in_lists_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "inputs.jsonl").write_text('{"parts": ["@a.txt", "@a.txt"]}')
    interface = ModelInterface(
        inputs={
            "properties": {"parts": {"type": "array", "items": {"type": "string", "format": "uri"}}}
        },
        output={},
        cog_version="0",
        sources_sha256="0" * 64,
    )
    (item,) = read_inputs(interface, (), tmp_path / "inputs.jsonl")
    assert isinstance(item, PreparedCustom)
    assert item.values == {"parts": [None, None]}
    assert [(one.at, one.data) for one in item.files] == [
        (["parts", 0], b"first"),
        (["parts", 1], b"first"),
    ]


def test_a_line_of_inputs_ends_at_a_line_feed_only(tmp_path: Path) -> None:
    interface = inspect_folder(write_class(tmp_path, SAYS)).interface
    (tmp_path / "inputs.jsonl").write_text('{"text": "one\u2028line"}\n', encoding="utf-8")
    (item,) = read_inputs(interface, (), tmp_path / "inputs.jsonl")
    assert item.values["text"] == "one\u2028line"
