"""A step's spare share, checked on steps whose fixed time is known.

The share is described in docs/reference/generation.md.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.models.service_rate import StepTime

PLACES = 16
TEXTS_MS = {1: 21.8, 2: 26.5, 4: 24.8, 8: 29.8, 16: 43.6}
"""Milliseconds for a decoding step with this number of texts in bf16
(docs/reference/generation.md).

A prompt of 256 tokens took 213 ms.
"""
PROMPT_TOKENS, PROMPT_MS = 256, 213.0


def texts() -> StepTime:
    return StepTime(0.5, PLACES)


def images() -> StepTime:
    return StepTime(0.0, PLACES)


def taken(time: StepTime, items: int, seconds: float, work: int | None = None) -> float:
    """The part of a step that counts as work."""
    return 1 - time.spare_s(items / PLACES, work or items, seconds) / seconds


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 100)), max_size=30),
    st.floats(0, 1),
    st.integers(1, 10_000),
    st.floats(1e-6, 100),
)
def test_what_counts_lies_between_the_room_that_is_taken_and_all(
    steps: list[tuple[int, float]], fill: float, work: int, seconds: float
) -> None:
    for time in (texts(), images()):
        for step in steps:
            time.observe(*step)
        spare_s = time.spare_s(fill, work, seconds)
        assert 0 <= spare_s <= seconds * (1 - fill) + 1e-9
    assert texts().spare_s(fill, work, seconds) == 0.0, "nothing is known before the first step"


@pytest.mark.parametrize("known", [[1, 2, 4, 8, 16], [1, 4], [1]])
def test_texts_count_for_what_a_full_worker_would_take(known: list[int]) -> None:
    time = texts()
    for _ in range(50):
        for items in known:
            time.observe(items, TEXTS_MS[items] / 1000)
    for items, step_ms in TEXTS_MS.items():
        full = items / PLACES * TEXTS_MS[PLACES] / step_ms
        assert taken(time, items, step_ms / 1000) == pytest.approx(full, abs=0.13)


def test_prompts_of_lone_texts_tell_the_fixed_time_too() -> None:
    time = texts()
    for _ in range(10):
        time.observe(PROMPT_TOKENS, PROMPT_MS / 1000)
        for _ in range(20):
            time.observe(1, TEXTS_MS[1] / 1000)
    assert time.fixed_s == pytest.approx(0.021, abs=0.001)
    # Other texts have to wait for a prompt, so hardly any of the prompt's step was spare.
    assert taken(time, 1, PROMPT_MS / 1000, PROMPT_TOKENS) > 0.9


def test_texts_that_are_only_read_take_the_worker() -> None:
    time = texts()
    for _ in range(10):
        time.observe(PROMPT_TOKENS, PROMPT_MS / 1000)
    assert taken(time, 1, PROMPT_MS / 1000, PROMPT_TOKENS) > 0.9


def test_lone_images_take_the_worker() -> None:
    time = images()
    for _ in range(10):
        time.observe(512 * 512, 0.1)
    assert taken(time, 1, 0.1, 512 * 512) == 1.0


def test_images_whose_company_costs_little_are_seen_as_such() -> None:
    time = images()
    for _ in range(10):
        for items in (1, 4):
            time.observe(items * 64 * 64, 0.008 + 0.002 * items)
    assert time.fixed_s == pytest.approx(0.008, rel=0.01)


def test_slow_steps_say_nothing_of_the_fixed_time() -> None:
    chance, time = random.Random(1), texts()
    for _ in range(500):
        for items in (1, 8, 16):
            slow = 10.0 if chance.random() < 0.2 else 1.0
            time.observe(items, (0.020 + 0.0015 * items) * slow)
    assert time.fixed_s == pytest.approx(0.020, rel=0.1)


def test_steps_that_others_slow_are_no_more_work() -> None:
    time = texts()
    for _ in range(100):
        for items in (1, 16):
            time.observe(items, 0.020 + 0.0015 * items)
    quiet, slowed = taken(time, 1, 0.0215), taken(time, 1, 2 * 0.0215)
    assert quiet == pytest.approx(slowed, abs=0.01)
    # A step ten times as long is no longer the same step.
    assert taken(time, 1, 10 * 0.0215) > 0.8


def test_a_device_that_gets_slower_is_followed() -> None:
    time = texts()
    for slowed in (1.0, 3.0):
        for _ in range(300):
            for items in (1, 16):
                time.observe(items, (0.020 + 0.0015 * items) * slowed)
        assert time.fixed_s == pytest.approx(0.020 * slowed, rel=0.1)
