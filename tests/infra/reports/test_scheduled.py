"""A scheduled run between real servers: tables, invoices, summaries, log lines and metrics."""

import asyncio
import datetime as dt
import html.parser
import logging
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from google.cloud import bigquery
from prometheus_client import REGISTRY
from typer.testing import CliRunner, Result

from infra.cli.main import app
from shared.errors import Unavailable
from shared.reports.day_tables import BillingDay, DayTables, days_asked
from shared.reports.runner import ReportRunner
from shared.reports.scheduled import RUN_LIMIT_S, ScheduledReports
from shared.stores.objects import ObjectStore
from tests.infra.reports.conftest import DATASET, load
from tests.infra.reports.generated import Fields
from tests.infra.reports.test_daily_tables import HOUR, WEEK, hourly, kept

pytestmark = pytest.mark.slow

Clock = Callable[[], dt.datetime]


class Running:
    """A dataset's scheduled reports, with their own clock and bucket."""

    def __init__(self, client: bigquery.Client, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.now = dt.datetime(2026, 11, 2, 4, tzinfo=dt.UTC)
        self.limit_s = RUN_LIMIT_S

    @property
    def reports(self) -> ScheduledReports:
        return ScheduledReports(
            DayTables(self.client, DATASET),
            ReportRunner(self.client, DATASET),
            ObjectStore(f"file://{self.folder}"),
            clock=lambda: self.now,
            limit_s=self.limit_s,
        )

    def days(self, tz: str = "UTC", **asked: str) -> list[BillingDay]:
        return days_asked(asked, tz, self.now)

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def running(empty: bigquery.Client, tmp_path: Path) -> Running:
    return Running(empty, tmp_path / "bucket")


def counted(measure: str) -> float:
    name = "penstock_reports_anomalies_total"
    return REGISTRY.get_sample_value(name, {"measure": measure}) or 0.0


async def test_run_makes_days_invoices_and_summaries(
    running: Running, made_rows: list[Fields], caplog: pytest.LogCaptureFixture
) -> None:
    load(running.client, "rows", made_rows)
    with caplog.at_level(logging.INFO, "shared.reports.scheduled"):
        result = await running.reports.run(running.days())
    assert [day.day.isoformat() for day in result.days] == [
        *("2026-10-29", "2026-10-30", "2026-10-31", "2026-11-01")
    ]
    files = running.files()
    assert files.keys() == set(result.objects)
    assert {name for name in files if name.startswith("summaries/")} == {
        f"summaries/{day.day}.{kind}" for day in result.days for kind in ("html", "txt")
    }
    assert len([name for name in files if name.startswith("invoices/2026-10/")]) == 5
    (reported,) = [record for record in caplog.records if record.message == "daily summary"]
    assert reported.subject in files["summaries/2026-11-01.txt"].decode()  # type: ignore[attr-defined]
    again = await running.reports.run(running.days())
    assert again.objects == result.objects
    assert running.files() == files


def test_invoices_of_the_bucket_are_those_of_the_command(
    running: Running,
    made_rows: list[Fields],
    bigquery_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(running.client, "rows", made_rows)
    asyncio.run(running.reports.run(running.days("Europe/Berlin", to="2026-10-31")))
    for name, value in {
        "BIGQUERY_ENDPOINT": bigquery_endpoint,
        "PROJECT": running.client.project,
        "DATASET": DATASET,
    }.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    words = ("invoice", "--month", "2026-10", "--tz", "Europe/Berlin", "--format", "csv")
    assert (
        running.files()["invoices/2026-10/all.csv"] == CliRunner().invoke(app, words).stdout_bytes
    )


async def test_two_runs_at_once_make_what_one_makes(
    running: Running, made_rows: list[Fields]
) -> None:
    load(running.client, "rows", made_rows)
    await running.reports.run(running.days())
    files, since = running.files(), "day >= '2026-10-01'"
    costs = sorted(line["cost_usd"] for line in kept(running.client, "daily_usage", since))
    first, second = running.reports, running.reports
    await asyncio.gather(first.run(running.days()), second.run(running.days()))
    assert running.files() == files
    again = sorted(line["cost_usd"] for line in kept(running.client, "daily_usage", since))
    assert again == pytest.approx(costs)


async def test_month_that_is_not_over_has_no_invoice(running: Running) -> None:
    running.now = dt.datetime(2026, 10, 31, 23, tzinfo=dt.UTC)
    result = await running.reports.run(running.days())
    assert [key for key in result.objects if key.startswith("invoices")] == []


async def test_late_rows_of_three_days_are_in_the_next_run(
    running: Running, made_rows: list[Fields]
) -> None:
    load(running.client, "rows", made_rows)
    await running.reports.run(running.days())
    late = next(row for row in made_rows if row["received_at"].date() == dt.date(2026, 10, 30))
    load(running.client, "rows", [late | {"row_id": "l:0", "request_id": "l", "cost_usd": 9.0}])
    before = sum(line["cost_usd"] for line in kept(running.client, "daily_usage", OCTOBER_30))
    running.now += dt.timedelta(days=1)
    await running.reports.run(running.days())
    after = sum(line["cost_usd"] for line in kept(running.client, "daily_usage", OCTOBER_30))
    assert after == pytest.approx(before + 9)


OCTOBER_30 = "day = '2026-10-30'"


async def test_anomaly_is_told_of_once_and_is_in_the_summary(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    day = BillingDay(dt.date(2026, 11, 5), "UTC")
    load(running.client, "rows", hourly(day, seed=5))
    errors, costs = counted("errors"), counted("cost_usd")
    running.now = day.since + 10 * HOUR + HOUR / 6
    with caplog.at_level(logging.WARNING, "shared.reports.scheduled"):
        first = await running.reports.judge_hours("UTC")
        assert first.anomalies == 2  # one for all tenants, and one for acme at nine
        assert (await running.reports.judge_hours("UTC")).anomalies == 0
    reported = [record for record in caplog.records if record.message == "anomaly"]
    assert [(one.measure, one.tenant) for one in reported] == [  # type: ignore[attr-defined]
        ("cost_usd", None),
        ("cost_usd", "acme"),
    ]
    running.now = day.until + 4 * HOUR
    daily = await running.reports.run(running.days(to="2026-11-05"))
    assert daily.anomalies > 0
    assert counted("cost_usd") + counted("errors") == costs + errors + 2 + daily.anomalies
    text = running.files()["summaries/2026-11-05.txt"].decode()
    assert "- 09:00 acme: $" in text
    assert " errors, usually 0 to 1" in text


async def test_backfill_finds_anomalies_and_wakes_nobody(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    day = BillingDay(dt.date(2026, 11, 5), "UTC")
    load(running.client, "rows", hourly(day, seed=5))
    running.now = day.until + WEEK
    before = counted("cost_usd")
    result = await running.reports.run(running.days(to="2026-11-05"))
    assert result.anomalies > 0
    assert counted("cost_usd") == before
    assert [one for one in caplog.records if one.message == "anomaly"] == []


async def test_run_out_of_time_says_how_far_it_came(running: Running) -> None:
    running.limit_s = 0.0
    with pytest.raises(Unavailable, match="the 0 s time limit expired before 2026-10-29 was done"):
        await running.reports.run(running.days())


async def test_names_of_others_stay_text(running: Running) -> None:
    name = '<script>alert("x")</script>\nSubject: forged'
    row = {
        "row_id": "r:0",
        "request_id": "r",
        "item": 0,
        "tenant": name,
        "model": "mini",
        "received_at": dt.datetime(2026, 11, 1, 5, tzinfo=dt.UTC),
        "attempt": 1,
        "status": "succeeded",
        "cost_usd": 1234.5,
    }
    load(running.client, "rows", [row])
    await running.reports.run(running.days(to="2026-11-01"))
    files = running.files()
    assert b"<script" not in files["summaries/2026-11-01.html"]
    lines = files["summaries/2026-11-01.txt"].decode().splitlines()
    assert [line for line in lines if line.startswith("Subject")] == []
    assert [line for line in lines if "$1,234.50" in line and "script" in line]


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.open += [] if tag == "meta" else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


async def test_summary_is_a_page_that_a_mail_can_hold(
    running: Running, made_rows: list[Fields]
) -> None:
    load(running.client, "rows", made_rows)
    await running.reports.run(running.days(to="2026-10-31"))
    page = running.files()["summaries/2026-10-31.html"]
    tags = _Tags()
    tags.feed(page.decode())
    assert (tags.open, tags.links) == ([], [])
    assert len(page) < 100_000  # Gmail clips emails over 102 KB


@pytest.fixture
def reported(
    empty: bigquery.Client,
    bigquery_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Result]:
    for name, value in {
        "BIGQUERY_ENDPOINT": bigquery_endpoint,
        "PROJECT": empty.project,
        "DATASET": DATASET,
        "OBJECTS_URL": f"file://{tmp_path / 'objects'}",
        "BILLING_TZ": "Europe/Berlin",
    }.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    return lambda *words: CliRunner().invoke(app, ("run-daily", *words))


def test_command_does_a_day_and_says_its_summary(
    reported: Callable[..., Result],
    empty: bigquery.Client,
    tmp_path: Path,
    made_rows: list[Fields],
) -> None:
    load(empty, "rows", made_rows)
    answer = reported("--day", "2026-10-31")
    assert answer.exit_code == 0, answer.stderr
    written = tmp_path / "objects" / "summaries" / "2026-10-31.txt"
    assert answer.stdout == written.read_text()
    assert "7 objects written" in answer.stderr
    total = sum(
        Decimal(repr(line["cost_usd"])) for line in kept(empty, "daily_usage", "day = '2026-10-31'")
    )
    assert f"Penstock 2026-10-31: ${total:.4f}, " in answer.stdout


def test_command_judges_hours(reported: Callable[..., Result]) -> None:
    answer = reported("--hours")
    assert (answer.exit_code, answer.stdout) == (0, "")
    assert answer.stderr == "0 objects written, 0 new anomalies\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--day", "2026-10-31", "--to", "2026-11-01"), "day can't be a range"),
        (("--hours", "--day", "2026-10-31"), "hours are always today's"),
        (("--day", "tomorrow"), "got 'tomorrow'"),
        (
            ("--from", "2020-01-01", "--to", "2020-12-31"),
            "from: the range must be at most 31 days, got 366",
        ),
    ],
)
def test_wrong_words_are_refused_by_name(
    reported: Callable[..., Result], words: tuple[str, ...], reason: str
) -> None:
    answer = reported(*words)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert reason in answer.stderr


def test_wrong_billing_zone_is_refused(
    reported: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_BILLING_TZ", "../../etc/passwd")
    answer = reported("--day", "2026-10-31")
    assert answer.exit_code == 1
    assert (
        "PENSTOCK_BILLING_TZ: must be a time zone such as Europe/Berlin, got '../../etc/passwd'"
        in answer.stderr
    )
