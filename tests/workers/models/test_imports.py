"""Which process loads which library: the reason why a worker is ready in seconds and its I/O process is small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "transformers", "diffusers", "sentence_transformers"]
IO_PROCESS = """
from pathlib import Path
from shared.catalogue import read_catalogue
from shared.messages import ImageInput, TextInput
from workers.model_pool import ModelPool
from workers.models import preparer_for
from workers.sources import resolve
texts, images = read_catalogue(Path("models.yaml")).models
folder = resolve(texts.source, texts.revision, Path("unused"))
ModelPool(texts, folder)
preparer_for(texts, folder).prepare([TextInput("a cat")])
preparer_for(images, folder).prepare([ImageInput("a", 64, 64, 1, 1.0, 1, "ddim")])
"""
EMBEDDING_PROCESS = """
from pathlib import Path
from shared.catalogue import read_catalogue
from workers.models import model_for
from workers.sources import resolve
texts, images = read_catalogue(Path("models.yaml")).models
model_for(texts, resolve(texts.source, texts.revision, Path("unused")), "cpu")
"""


@pytest.mark.parametrize(
    ("code", "loaded"),
    [(IO_PROCESS, []), (EMBEDDING_PROCESS, ["torch", "transformers"]), ("import workers.model_process", [])],
    ids=["io-process", "embedding-model", "model-process"],
)
def test_a_process_loads_only_what_it_needs(code: str, loaded: list[str]) -> None:
    report = f"import json, sys; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        check=True,
        timeout=50,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert json.loads(done.stdout.splitlines()[-1]) == loaded
