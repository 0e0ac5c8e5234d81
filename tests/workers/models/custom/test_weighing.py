"""`work(self, input) -> int`: an input's weight, from 1 to the catalog's limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ConfigurationError, InputTooLarge, ModelFailed, PenstockError
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.tasks.custom import CustomInput, CustomResult, FilePlace
from tests.workers.models.custom.classes import entry_of, write_class
from tests.workers.models.custom.started import StartedClass
from workers.models.base import PreparedCustom
from workers.models.custom.aside import AsideClass
from workers.models.custom.checking import inspect_folder
from workers.models.custom.preparation import CustomPreparer

NO_REPR = """
class NoRepr:
    def __repr__(self):
        raise ValueError
"""
WORK = """
    def work(self, input) -> int:
        if input.mode == "loop":
            while True: time.sleep(0.01)
        if input.mode == "exit":
            os._exit(3)
        return {
            "minus": lambda: -5, "none": lambda: None, "text": lambda: "x", "float": lambda: 1.5,
            "huge": lambda: 10**30, "raise": lambda: {}["gone"], "long": lambda: "x" * 10**6,
            "no repr": NoRepr, "pid": os.getpid, "environment": lambda: "KEY" in os.environ,
        }.get(input.mode, lambda: len(input.text))()
"""
ONE = (
    NO_REPR
    + """
class Predictor(BasePredictor):
    def setup(self) -> None:
        raise RuntimeError("weighing needs no setup")

    def predict(self, text: str = "abc", mode: str = "") -> str:
        return text
"""
    + WORK
)
BATCHED = (
    NO_REPR
    + """
class Given(BaseModel):
    text: str = "abc"
    mode: str = ""

class Predictor(BasePredictor):
    def predict_batch(self, inputs: list[Given]) -> list[str]:
        return [one.text for one in inputs]
"""
    + WORK
)
MOST = 2**22
"""Higher than any process id."""


@pytest.fixture
def preparing() -> Iterator[Any]:
    weighers: list[AsideClass] = []

    def prepare(folder: Path, *inputs: CustomInput, most: int = MOST) -> list[Any]:
        entry = entry_of(folder, work={"max": most})
        weighers.append(AsideClass(entry, folder))
        return list(CustomPreparer(entry, weighers[-1]).prepare(inputs))

    yield prepare
    for weigher in weighers:
        weigher.close()


@pytest.mark.parametrize("body", [ONE, BATCHED])
def test_an_item_weighs_what_the_class_says(tmp_path: Path, preparing: Any, body: str) -> None:
    inputs = [CustomInput({}), CustomInput({"text": "x" * 70})]
    assert [one.length for one in preparing(write_class(tmp_path, body), *inputs)] == [3, 70]


WRONG_WEIGHTS: list[tuple[str, type[PenstockError], str]] = [
    ("minus", ModelFailed, "work: must return a whole number of at least 1, got -5"),
    ("none", ModelFailed, "work: must return a whole number, got None"),
    ("text", ModelFailed, "work: must return a whole number, got 'x'"),
    ("float", ModelFailed, "work: must return a whole number, got 1.5"),
    ("no repr", ModelFailed, "work: must return a whole number, got a value of type NoRepr"),
    ("huge", InputTooLarge, "which exceeds the maximum of 4194304"),
    ("raise", ModelFailed, "work: KeyError: 'gone'"),
    ("exit", ModelFailed, "work: the class's process exited with status 3"),
]


@pytest.mark.parametrize("body", [ONE, BATCHED])
def test_a_wrong_weight_fails_its_item_alone(tmp_path: Path, preparing: Any, body: str) -> None:
    modes = [mode for wrong, _, _ in WRONG_WEIGHTS for mode in ("", wrong)]
    inputs = [CustomInput({"mode": one}) for one in (*modes, "")]
    found = preparing(write_class(tmp_path, body), *inputs)
    assert [one.length for one in found[::2]] == [3] * (len(WRONG_WEIGHTS) + 1)
    for wrong, (_, kind, reason) in zip(found[1::2], WRONG_WEIGHTS, strict=True):
        assert isinstance(wrong, kind)
        assert reason in wrong.message


def test_what_a_class_returns_is_shown_in_short(tmp_path: Path, preparing: Any) -> None:
    (wrong,) = preparing(write_class(tmp_path, ONE), CustomInput({"mode": "long"}))
    assert len(wrong.message) < 200


def test_a_loop_is_killed_and_others_are_weighed(
    tmp_path: Path, preparing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.models.custom.aside.ANSWER_LIMIT_S", 1.0)
    inputs = [CustomInput({"mode": one}) for one in ("pid", "loop", "pid")]
    before, looped, after = preparing(write_class(tmp_path, ONE), *inputs)
    assert isinstance(looped, ModelFailed)
    assert "no response within 1 s" in looped.message
    assert before.length != after.length, "the process is another one"
    with pytest.raises(ProcessLookupError):
        os.kill(before.length, 0)


def test_an_input_that_the_class_does_not_take_is_refused_by_name(
    tmp_path: Path, preparing: Any
) -> None:
    body = ONE.replace('text: str = "abc"', 'text: str = Input(default="abc", regex="(?!b).*")')
    (wrong,) = preparing(write_class(tmp_path, body), CustomInput({"text": "bad"}))
    assert isinstance(wrong, BadInput)
    assert wrong.field == "text"


def test_work_may_call_an_input_wrong(tmp_path: Path, preparing: Any) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, text: str) -> str:
            return text

        def work(self, input) -> int:
            error = ValueError("no recording")
            error.field = "text"
            raise error
    """
    (wrong,) = preparing(write_class(tmp_path, body), CustomInput({"text": "a"}))
    assert isinstance(wrong, BadInput)
    assert (wrong.field, wrong.message) == ("text", "text: no recording")


def test_a_file_is_weighed_by_its_size(tmp_path: Path, preparing: Any) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, file: Path) -> str:
            return ""

        def work(self, input) -> int:
            return input.file.stat().st_size
    """
    given = CustomInput({"file": None}, [Blob("a/b", b"x" * 700)], [FilePlace(["file"], "a")])
    (found,) = preparing(write_class(tmp_path, body), given)
    assert isinstance(found, PreparedCustom)
    assert found.length == 700


def test_weighing_sees_no_key_of_ours(
    tmp_path: Path, preparing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "do-not-tell")
    (found,) = preparing(write_class(tmp_path, ONE), CustomInput({"mode": "environment"}))
    assert "got 0" in found.message


def test_a_class_that_cant_be_imported_says_so(tmp_path: Path, preparing: Any) -> None:
    folder = write_class(tmp_path, ONE)
    entry = entry_of(folder, work={"max": 9})
    write_class(folder, "raise RuntimeError('not today')")
    weigher = AsideClass(entry, folder)
    with pytest.raises(ModelFailed, match="work: RuntimeError: not today"):
        weigher.weigh(PreparedCustom(key="", length=1, values={}))


OTHER_FORMS = [
    "def work(self, text: str, mode: str) -> int: return 1",
    "def work(self, input): return 1",
    "def work(self) -> int: return 1",
    "async def work(self, input) -> int: return 1",
]


@pytest.mark.parametrize("method", OTHER_FORMS)
def test_another_method_of_the_name_is_noted_and_not_called(tmp_path: Path, method: str) -> None:
    """A class written for Cog may already have a method with this name."""
    body = (
        f"class Predictor(BasePredictor):\n    def predict(self, a: int) -> int: ...\n    {method}"
    )
    inspected = inspect_folder(write_class(tmp_path, body))
    assert not inspected.interface.weighs
    assert inspected.notes == [
        "work is not called because its signature is not work(self, input) -> int, so each input "
        "weighs 1"
    ]


def test_a_worker_compares_whether_the_class_weighs(tmp_path: Path) -> None:
    usual = ONE.replace('raise RuntimeError("weighing needs no setup")', "pass")
    folder = write_class(tmp_path, usual)
    entry = entry_of(folder, work={"max": 9})
    write_class(folder, usual.replace(WORK, ""))
    with pytest.raises(ConfigurationError, match=r"weighs: true in penstock\.schema\.json, false"):
        StartedClass(entry, folder)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "set it to the maximum work of an input"),
        ({"work": {"max": 0}}, "greater than or equal to 1"),
        ({"work": {"max": 10**30}}, "less than or equal to 1000000000"),
        ({"work": {"max": -5}}, "greater than or equal to 1"),
        ({"work": {"max": "many"}}, "valid integer"),
        ({"work": {"max": 9}, "price": {"per_work_usd": -1}}, "greater than or equal to 0"),
        ({"work": {"max": 9}, "price": {"per_second_usd": "nan"}}, "finite number"),
    ],
)
def test_an_entry_without_sane_bounds_is_refused(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        entry_of(write_class(tmp_path, BATCHED), **fields)


def test_bounds_of_work_need_a_class_that_weighs(tmp_path: Path) -> None:
    folder = write_class(tmp_path, ONE.replace(WORK, ""))
    for fields in ({"work": {"max": 9}}, {"batch": {"max_items": 1, "max_work": 9}}):
        with pytest.raises(ValueError, match="require a class with work"):
            entry_of(folder, **fields)
    letters = {"name": "letters", "task": "embedding", "source": "local:x", "dimensions": 1}
    for field, given in (
        ("work.max", {"work": {"max": 9}}),
        ("price.per_work_usd", {"price": {"per_work_usd": 1}}),
    ):
        entry = {**letters, "batch": {"max_tokens": 9}, **given}
        with pytest.raises(ValueError, match=f"{field}: not supported by an embedding model"):
            Model.model_validate(entry)


def test_a_batch_weighs_as_much_as_the_entry_says(tmp_path: Path) -> None:
    folder = write_class(tmp_path, BATCHED)
    assert entry_of(folder, work={"max": 9}).budget == 64 * 9
    assert entry_of(folder, work={"max": 9}, batch={"max_items": 8, "max_work": 20}).budget == 20


def test_a_comparison_that_loops_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.models.custom.aside.ANSWER_LIMIT_S", 1.0)
    body = """
    class Predictor(BasePredictor):
        def predict(self, a: int) -> int: return a

        def is_close(self, a, b) -> bool:
            while a == 1: time.sleep(0.01)
            return a == b
    """
    folder = write_class(tmp_path, body)
    aside = AsideClass(entry_of(folder), folder)
    with pytest.raises(ModelFailed, match="is_close: no response within 1 s"):
        aside.is_close(CustomResult(1), CustomResult(1))
    assert aside.is_close(CustomResult(2), CustomResult(2))
    assert not aside.is_close(CustomResult(2), CustomResult(3))
    aside.close()
