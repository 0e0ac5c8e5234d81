"""When an API instance looks for a text's next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.stores.token_streams import FIRST_SHARE, MAX_GAP_S, READ_EVERY_S, ReadPace


def looks(pace: ReadPace, tokens_s: Sequence[float], skipped_s: float = 0.0) -> tuple[int, float]:
    """The number of reads until a reader has all tokens, and the longest any token waited.

    Args:
        pace: the reader's pace; it wakes up every READ_EVERY_S.
        skipped_s: when counting starts; the reader has all earlier tokens by then.
    """
    count, latest_s, turn = 0, 0.0, round(skipped_s / READ_EVERY_S)
    waiting = list(tokens_s)
    while waiting:
        now_s = turn * READ_EVERY_S
        turn += 1
        if not pace.is_due(now_s):
            continue
        count += 1
        there = [at_s for at_s in waiting if at_s <= now_s]
        pace.record_check(now_s, has_tokens=bool(there))
        if there:
            latest_s = max(latest_s, now_s - there[0])
            waiting = waiting[len(there) :]
    return count, latest_s


@pytest.mark.parametrize("gap_s", [0.01, 0.05, 0.12, 0.225, 0.31])
def test_tokens_at_an_even_pace_are_had_at_the_next_turn(gap_s: float) -> None:
    written_s = [1.0 + gap_s * number for number in range(200)]
    _, latest_s = looks(ReadPace(0.0), written_s)
    assert latest_s <= READ_EVERY_S + 1e-9


def test_a_slow_model_is_asked_half_as_often() -> None:
    written_s = [0.225 * number for number in range(1, 201)]
    count, _ = looks(ReadPace(0.0), written_s)
    turns = written_s[-1] / READ_EVERY_S
    assert count < turns / 2


def test_one_long_wait_makes_no_reader_late() -> None:
    written_s = [0.1, 0.2, 0.3, 5.0, 5.1, 5.2, 5.3]
    _, latest_s = looks(ReadPace(0.0), written_s)
    assert latest_s <= READ_EVERY_S + 1e-9


def test_a_model_that_gets_faster_is_late_once_and_by_a_part_of_the_longest_gap() -> None:
    slow_s = [2.0 * number for number in range(1, 5)]
    written_s = slow_s + [slow_s[-1] + 0.05 * number for number in range(1, 20)]
    _, latest_s = looks(ReadPace(0.0), written_s)
    assert READ_EVERY_S < latest_s < MAX_GAP_S


@pytest.mark.parametrize("first_s", [0.0, 0.06, 0.31, 0.52, 0.99])
def test_a_first_token_within_a_second_is_had_at_the_next_turn(first_s: float) -> None:
    _, latest_s = looks(ReadPace(0.0), [first_s])
    assert latest_s <= READ_EVERY_S + 1e-9


@pytest.mark.parametrize("first_s", [1.49, 3.01, 7.77, 20.02, 99.9])
def test_a_late_first_token_is_had_after_a_small_part_of_the_wait(first_s: float) -> None:
    _, latest_s = looks(ReadPace(0.0), [first_s])
    assert latest_s <= min(FIRST_SHARE * first_s, MAX_GAP_S) + READ_EVERY_S + 1e-9


def test_a_long_wait_for_the_first_token_takes_few_looks() -> None:
    count, _ = looks(ReadPace(0.0), [20.0])
    assert count < 20.0 / READ_EVERY_S / 3


def test_readers_that_wait_for_first_tokens_share_their_turns() -> None:
    paces = [ReadPace(0.61 * number) for number in range(16)]
    shared = 0
    for turn in range(round(20.0 / READ_EVERY_S), round(30.0 / READ_EVERY_S)):
        now_s = turn * READ_EVERY_S
        due = [pace for pace in paces if pace.is_due(now_s)]
        for pace in due:
            pace.record_check(now_s, has_tokens=False)
        shared += bool(due)
    assert shared <= 10.0 / READ_EVERY_S / 7


def test_tokens_after_a_late_first_one_are_had_at_the_next_turn() -> None:
    written_s = [20.02 + 0.12 * number for number in range(200)]
    pace = ReadPace(0.0)
    looks(pace, written_s[:1])
    reached_s = written_s[0] + MAX_GAP_S + READ_EVERY_S
    _, latest_s = looks(pace, [at_s for at_s in written_s if at_s > reached_s], reached_s)
    assert latest_s <= READ_EVERY_S + 1e-9
