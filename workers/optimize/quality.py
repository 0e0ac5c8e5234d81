"""Distances from the reference: cosine and ranking for vectors, and three measures for images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import uniform_filter
from scipy.stats import spearmanr

NEIGHBORS = 10
_SSIM_WINDOW = 7
_NO_DIFFERENCE_DB = 100.0
"""The PSNR reported for two bit-identical images, for which the formula is undefined."""


@dataclass(frozen=True)
class VectorQuality:
    """Comparison of vectors with the reference's vectors. All values range from -1 or 0 to 1.

    `neighbors`: average fraction of a text's ten nearest neighbors that stay the same.
    `rank_correlation`: Spearman's rank correlation of the similarities of all pairs of texts.
    """

    cosine_mean: float
    cosine_min: float
    neighbors: float
    rank_correlation: float


def compare_vectors(vectors: np.ndarray, reference: np.ndarray) -> VectorQuality:
    """Compares `vectors` [texts, dimensions] with `reference`, in the same order."""
    ours, theirs = _unit(vectors), _unit(reference)
    cosines = np.einsum("td,td->t", ours, theirs)
    our_pairs, their_pairs = ours @ ours.T, theirs @ theirs.T
    upper = np.triu_indices(len(ours), k=1)
    return VectorQuality(
        cosine_mean=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        neighbors=_measure_kept_neighbors(our_pairs, their_pairs),
        rank_correlation=float(spearmanr(our_pairs[upper], their_pairs[upper]).statistic),
    )


def _unit(vectors: np.ndarray) -> np.ndarray:
    exact = vectors.astype(np.float64)
    return np.asarray(exact / np.linalg.norm(exact, axis=1, keepdims=True))


def _measure_kept_neighbors(ours: np.ndarray, theirs: np.ndarray) -> float:
    count = min(NEIGHBORS, len(ours) - 1)
    common = [
        len(set(neighbors) & set(other_neighbors))
        for neighbors, other_neighbors in zip(
            _nearest(ours, count), _nearest(theirs, count), strict=True
        )
    ]
    return float(np.mean(common)) / count


def _nearest(similarities: np.ndarray, count: int) -> np.ndarray:
    """Returns the `count` other texts most similar to each text, [texts, count]."""
    others = similarities.copy()
    np.fill_diagonal(others, -np.inf)
    return np.argsort(-others, axis=1, kind="stable")[:, :count]


def psnr_db(image: np.ndarray, reference: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio (in dB) of two images with values from 0 to 1.

    10 log10(1 / MSE), as in ITU-T J.340. Returns 100 for two identical images, and negative
    infinity for an image that is not finite.
    """
    error = float(np.mean((image.astype(np.float64) - reference) ** 2))
    if not np.isfinite(error):
        return -np.inf
    return _NO_DIFFERENCE_DB if error == 0 else min(_NO_DIFFERENCE_DB, float(-10 * np.log10(error)))


def ssim(image: np.ndarray, reference: np.ndarray) -> float:
    """Returns the structural similarity of two images [height, width, channels] of values 0 to 1.

    The formula is from Wang, Bovik, Sheikh, and Simoncelli, "Image Quality Assessment: From Error
    Visibility to Structural Similarity" (2004), with a uniform window of 7 pixels, K1 = 0.01 and K2
    = 0.03, averaged over pixels and channels.
    """
    ours, theirs = image.astype(np.float64), reference.astype(np.float64)
    size = (_SSIM_WINDOW, _SSIM_WINDOW, 1)
    mean_ours, mean_theirs = uniform_filter(ours, size), uniform_filter(theirs, size)
    variance_ours = uniform_filter(ours * ours, size) - mean_ours**2
    variance_theirs = uniform_filter(theirs * theirs, size) - mean_theirs**2
    covariance = uniform_filter(ours * theirs, size) - mean_ours * mean_theirs
    light, contrast = 0.01**2, 0.03**2
    similarity = (2 * mean_ours * mean_theirs + light) * (2 * covariance + contrast)
    similarity /= (mean_ours**2 + mean_theirs**2 + light) * (
        variance_ours + variance_theirs + contrast
    )
    edge = _SSIM_WINDOW // 2
    return float(similarity[edge:-edge, edge:-edge].mean())


def feature_distance(features: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Compares two images by features, one array [channels, height, width] per layer.

    Defined like LPIPS (Zhang et al., "The Unreasonable Effectiveness of Deep Features as a
    Perceptual Metric", 2018): at each position, the channels are scaled to unit length, and the
    squared differences are averaged over positions and summed over layers. The features are not
    LPIPS's and have no learned weights, so the figures are comparable only with one another.
    """
    return float(
        sum(
            np.mean(np.sum((_direction(a) - _direction(b)) ** 2, 0))
            for a, b in zip(features, reference, strict=True)
        )
    )


def _direction(features: np.ndarray) -> np.ndarray:
    exact = features.astype(np.float64)
    return np.asarray(exact / (np.linalg.norm(exact, axis=0, keepdims=True) + 1e-10))
