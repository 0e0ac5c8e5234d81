"""Amounts in US dollars, as shown in headers, errors, reports, invoices and the console."""

import json
import shutil
import subprocess
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.routes.pages import CONSOLE
from shared.money.amounts import amount, dollars, plain

SHOWN = [
    # amount, as shown in headers and errors, as shown on pages
    (0.0, "0", "$0.00"),
    (-0.0, "0", "$0.00"),
    (0.0012000000000000001, "0.0012", "$0.0012"),
    (0.1 + 0.2, "0.3", "$0.30"),
    (4.6e-7, "0.00000046", "$0.00000046"),
    (4e-08, "0.00000004", "$0.00000004"),
    (1.23456789e-5, "0.000012346", "$0.00001235"),
    (1e-12, "0.000000001", "$0.000000001"),
    (-1e-12, "-0.000000001", "-$0.000000001"),
    (0.0109, "0.0109", "$0.0109"),
    (0.015899999999999998, "0.0159", "$0.0159"),
    (0.5, "0.5", "$0.50"),
    (0.99996, "0.99996", "$1.00"),
    (1.0, "1", "$1.00"),
    (1.125, "1.125", "$1.13"),
    (12.3456789012, "12.345678901", "$12.35"),
    (120.0, "120", "$120.00"),
    (-2.5, "-2.5", "-$2.50"),
    (1234567.891, "1234567.891", "$1,234,567.89"),
    (1e9, "1000000000", "$1,000,000,000.00"),
]
MONEY_JS = CONSOLE / "js" / "money.js"


@pytest.mark.parametrize(("usd", "in_header", "on_page"), SHOWN)
def test_amounts_are_plain_decimals(usd: float, in_header: str, on_page: str) -> None:
    assert (plain(usd), dollars(usd)) == (in_header, on_page)
    assert dollars(Decimal(repr(usd))) == on_page


def in_console(amounts: list[float]) -> list[list[str]]:
    """Amounts as formatted by the console's JavaScript: plain, and for display on a page."""
    program = (
        f"import {{ dollars, plain }} from {json.dumps(MONEY_JS.as_uri())};"
        f"const found = {json.dumps(amounts)}.map((usd) => [plain(usd), dollars(usd)]);"
        "console.log(JSON.stringify(found));"
    )
    command = ["node", "--input-type=module", "-e", program]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=60)
    found: list[list[str]] = json.loads(shown.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_console_writes_the_same() -> None:
    amounts = [usd for usd, _, _ in SHOWN]
    amounts += [number / 8 for number in range(-80, 80)] + [10.0**-at * 7.5 for at in range(14)]
    assert in_console(amounts) == [[plain(usd), dollars(usd)] for usd in amounts]


@given(st.floats(-1e9, 1e9))
def test_header_is_within_a_billionth_of_its_row(usd: float) -> None:
    shown = plain(usd)
    assert abs(Decimal(shown) - Decimal(usd)) <= Decimal("1e-9")
    assert len(shown.partition(".")[2]) <= 9
    assert "e" not in shown.lower()
    assert (float(shown) == 0) == (usd == 0)


@given(st.floats(-1e9, 1e9))
def test_pages_keep_four_digits(usd: float) -> None:
    shown = float(amount(usd).replace(",", ""))
    assert abs(shown - usd) <= max(abs(usd) * 5.1e-4 if abs(usd) < 1 else 0.00501, 1e-9)
