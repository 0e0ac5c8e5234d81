"""INT8 products with fixed scales: small graphs go in, and ONNX Runtime's results for the quantized
graphs are checked.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from workers.optimize.quantization import Feed, quantize_calibrated

pytestmark = pytest.mark.slow

INPUTS, OUTPUTS, TOKENS = 64, 32, 400
WEIGHTS = np.random.default_rng(3).normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
BIAS = np.random.default_rng(4).normal(size=OUTPUTS).astype(np.float32)
PRODUCT = helper.make_node("MatMul", ["x", "weights"], ["product"], name="multiply")


def graph(folder: Path, *following: onnx.NodeProto) -> Path:
    """From x [tokens, INPUTS] to y [tokens, OUTPUTS]: the product and the operators after it."""
    made = helper.make_graph(
        [PRODUCT, *following],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", OUTPUTS])],
        [numpy_helper.from_array(WEIGHTS, "weights"), numpy_helper.from_array(BIAS, "bias")],
    )
    path = folder / "fp32.onnx"
    onnx.save(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


def feed(seed: int) -> Feed:
    """Values like those after a GELU: most are just below zero, and a scale that fits the few large
    values rounds all of them to the same step.
    """
    values = np.random.default_rng(seed).gamma(0.3, 2.0, size=(TOKENS, INPUTS)) - 0.05
    return {"x": values.astype(np.float32)}


def run(path: Path, given: Feed) -> np.ndarray:
    return np.asarray(
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
            ["y"], given
        )[0]
    )


FOLLOWING = {
    "bias": [helper.make_node("Add", ["bias", "product"], ["y"])],
    "no bias": [helper.make_node("Relu", ["product"], ["y"])],
    "what came in again": [helper.make_node("Add", ["product", "product"], ["y"])],
    "bias, and another who takes the product": [
        helper.make_node("Add", ["product", "bias"], ["sum"]),
        helper.make_node("Mul", ["product", "sum"], ["y"]),
    ],
}


@pytest.mark.parametrize("following", FOLLOWING.values(), ids=list(FOLLOWING))
def test_product_becomes_one_operator_that_computes_the_same(
    tmp_path: Path, following: list[onnx.NodeProto]
) -> None:
    source, target, given = graph(tmp_path, *following), tmp_path / "int8.onnx", feed(5)
    quantize_calibrated(source, target, [given], "minmax")
    made = [node.op_type for node in onnx.load(target).graph.node]
    left = (
        []
        if list(following[0].input) == ["bias", "product"]
        else [node.op_type for node in following]
    )
    assert made == ["QuantizeLinear", "MatMulIntegerToFloat", *left]
    expected, found = run(source, given), run(target, given)
    assert np.corrcoef(expected.ravel(), found.ravel())[0, 1] > 0.999
    assert np.abs(expected - found).max() < 0.05 * np.abs(expected).max()


def test_rounding_moves_no_output_on_average(tmp_path: Path) -> None:
    source, target = graph(tmp_path, *FOLLOWING["bias"]), tmp_path / "int8.onnx"
    given = [feed(5), feed(6)]
    quantize_calibrated(source, target, given, "minmax")
    errors = np.concatenate([run(target, one) - run(source, one) for one in given])
    assert np.abs(errors).mean() > 1e-3, "there is rounding"
    assert np.abs(errors.mean(axis=0)).max() < 1e-3, "it is 0.1 without the correction"
