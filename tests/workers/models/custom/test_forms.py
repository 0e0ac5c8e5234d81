"""Classes in each form of the interface, in their own process: same outputs as when called
directly.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ConfigurationError, ModelFailed
from shared.messages import PrintedLogs
from shared.models.blob import Blob
from shared.models.interface import INTERFACE_FILE, read_interface
from shared.models.tasks.custom import (
    CustomResult,
    StreamedElement,
    StreamedFile,
    file_digest,
    read_elements,
)
from tests.workers.models.custom.classes import compute, entry_of, output_of, prepared, write_class
from tests.workers.models.custom.forms import FORMS, Form, write_form
from tests.workers.models.custom.started import StartClass, StartedClass
from workers.models.base import PreparedFile
from workers.models.custom.checking import inspect_folder, is_current, write_interface
from workers.models.custom.runner.scope import RecordedMetrics
from workers.models.custom.sources import read_sources
from workers.models.custom.trial import predict

pytestmark = pytest.mark.slow(about_s=30)

WRITES_FRAME = """
data = {!r}.encode()
for fd in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
    try:
        os.write(fd, len(data).to_bytes(4, "little") + data)
    except OSError:
        pass
"""


QUICK_FORMS = {"Text", "Typed", "Files", "Hidden", "Unions", "Pydantic", "AsyncPages", "say"}
"""A sample of input and output forms, because each additional form also takes a process."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_FORMS else pytest.param(name, marks=pytest.mark.slow(about_s=1))
        for name in dict.fromkeys(one.name for one in FORMS)
    ],
)
def test_output_is_that_of_the_class(tmp_path: Path, start_class: StartClass, name: str) -> None:
    """Outputs are compared with direct calls, for each input.

    Clients get the same outputs (tests/end_to_end).
    """
    folder = write_form(tmp_path / "served", name)
    model = start_class(folder, interface=read_interface(folder / INTERFACE_FILE.name))
    for form in FORMS:
        if form.name == name:
            assert served(model, form) == form.output(tmp_path)


def served(model: StartedClass, form: Form) -> Any:
    """A model's output, with files represented as in the form."""
    values, files = dict(form.values), []
    for field, texts in form.files.items():
        is_one = isinstance(texts, str)
        all_texts = [texts] if isinstance(texts, str) else texts
        values[field] = None if is_one else [None] * len(all_texts)
        for at, text in enumerate(all_texts):
            where: list[str | int] = [field] if is_one else [field, at]
            files.append(PreparedFile(where, f"{field}-{at}.txt", text.encode()))
    result: Any
    if "Batches" in form.name:
        (result,) = model.run(prepared(values, files)).results
    else:
        result = compute(model, values, files).results[0]
    assert isinstance(result, CustomResult), result
    output = [result.output]
    for place, file in zip(result.places, result.files, strict=True):
        folders: list[str | int] = [0, *place.at[:-1]]
        last = place.at[-1] if place.at else folders.pop()
        there: Any = output
        for part in folders:
            there = there[part]
        assert there[last] is None
        there[last] = {"file": (file.data or b"").decode()}
    return output[0]


@pytest.mark.parametrize("is_used", [False, True])
def test_large_packages_are_there_for_who_imports_them(
    tmp_path: Path, start_class: StartClass, is_used: bool
) -> None:
    """In that case, Cog uses the real packages too.

    A process that doesn't load them starts in a third of the time.
    """
    names = ["asyncio", "pydantic", "requests", "urllib.request", "yaml"]
    body = f"""
    {f"import {', '.join(names)}" if is_used else "import urllib"}
    loaded = [name for name in {names} if name in sys.modules]

    class Predictor(BasePredictor):
        def predict(self, a: int) -> list[str]:
            if {is_used}:
                assert cog.types.requests.get is requests.get
                assert cog._inspector.PydanticBaseModel is pydantic.BaseModel
            else:
                assert cog.types.requests.Session().headers
            assert cog.types.urllib.request.urlopen is sys.modules["urllib.request"].urlopen
            assert callable(urllib.request.urlopen)
            return loaded
    """
    assert output_of(compute(start_class(write_class(tmp_path, body)), {"a": 1})) == names * is_used


@pytest.mark.parametrize("name", ["queue", "logging", "requests"])
def test_files_that_hide_modules_do_so_for_the_class_alone(
    tmp_path: Path, start_class: StartClass, name: str
) -> None:
    """An asyncio loop needs two of these modules, and Cog's HTTP client the third."""
    body = """
    class Predictor(BasePredictor):
        async def predict(self, a: int) -> bool:
            return callable(cog.types.requests.get)
    """
    folder = write_class(tmp_path, body)
    (folder / f"{name}.py").write_text("")
    assert output_of(compute(start_class(folder), {"a": 1})) is True


def test_files_go_in_and_out_in_lists_and_objects(tmp_path: Path, start_class: StartClass) -> None:
    folder = write_class(
        tmp_path,
        """
        class Answer(BaseModel):
            whole: Path
            size: int

        class Predictor(BasePredictor):
            def predict(self, parts: list[Path]) -> Answer:
                whole = Path("/tmp") / f"whole-{os.getpid()}.txt"
                whole.write_bytes(b"".join(part.read_bytes() for part in parts))
                return Answer(whole=whole, size=len(parts))
        """,
    )
    files = [PreparedFile(["parts", at], f"{at}.txt", text) for at, text in enumerate((b"a", b"b"))]
    found = compute(start_class(folder), {"parts": [None, None]}, files).results[0]
    assert isinstance(found, CustomResult)
    assert found.output == {"whole": None, "size": 2}
    assert (found.files, found.places[0].at) == ([Blob("text/plain", b"ab")], ["whole"])
    shown = found.to_output("", lambda key, media_type="": "unused")
    assert shown == {"whole": "data:text/plain;base64,YWI=", "size": 2}


YIELDS_FILES = """
class Predictor(BasePredictor):
    {kind} predict(self, sizes: list[int]) -> {output}:
        for number, size in enumerate(sizes):
            path = Path(os.environ["TMPDIR"]) / "one.txt"
            path.write_bytes(bytes([97 + number]) * size)
            yield path if number % 2 else open(path, "rb")
"""


@pytest.mark.parametrize(
    ("kind", "output"), [("def", "Iterator[Path]"), ("async def", "AsyncIterator[Path]")]
)
def test_files_are_pieces_of_a_stream(
    tmp_path: Path, start_class: StartClass, kind: str, output: str
) -> None:
    """Each file is read when it is yielded, so the class may use the same path again."""
    model = start_class(write_class(tmp_path, YIELDS_FILES.format(kind=kind, output=output)))
    model.admit(0, prepared({"sizes": [2, 70_000, 1]}, is_streamed=True))
    text, large = "", []
    while not (end := model.step()).results:
        text += "".join(chunk.text for chunk in model.take_chunks().values())
        large += model.take_files().get(0, [])
    result = end.results[0]
    assert isinstance(result, CustomResult)
    assert result.text.startswith(text)
    small, big, last = read_elements(result.text)
    assert small == StreamedElement(
        None, [StreamedFile([], "text/plain", 0, file_digest(b"aa"), "data:text/plain;base64,YWE=")]
    )
    assert big.files == [StreamedFile([], "text/plain", 1, file_digest(b"b" * 70_000))]
    assert last.to_json_value(str) == "data:text/plain;base64,Yw=="
    assert large in ([], [(big.files[0], b"b" * 70_000)])
    assert [file.data for file in result.files] == [b"aa", b"b" * 70_000, b"c"]
    assert result.blob_suffix(1) == f".1-{big.files[0].digest}"


def test_files_of_an_output_have_a_bound_together(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> Iterator[Path]:
            path = Path(os.environ["TMPDIR"]) / "zeros"
            with open(path, "wb") as file:
                file.truncate(50 * 1024 * 1024)
            for _ in range(a):
                yield path
    """
    model = start_class(write_class(tmp_path, body))
    failed = compute(model, {"a": 4}).results[0]
    assert isinstance(failed, ModelFailed)
    assert failed.message.startswith("output: total file size exceeds the maximum of")


def test_metrics_and_what_was_printed(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        def setup(self) -> None:
            print("not of a prediction")

        def predict(self, a: int) -> int:
            print("before", a)
            os.write(1, b"from below\\n")
            print("to stderr", file=sys.stderr)
            self.record_metric("size.width", a)
            current_scope().record_metric("calls", 1, mode="incr")
            current_scope().record_metric("calls", 1, mode="incr")
            return a
    """
    model = start_class(write_class(tmp_path, body))
    for value in (1, 2):
        end = compute(model, {"a": value})
        found = end.results[0]
        assert isinstance(found, CustomResult)
        assert found.metrics == {"size": {"width": value}, "calls": 2}
        assert end.logs[0].text == f"before {value}\nfrom below\nto stderr\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("_a", "must start each segment with a letter"),
        ("a__b", "must not contain consecutive underscores"),
        ("a.b_", "must end each segment with a letter or digit"),
        (".a", "must not start with a dot"),
        ("a.", "must not end with a dot"),
        ("a..b", "must not have empty segments"),
        ("", "must not have empty segments"),
        ("a-b", "may contain only letters, digits, underscores"),
        ("a.b.c.d.e", "at most 4 dot-separated segments"),
        ("a" * 129, "at most 128 characters"),
        ("predict_time", "is reserved"),
        ("cog.a", "is reserved"),
    ],
)
def test_wrong_names_of_metrics_are_refused_with_their_reason(name: str, reason: str) -> None:
    metrics = RecordedMetrics()
    with pytest.raises(ValueError, match=reason):
        metrics.record(name, 1)
    assert metrics.nest() == {}
    metrics.record("a1.b_c", 1)
    assert metrics.nest() == {"a1": {"b_c": 1}}


@pytest.mark.parametrize(
    ("recorded", "nested"),
    [
        ({"b": 0, "a": 1, "a.b": 2}, {"b": 0, "a": {"b": 2}}),
        ({"a.b": 2, "a": 1}, {"a": 1}),
        ({"a": {"x": {"p": 1}}, "a.x.q": 2}, {"a": {"x": {"p": 1, "q": 2}}}),
    ],
)
def test_metric_below_another_replaces_or_extends_it(
    recorded: dict[str, Any], nested: dict[str, Any]
) -> None:
    metrics = RecordedMetrics()
    before = copy.deepcopy(recorded)
    for name, value in recorded.items():
        metrics.record(name, value)
    assert metrics.nest() == nested
    assert recorded == before, "the caller's own objects were changed"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("nan")]}])
def test_metric_that_is_not_finite_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="metric speed: numbers must be finite"):
        RecordedMetrics().record("speed", value)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("def predict(self, a: int) -> list[str]: return ['\\ud800']", "output[0]: lone surrogate"),
        ("def predict(self, a: int) -> int: return 2**65", "output: integers must be at most 64"),
        ("def predict(self, a: int) -> Path: return Path('/none')", "file none does not exist"),
        ("def predict(self, a: int) -> dict: return {'a': object()}", "can't be sent as JSON"),
        ("def predict(self, a: int) -> float: return float('nan')", "NaN and infinite numbers"),
        ("def predict(self, a: int) -> str: return 'x' * 2**24", "at most 16777216 bytes"),
        ("def predict(self, a: int) -> str: raise KeyError('secret')", "KeyError: 'secret'"),
        ("def predict(self, a: int) -> str: raise Silent", "Silent"),
        ("def predict(self, a: int) -> str: raise Odd('day')", "Odd: day"),
        ("def predict(self, a: int) -> str: sys.exit(3)", "the model called sys.exit(3)"),
        (
            "def predict(self, a: int) -> str: sys.exit(NoRepr())",
            "the model called sys.exit(a value of type NoRepr)",
        ),
        ("def predict(self, a: int) -> str: os._exit(3)", "exited with status 3 while"),
    ],
)
def test_an_error_ends_its_prediction_and_not_the_model(
    tmp_path: Path, start_class: StartClass, method: str, reason: str
) -> None:
    head, _, tail = method.rpartition(": ")
    silent = (
        "class Silent(Exception):\n    def __str__(self): raise ValueError\n"
        "class Odd(Exception):\n    field = property(lambda self: self.none.there)\n"
        "    none = property(lambda self: 1 / 0)\n"
        "class NoRepr:\n    def __repr__(self): raise ValueError\n"
    )
    folder = write_class(
        tmp_path, f"{silent}class Predictor(BasePredictor):\n    {head}:\n        {tail}\n"
    )
    model = start_class(folder)
    for _ in range(2):
        found = compute(model, {"a": 1}).results[0]
        assert isinstance(found, ModelFailed)
        assert reason in found.message


@pytest.mark.parametrize(
    "cog_yaml",
    [
        *("concurrency: 5", "concurrency: [2]", "a: 2024-13-45", "[]", "[" * 5000),
        *('environment: ["A=\\0"]', 'environment: ["A=\\ud800"]'),
    ],
    ids=lambda text: text[:20],
)
def test_settings_that_are_no_mappings_are_explained(tmp_path: Path, cog_yaml: str) -> None:
    body = "class Predictor(BasePredictor):\n    def predict(self) -> str: return ''\n"
    folder = write_class(tmp_path, body, f"{cog_yaml}\n")
    with pytest.raises(ConfigurationError, match=r"cog\.yaml: ") as caught:
        inspect_folder(folder)
    assert "Traceback" not in caught.value.message


def test_integers_of_64_bits_are_sent(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> dict:
            return {"smallest": -(2**63), "largest": 2**64 - 1, -(2**63): a}
    """
    model = start_class(write_class(tmp_path, body))
    expected = {"smallest": -(2**63), "largest": 2**64 - 1, str(-(2**63)): 1}
    assert output_of(compute(model, {"a": 1})) == expected


def test_the_traceback_is_in_the_logs_without_our_frames(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> str:
            return {}[a]
    """
    model = start_class(write_class(tmp_path, body))
    end = compute(model, {"a": 7})
    assert isinstance(end.results[0], ModelFailed)
    assert "KeyError: 7" in end.logs[0].text
    assert "predict.py" in end.logs[0].text
    assert "penstock" not in end.logs[0].text.lower()


def test_an_input_that_only_the_class_refuses_names_its_field(
    tmp_path: Path, start_class: StartClass
) -> None:
    # The API's regex engine does not support Python's look-behind.
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: str = Input(regex="(?!b).*")) -> str:
            return a
    """
    model = start_class(write_class(tmp_path, body))
    found = compute(model, {"a": "bad"}).results[0]
    assert isinstance(found, BadInput)
    assert found.field == "a"
    assert output_of(compute(model, {"a": "good"})) == "good"


def test_an_exception_with_a_field_calls_that_input_wrong(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: str, b: str, ab: str = "") -> str:
            error = ValueError("too dark")
            error.field = b
            raise error
    """
    model = start_class(write_class(tmp_path, body))
    wrong = compute(model, {"a": "x", "b": "a"}).results[0]
    assert isinstance(wrong, BadInput)
    assert (wrong.field, wrong.message) == ("a", "a: too dark")
    longer = compute(model, {"a": "x", "b": "ab"}).results[0]
    assert isinstance(longer, BadInput)
    assert longer.field == "ab"
    other = compute(model, {"a": "x", "b": "no input"}).results[0]
    assert isinstance(other, ModelFailed)
    assert other.message == "ValueError: too dark"


def test_a_loop_is_killed_and_others_are_served(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: str) -> str:
            print("begin")
            while a == "loop":
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass
            return f"{a} {os.getpid()}"
    """
    model = start_class(write_class(tmp_path, body))
    first = compute(model, {"a": "x"}).results[0]
    model.admit(1, prepared({"a": "loop"}))
    model.wait_for_logs(1)
    model.drop(1)
    second = compute(model, {"a": "x"}).results[0]
    assert isinstance(first, CustomResult)
    assert isinstance(second, CustomResult)
    assert first.output.split()[0] == second.output.split()[0] == "x"
    assert first.output != second.output, "the process is another one"


def test_a_cancellation_raises_cogs_exception(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        stopped = 0

        def predict(self, a: str) -> str:
            print("begin")
            try:
                while a == "loop":
                    time.sleep(0.01)
            except CancelationException:
                self.stopped += 1
                raise
            return f"{self.stopped} {os.getpid()}"
    """
    model = start_class(write_class(tmp_path, body))
    first = compute(model, {"a": "x"}).results[0]
    model.admit(1, prepared({"a": "loop"}))
    model.wait_for_logs(1)
    model.drop(1)
    second = compute(model, {"a": "x"}).results[0]
    assert isinstance(first, CustomResult)
    assert isinstance(second, CustomResult)
    pid = first.output.split()[1]
    assert (first.output, second.output) == (f"0 {pid}", f"1 {pid}")


def test_asynchronous_classes_run_several_at_a_time(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Runner(BaseRunner):
        def setup(self) -> None:
            self.inside, self.both = 0, asyncio.Event()

        async def run(self, a: int) -> int:
            self.inside += 1
            if self.inside == 2:
                self.both.set()
            await self.both.wait()
            return a
    """
    folder = write_class(tmp_path, body, "concurrency: {max: 2}")
    model = start_class(folder, batch={"max_items": 2})
    model.admit(0, prepared({"a": 1}))
    model.admit(1, prepared({"a": 2}))
    found: dict[int, Any] = {}
    while len(found) < 2:
        found |= model.step().results
    assert {slot: one.output for slot, one in found.items()} == {0: 1, 1: 2}


def test_a_cancellation_that_comes_with_its_prediction_is_heard(
    tmp_path: Path, start_class: StartClass
) -> None:
    """Otherwise nothing reacts to the cancellation, and after 2 s the process is killed along with
    all its other predictions.
    """
    body = """
    class Runner(BaseRunner):
        @concurrent(max=3)
        async def run(self, a: float, blocks: bool = False) -> int:
            if blocks:  # so that what comes meanwhile is read at once
                time.sleep(a)
            await asyncio.sleep(a)
            return os.getpid()
    """
    model = start_class(write_class(tmp_path, body), batch={"max_items": 3})
    before = output_of(compute(model, {"a": 0.0}))
    model.admit(1, prepared({"a": 0.5, "blocks": True}))
    model.admit(2, prepared({"a": 600.0}))
    model.drop(2)
    assert output_of(model.steps_until(1), 1) == before
    assert output_of(compute(model, {"a": 0.0})) == before
    # A process that missed a cancellation would have been killed by this point.
    assert output_of(compute(model, {"a": 3.0})) == before


def test_the_class_sees_no_key_and_no_process_of_ours(
    tmp_path: Path, start_class: StartClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL_SECRET", "do-not-tell")
    body = """
    class Predictor(BasePredictor):
        def predict(self, pid: int) -> dict:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    theirs = file.read().decode()
            except OSError as error:
                theirs = type(error).__name__
            return {"own": dict(os.environ), "theirs": theirs, "modules": sorted(sys.modules)}
    """
    found = compute(start_class(write_class(tmp_path, body)), {"pid": os.getpid()}).results[0]
    assert isinstance(found, CustomResult)
    assert "do-not-tell" not in str(found.output)
    assert found.output["theirs"] == "PermissionError"
    assert not {"shared", "msgspec", "torch", "workers"} & set(found.output["modules"])


def test_what_runs_on_in_a_fork_answers_nobody(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> str:
            os.fork()
            return f"{a}"
    """
    model = start_class(write_class(tmp_path, body))
    assert [output_of(compute(model, {"a": one})) for one in (1, 2, 3)] == ["1", "2", "3"]


def test_much_output_is_cut_at_its_begin(tmp_path: Path, start_class: StartClass) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> int:
            for number in range(40_000):
                print("x" * 99)
            print("the end")
            return a
    """
    end = compute(start_class(write_class(tmp_path, body)), {"a": 1})
    logs = end.logs[0]
    assert logs.end == 40_000 * 100 + len("the end\n")
    assert len(logs.text) == 32 * 1024
    assert logs.after(0).startswith(f"… {logs.left_out} characters are omitted …\n")
    assert logs.text.endswith("the end\n")
    assert logs.after(logs.end - 4) == "end\n"


def test_what_is_printed_is_there_while_it_computes(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> int:
            os.write(1, "gr\\u00fc".encode()[:3])
            while True:
                time.sleep(0.01)
    """
    model = start_class(write_class(tmp_path, body))
    model.admit(0, prepared({"a": 1}))
    assert model.wait_for_logs(0) == PrintedLogs("gr")  # without half a character


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("class Predictor(BasePredictor): pass", "run or predict method not found"),
        ("class Other: pass", "no class Runner or Predictor"),
        ("raise RuntimeError('at import')", "at import"),
        (
            "class Predictor(BasePredictor):\n    def predict(self, a) -> str: return a",
            "missing type annotation for input: a",
        ),
        (
            "class Predictor(BasePredictor):\n    def predict(self, a: object) -> str: return ''",
            "invalid input field a: unsupported Cog type object",
        ),
        ("import os; os._exit(7)", "exited with status 7"),
        (WRITES_FRAME.format("nonsense"), "it sent an invalid response"),
        (WRITES_FRAME.format('{"ready": {}}'), "it sent an invalid response"),
        (WRITES_FRAME.format("[" * 5000), "it sent an invalid response"),
        (
            WRITES_FRAME.format(f'{{"blobs": [], "ready": {"[" * 9000 + "]" * 9000}}}'),
            "it sent an invalid response",
        ),
        (WRITES_FRAME.format('{"blobs": [], "ready": 5}'), "it sent an invalid response"),
    ],
    ids=lambda text: text.strip()[:40],
)
def test_a_folder_that_cant_be_served_says_why(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        inspect_folder(write_class(tmp_path, body))


def test_a_folder_of_a_user_who_does_not_exist_is_named() -> None:
    folder = Path("~no-such-user")
    with pytest.raises(ConfigurationError, match="~no-such-user is not a folder"):
        inspect_folder(folder)
    with pytest.raises(ConfigurationError, match="~no-such-user is not a folder"):
        predict(folder, [], folder)
    assert not is_current(folder)


def test_a_file_that_cant_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "helper.py").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigurationError, match=r"helper\.py: Input/output error"):
        read_sources(tmp_path)


def test_names_of_files_may_be_any_bytes(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.py")).write_text("")
    first = read_sources(tmp_path).sha256
    (tmp_path / os.fsdecode(b"\xff.py")).rename(tmp_path / os.fsdecode(b"\xfe.py"))
    assert read_sources(tmp_path).sha256 != first


def test_setup_that_raises_refuses_with_its_traceback(tmp_path: Path) -> None:
    body = """
    class Predictor(BasePredictor):
        def setup(self) -> None:
            raise ValueError("no weights here")

        def predict(self, a: int) -> int:
            return a
    """
    folder = write_class(tmp_path, body)
    with pytest.raises(ModelFailed, match=r"(?s)no weights here.*Traceback"):
        StartedClass(entry_of(folder), folder)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ("def predict(self, a: int = Input(le=9)) -> int: return a", "inputs.a.maximum: 5 in"),
        ("def predict(self, b: int = Input(le=5)) -> int: return b", "inputs.a: there in"),
        ("def predict(self, a: int = Input(le=5)) -> str: return ''", "output: "),
    ],
)
def test_code_that_disagrees_with_the_schema_is_refused(
    tmp_path: Path, changed: str, field: str
) -> None:
    usual = "def predict(self, a: int = Input(le=5)) -> int: return a"
    entry = entry_of(write_class(tmp_path, f"class Predictor(BasePredictor):\n    {usual}"))
    write_class(tmp_path, f"class Predictor(BasePredictor):\n    {changed}")
    with pytest.raises(ConfigurationError) as refused:
        StartedClass(entry, tmp_path)
    assert field in refused.value.message
    assert "penstock models check" in refused.value.message


def test_a_schema_is_current_until_a_source_changes(tmp_path: Path) -> None:
    body = "class Predictor(BasePredictor):\n    def predict(self, a: int) -> int: return a"
    folder = write_class(tmp_path, body)
    assert not is_current(folder)
    write_interface(folder, inspect_folder(folder).interface)
    assert is_current(folder)
    (folder / "weights.bin").write_bytes(b"not a source")
    assert is_current(folder)
    (folder / "helper.py").write_text("")
    assert not is_current(folder)


def test_what_cog_yaml_asks_for_in_vain_is_named(tmp_path: Path) -> None:
    body = "class Predictor(BasePredictor):\n    def predict(self, a: int) -> int: return a"
    cog_yaml = f"""
    build:
      python_version: "{sys.version_info.major}.{sys.version_info.minor}"
      system_packages: [ffmpeg]
    environment: [MODE=fast]
    image: r8.im/someone/model
    """
    notes = inspect_folder(write_class(tmp_path, body, cog_yaml)).notes
    assert notes == [
        "cog.yaml: build.system_packages has no effect here",
        "cog.yaml: image has no effect here",
    ]


def test_a_prediction_that_joins_need_not_wait_for_others(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Runner(BaseRunner):
        def setup(self) -> None:
            self.joined = asyncio.Event()

        async def run(self, a: int) -> int:
            if a == 2:
                self.joined.set()
            await self.joined.wait()
            return a
    """
    folder = write_class(tmp_path, body, "concurrency: {max: 2}")
    model = start_class(folder)
    model.admit(1, prepared({"a": 1}))
    model.admit(2, prepared({"a": 2}))
    assert output_of(model.steps_until(2), 2) == 2
