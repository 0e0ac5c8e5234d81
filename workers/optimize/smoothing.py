"""SmoothQuant for a graph: moves large channels of activations into the weights.

After Xiao, Lin, Seznec, Wu, Demouth and Han, "SmoothQuant: Accurate and Efficient Post-Training
Quantization for Large Language Models" (2022). ONNX Runtime offers it only through another package,
which is not maintained any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

Feed = dict[str, np.ndarray]
_STRENGTH = 0.75
"""The paper's alpha.

Measured with MiniLM, 0.5 to 1.0 in INT8: 0.75 has the highest least cosine.
"""
_FLOOR = 1e-5


def smooth_graph(source: Path, target: Path, feeds: Sequence[Feed]) -> int:
    """Writes `source` with scaled weights, and activations multiplied by the inverse scales.

    The result computes what `source` does, up to rounding.

    Args:
        source: a graph in fp32.
        target: the .onnx file to write.
        feeds: inputs whose activations are typical.

    Returns:
        How many activations are scaled.
    """
    model = onnx.load(source)
    products = weighted_products(model)
    peaks = _peaks(source, list(products), feeds)
    weights = {weight.name: weight for weight in model.graph.initializer}
    for activation, nodes in products.items():
        matrices = [numpy_helper.to_array(weights[node.input[1]]) for node in nodes]
        scales = _scales(peaks[activation], matrices)
        for node, matrix in zip(nodes, matrices, strict=True):
            scaled = numpy_helper.from_array(
                (matrix * scales[:, None]).astype(np.float32), node.input[1]
            )
            weights[node.input[1]].CopyFrom(scaled)
        _multiply(model.graph, activation, nodes, 1 / scales)
    onnx.save(model, target)
    return len(products)


def weighted_products(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Matrix products whose constant weights have no other user, by their activation."""
    constants = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    users: dict[str, int] = defaultdict(int)
    for node in model.graph.node:
        for name in node.input:
            users[name] += 1
    products: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in constants and users[node.input[1]] == 1:
            products[node.input[0]].append(node)
    return dict(products)


def _peaks(source: Path, names: Sequence[str], feeds: Sequence[Feed]) -> dict[str, np.ndarray]:
    """The greatest magnitude of each channel of each activation over all feeds."""
    peaks: dict[str, np.ndarray] = {}
    for values in activations(source, names, feeds):
        for name, value in values.items():
            peak = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            peaks[name] = np.maximum(peaks.get(name, 0.0), peak)
    return peaks


def activations(
    source: Path, names: Sequence[str], feeds: Sequence[Feed]
) -> Iterator[dict[str, np.ndarray]]:
    """For each feed the inner values of these names, as a graph in fp32 computes them."""
    model = onnx.load(source)
    model.graph.output.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for feed in feeds:
        yield dict(zip(names, session.run(list(names), feed), strict=True))


def _scales(peak: np.ndarray, matrices: list[np.ndarray]) -> np.ndarray:
    """The factor of each input channel, for all matrices that multiply the activation.

    The geometric mean is 1.
    """
    widest = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)
    scales = np.maximum(peak, _FLOOR) ** _STRENGTH / np.maximum(widest, _FLOOR) ** (1 - _STRENGTH)
    return np.asarray(scales / np.exp(np.log(scales).mean()))


def _multiply(
    graph: onnx.GraphProto, activation: str, nodes: list[onnx.NodeProto], factors: np.ndarray
) -> None:
    """Has `nodes` take the activation times `factors`, by one new node before the first of them."""
    constant, product = f"{activation}_smooth_factors", f"{activation}_smooth"
    graph.initializer.append(numpy_helper.from_array(factors.astype(np.float32), constant))
    place = min(list(graph.node).index(node) for node in nodes)
    for node in nodes:
        node.input[0] = product
    graph.node.insert(
        place, helper.make_node("Mul", [activation, constant], [product], name=product)
    )
