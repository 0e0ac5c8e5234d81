"""`penstock predict`: inputs as people type them."""

from pathlib import Path

import pytest

from shared.errors import BadInput, ModelFailed
from tests.workers.models.custom.classes import write_class
from workers.models.custom.trial import predict

CLASS = """
class Runner(BaseRunner):
    def run(self, words: list[str] = ["none"], numbers: list[int] = [], of: dict = {}) -> dict:
        return {"words": words, "numbers": numbers, "of": of}
"""


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["words=one"], '"words": [\n    "one"\n  ]'),
        (["words=one", "words=two"], '"words": [\n    "one",\n    "two"\n  ]'),
        (['words=["one", "two"]'], '"words": [\n    "one",\n    "two"\n  ]'),
        (["numbers=3", "numbers=4"], '"numbers": [\n    3,\n    4\n  ]'),
        (['of={"a": 1}'], '"of": {\n    "a": 1\n  }'),
    ],
)
def test_lists_are_typed_as_json_or_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], shown: str
) -> None:
    predict(write_class(tmp_path, CLASS), typed, tmp_path)
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000], ids=["deep", "digits"])
def test_what_json_can_not_be_read_from_is_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    predict(write_class(tmp_path, CLASS), [f"of={text}"], tmp_path)
    assert f'"of": "{text}"' in capsys.readouterr().out


def test_list_that_is_no_json_takes_no_more_elements(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"-i words: \[one is not a list as JSON"):
        predict(write_class(tmp_path, CLASS), ["words=[one", "words=two"], tmp_path)


def test_process_that_sends_something_else_is_killed(tmp_path: Path) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self) -> str:
            for fd in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
                try:
                    os.write(fd, (4).to_bytes(4, "little") + b"what")
                except OSError:
                    pass
            time.sleep(600)
            return ""
    """
    with pytest.raises(ModelFailed, match="killed: it sent an invalid response"):
        predict(write_class(tmp_path, body), [], tmp_path)


def test_process_that_ends_is_named_with_its_status(tmp_path: Path) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self) -> str:
            os._exit(3)
    """
    with pytest.raises(ModelFailed, match="the model process exited with status 3"):
        predict(write_class(tmp_path, body), [], tmp_path)
