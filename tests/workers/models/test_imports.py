"""The libraries each process loads: few, so that a worker is ready in seconds and its I/O process
is small.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

HEAVY = ["torch", "transformers", "diffusers", "sentence_transformers"]
IO_PROCESS = """
from pathlib import Path
from shared.models.catalog_file import read_catalog
from shared.models.tasks.embedding import TextInput
from shared.models.tasks.image import ImageInput
from workers.runtime.pool import HostedModel, ModelPool
from workers.tasks import preparer_for
from workers.models.source import resolve
texts, images = read_catalog(Path("models.yaml")).models
folder = resolve(texts.source, texts.revision, Path("unused"))
ModelPool([HostedModel(texts, folder)])
preparer_for(texts, folder).prepare([TextInput("a cat")])
preparer_for(images, folder).prepare([ImageInput("a", 64, 64, 1, 1.0, 1, "ddim")])
"""
EMBEDDING_PROCESS = """
from pathlib import Path
from shared.models.catalog_file import read_catalog
from workers.models.base import PreparedText
from workers.tasks import model_for
from workers.models.source import resolve
texts, images = read_catalog(Path("models.yaml")).models
model = model_for(texts, resolve(texts.source, texts.revision, Path("unused")), "cpu")
model.setup()
model.warmup()
model.predict([PreparedText(key="", length=1, ids=bytes(4))], lambda step, steps: None)
"""


CHOOSING = """
import asyncio, tempfile
from pathlib import Path
from shared.models.catalog_file import read_catalog
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from workers.autotune.client import choose_backend
from workers.models.source import resolve
texts = read_catalog(Path("models.yaml")).models[0].model_copy(update={"backend": "onnx"})
folder = resolve(texts.source, texts.revision, Path("unused"))
try:
    settings = WorkerSettings(model=texts.name, artifacts_dir=Path(tempfile.mkdtemp()))
    asyncio.run(choose_backend(texts, folder, settings))
except ConfigurationError:
    pass
"""
ONNX_PROCESS = """
import json, tempfile
from pathlib import Path
import numpy as np
from onnx import TensorProto, helper, save
from shared.models.catalog_file import read_catalog
from workers.tasks import model_for
from workers.models.backend import Backend
from workers.models.base import PreparedText
import workers.runtime.server
texts = read_catalog(Path("models.yaml")).models[0].model_copy(update={"dimensions": 2})
folder = Path(tempfile.mkdtemp())
(folder / "tokenizer.json").write_text("{}")
given = [helper.make_tensor_value_info(name, TensorProto.INT64, ["items", "tokens"])
         for name in ("input_ids", "attention_mask")]
states = helper.make_tensor_value_info("states", TensorProto.FLOAT, ["items", "tokens", 2])
table = helper.make_tensor("table", TensorProto.FLOAT, [9, 2], list(map(float, range(18))))
nodes = [helper.make_node("Gather", ["table", "input_ids"], ["states"])]
graph = helper.make_graph(nodes, "tiny", given, [states], [table])
opsets = [helper.make_opsetid("", 17)]
save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "tiny.onnx")
backend = Backend(backend="onnx", graph=str(folder / "tiny.onnx"))
model = model_for(texts, folder, "cpu", backend=backend)
model.setup()
model.warmup()
ids = np.array([1, 3], "<u4").tobytes()
(result,) = model.predict([PreparedText(key="", length=2, ids=ids)], lambda step, steps: None)
assert np.frombuffer(result.vector, "<f4").tolist() == [4.0, 5.0], result
"""


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        (IO_PROCESS, []),
        (CHOOSING, []),
        (EMBEDDING_PROCESS, ["torch"]),
        (ONNX_PROCESS, []),
        ("import workers.runtime.server", []),
    ],
    ids=["io-process", "choosing", "embedding-in-torch", "embedding-in-onnx", "model-process"],
)
def test_a_process_loads_only_what_it_needs(code: str, loaded: list[str]) -> None:
    report = (
        f"import json, sys; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        check=True,
        timeout=WAIT_LIMIT_S,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert json.loads(done.stdout.splitlines()[-1]) == loaded
