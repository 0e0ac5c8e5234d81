"""Static INT8 products as one operator each, with a bias that corrects rounding errors.

The correction is that of Nagel, van Baalen, Blankevoort and Welling, "Data-Free Quantization
Through Weight Equalization and Bias Correction" (2019), with averages over real inputs instead of
estimated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.transformers.onnx_model import OnnxModel

from workers.optimize.smoothing import Feed, activations, weighted_products

_OPERATOR, _DOMAIN = "MatMulIntegerToFloat", "com.microsoft"


@dataclass(frozen=True)
class _Product:
    """An INT8 product between the quantizer's conversions, and the fp32 product that it replaces.

    Its activation is rounded by `scale` and `zero` to 0 … 255. `weights` and `rounded_weights` are
    [inputs, outputs].
    """

    node: onnx.NodeProto
    left: onnx.NodeProto
    """The conversion of the activation back to fp32. `right`: of the weights."""
    right: onnx.NodeProto
    activation: str
    scale: np.ndarray
    zero: np.ndarray
    weights: np.ndarray
    rounded_weights: np.ndarray


def fold_products(source: Path, target: Path, feeds: Sequence[Feed]) -> None:
    """Rewrites `target`: conversions, product and corrected bias become one operator.

    ONNX Runtime does as much when it loads a graph on a CPU, but leaves the bias out, which then is
    a pass over memory of its own: a tenth of MiniLM's time.

    Args:
        source: the graph in fp32 that `target` was made of.
        target: what quantize_static made, with conversions (QDQ) around the products with constant
            weights only.
        feeds: inputs whose activations are typical.
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
    found = []
    for activation, originals in weighted_products(source).items():
        for original in originals:
            node = nodes[original.name]
            left, right = (producers[name] for name in node.input)
            integers, scales, _ = (graph.get_constant_value(name) for name in right.input)
            found.append(
                _Product(
                    node=node,
                    left=left,
                    right=right,
                    activation=activation,
                    scale=graph.get_constant_value(left.input[1]),
                    zero=graph.get_constant_value(left.input[2]),
                    weights=numpy_helper.to_array(weights[original.input[1]]),
                    rounded_weights=integers * scales,
                )
            )
    return found


def _shifts(source: Path, products: Sequence[_Product], feeds: Sequence[Feed]) -> list[np.ndarray]:
    """What each product loses by rounding, [outputs], on average over all tokens of all feeds."""
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
    """Turns the product into the operator, with the addition of a constant if only that follows."""
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
