"""INT8 graphs by ONNX Runtime's quantizer.

Weights are scaled per channel, activations per call or once by calibration.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from workers.optimize.folding import fold_products
from workers.optimize.smoothing import Feed, weighted_products

_METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
# Fused operators have no inferred types; all their values are floats.
_TYPES = {"DefaultTensorType": onnx.TensorProto.FLOAT}


def quantize_per_call(source: Path, target: Path) -> None:
    """Writes `source` with INT8 matrix products and embedding tables.

    Each call scales its own activations.

    So a text's vector depends a little on the texts beside it in its batch.
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
    """Writes `source` with INT8 products whose activations have fixed scales, found with `feeds`.

    Args:
        source: a graph of export_graph, maybe smoothed, but not fused: calibration sees only
            standard operators.
        target: the .onnx file to write.
        feeds: inputs to calibrate on. They must have one shape for `entropy` and `percentile`,
            which keep histograms.
        method: how a range is taken from the values seen: `minmax`, `entropy` or `percentile`.
    """
    products = [
        node.name for nodes in weighted_products(onnx.load(source)).values() for node in nodes
    ]
    options = {
        # What comes out stays fp32: rounding it too cost far more than all the rest (MiniLM: cosine
        # 0.94, not 0.998).
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
    """The feeds one by one, as the calibrator asks for them."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._left = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._left, None)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the quantizer's words about preprocessing, and the calibrator's prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
