"""Sampling, compared with a simple reference that sorts the whole vocabulary."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.tiers import examples
from tests.workers.models.generation.tiny import prompt
from workers.models.generation.writing import adjust, choose, largest, log_probabilities, uniform

pytestmark = pytest.mark.slow

LOGITS = arrays(np.float32, st.integers(2, 200), elements=st.floats(-20, 20, width=32))


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Probabilities of the tokens that may be chosen."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if top_k:
        order = order[:top_k]
    # Scores that differ by less than rounding error have equal weights.
    weight_of = {token: float(np.exp(scaled[token] - scaled.max())) for token in order}
    order.sort(key=lambda token: (-weight_of[token], token))
    weights = np.array([weight_of[token] for token in order])
    # If a sum equals top_p to within rounding error, either number of tokens is correct.
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
    # The token at which the cumulative probability, in order of id, exceeds the item's random
    # number.
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
    counts = np.bincount([choose(logits, item, position) for position in range(4000)], minlength=4)
    assert counts / 4000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_randomness_depends_on_seed_and_place_alone() -> None:
    drawn = [uniform(7, position) for position in range(200)]
    assert drawn == [uniform(7, position) for position in range(200)]
    assert len({*drawn, *(uniform(8, position) for position in range(200))}) == 400
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert 0.4 < float(np.mean(drawn)) < 0.6


NO_PROMPT = np.empty(0, np.int64)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(2, 60),
    st.dictionaries(st.integers(0, 1), st.floats(-100, 100, width=32), max_size=2),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([0, 3]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_the_choice_is_that_of_transformers(
    size: int,
    bias: dict[int, float],
    repetition_penalty: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    """Uses the processors that generate() builds from the same options, in generate()'s order."""
    logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    item = prompt(
        [0, 1],
        temperature=0.7,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        logit_bias=bias,
        repetition_penalty=repetition_penalty,
    )
    processors = [
        *([SequenceBiasLogitsProcessor([[[one], bias[one]] for one in bias])] if bias else []),
        RepetitionPenaltyLogitsProcessor(repetition_penalty),
        TemperatureLogitsWarper(0.7),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        MinPLogitsWarper(min_p),
    ]
    ids, scores = torch.tensor([[0, 1, 1]]), torch.tensor(logits)[None]
    for processor in processors:
        scores = processor(ids, scores)
    chances = scores[0].double().softmax(-1).numpy()
    adjusted = adjust(logits, [1], np.array([0, 1]), item)
    # If equal weights or sums fall exactly on a limit, either token is correct.
    assume(_is_clear(adjusted, top_k, top_p, min_p))
    token = choose(adjusted, item, 4)
    sums = np.cumsum(chances)
    assert chances[token] > 0
    assert sums[token] - chances[token] - 1e-4 <= uniform(seed, 4) <= sums[token] + 1e-4


def _is_clear(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> bool:
    weights = np.sort(np.exp((logits.astype(np.float64) - logits.max()) / 0.7))[::-1]
    if top_k and len(weights) > top_k and np.isclose(weights[top_k - 1], weights[top_k]):
        return False
    kept = weights[: top_k or None]
    sums = np.cumsum(kept) / kept.sum()
    has_level = any(np.isclose(one, other) for one, other in itertools.pairwise(kept))
    near_p = np.isclose(sums, top_p, rtol=1e-4, atol=1e-5).any() or has_level
    return not (top_p < 1 and near_p) and not np.isclose(kept, min_p, rtol=1e-4).any()


def test_a_bias_bans_a_token_or_asks_for_it() -> None:
    logits = np.array([5, 4, 0], np.float32)
    for bias, wanted in (({0: -100.0}, 1), ({2: 100.0}, 2), ({}, 0)):
        item = prompt([1], logit_bias=bias)
        assert choose(adjust(logits, [], NO_PROMPT, item), item, 0) == wanted
    assert logits.tolist() == [5, 4, 0]


def test_penalties_are_those_of_openai() -> None:
    item = prompt([1], frequency_penalty=0.5, presence_penalty=0.25)
    found = adjust(np.zeros(4, np.float32), [2, 2, 3], NO_PROMPT, item)
    assert found.tolist() == [0, 0, -1.25, -0.75]


def test_tokens_that_are_not_allowed_are_never_chosen() -> None:
    logits = np.full(6, -np.inf, np.float32)
    logits[[1, 4]] = 0
    item = prompt([1], temperature=5.0, top_p=0.99, top_k=5)
    assert {choose(logits, item, position) for position in range(100)} == {1, 4}


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
