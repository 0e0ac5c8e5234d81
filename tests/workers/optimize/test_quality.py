"""Quality measures, tested on cases with known values."""

import numpy as np
import pytest

from workers.optimize.quality import compare_vectors, feature_distance, psnr_db, ssim

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(3)
VECTORS = RANDOM.normal(size=(40, 16)).astype(np.float32)
IMAGE = RANDOM.random((32, 24, 3)).astype(np.float32)


def test_same_vectors_at_another_length_are_perfect() -> None:
    quality = compare_vectors(3 * VECTORS, VECTORS)
    assert (quality.cosine_min, quality.neighbors, quality.rank_correlation) == pytest.approx(
        (1, 1, 1)
    )


def test_one_wrong_vector_shows_in_the_minimum() -> None:
    wrong = VECTORS.copy()
    wrong[5] = -wrong[5]
    quality = compare_vectors(wrong, VECTORS)
    assert quality.cosine_min == pytest.approx(-1)
    assert quality.cosine_mean == pytest.approx(1 - 2 / 40)


def test_unrelated_vectors_keep_no_ranking() -> None:
    quality = compare_vectors(RANDOM.normal(size=(40, 16)), VECTORS)
    assert abs(quality.rank_correlation) < 0.2
    assert quality.neighbors < 0.5


def test_psnr_of_a_known_error() -> None:
    assert psnr_db(np.full((4, 4, 3), 0.6), np.full((4, 4, 3), 0.5)) == pytest.approx(20)
    assert psnr_db(IMAGE, IMAGE) == 100
    assert psnr_db(IMAGE * np.nan, IMAGE) == -np.inf


def test_ssim_sees_lost_structure() -> None:
    assert ssim(IMAGE, IMAGE) == pytest.approx(1)
    assert ssim(np.full_like(IMAGE, IMAGE.mean()), IMAGE) < 0.1
    assert ssim(1 - IMAGE, IMAGE) < 0


def test_feature_distance_ignores_scale() -> None:
    features = [RANDOM.normal(size=(8, 4, 4)) for _ in range(2)]
    assert feature_distance([2 * layer for layer in features], features) == pytest.approx(
        0, abs=1e-8
    )
    assert feature_distance([-layer for layer in features], features) == pytest.approx(8, rel=1e-6)
