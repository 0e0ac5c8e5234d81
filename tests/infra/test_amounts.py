"""Numbers that no option of a command accepts."""

from __future__ import annotations

import pytest

from tests.penstock_command import penstock


@pytest.mark.parametrize("amount", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    "words",
    [
        ("budgets", "restore", "--max-gib"),
        ("dead-letters", "replay", "tiny", "--all", "--deadline"),
        ("load", "--speed"),
        ("load", "--wait"),
        ("optimize", "tiny", "--tolerance"),
        ("provision", "--wait-s"),
        ("up", "--startup-s"),
    ],
)
def test_amount_that_is_negative_or_infinite_or_no_number_is_refused(
    words: tuple[str, ...], amount: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock(*words, amount) == 2
    assert "Invalid value" in capsys.readouterr().err
