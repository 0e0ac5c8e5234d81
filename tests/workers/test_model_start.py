"""A model process starts, computes one item, and exits: a quick check that workers can start.

The other model process tests are slow, so without this one, the quick tests would miss a wrong
argument passed from the pool to the model. The model is a table of two numbers per token, run in
ONNX Runtime, because importing torch takes seconds.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from tests.limits import START_LIMIT_S
from tests.waiting import until
from workers.models.backend import Backend
from workers.models.base import PreparedText
from workers.runtime import pool as pools
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.template import can_fork
from workers.tasks import preparer_for

BATCH = Batch(max_tokens=64)
ENTRY = Model(name="table", task="embedding", source="local:no", dimensions=2, batch=BATCH)
WORDS = {"[UNK]": 0, "cat": 1, "dog": 2}
VECTORS = [[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]


@pytest.fixture
def hosted(tmp_path: Path) -> HostedModel:
    from onnx import TensorProto, helper, save  # takes half a second, too long for test collection

    words = {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text("{}")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["items", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    states = helper.make_tensor_value_info("states", TensorProto.FLOAT, ["items", "tokens", 2])
    table = helper.make_tensor("table", TensorProto.FLOAT, [3, 2], np.ravel(VECTORS).tolist())
    lookup = helper.make_node("Gather", ["table", "input_ids"], ["states"])
    graph = helper.make_graph([lookup], "table", inputs, [states], [table])
    path = tmp_path / "table.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return HostedModel(ENTRY, tmp_path, Backend(backend="onnx", graph=str(path)))


@pytest.mark.anyio
@pytest.mark.parametrize("forks", [can_fork, lambda: False], ids=["forked", "executed"])
async def test_a_model_process_starts_computes_an_item_and_ends(
    hosted: HostedModel, forks: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "can_fork", forks)
    prepared = preparer_for(hosted.entry, hosted.folder).prepare([TextInput("cat dog")])
    texts = [item for item in prepared if isinstance(item, PreparedText)]
    async with ModelPool(
        [hosted], device="cpu", processes=1, start_timeout_s=START_LIMIT_S
    ) as pool:
        (process,) = pool.processes
        assert process.pid not in (None, os.getpid())
        (result,) = (await process.run(texts, timeout_s=START_LIMIT_S)).results
        pid = process.pid
    assert isinstance(result, EmbeddingResult)
    assert np.frombuffer(result.vector, "<f4").tolist() == [2.0, 3.0]
    assert result.tokens == 2
    await until(lambda: not psutil.pid_exists(pid))
