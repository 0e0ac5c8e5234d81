"""`penstock init`: creates a folder with a working custom model as a starting point."""

from __future__ import annotations

import re
from pathlib import Path

from shared.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{2,63}")
_CLASS = '''"""A custom model. `penstock models check .` writes its interface."""

from cog import BasePredictor, ConcatenateIterator, Input


class Predictor(BasePredictor):
    """Says each word of a text backward."""

    def setup(self) -> None:
        """Runs once in each process: load weights here."""
        self.separator = " "

    def predict(
        self,
        text: str = Input(description="The text to turn around.", min_length=1),
        repeat: int = Input(description="How often it is said.", default=1, ge=1, le=10),
    ) -> ConcatenateIterator[str]:
        """Each word is sent as soon as it is yielded."""
        for _ in range(repeat):
            for word in text.split():
                yield word[::-1] + self.separator
'''
_TEST = '''"""The class by itself: python -m pytest test_predict.py"""

from predict import Predictor


def test_each_word_is_turned_around() -> None:
    predictor = Predictor()
    predictor.setup()
    assert "".join(predictor.predict(text="stressed mood", repeat=1)) == "desserts doom "
'''
_ENTRY = """models:
  - name: {name}
    task: custom
    source: local:{folder}
    price: {{per_item_usd: 0.001}}
"""


def write_sample(name: str, parent: Path) -> Path:
    """Writes a new folder `name` with predict.py, test_predict.py and models.yaml.

    Raises:
        ConfigurationError: the name is not a valid model name, or the folder already exists.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name[:80]!r} is not a valid model name; use 3 to 64 letters, digits, '_' and '-', "
            "starting with a letter"
        )
    folder = parent / name
    try:
        folder.mkdir()
        (folder / "predict.py").write_text(_CLASS, encoding="utf-8")
        (folder / "test_predict.py").write_text(_TEST, encoding="utf-8")
        entry = _ENTRY.format(name=name, folder=folder.resolve())
        (folder / "models.yaml").write_text(entry, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror}") from error
    return folder
