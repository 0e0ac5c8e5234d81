"""INT8 yields the same numbers on every CPU: without VNNI, products of u8 and s8 must not saturate
at 16 bits.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import START_LIMIT_S
from workers.runtime.child_process import child_environment

pytestmark = pytest.mark.slow

LARGEST = 255 * 127 * 64
PRODUCT = """
import numpy as np, onnxruntime
from onnx import TensorProto, helper, numpy_helper
import workers
from workers.models.embedding.encoder_onnx import session_options
given = helper.make_tensor_value_info("given", TensorProto.UINT8, [4, 64])
product = helper.make_tensor_value_info("product", TensorProto.INT32, [4, 8])
weights = numpy_helper.from_array(np.full((64, 8), 127, np.int8), "weights")
node = helper.make_node("MatMulInteger", ["given", "weights"], ["product"])
graph = helper.make_graph([node], "largest", [given], [product], [weights])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), session_options(1))
(rows,) = session.run(None, {"given": np.full((4, 64), 255, np.uint8)})
print(set(rows.ravel().tolist()))
"""
EMULATOR = "qemu-x86_64"
"""From the package qemu-user. The emulated CPU has AVX2 but neither AVX-512 nor VNNI.

/proc/cpuinfo is still the host's.
"""


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        pytest.param([], {}, id="this CPU"),
        pytest.param(
            [EMULATOR, "-cpu", "max"],
            {"ONEDNN_MAX_CPU_ISA": "AVX2"},
            id="a CPU without VNNI",
            marks=pytest.mark.skipif(shutil.which(EMULATOR) is None, reason="needs qemu-user"),
        ),
    ],
)
def test_the_largest_product_is_exact(command: list[str], settings: dict[str, str]) -> None:
    done = subprocess.run(
        [*command, sys.executable, "-c", PRODUCT],
        check=True,
        timeout=START_LIMIT_S,
        capture_output=True,
        text=True,
        env=child_environment(1) | settings,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.splitlines()[-1] == str({LARGEST})
