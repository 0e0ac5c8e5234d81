"""A class's scratch folder, with tenants' inputs and outputs, is removed with its pool."""

from __future__ import annotations

from pathlib import Path

from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass

BODY = """
class Predictor(BasePredictor):
    def predict(self, a: int) -> str:
        return os.environ["TMPDIR"]
"""


def test_a_scratch_folder_is_removed_with_its_process(tmp_path: Path) -> None:
    folder = write_class(tmp_path, BODY)
    with StartedClass(entry_of(folder), folder) as model:
        scratch = Path(output_of(compute(model, {"a": 1})))
        assert scratch.is_dir()
    assert not scratch.exists()
