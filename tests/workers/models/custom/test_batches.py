"""Classes with `predict_batch`, in a separate process: one outcome per input, no matter what they
do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ConfigurationError, ModelFailed
from shared.messages import PrintedLogs
from shared.models.catalog import Model
from shared.models.interface import INTERFACE_FILE
from shared.models.tasks.custom import CustomInput, CustomResult
from tests.limits import WAIT_LIMIT_S
from tests.penstock_command import penstock
from tests.workers.models.custom.classes import entry_of, prepared, write_class
from tests.workers.models.custom.started import StartClass, StartedClass
from workers.models.base import PreparedFile
from workers.models.client import ModelProcessDied
from workers.models.custom.checking import inspect_folder
from workers.models.custom.preparation import CustomPreparer
from workers.models.reports import BatchResult

pytestmark = pytest.mark.slow(about_s=30)

PYDANTIC = """
import pydantic

class Given(pydantic.BaseModel):
    text: str = pydantic.Field(min_length=1, max_length=9, description="What is said.")
    times: int = pydantic.Field(1, ge=1, le=5)
    mode: Literal["say", "fail", "exit", "raise", "loop", "die"] = "say"

class Predictor(BasePredictor):
    def setup(self) -> None:
        self.sizes = []

    def predict_batch(self, inputs: list[Given]) -> list[str | Exception]:
        self.sizes.append(len(inputs))
        modes = {one.mode for one in inputs}
        if "exit" in modes: os._exit(4)
        if "raise" in modes: raise RuntimeError("not with these")
        while "loop" in modes: time.sleep(0.01)
        return [
            ValueError(f"not {one.text}") if one.mode == "fail" else one.text * one.times
            for one in inputs
        ]
"""
ASYNC = PYDANTIC.replace("def ", "async def ").replace("time.sleep", "await asyncio.sleep")
COG = """
class Given(BaseModel):
    text: str = Input(min_length=1, max_length=9, description="What is said.")
    times: int = Input(default=1, ge=1, le=5)
    mode: str = Input(default="say", choices=["say", "fail", "exit", "raise", "loop", "die"])

class Predictor(BasePredictor):
    def predict_batch(self, inputs: List[Given]) -> List[str]:
        return [one.text * one.times for one in inputs]
"""


Start = Callable[[str], StartedClass]
KINDS = ["def", "async def"]


def simple(method: str, kind: str = "def") -> str:
    """A class with one input and a one-line `predict_batch`."""
    return f"""
class Given(BaseModel):
    a: int

class Predictor(BasePredictor):
    {kind} predict_batch(self, inputs: list[Given]) -> list[int]:
        {method}
"""


@pytest.fixture
def started(tmp_path: Path, start_class: StartClass) -> Start:
    """Starts a class with this body."""
    return lambda body: start_class(write_class(tmp_path, body))


def compute(
    model: StartedClass, *inputs: dict[str, Any], cancels_after_s: float | None = None
) -> list[Any]:
    """Computes a batch. Returns each item's output or error."""
    return outputs(run(model, *inputs, cancels_after_s=cancels_after_s))


def run(
    model: StartedClass, *inputs: dict[str, Any], cancels_after_s: float | None = None
) -> BatchResult:
    return model.run(*(prepared(values) for values in inputs), cancels_after_s=cancels_after_s)


def outputs(done: BatchResult) -> list[Any]:
    return [one.output if isinstance(one, CustomResult) else one for one in done.outcomes]


@pytest.mark.parametrize("body", [PYDANTIC, COG, ASYNC])
def test_the_fields_of_the_element_are_the_inputs(tmp_path: Path, body: str) -> None:
    interface = inspect_folder(write_class(tmp_path, body)).interface
    assert (interface.batches, interface.concurrency, interface.streams) == (True, 1, "")
    assert interface.inputs["required"] == ["text"]
    assert interface.properties["text"] == {
        "type": "string",
        "title": "Text",
        "description": "What is said.",
        "minLength": 1,
        "maxLength": 9,
        "x-order": 0,
    }
    assert interface.properties["times"]["default"] == 1
    assert (interface.properties["times"]["minimum"], interface.properties["times"]["maximum"]) == (
        1,
        5,
    )
    assert interface.properties["mode"]["enum"][:2] == ["say", "fail"]
    assert interface.output["type"] == "string"


@pytest.mark.parametrize("body", [PYDANTIC, COG, ASYNC])
def test_a_batch_has_an_output_for_each_input_in_order(started: Start, body: str) -> None:
    model = started(body)
    assert compute(model, {"text": "a"}, {"text": "b", "times": 3}, {"text": "c"}) == [
        "a",
        "bbb",
        "c",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_call_of_the_class(started: Start, kind: str) -> None:
    model = started(simple("return [len(inputs)] * len(inputs)", kind))
    assert compute(model, *({"a": one} for one in range(5))) == [5] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_the_list_fails_its_item_alone_with_its_own_log(
    started: Start, kind: str
) -> None:
    body = (
        simple("return [self.tried(one.a) for one in inputs]", kind)
        + """
    def tried(self, a):
        print("seen by all", a)
        try:
            return 10 // a
        except ZeroDivisionError as error:
            return error
"""
    )
    done = run(started(body), {"a": 1}, {"a": 0}, {"a": 2})
    first, failed, last = outputs(done)
    assert (first, last) == (10, 5)
    assert isinstance(failed, ModelFailed)
    assert "by zero" in failed.message
    assert list(done.logs) == [1]
    assert "ZeroDivisionError" in done.logs[1].text
    assert "seen by all" not in done.logs[1].text, "others may be in the batch"


@pytest.mark.parametrize("body", [PYDANTIC, ASYNC], ids=KINDS)
@pytest.mark.parametrize(
    ("mode", "reason"), [("raise", "not with these"), ("exit", "exited with status 4")]
)
def test_what_breaks_a_batch_fails_alone(started: Start, mode: str, reason: str, body: str) -> None:
    model = started(body)
    given = [{"text": str(one), "mode": mode if one == 5 else "say"} for one in range(8)]
    done = run(model, *given)
    found = outputs(done)
    assert isinstance(found[5], ModelFailed)
    assert reason in found[5].message
    assert [one for at, one in enumerate(found) if at != 5] == list("0123467")
    if mode == "raise":
        assert "RuntimeError: not with these" in done.logs[5].text


WRONG_NUMBERS = {
    "[]": "returned 0 outputs for 1 inputs",
    "[1] * 3": "returned 3 outputs for 1 inputs",
    "None": "returned a value of type NoneType for 1 inputs",
    "(one.a for one in inputs)": "returned a value of type generator for 1",
    "'ab'": "returned a value of type str for 1 inputs",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_number_of_outputs_fails_with_its_reason(started: Start, kind: str) -> None:
    model = started(simple(f"return [{', '.join(WRONG_NUMBERS)}][inputs[0].a]", kind))
    for number, reason in enumerate(WRONG_NUMBERS.values()):
        (wrong,) = compute(model, {"a": number})
        assert isinstance(wrong, ModelFailed)
        assert reason in wrong.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_output_fails_its_item_alone(started: Start, kind: str) -> None:
    model = started(simple("return [one.a if one.a else object() for one in inputs]", kind))
    first, wrong, last = compute(model, {"a": 1}, {"a": 0}, {"a": 2})
    assert (first, last) == (1, 2)
    assert "a value of type object can't be sent as JSON" in wrong.message


def test_an_input_that_only_the_element_refuses_names_its_field(started: Start) -> None:
    body = PYDANTIC.replace(
        "class Predictor",
        "    @pydantic.field_validator('text')\n"
        "    def no_digits(cls, text):\n"
        "        assert not text.isdigit(), 'no digits'\n"
        "        return text\n\n"
        "class Predictor",
    )
    good, bad = compute(started(body), {"text": "a"}, {"text": "1"})
    assert good == "a"
    assert isinstance(bad, BadInput)
    assert bad.field == "text"
    assert "no digits" in bad.message


def test_files_go_in_and_out(tmp_path: Path, started: Start) -> None:
    body = """
    class Given(BaseModel):
        file: Path

    class Predictor(BasePredictor):
        def predict_batch(self, inputs: list[Given]) -> list[Path]:
            found = []
            for number, one in enumerate(inputs):
                out = Path(os.environ["TMPDIR"]) / f"{number}.txt"
                out.write_bytes(one.file.read_bytes() * 2)
                found.append(out)
            return found
    """
    model = started(body)
    batch = [
        prepared({"file": None}, [PreparedFile(["file"], "a.txt", data)]) for data in (b"a", b"b")
    ]
    found: list[Any] = model.run(*batch).outcomes
    assert [one.files[0].data for one in found] == [b"aa", b"bb"]


@pytest.mark.parametrize("body", [PYDANTIC, ASYNC], ids=KINDS)
def test_a_canceled_batch_is_stopped_and_the_next_one_computed(started: Start, body: str) -> None:
    """The process stays the same and does not need another setup."""
    body = body.replace("one.text * one.times", "f'{one.text} {os.getpid()}'")
    model = started(body)
    before = compute(model, {"text": "c"}, {"text": "d"})
    for _ in range(2):
        found = compute(model, {"text": "a", "mode": "loop"}, {"text": "b"}, cancels_after_s=0)
        assert [one.code for one in found] == ["canceled", "canceled"]
        assert compute(model, {"text": "c"}, {"text": "d"}) == before


@pytest.mark.parametrize(
    ("kind", "sleep"), [("def", "time.sleep"), ("async def", "await asyncio.sleep")], ids=KINDS
)
def test_a_batch_that_does_not_stop_is_killed(started: Start, kind: str, sleep: str) -> None:
    body = simple(
        f"while inputs[0].a:\n            try: {sleep}(0.01)\n"
        "            except BaseException: pass\n        return [os.getpid()] * len(inputs)",
        kind,
    )
    model = started(body)
    (before,) = compute(model, {"a": 0})
    after, wait_s = before, 0.1
    while before == after:  # otherwise it was canceled before it started
        wait_s *= 2
        assert wait_s < WAIT_LIMIT_S
        found = compute(model, {"a": 1}, {"a": 2}, cancels_after_s=wait_s)
        assert [one.code for one in found] == ["canceled", "canceled"]
        (after,) = compute(model, {"a": 0})


@pytest.mark.parametrize("kind", KINDS)
def test_large_batches_go_through(started: Start, kind: str) -> None:
    """Together, 64 inputs and outputs of nearly 1 MiB each exceed the size limit for one
    message.
    """
    body = f"""
    class Given(BaseModel):
        a: str

    class Predictor(BasePredictor):
        {kind} predict_batch(self, inputs: list[Given]) -> list[str]:
            return [one.a for one in inputs]
    """
    text = "x" * 1_000_000
    assert compute(started(body), *({"a": text} for _ in range(64))) == [text] * 64


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_alone_printed_and_recorded_is_its_own(started: Start, kind: str) -> None:
    records = "print(len(inputs)); self.record_metric('n', len(inputs)); return [1] * len(inputs)"
    model = started(simple(records, kind))
    alone = run(model, {"a": 1})
    assert alone.logs == {0: PrintedLogs("1\n")}
    assert [one.metrics for one in alone.outcomes] == [{"n": 1}]  # type: ignore[union-attr]
    both = run(model, {"a": 1}, {"a": 2})
    assert both.logs == {}
    assert [one.metrics for one in both.outcomes] == [{}, {}]  # type: ignore[union-attr]


WRONG_FORMS = [
    (
        "def predict_batch(self, inputs: list[Given]) -> list[int]: yield",
        "must return a list with",
    ),
    (
        "async def predict_batch(self, inputs: list[Given]) -> list[int]: yield",
        "must return a list",
    ),
    (
        "def predict_batch(self, inputs) -> list[int]: ...",
        "the argument inputs must have the type list",
    ),
    (
        "def predict_batch(self, inputs: list[Given]): ...",
        "the return value must have the type list",
    ),
    ("def predict_batch(self, inputs: list[int]) -> list[int]: ...", "whose fields are the inputs"),
    (
        "def predict_batch(self, inputs: list[Given], b: int) -> list[int]: ...",
        "one list of inputs",
    ),
    ("def predict_batch(self, inputs: list[Given]) -> list[Iterator[int]]: ...", "be iterators"),
    ("def predict_batch(self, inputs: list[Gone]) -> list[int]: ...", "name 'Gone' is not defined"),
]


@pytest.mark.parametrize(("method", "reason"), WRONG_FORMS)
def test_another_form_is_refused_by_check(tmp_path: Path, method: str, reason: str) -> None:
    body = f"class Given(BaseModel):\n    a: int\n\nclass Predictor(BasePredictor):\n    {method}\n"
    with pytest.raises(ConfigurationError, match=reason):
        inspect_folder(write_class(tmp_path, body))


def test_check_says_that_a_class_batches_and_the_worker_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_class(tmp_path, simple("return [1] * len(inputs)"))
    assert penstock("models", "check", str(folder)) == 0
    assert "in batches" in capsys.readouterr().out
    assert '"batches": true' in (folder / INTERFACE_FILE.name).read_text()
    entry = entry_of(folder)
    write_class(
        tmp_path, "class Predictor(BasePredictor):\n    def predict(self, a: int) -> int: ..."
    )
    with pytest.raises(ConfigurationError, match=r"batches: true in penstock\.schema\.json, false"):
        StartedClass(entry, folder)


def test_predict_runs_a_batch_of_one_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_class(tmp_path, PYDANTIC)
    assert penstock("predict", str(folder), "-i", "text=ab", "-i", "times=2") == 0
    assert '"abab"' in capsys.readouterr().out
    assert penstock("predict", str(folder), "-i", "text=ab", "-i", "mode=fail") == 1
    assert "not ab" in capsys.readouterr().err
    assert penstock("predict", str(folder), "-i", "text=ab", "-i", "mode=raise") == 1
    assert "not with these" in capsys.readouterr().err


def entry_with(folder: Path, **batch: Any) -> Model:
    return entry_of(write_class(folder, PYDANTIC), batch=batch)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (
            "language",
            "'language' is not an input with comparable values; use one of text, times",
        )
    ],
)
def test_a_key_that_does_not_exist_is_refused(tmp_path: Path, key: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        entry_with(tmp_path, key=key)


@pytest.mark.parametrize("kind", KINDS)
def test_concurrency_does_not_go_with_batches(tmp_path: Path, kind: str) -> None:
    folder = write_class(tmp_path, simple("return []", kind), "concurrency: {max: 2}")
    with pytest.raises(ConfigurationError, match=r"concurrency\.max"):
        inspect_folder(folder)


def test_a_key_needs_a_class_with_batches_and_a_task_with_inputs(tmp_path: Path) -> None:
    folder = write_class(
        tmp_path, "class Predictor(BasePredictor):\n    def predict(self, a: int) -> int: ..."
    )
    with pytest.raises(ValueError, match="requires a class with predict_batch"):
        entry_of(folder, batch={"key": "a", "max_items": 1})
    with pytest.raises(ValueError, match="not supported by an embedding model; omit it"):
        Model.model_validate(
            {
                "name": "letters",
                "task": "embedding",
                "source": "local:x",
                "dimensions": 1,
                "batch": {"max_tokens": 9, "key": "a"},
            }
        )


def test_a_batch_has_64_items_unless_the_entry_says_otherwise(tmp_path: Path) -> None:
    folder = write_class(tmp_path, PYDANTIC)
    assert entry_of(folder).batch.max_items == 64
    assert entry_of(folder, batch={"max_items": 8}).budget == 8


def test_equal_values_share_a_key_and_a_default_is_a_value(tmp_path: Path) -> None:
    preparer = CustomPreparer(entry_with(tmp_path, key="times"))
    given = ({"text": "a"}, {"text": "b", "times": 1}, {"text": "c", "times": 2})
    keys = [one.key for one in preparer.prepare([CustomInput(values) for values in given])]  # type: ignore[union-attr]
    assert keys[0] == keys[1] != keys[2]
    long = CustomPreparer(entry_with(tmp_path, key="text"))
    (found,) = long.prepare([CustomInput({"text": "x" * 10_000_000})])
    assert len(found.key) == 64  # type: ignore[union-attr]


def test_a_batch_whose_process_the_system_kills_is_to_be_tried_again(started: Start) -> None:
    """The worker retries it in halves (tests/api/test_custom_batches.py)."""
    model = started(simple("if inputs[0].a < 0: os.kill(os.getpid(), 9)\n        return [1, 2]"))
    with pytest.raises(ModelProcessDied):
        run(model, {"a": -1}, {"a": 2})
    assert compute(model, {"a": 1}, {"a": 2}) == [1, 2]


@pytest.mark.parametrize(
    "frame", ['{"id": 0, "output": 7, "files": [], "metrics": {}, "blobs": []}', '{"blobs": []}']
)
def test_an_answer_that_the_class_makes_up_is_not_given_to_others(
    started: Start, frame: str
) -> None:
    """The class has access to the socket, so it could send a reply meant for the next batch."""
    body = (
        simple("return self.tried(inputs)")
        + f"""
    def tried(self, inputs):
        if inputs[0].a == 1:
            data = {frame!r}.encode()
            for fd in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
                try:
                    os.write(fd, len(data).to_bytes(4, "little") + data)
                except OSError:
                    pass
        return [one.a for one in inputs]
"""
    )
    model = started(body)
    assert compute(model, {"a": 5}) == [5]
    (wrong,) = compute(model, {"a": 1})
    assert "it sent a response to a different request" in wrong.message
    assert compute(model, {"a": 6}, {"a": 9}) == [6, 9]
