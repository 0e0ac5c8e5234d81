"""INT8 graphs created with ONNX Runtime's quantizer.

Weights are scaled per channel; activations are scaled on each call, or once through calibration.

Each static INT8 product is a single operator, with a bias that corrects rounding errors. The
correction follows Nagel, van Baalen, Blankevoort, and Welling, "Data-Free Quantization Through
Weight Equalization and Bias Correction" (2019), but averages over real inputs instead of
estimating.

SmoothQuant shifts the scale of large activation channels into a graph's weights, following Xiao,
Lin, Seznec, Wu, Demouth, and Han, "SmoothQuant: Accurate and Efficient Post-Training Quantization
for Large Language Models" (2022). ONNX Runtime offers it only through a separate package that is no
longer maintained.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.transformers.onnx_model import OnnxModel

Feed = dict[str, np.ndarray]
_STRENGTH = 0.75
"""The paper's alpha.

Of the values from 0.5 to 1.0, 0.75 yields the highest minimum cosine, as measured with MiniLM in
INT8.
"""
_FLOOR = 1e-5

_OPERATOR, _DOMAIN = "MatMulIntegerToFloat", "com.microsoft"

_METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
# Fused operators have no inferred types, but all their values are floats.
_TYPES = {"DefaultTensorType": onnx.TensorProto.FLOAT}


def smooth_graph(source: Path, target: Path, feeds: Sequence[Feed]) -> int:
    """Writes `source` with scaled weights, and activations multiplied by the inverse scales.

    The result is equivalent to `source`, up to rounding.

    Args:
        source: an fp32 graph.
        feeds: inputs that produce typical activations.

    Returns:
        The number of scaled activations.
    """
    model = onnx.load(source)
    products = find_weighted_products(model)
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


def find_weighted_products(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Returns products whose constant weights are not used anywhere else, keyed by activation."""
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
    """Returns each activation channel's maximum magnitude over all feeds."""
    peaks: dict[str, np.ndarray] = {}
    for values in activations(source, names, feeds):
        for name, value in values.items():
            peak = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            peaks[name] = np.maximum(peaks.get(name, 0.0), peak)
    return peaks


def activations(
    source: Path, names: Sequence[str], feeds: Sequence[Feed]
) -> Iterator[dict[str, np.ndarray]]:
    """Yields, for each feed, the intermediate values with these names, from an fp32 graph."""
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
    """Returns a factor for each input channel, shared by all matrices that multiply the activation.

    The geometric mean of the factors is 1.
    """
    widest = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)
    scales = np.maximum(peak, _FLOOR) ** _STRENGTH / np.maximum(widest, _FLOOR) ** (1 - _STRENGTH)
    return np.asarray(scales / np.exp(np.log(scales).mean()))


def _multiply(
    graph: onnx.GraphProto, activation: str, nodes: list[onnx.NodeProto], factors: np.ndarray
) -> None:
    """Feeds `nodes` the activation times `factors`, through one new node before the first one."""
    constant, product = f"{activation}_smooth_factors", f"{activation}_smooth"
    graph.initializer.append(numpy_helper.from_array(factors.astype(np.float32), constant))
    first_index = min(list(graph.node).index(node) for node in nodes)
    for node in nodes:
        node.input[0] = product
    graph.node.insert(
        first_index, helper.make_node("Mul", [activation, constant], [product], name=product)
    )


@dataclass(frozen=True)
class _Product:
    """An INT8 product between the quantizer's conversions, and the fp32 product it replaces.

    Its activation is quantized with `scale` and `zero` to 0 … 255. `weights` and `rounded_weights`
    are [inputs, outputs].
    """

    node: onnx.NodeProto
    left: onnx.NodeProto
    """Converts the activation back to fp32. `right`: converts the weights."""
    right: onnx.NodeProto
    activation: str
    scale: np.ndarray
    zero: np.ndarray
    weights: np.ndarray
    rounded_weights: np.ndarray


def fold_products(source: Path, target: Path, feeds: Sequence[Feed]) -> None:
    """Rewrites `target` so that the conversions, product, and corrected bias become one operator.

    ONNX Runtime does the same when it loads a graph on a CPU, but leaves out the bias, which then
    requires a separate pass over memory that takes a tenth of MiniLM's time.

    Args:
        source: the fp32 graph from which `target` was created.
        target: output of quantize_static, with conversions (QDQ) only around products with constant
            weights.
        feeds: inputs that produce typical activations.
    """
    graph = OnnxModel(onnx.load(target))
    products = _products(onnx.load(source), graph)
    shifts = _shifts(source, products, feeds)
    users = graph.input_name_to_nodes()
    for product, shift in zip(products, shifts, strict=True):
        _fold(graph, product, shift, users[product.node.output[0]])
    graph.model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    graph.prune_graph()
    graph.save_model_to_file(str(target))


def _products(source: onnx.ModelProto, graph: OnnxModel) -> list[_Product]:
    weights = {weight.name: weight for weight in source.graph.initializer}
    nodes = {node.name: node for node in graph.get_nodes_by_op_type("MatMul")}
    producers = graph.output_name_to_node()
    replaced = []
    for activation, originals in find_weighted_products(source).items():
        for original in originals:
            node = nodes[original.name]
            left_producer, right_producer = (producers[name] for name in node.input)
            integers, scales, _ = (graph.get_constant_value(name) for name in right_producer.input)
            replaced.append(
                _Product(
                    node=node,
                    left=left_producer,
                    right=right_producer,
                    activation=activation,
                    scale=graph.get_constant_value(left_producer.input[1]),
                    zero=graph.get_constant_value(left_producer.input[2]),
                    weights=numpy_helper.to_array(weights[original.input[1]]),
                    rounded_weights=integers * scales,
                )
            )
    return replaced


def _shifts(source: Path, products: Sequence[_Product], feeds: Sequence[Feed]) -> list[np.ndarray]:
    """Returns each product's mean rounding error over all tokens in all feeds, [outputs]."""
    roundings = {
        product.activation: (product.scale, np.float32(product.zero)) for product in products
    }
    means: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {name: [] for name in roundings}
    for values in activations(source, list(roundings), feeds):
        for name, value in values.items():
            exact = value.reshape(-1, value.shape[-1]).astype(np.float64)
            scale, zero = roundings[name]
            rounded = (np.clip(np.rint(exact / scale) + zero, 0, 255) - zero) * scale
            means[name].append((len(exact), exact.mean(axis=0), rounded.mean(axis=0)))
    shifts = []
    for product in products:
        tokens, exact, rounded = zip(*means[product.activation], strict=True)
        exact_mean, rounded_mean = (
            np.average(of_feeds, axis=0, weights=tokens) for of_feeds in (exact, rounded)
        )
        shifts.append(exact_mean @ product.weights - rounded_mean @ product.rounded_weights)
    return shifts


def _fold(
    graph: OnnxModel, product: _Product, shift: np.ndarray, users: Sequence[onnx.NodeProto]
) -> None:
    """Turns the product into the operator, folding in a constant addition if only that follows."""
    node = product.node
    bias = shift
    if len(users) == 1 and users[0].op_type == "Add":
        (other,) = (name for name in users[0].input if name != node.output[0])
        constant = graph.get_constant_value(other)
        if constant is not None and constant.shape == shift.shape:
            bias = constant + shift
            node.output[0] = users[0].output[0]
            graph.remove_node(users[0])
    name = f"{node.name}_bias"
    graph.add_initializer(numpy_helper.from_array(bias.astype(np.float32), name))
    inputs = [
        name for pair in zip(product.left.input, product.right.input, strict=True) for name in pair
    ]
    node.op_type, node.domain = _OPERATOR, _DOMAIN
    del node.input[:]
    node.input.extend([*inputs, name])


def quantize_per_call(source: Path, target: Path) -> None:
    """Writes `source` with INT8 matrix products and embedding tables.

    Each call scales its own activations.

    A text's vector therefore depends slightly on the other texts in its batch.
    """
    with _silent():
        quantize_dynamic(
            source,
            target,
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options=dict(_TYPES),
        )


def quantize_calibrated(source: Path, target: Path, feeds: Sequence[Feed], method: str) -> None:
    """Writes `source` with INT8 products whose activations have fixed scales, found using `feeds`.

    Args:
        source: a graph from export_graph, possibly smoothed but not fused, because calibration
            recognizes only standard operators.
        target: the .onnx file to write.
        feeds: inputs for calibration. All of them must have the same shape for `entropy` and
            `percentile`, which keep histograms.
        method: how a range is derived from the observed values: `minmax`, `entropy`, or
            `percentile`.
    """
    products = [
        node.name for nodes in find_weighted_products(onnx.load(source)).values() for node in nodes
    ]
    options = {
        # Outputs stay in fp32, because quantizing them as well reduced quality far more than
        # everything else combined (MiniLM: cosine 0.94 instead of 0.998).
        "OpTypesToExcludeOutputQuantization": ["MatMul"],
        "CalibPercentile": 99.999,
        **_TYPES,
    }
    with _silent():
        quantize_static(
            source,
            target,
            _Feeds(feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=products,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=_METHODS[method],
            extra_options=options,
        )
    fold_products(source, target, feeds)


class _Feeds(CalibrationDataReader):  # type: ignore[misc]
    """Yields the feeds one by one, as the calibrator requests them."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._remaining_feeds = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._remaining_feeds, None)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silences the quantizer's messages about preprocessing, and the calibrator's prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
