"""A class and its worker's I/O process: neither is harmed by the other's files, death or output."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from shared.errors import ModelFailed
from shared.models.blob import Blob
from shared.models.tasks.custom import CustomResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import compute, entry_of, output_of, prepared, write_class
from tests.workers.models.custom.started import STEP_S, StartClass, StartedClass
from workers.models.base import PreparedFile

NAMES_FILES = """
class Predictor(BasePredictor):
    def predict(self, how: str) -> Path:
        path = Path("/proc/self/environ")
        if how == "link":
            os.symlink(path, "out.txt")
            path = Path("out.txt")
        if how == "link below a folder":
            os.symlink("/proc/self", "me")
            path = Path("me/environ")
        if how == "renamed":
            os.symlink(path, "later.txt")
            Path("out.txt").write_text("first")
            os.rename("later.txt", "out.txt")
            path = Path("out.txt")
        return open(path, "rb") if how == "open" else path
"""


def test_packed_output_must_be_json() -> None:
    packed = CustomResult(None, files=[Blob("application/json", b"{")], is_packed=True)
    with pytest.raises(ModelFailed, match=r"^output: must be the JSON that the class declared$"):
        packed.unpack()


@pytest.mark.parametrize("how", ["path", "link", "link below a folder", "renamed", "open"])
def test_an_output_is_read_as_the_class_sees_it(
    tmp_path: Path, start_class: StartClass, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("KEY_OF_THE_WORKER", "never-told")
    folder = write_class(tmp_path, NAMES_FILES, "environment: [MARK=of-the-class]\n")
    result = compute(start_class(folder), {"how": how}).results[0]
    assert isinstance(result, CustomResult), result
    (file,) = result.files
    assert file.data is not None
    assert b"MARK=of-the-class" in file.data
    assert b"never-told" not in file.data


def test_links_in_its_folders_are_not_followed_when_they_are_removed(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, outside: str) -> str:
            for place in (os.environ["TMPDIR"], "/tmp", "."):
                os.symlink(outside, f"{place}/link-of-a-class")
            os._exit(3)
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as outside:
        kept = Path(outside, "kept")
        kept.write_text("kept")
        model = start_class(write_class(tmp_path, body))
        assert isinstance(compute(model, {"outside": outside}).results[0], ModelFailed)
        assert isinstance(compute(model, {"outside": outside}).results[0], ModelFailed)
        model.close()
        assert kept.read_text() == "kept"


LEAVES_A_CHILD = """
class Predictor(BasePredictor):
    def predict(self, how: str) -> str:
        if how == "leave":
            if not os.fork():
                os.setsid()
                time.sleep(3600)  # with everything that this process has open
            os._exit(4)
        return how
"""


def test_a_death_is_noticed_though_a_child_has_its_connection(
    tmp_path: Path, start_class: StartClass
) -> None:
    model = start_class(write_class(tmp_path, LEAVES_A_CHILD))
    failed = compute(model, {"how": "leave"}).results[0]
    assert isinstance(failed, ModelFailed)
    assert "exited with status 4 while processing this item" in failed.message
    assert output_of(compute(model, {"how": "go on"})) == "go on"


def test_a_death_in_a_batch_is_noticed_though_a_child_has_its_connection(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = LEAVES_A_CHILD.replace(
        "def predict(self, how: str) -> str:",
        "def predict_batch(self, inputs: list[Given]) -> list[str]:\n        how = inputs[0].how",
    ).replace("return how", "return [one.how for one in inputs]")
    given = "class Given(BaseModel):\n    how: str\n"
    model = start_class(write_class(tmp_path, given + body))
    (failed,) = model.run(prepared({"how": "leave"})).outcomes
    assert isinstance(failed, ModelFailed)
    assert "exited with status 4 while processing this item" in failed.message
    done: list[Any] = model.run(prepared({"how": "a"}), prepared({"how": "b"})).outcomes
    assert [one.output for one in done] == ["a", "b"]


PRINTS_ON = """
class Predictor(BasePredictor):
    {kind} predict(self, how: str) -> str:
        while how == "print":
            os.write(1, b"x" * 65536)
        return how
"""
PRINTS_FOR_S = 3.0
MAX_SHARE = 0.4


@pytest.mark.slow(about_s=10)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_endless_output_takes_little_of_the_io_process(
    tmp_path: Path, start_class: StartClass, kind: str
) -> None:
    """The I/O process also holds other models' leases.

    The test measures CPU time, which is not affected by load.
    """
    for name in ("loud", "other"):
        (tmp_path / name).mkdir()
    loud = start_class(write_class(tmp_path / "loud", PRINTS_ON.format(kind=kind)))
    other = start_class(write_class(tmp_path / "other", LEAVES_A_CHILD))
    loud.admit(1, prepared({"how": "print"}))
    loud.wait_for_logs(1)
    began_s, began_cpu_s, served = time.monotonic(), time.process_time(), 0
    while (took_s := time.monotonic() - began_s) < PRINTS_FOR_S:
        loud.step()
        if not served:
            served += output_of(compute(other, {"how": "go on"})) == "go on"
    assert (time.process_time() - began_cpu_s) / took_s < MAX_SHARE
    assert served
    loud.drop(1)
    assert output_of(compute(loud, {"how": "quiet"})) == "quiet"


@pytest.mark.slow(about_s=10)
def test_output_between_predictions_takes_little_of_the_io_process(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    import threading

    class Predictor(BasePredictor):
        def setup(self) -> None:
            threading.Thread(target=self.print_on, daemon=True).start()

        def print_on(self) -> None:
            while True:
                os.write(1, b"x" * 65536)

        def predict(self, how: str) -> str:
            return how
    """
    loud = start_class(write_class(tmp_path, body))
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    while (took_s := time.monotonic() - began_s) < PRINTS_FOR_S:
        loud.step()
    assert (time.process_time() - began_cpu_s) / took_s < MAX_SHARE
    assert output_of(compute(loud, {"how": "still here"})) == "still here"


def test_a_process_ends_with_its_worker(tmp_path: Path) -> None:
    body = PRINTS_ON.format(kind="def").replace(
        "        while", "        print(os.getpid())\n        while"
    )
    folder = write_class(tmp_path, body)
    with StartedClass(entry_of(folder), folder) as model:
        pid = int(compute(model, {"how": "go on"}).logs[0].text)
        model.admit(1, prepared({"how": "print"}))
        assert len(model.wait_for_logs(1).text) <= 32 * 1024
        assert runs(pid)
    until_s = time.monotonic() + WAIT_LIMIT_S
    while runs(pid):
        assert time.monotonic() < until_s, "it runs on without a worker"
        time.sleep(STEP_S)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


MAX_ANSWER_CPU_S = 0.5
LARGE = """
class Predictor(BasePredictor):
    def predict(self, count: int, given: list[dict] = []) -> list[Any]:
        return [{"a": 1, "b": [0.5]}] * count + given
"""


@pytest.mark.slow(about_s=20)
@pytest.mark.parametrize("method", ["predict", "predict_batch"])
def test_large_json_takes_little_of_the_io_process(
    tmp_path: Path, start_class: StartClass, method: str
) -> None:
    """The I/O process neither parses nor writes the JSON.

    Parsing 4 MiB of small objects takes a second.
    """
    body = LARGE
    if method == "predict_batch":
        body = """
        class Given(BaseModel):
            count: int
            given: Optional[list[dict]] = None

        class Predictor(BasePredictor):
            def predict_batch(self, inputs: list[Given]) -> list[Any]:
                return [[{"a": 1, "b": [0.5]}] * one.count + (one.given or [])
                        for one in inputs]
        """
    model = start_class(write_class(tmp_path, body))
    objects = [{"a": 1, "b": [0.5]}] * 200_000
    written = msgspec.json.encode(objects)
    file = PreparedFile(["given"], "given.json", written, is_json=True)
    for given in ({"count": 200_000}, {"count": 0, "given": None}):
        item = prepared(given, [file] if "given" in given else [])
        began_cpu_s = time.process_time()
        if method == "predict_batch":
            result = model.run(item).outcomes[0]
        else:
            result = compute(model, item.values, item.files).results[0]
        assert time.process_time() - began_cpu_s < MAX_ANSWER_CPU_S
        assert isinstance(result, CustomResult), result
        assert result.unpack().output == objects[:1] * (given["count"] or len(objects))
