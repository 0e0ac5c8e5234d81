"""Rows in docs/reference/own-models.md that aren't covered by other tests (test_reference.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ModelFailed
from shared.models.entry import ModelResources
from shared.models.tasks.custom import CustomResult
from tests.anywhere.launcher import SKIPPED
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import (
    HEAD,
    compute,
    entry_of,
    output_of,
    prepared,
    write_class,
)
from tests.workers.models.custom.started import StartClass, StartedClass
from tests.workers.models.custom.wheels import make_wheel
from workers.models.client import ModelProcessDied
from workers.models.custom.checking import inspect_folder

ROOT = Path(__file__).parents[4]
LAUNCHER = ROOT / "tests" / "anywhere" / "launcher.py"
ONE = """
class Predictor(BasePredictor):
    def predict(self, a: int) -> int:
        return a
"""


@pytest.mark.parametrize(
    ("file", "body"),
    [
        ("run.py", "class Runner(BaseRunner):\n    def run(self, a: int) -> int: return a"),
        ("predict.py", "class Runner(BaseRunner):\n    def run(self, a: int) -> int: return a"),
        (
            "run.py",
            "class Predictor(BasePredictor):\n    def predict(self, a: int) -> int: return a",
        ),
    ],
)
def test_a_class_is_found_without_cog_yaml(
    tmp_path: Path, start_class: StartClass, file: str, body: str
) -> None:
    (tmp_path / file).write_text(HEAD + body)
    assert output_of(compute(start_class(tmp_path), {"a": 3})) == 3


@pytest.mark.slow(about_s=8)
def test_packages_of_cog_yaml_are_installed_as_uv_is_configured(
    tmp_path: Path, start_class: StartClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENVIRONMENTS_DIR", str(tmp_path / "environments"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    make_wheel(tmp_path / "wheels", "told", "2.0")
    body = """
    import told

    class Predictor(BasePredictor):
        def predict(self) -> str:
            return told.version
    """
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", body, "build: {python_packages: [told==2.0]}\n")
    assert output_of(compute(start_class(folder), {})) == "2.0"


def test_a_setup_timeout_for_cogs_server_has_no_effect(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        def setup(self) -> None:
            time.sleep(1.5)

        def predict(self) -> str:
            return os.environ["COG_SETUP_TIMEOUT"]
    """
    folder = write_class(tmp_path, body, "environment: [COG_SETUP_TIMEOUT=1]\n")
    assert output_of(compute(start_class(folder), {})) == "1"


NAMES_A_FILE = """
class Report(BaseModel):
    name: str
    file: Path

class Predictor(BasePredictor):
    def predict(self, exists: bool) -> {output}:
        Path("made.txt").write_text("made by the class")
        return {value}
"""


@pytest.mark.parametrize(
    ("output", "value", "at"),
    [
        ("Path", "'made.txt'", []),
        ("list[Path]", "[os.path.abspath('made.txt')]", [0]),
        ("list[list[Path]]", "[[], ['made.txt']]", [1, 0]),
        ("set[Path]", "{'made.txt'}", [0]),
        ("Report", "Report(name='made.txt', file='made.txt')", ["file"]),
        ("list[Report]", "[dict(name='made.txt', file='made.txt')]", [0, "file"]),
    ],
)
def test_a_text_that_names_a_file_becomes_it(
    tmp_path: Path, start_class: StartClass, output: str, value: str, at: list[int]
) -> None:
    folder = write_class(tmp_path, NAMES_A_FILE.format(output=output, value=value))
    result = compute(start_class(folder), {"exists": True}).results[0]
    assert isinstance(result, CustomResult), result
    assert [(one.at, one.name) for one in result.places] == [(at, "made.txt")]
    assert [one.data for one in result.files] == [b"made by the class"]


VALUES = """
import datetime, numpy

VALUES = {
    "secret": lambda: Secret("never-told"),
    "secret inside": lambda: {"all": [Secret("never-told")]},
    "boolean of numpy": lambda: [numpy.bool_(True), numpy.array([False])],
    "date": lambda: [datetime.date(2026, 1, 2)],
}

class Predictor(BasePredictor):
    def predict(self, name: str) -> Any:
        return VALUES[name]()
"""


def test_secrets_are_no_outputs_and_dates_and_booleans_of_numpy_are(
    tmp_path: Path, start_class: StartClass
) -> None:
    model = start_class(write_class(tmp_path, VALUES))
    for name, place in (("secret", "output: "), ("secret inside", "output.all[0]: ")):
        failed = compute(model, {"name": name}).results[0]
        assert isinstance(failed, ModelFailed)
        assert failed.message.startswith(place)
        assert "never-told" not in failed.message
    assert output_of(compute(model, {"name": "boolean of numpy"})) == [True, [False]]
    assert output_of(compute(model, {"name": "date"})) == ["2026-01-02"]


def test_a_piece_and_the_files_of_an_output_have_bounds(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, letters: int, files: int) -> Iterator[Any]:
            yield "x" * letters
            path = Path("one.txt")
            path.write_text("a")
            yield [path] * files
    """
    model = start_class(write_class(tmp_path, body))
    fits = output_of(compute(model, {"letters": 1_000_000, "files": 512}))
    assert (len(fits[0]), len(fits[1])) == (1_000_000, 512)
    long = compute(model, {"letters": 2**20 + 1, "files": 0}).results[0]
    assert isinstance(long, ModelFailed)
    assert "at most 1048576 bytes" in long.message
    many = compute(model, {"letters": 1, "files": 513}).results[0]
    assert isinstance(many, ModelFailed)
    assert "512" in many.message


def test_a_batch_that_takes_too_long_is_killed_and_the_next_is_computed(
    tmp_path: Path, start_class: StartClass
) -> None:
    """A worker allows each batch 5 minutes and then retries its items in halves."""
    body = """
    class Given(BaseModel):
        a: int

    class Predictor(BasePredictor):
        def predict_batch(self, inputs: list[Given]) -> list[int]:
            while inputs[0].a < 0:
                time.sleep(0.01)
            return [one.a for one in inputs]
    """
    model = start_class(write_class(tmp_path, body))
    with pytest.raises(ModelProcessDied, match=r"did not finish within 1\.5 s"):
        model.run(prepared({"a": -1}), prepared({"a": 2}), timeout_s=1.5)
    done: list[Any] = model.run(prepared({"a": 1}), prepared({"a": 2})).outcomes
    assert [one.output for one in done] == [1, 2]


def test_bounds_of_an_entry_are_those_of_the_page(tmp_path: Path) -> None:
    folder = write_class(tmp_path, ONE)
    entry = entry_of(folder)
    assert (entry.startup_s, entry.batch.max_items) == (180, 1)
    assert ModelResources().disk_bytes == 4 * 2**30
    assert ModelResources().memory_bytes is None
    assert entry_of(folder, startup_s=7200).startup_s == 7200
    many = {f"A{number}": "x" for number in range(65)}
    for field, value in (("startup_s", 7201), ("environment", many)):
        with pytest.raises(ValueError, match=field):
            entry_of(folder, **{field: value})


def test_variables_that_are_too_large_are_refused(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", ONE)
    (tmp_path / "large").write_text("x" * (64 * 1024 + 1))
    entry = entry_of(folder, secrets={"TOKEN": f"local:{tmp_path}/large"})
    with pytest.raises(Exception, match=r"secrets\.TOKEN: .*65536 bytes"):
        StartedClass(entry, folder)


def test_look_around_is_left_to_the_class_and_unknown_arguments_are_no_inputs(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = r"""
    class Predictor(BasePredictor):
        def predict(self, *args: Any, a: str = Input(regex="(?<!x)a"), **more: Any) -> str:
            return a
    """
    folder = write_class(tmp_path, body)
    assert list(inspect_folder(folder).interface.properties) == ["a"]
    model = start_class(folder)
    refused = compute(model, {"a": "b"}).results[0]
    assert isinstance(refused, BadInput)
    assert refused.field == "a"
    assert output_of(compute(model, {"a": "a"})) == "a"


STARTS = """
import sys
from pathlib import Path
from tests.workers.models.custom.classes import entry_of
from tests.workers.models.custom.started import StartedClass

folder = Path(sys.argv[1])
StartedClass(entry_of(folder), folder).close()
"""


def test_a_worker_says_what_its_system_lacks(tmp_path: Path) -> None:
    folder = write_class(tmp_path, ONE)
    options = json.dumps({"refuses": ["namespaces", "landlock"]})
    command = [sys.executable, str(LAUNCHER), options, sys.executable, "-c", STARTS, str(folder)]
    done: Any = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False, cwd=ROOT
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert "a class is running unconfined" in done.stderr


def test_a_file_in_an_object_keeps_its_name(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self) -> dict:
            Path("cat.txt").write_text("a cat")
            return {"best": Path("cat.txt"), "all": [open("cat.txt")]}
    """
    result = compute(start_class(write_class(tmp_path, body)), {}).results[0]
    assert isinstance(result, CustomResult), result
    assert [(one.at, one.name) for one in result.places] == [
        (["best"], "cat.txt"),
        (["all", 0], "cat.txt"),
    ]


def test_defaults_have_the_types_of_values_that_callers_give(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    import enum

    class Mode(enum.Enum):
        FAST = "fast"

    class Predictor(BasePredictor):
        def predict(
            self,
            mode: Mode = Mode.FAST,
            key: Secret = Input(default="a key"),
            file: Path = Input(default="/etc/hostname"),
        ) -> list[str]:
            return [type(one).__name__ for one in (mode, key, file)]
    """
    found = output_of(compute(start_class(write_class(tmp_path, body)), {}))
    assert found[:2] == ["str", "Secret"]
    assert found[2].endswith("Path")
