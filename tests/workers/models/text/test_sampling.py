"""Sampling beside a plain reference that sorts the whole vocabulary."""

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.tiers import examples
from tests.workers.models.text.tiny import prompt
from workers.models.text.sampling import choose, largest, log_probabilities, penalize, uniform

pytestmark = pytest.mark.slow

LOGITS = arrays(np.float32, st.integers(2, 200), elements=st.floats(-20, 20, width=32))


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Probabilities of the tokens that may be chosen."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if top_k:
        order = order[:top_k]
    # Scores that differ by less than a rounding have equal weights.
    weight_of = {token: float(np.exp(scaled[token] - scaled.max())) for token in order}
    order.sort(key=lambda token: (-weight_of[token], token))
    weights = np.array([weight_of[token] for token in order])
    # Where a sum is equal to top_p but for rounding, either count of tokens is right.
    sums = np.cumsum(weights) / weights.sum()
    assume(top_p == 1 or not np.isclose(sums, top_p, rtol=1e-9, atol=1e-12).any())
    kept, total = 0, 0.0
    while kept < len(order) and (kept == 0 or total < top_p * weights.sum()):
        total += weights[kept]
        kept += 1
    chances = weights[:kept] / weights[:kept].sum()
    return dict(zip(order[:kept], chances.tolist(), strict=True))


@settings(max_examples=examples(200), deadline=None)
@example(np.array([0, 1e-40], np.float32), 1.0, 0, 0.0, 0)
@given(
    LOGITS,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_the_choice_is_that_of_the_reference(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    item = prompt([1], temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    chances = allowed(logits, temperature, top_k, top_p)
    token = choose(logits, item, 4)
    assert token in chances or min(chances.values()) < 1e-9
    # The one where the sum of chances, in order of ids, passes the item's random number.
    drawn, total = uniform(seed, 4), 0.0
    near = []
    for one in sorted(chances):
        if total - 1e-9 <= drawn <= total + chances[one] + 1e-9:
            near.append(one)
        total += chances[one]
    assert token in near


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    item = prompt([1], temperature=1.0)
    counts = np.bincount([choose(logits, item, place) for place in range(4000)], minlength=4)
    assert counts / 4000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_randomness_depends_on_seed_and_place_alone() -> None:
    drawn = [uniform(7, place) for place in range(200)]
    assert drawn == [uniform(7, place) for place in range(200)]
    assert len({*drawn, *(uniform(8, place) for place in range(200))}) == 400
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert 0.4 < float(np.mean(drawn)) < 0.6


def test_penalties_are_those_of_openai() -> None:
    item = prompt([1], frequency_penalty=0.5, presence_penalty=0.25)
    found = penalize(np.zeros(4, np.float32), [2, 2, 3], item)
    assert found.tolist() == [0, 0, -1.25, -0.75]


def test_tokens_that_are_not_allowed_are_never_chosen() -> None:
    logits = np.full(6, -np.inf, np.float32)
    logits[[1, 4]] = 0
    item = prompt([1], temperature=5.0, top_p=0.99, top_k=5)
    assert {choose(logits, item, place) for place in range(100)} == {1, 4}


def test_a_tiny_temperature_takes_the_most_likely() -> None:
    item = prompt([1], temperature=1e-300)
    assert choose(np.array([1, 3, 2], np.float32), item, 0) == 1


@given(LOGITS, st.integers(1, 40))
def test_the_largest_are_those_of_a_sort(values: np.ndarray, count: int) -> None:
    wanted = sorted(range(len(values)), key=lambda one: (-values[one], one))[:count]
    assert largest(values, count).tolist() == wanted


@given(LOGITS)
def test_probabilities_sum_to_one(logits: np.ndarray) -> None:
    assert np.exp(log_probabilities(logits)).sum() == pytest.approx(1, abs=1e-4)
