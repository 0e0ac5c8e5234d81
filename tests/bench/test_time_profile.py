"""Phases of a request add up to its round trip, and a batch's time counts once."""

import pytest

from bench.time_profile import MOMENTS, Row, model_busy_s, phases_ms
from penstock_load.exchange import Exchange


def row(received_at: float, *steps_s: float) -> Row:
    """Moments that lie `steps_s` apart."""
    moments = [received_at]
    for step_s in steps_s:
        moments.append(moments[-1] + step_s)
    return dict(zip(MOMENTS, moments, strict=True))


def test_phases_add_up_to_the_round_trip() -> None:
    exchanges = [Exchange(200, 22.5, "a", total_ms=22.0)]
    found = phases_ms(exchanges, {"a": row(1000.0, 0.001, 0.002, 0.003, 0.010, 0.002)})
    assert found == pytest.approx(
        {
            "HTTP outside the API": 0.5,
            "API: received to published": 1,
            "jobs topic: published to pulled": 2,
            "worker: pulled to model": 3,
            "model": 10,
            "worker: model to reply": 2,
            "inbox: reply to answer": 4,
            "remainder": 0,
            "round trip": 22.5,
        },
        abs=1e-3,
    )


def test_phases_are_those_of_the_middle_requests() -> None:
    rows = {str(number): row(0.0, *[number / 1000] * 5) for number in range(10)}
    exchanges = [
        Exchange(200, number * 6.0, str(number), total_ms=number * 6.0) for number in range(10)
    ]
    assert phases_ms(exchanges, rows)["model"] == pytest.approx(4.5)


def test_request_without_a_row_is_left_out() -> None:
    exchanges = [Exchange(200, 6.0, "a", total_ms=6.0), Exchange(200, 99.0, "b", total_ms=99.0)]
    assert phases_ms(exchanges, {"a": row(0.0, *[0.001] * 5)})["round trip"] == pytest.approx(6.0)


def test_batch_counts_once() -> None:
    shared, alone = row(0.0, *[0.5] * 5), row(7.0, *[0.25] * 5)
    assert model_busy_s({"a": shared, "b": shared, "c": alone}) == pytest.approx(0.75)
