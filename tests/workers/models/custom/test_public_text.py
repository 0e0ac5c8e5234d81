"""The text of a class's errors and output, as seen by the caller and by the operator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.errors import BadInput, ConfigurationError, ModelFailed
from shared.messages import PrintedLogs
from tests.penstock_command import penstock
from tests.workers.models.custom.classes import compute, entry_of, prepared, write_class
from tests.workers.models.custom.started import OperatorsLog, StartClass, StartedClass
from workers.models.base import PreparedFile
from workers.models.custom.public_text import PathRemover, PublicLogs
from workers.models.custom.trial import predict


def assert_names_no_path(text: str, folder: Path) -> None:
    """Fails if a text contains a path on this machine."""
    for part in (str(folder), "penstock-scratch", "/prediction-", "site-packages", "/lib/python"):
        assert part not in text, text


LEAKS = """
class Predictor(BasePredictor):
    def predict(self, image: Path, how: str = "") -> str:
        import json, warnings
        print("image", image, "in", os.getcwd(), "of", __file__)
        warnings.warn("old")
        if how == "library":
            json.loads("{")
        if how == "pillow":
            from PIL import Image
            Image.open(image)
        os.write(2, f"again {image}\\n".encode())
        raise OSError(f"cannot read {image}, nor {__file__}")
"""


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("", "OSError: cannot read cat.png, nor predict.py"),
        ("library", "JSONDecodeError: Expecting property name enclosed in double quotes"),
        ("pillow", "UnidentifiedImageError: cannot identify image file 'cat.png'"),
    ],
)
def test_errors_and_logs_name_no_path_of_the_machine(
    tmp_path: Path, start_class: StartClass, how: str, error: str
) -> None:
    model = start_class(write_class(tmp_path, LEAKS))
    file = PreparedFile(["image"], "cat.png", b"not an image")
    end = compute(model, {"image": None, "how": how}, [file])
    failed = end.results[0]
    assert isinstance(failed, ModelFailed)
    assert failed.message.startswith(error)
    logs = end.logs[0].text
    assert logs.startswith("image cat.png in . of predict.py\n")
    assert 'File "predict.py", line' in logs
    for text in (failed.message, logs):
        assert_names_no_path(text, tmp_path)


def test_a_path_printed_in_two_parts_is_removed_too(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, go: str) -> str:
            half = len(__file__) // 2
            os.write(1, f"at {__file__[:half]}".encode())
            while not os.path.exists(go):
                time.sleep(0.01)
            os.write(1, f"{__file__[half:]} 3/4".encode())
            return ""
    """
    (tmp_path / "class").mkdir()
    model = start_class(write_class(tmp_path / "class", body))
    go = tmp_path / "class" / "go"
    model.admit(0, prepared({"go": str(go)}))
    assert model.wait_for_logs(0) == PrintedLogs("at ")
    go.touch()
    end = model.steps_until(0)
    assert end.logs[0] == PrintedLogs("at predict.py 3/4")


def test_positions_in_logs_stay_when_paths_are_removed_and_the_begin_is_cut() -> None:
    logs = PublicLogs(PathRemover(Path("/tmp/scratch"), [Path("/srv/class")]))
    raw, read = "", ""
    for number in range(3000):
        raw += f"{number} /srv/class/predict.py and /tmp/scratch/src/out.png\n"
        kept = raw[-32 * 1024 :]
        public = logs.add(PrintedLogs(kept, len(raw) - len(kept)))
        read += public.after(len(read))
    assert read == "".join(f"{number} predict.py and out.png\n" for number in range(3000))


@pytest.mark.parametrize("before", ["", "in ", "\x1b[35m", "cc -I", "(", "file://"])
def test_a_folder_printed_in_two_parts_is_removed(before: str) -> None:
    logs = PublicLogs(PathRemover(None, [Path("/srv/class")]))
    logs.add(PrintedLogs(f"{before}/srv/cla"))
    printed = logs.add(PrintedLogs(f"{before}/srv/class/a.py\n"), is_all=True)
    assert printed.text == f"{before}a.py\n"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/srv/class", "."),
        ("in /srv/class.", "in .."),
        ("/srv/class/a/b.py", "a/b.py"),
        ("/srv/classes/a", "/srv/classes/a"),
        ("/srv/class-2 /srv/class.old", "/srv/class-2 /srv/class.old"),
        ("Path('/opt/e/lib/python3.11/site-packages/x.py')", "Path('x.py')"),
        ("/usr/bin/ffmpeg -i 1/2", "/usr/bin/ffmpeg -i 1/2"),
        ("\x1b[35m/srv/class/a.py\x1b[0m", "\x1b[35ma.py\x1b[0m"),
        ("cc -I/srv/class/inc -L/srv/class/lib", "cc -Iinc -Llib"),
        ("\u201c/srv/class/a\u201d @/srv/class/b \u2026/srv/class/c", "\u201ca\u201d @b \u2026c"),
        ("sqlite:////srv/class/db", "sqlite:///db"),
        ("https://a.org/o/srv/class/main.py", "https://a.org/o/srv/class/main.py"),
        ("/home/me/srv/class/a.c x/srv/class", "/home/me/srv/class/a.c x/srv/class"),
        ("file:///srv/class/a.png PYTHONPATH=/srv/class:/a", "file://a.png PYTHONPATH=.:/a"),
    ],
)
def test_only_whole_folders_are_removed(text: str, public: str) -> None:
    assert PathRemover(None, [Path("/srv/class")]).remove(text) == public


def test_without_folders_only_those_of_python_are_removed() -> None:
    text = "/srv/class/a.py /usr/lib/python3.11/json/decoder.py"
    assert PathRemover(None, []).remove(text) == "/srv/class/a.py json/decoder.py"


QUIET = "environment: [PENSTOCK_TRACEBACKS=off]\n"
RAISES = """
class Predictor(BasePredictor):
    def predict(self, a: int) -> str:
        print("begin")
        raise KeyError("secret table")
"""


def test_the_author_can_keep_tracebacks_from_callers(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_class(write_class(tmp_path, RAISES, QUIET))
    end = compute(model, {"a": 1})
    assert end.logs == {0: PrintedLogs("begin\n")}
    operators_log.wait_for("Traceback")
    operators_log.wait_for('/predict.py", line')  # with the full path


def test_tracebacks_are_on_or_off(tmp_path: Path) -> None:
    folder = write_class(tmp_path, RAISES, "environment: [PENSTOCK_TRACEBACKS=no]\n")
    with pytest.raises(ConfigurationError, match="PENSTOCK_TRACEBACKS must be on or off, got 'no'"):
        entry_of(folder)


PRINTS_IN_SETUP = """
print("imported")

class Predictor(BasePredictor):
    def setup(self) -> None:
        print("weights are loaded")
        if os.path.exists("once"):
            raise OSError(f"no weights in {__file__}")

    def predict(self, a: int) -> str:
        print("computed", a)
        if a == 2:
            os._exit(3)
        return ""
"""


def test_the_operator_sees_what_a_setup_that_succeeds_prints(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_class(write_class(tmp_path, PRINTS_IN_SETUP))
    operators_log.wait_for("imported\nweights are loaded\n")
    assert compute(model, {"a": 1}).logs == {0: PrintedLogs("computed 1\n")}
    assert compute(model, {"a": 2}).logs == {0: PrintedLogs("computed 2\n")}
    assert compute(model, {"a": 1}).logs == {0: PrintedLogs("computed 1\n")}
    model.close()
    said = operators_log.look()
    assert said.count("imported\nweights are loaded\n") == 2, "of the second process, too"
    assert "computed" not in said, "what a prediction prints is its own"


def test_commands_show_what_the_class_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_class(tmp_path, PRINTS_IN_SETUP)
    assert penstock("models", "check", str(folder)) == 0
    assert "imported\n" in capfd.readouterr().err
    predict(folder, ["a=1"], tmp_path)
    assert capfd.readouterr().err.endswith("imported\nweights are loaded\ncomputed 1\n")


ASYNC = """
class Predictor(BasePredictor):
    async def predict(self, a: int) -> int:
        return a
"""


def test_check_prints_how_many_run_at_a_time_and_their_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_class(tmp_path, ASYNC)
    assert penstock("models", "check", str(folder)) == 0
    assert "each process computes one prediction at a time\n" in capfd.readouterr().out
    write_class(tmp_path, ASYNC, "concurrency: {max: 3}\n")
    assert penstock("models", "check", str(folder)) == 0
    said = capfd.readouterr().out
    assert "up to 3 predictions at a time (concurrency.max); batch.max_items in the entry" in said
    assert f"how much memory this takes: penstock models measure {folder}\n" in said
    assert penstock("models", "measure", str(folder), "-i", "a=1", "--repeats", "1", "--cpu") == 0
    assert penstock("models", "check", str(folder)) == 0
    assert re.search(r"3 at a time took [1-9]\d* MiB of memory\n", capfd.readouterr().out)


def test_a_setup_that_fails_later_names_no_path_to_the_caller(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_class(write_class(tmp_path, PRINTS_IN_SETUP))
    (tmp_path / "once").touch()
    compute(model, {"a": 2})
    failed = compute(model, {"a": 1}).results[0]
    assert isinstance(failed, ModelFailed)
    assert (
        failed.message == "the model could not be set up again: OSError: no weights in predict.py"
    )
    operators_log.wait_for("Traceback")


INVALID = """
class InvalidInput(Exception):
    pass

class TooDark(InvalidInput):
    pass

class Predictor(BasePredictor):
    def predict(self, image: str, kind: str) -> str:
        raise {"own": InvalidInput, "below": TooDark, "other": ValueError}[kind]("too dark")
"""
INVALID_BATCH = INVALID.replace(
    "def predict(self, image: str, kind: str) -> str:\n        raise",
    "def predict_batch(self, inputs: list[Given]) -> list[str]:\n"
    "        kind = inputs[0].kind\n        raise",
).replace(
    "class Predictor", "class Given(BaseModel):\n    image: str\n    kind: str\n\nclass Predictor"
)


@pytest.mark.parametrize("kind", ["own", "below"])
def test_a_class_blames_the_input_without_an_import(
    tmp_path: Path, start_class: StartClass, kind: str
) -> None:
    end = compute(start_class(write_class(tmp_path, INVALID)), {"image": "x", "kind": kind})
    wrong = end.results[0]
    assert isinstance(wrong, BadInput)
    assert (wrong.field, wrong.message, end.logs) == (None, "too dark", {})


def test_another_exception_is_a_failure_of_the_model(
    tmp_path: Path, start_class: StartClass
) -> None:
    end = compute(start_class(write_class(tmp_path, INVALID)), {"image": "x", "kind": "other"})
    assert isinstance(end.results[0], ModelFailed)


@pytest.mark.parametrize("kind", ["own", "below"])
def test_a_batch_of_one_blames_its_input(tmp_path: Path, kind: str) -> None:
    folder = write_class(tmp_path, INVALID_BATCH)
    with StartedClass(entry_of(folder), folder) as model:
        (wrong,) = model.run(prepared({"image": "x", "kind": kind})).outcomes
    assert isinstance(wrong, BadInput)
    assert wrong.message == "too dark"
