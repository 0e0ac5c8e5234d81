import pytest

from infra.text_table import format_transposed, table


def test_numbers_stand_to_the_right() -> None:
    assert table(
        ("model", "items", "cost"), [("mini", 12, 0.5), ("painter", 4, None), ("x", -1, 0.000125)]
    ) == (
        "  model    items      cost\n"
        "  mini        12      0.50\n"
        "  painter      4         -\n"
        "  x           -1  0.000125"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1425408, "0.1425408"),
        (0.00000007, "0.00000007"),
        (0.1 + 0.2, "0.30"),
        (1234.5678912345, "1234.567891"),
        (123_456_789_012.345, "123456789012.35"),
        (-2.0, "-2"),
        (0.0, "0"),
        (float("inf"), "inf"),
    ],
)
def test_money_is_shown_to_the_last_fraction_of_a_cent(value: float, shown: str) -> None:
    assert table(("cost_usd",), [(value,)]).split()[-1] == shown


def test_whole_numbers_have_no_decimals() -> None:
    heads, rows = (
        ("model", "charged_tokens", "cost_usd"),
        [("mini", 64.0, 0.0), ("painter", 131072.0, 0.1425408)],
    )

    assert table(heads, rows) == (
        "  model    charged_tokens   cost_usd\n"
        "  mini                 64       0.00\n"
        "  painter          131072  0.1425408"
    )
    assert format_transposed(heads, rows) == (
        "  model           mini    painter\n"
        "  charged_tokens    64     131072\n"
        "  cost_usd        0.00  0.1425408"
    )


def test_columns_of_words_stand_to_the_left() -> None:
    assert table(("a", "b"), [("1", "x1"), ("22", "y")]) == "   a  b\n   1  x1\n  22  y"


def test_table_without_rows_is_its_heads() -> None:
    assert table(("a", "b"), []) == "  a  b"


def test_rows_side_by_side() -> None:
    assert format_transposed(("model", "items"), [("mini", 1), ("painter", 22)]) == (
        "  model  mini  painter\n  items     1       22"
    )


def test_rows_must_fit_the_heads() -> None:
    with pytest.raises(ValueError, match="zip"):
        table(("a",), [(1, 2)])
