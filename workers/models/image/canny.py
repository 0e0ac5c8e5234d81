"""Edges of an image by Canny, equal to those of OpenCV's `Canny` bit by bit.

ControlNets for edges are trained with OpenCV's, which workers do without: it is 60 MB, for this.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import ndimage

_TAN_22 = 13573
"""The tangent of 22.5 degrees, times 2^15."""
_ALL_AROUND = np.ones((3, 3), bool)


def edges(pixels: npt.NDArray[np.uint8], low: int, high: int) -> npt.NDArray[np.uint8]:
    """Returns 255 on edges and 0 elsewhere, [height, width].

    As in J. Canny, A Computational Approach to Edge Detection, 1986: gradients by Sobel, of the
    channel with the largest one; only what is largest across its edge; and of this what is above
    `high`, or above `low` and connected to it.

    Args:
        pixels: [height, width, channels].
        low: of |dx| + |dy|, in levels: 0 to 2040.
        high: as `low`.
    """
    values = np.pad(pixels.astype(np.int32), ((1, 1), (1, 1), (0, 0)), "edge")
    columns = values[:-2] + 2 * values[1:-1] + values[2:]
    rows = values[:, :-2] + 2 * values[:, 1:-1] + values[:, 2:]
    across, down = columns[:, 2:] - columns[:, :-2], rows[2:] - rows[:-2]
    sizes = np.abs(across) + np.abs(down)
    channel = sizes.argmax(axis=2)[..., None]
    x, y, size = (
        np.take_along_axis(part, channel, axis=2)[..., 0] for part in (across, down, sizes)
    )
    thin = (size > low) & _is_largest(x, y, np.pad(size, 1))
    labels, _ = ndimage.label(thin, _ALL_AROUND)
    is_kept = np.bincount(labels[size > high], minlength=labels.max() + 1) > 0
    is_kept[0] = False
    return np.where(is_kept[labels], 255, 0).astype(np.uint8)


def _is_largest(
    x: npt.NDArray[np.int32], y: npt.NDArray[np.int32], padded: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Whether a gradient is the largest along its direction, rounded to 45 degrees."""
    height, width = x.shape

    def beside(down: int, right: int) -> npt.NDArray[np.int32]:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    size, flat = beside(0, 0), np.abs(x).astype(np.int64) * _TAN_22
    steep, tall = flat + (np.abs(x).astype(np.int64) << 16), np.abs(y).astype(np.int64) << 15
    falls = (x ^ y) >= 0
    diagonal = np.where(
        falls,
        (size > beside(-1, -1)) & (size > beside(1, 1)),
        (size > beside(-1, 1)) & (size > beside(1, -1)),
    )
    level = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    return np.where(tall < flat, level, np.where(tall > steep, upright, diagonal))
