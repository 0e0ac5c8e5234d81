"""`penstock load`: plans and replays a day or a trace, or checks the ledger of one.

A replay runs from its first request to the summary, and stops in order. Its progress is shown as a
live table on a terminal, otherwise as a line every LINE_EVERY_S. `--check` asks BigQuery until all
of a ledger is there, or the time is up.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.live import Live
from rich.table import Table

from infra.load.comparison import (
    CLOCK_SKEW_S,
    Comparison,
    Place,
    Sums,
    compare_report,
    compare_rows,
)
from infra.load.day import NUMBERS, Day, DayModel, arrivals_of
from infra.load.inputs import RequestForm, can_be_replayed, form_of
from infra.load.ledger import Ledger, LedgerHead, opened_ledger
from infra.load.replay import Pace, Replay, Show
from infra.load.rows import LoadRows
from infra.load.tally import Look, Tally
from infra.load.target import ServedModel, Target
from infra.load.trace import Arrival, read_trace
from shared.errors import BadInput, ConfigurationError, Unavailable


class LoadPlan(NamedTuple):
    """The arrivals to send, and the form of each model's requests."""

    arrivals: Sequence[Arrival]
    forms: Mapping[str, RequestForm]


class DayOptions(NamedTuple):
    """A day, as the command line says it."""

    requests: int
    tenants: int
    models: tuple[str, ...]
    """`NAME` or `NAME=SHARE`. None: all that are served and can be replayed."""
    seed: int
    numbers: Mapping[str, float]


def run_id(now: datetime | None = None) -> str:
    """A new name for a replay: the start of the id of each of its requests."""
    moment = now or datetime.now(UTC)
    return f"load-{moment:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def plan_day(target: Target, options: DayOptions) -> LoadPlan:
    """The arrivals of a day.

    Raises:
        BadInput: a model is not served, or a number is wrong.
        Unavailable: the target does not say what it serves.
    """
    served = target.models()
    shares = _shares(options.models, served)
    forms = {name: form_of(name, _tasks(served)) for name in shares}
    if target.keys and options.tenants > len(target.keys):
        raise BadInput(
            f"tenants: {options.tenants} tenants, but keys of {len(target.keys)}", field="tenants"
        )
    known = list(target.keys) or [f"tenant-{place + 1}" for place in range(options.tenants)]
    day = Day(
        requests=options.requests,
        tenants=known[: options.tenants],
        models={
            name: DayModel(
                share=share or forms[name].share,
                sizes=forms[name].sizes,
                items=forms[name].items,
            )
            for name, share in shares.items()
        },
        seed=options.seed,
        **_plan_numbers(options.numbers),
    )
    return LoadPlan(arrivals_of(day), forms)


def plan_trace(target: Target, path: Path, requests: int = 0) -> LoadPlan:
    """The arrivals of a trace.

    Args:
        target: serves its models, and has keys of its tenants.
        path: the trace.
        requests: only the first N are sent. 0: all.

    Raises:
        ConfigurationError: the trace can't be read, or names a tenant without a key.
        BadInput: it names a model that is not served, or has a task that can't be replayed.
        Unavailable: the target does not say what it serves.
    """
    arrivals = read_trace(path)[: requests or None]
    served = target.models()
    usual = next((one.id for one in served.values() if can_be_replayed(one.task)), "")
    if target.keys and (unknown := {one.tenant for one in arrivals} - target.keys.keys()):
        raise ConfigurationError(f"{path}: no key of the tenant {min(unknown)!r}", field="keys")
    names = {one.model for one in arrivals}
    # Rows have names, so the ledger has no aliases.
    named = {name: served[name or usual].id for name in names if (name or usual) in served}
    forms = {
        named.get(name, name): form_of(name or usual, _tasks(served)) for name in sorted(names)
    }
    return LoadPlan(
        [msgspec.structs.replace(one, model=named[one.model]) for one in arrivals], forms
    )


def _tasks(served: Mapping[str, ServedModel]) -> dict[str, str]:
    return {name: model.task for name, model in served.items()}


def _shares(models: Sequence[str], served: Mapping[str, ServedModel]) -> dict[str, float | None]:
    """The models of a day with their shares. None: the usual one of its task."""
    if not models:
        found = {one.id: None for one in served.values() if can_be_replayed(one.task)}
        if not found:
            raise BadInput("model: none is served that can be replayed", field="model")
        return dict(found)
    shares: dict[str, float | None] = {}
    for given in models:
        name, sign, text = given.partition("=")
        try:
            share = float(text) if sign else None
        except ValueError:
            share = -1.0
        if share is not None and not 0 < share < float("inf"):
            raise BadInput(f"model: {given!r} is not NAME or NAME=SHARE", field="model")
        shares[served[name].id if name in served else name] = share
    return shares


def _plan_numbers(given: Mapping[str, float]) -> dict[str, Any]:
    if unknown := given.keys() - NUMBERS.keys():
        raise BadInput(
            f"set: a day has no {min(unknown)[:80]!r}; there are: {', '.join(NUMBERS)}", field="set"
        )
    return {
        name: int(value) if name == "bursts" and isfinite(value) else value
        for name, value in given.items()
    }


LINE_EVERY_S = 10.0


@contextmanager
def shown_progress(total: int) -> Iterator[Show]:
    """Yields a function that reports progress to stderr.

    Args:
        total: requests of the whole replay.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda look, tally: live.update(_table(look, tally, total))


class _Lines:
    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, look: Look, tally: Tally) -> None:
        if look.at_s >= self._next_s:
            self._next_s = look.at_s + LINE_EVERY_S
            facts = "  ".join(f"{name} {value}" for name, value in _facts(look, tally))
            print(facts, file=sys.stderr, flush=True)


def _facts(look: Look, tally: Tally) -> list[tuple[str, str]]:
    hours, seconds = divmod(int(look.trace_s), 3600)
    errors = {name: count for name, count in tally.by_outcome.items() if name != "200"}
    shown = ", ".join(f"{name}: {count:,}" for name, count in sorted(errors.items()))
    return [
        ("after", f"{look.at_s:.0f} s"),
        ("trace at", f"{hours:02}:{seconds // 60:02}"),
        ("due", f"{look.due:,}"),
        ("answered", f"{tally.by_outcome['200']:,}"),
        ("per second", f"{look.rate:,.0f}"),
        ("p50", f"{look.p50_ms:,.0f} ms"),
        ("p99", f"{look.p99_ms:,.0f} ms"),
        ("in flight", f"{look.in_flight:,}"),
        ("not sent", f"{tally.not_sent:,}"),
        ("others", shown or "none"),
    ]


def _table(look: Look, tally: Tally, total: int) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _facts(look, tally):
        table.add_row(name, f"{value} of {total:,}" if name == "due" else value)
    return table


def replay(
    target: Target, plan: LoadPlan, pace: Pace, *, run: str, seed: int, path: Path
) -> dict[str, Any]:
    """Sends everything, and returns the summary. SIGINT and SIGTERM stop it in order.

    Args:
        target: whom to ask.
        plan: the requests to send.
        pace: speed and limits.
        run: the start of the id of each request.
        seed: seed of generated inputs.
        path: path of the ledger, a new file.

    Raises:
        ConfigurationError: the ledger can't be written.
        Unavailable: nothing listens at the target.
    """
    return uvloop.run(_replay(target, plan, pace, run=run, seed=seed, path=path))


async def _replay(
    target: Target, plan: LoadPlan, pace: Pace, *, run: str, seed: int, path: Path
) -> dict[str, Any]:
    head = LedgerHead(run, target.url, time.time())
    with opened_ledger(path, head) as ledger, shown_progress(len(plan.arrivals)) as show:
        one = Replay(
            target,
            run,
            plan.arrivals,
            plan.forms,
            pace,
            seed=seed,
            ledger=ledger,
            show=show,
        )
        was_stopped = asyncio.Event()

        def stop() -> None:
            was_stopped.set()
            one.stop()

        with _stopped_by_signals(stop):
            try:
                await one.run()
            except OSError as error:
                raise Unavailable(f"{target.url}: {error}") from error
    return {
        "run": run,
        "ledger": str(path),
        "was_stopped": was_stopped.is_set(),
        **one.tally.summary(one.took_s),
    }


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


PAUSE_S = 2.0
HOUR = timedelta(hours=1)


def check(
    ledger: Ledger,
    rows: LoadRows,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Compares a ledger with rows and report, again and again while they differ.

    Rows come in the background, and later after an outage. So a difference counts only after
    `wait_s`.

    Args:
        ledger: the ledger of one replay.
        rows: access to the rows.
        wait_s: seconds in which differences may disappear.
        sleep: waits. Tests replace it.
        clock: seconds. Tests replace it.

    Raises:
        Unavailable: BigQuery is out of reach, or refused.
    """
    until_s = clock() + wait_s
    while True:
        found = _compared(ledger, rows)
        if not found.differences or clock() >= until_s:
            return found
        sleep(PAUSE_S)


def _compared(ledger: Ledger, rows: LoadRows) -> Comparison:
    since, until = _span(ledger)
    found, expected = compare_rows(ledger, rows.of_run(ledger.head.run, since, until))
    if not expected:
        return found
    first = min(hour for hour, _, _ in expected)
    after = max(hour for hour, _, _ in expected) + HOUR
    tenants = sorted({tenant for _, tenant, _ in expected})
    others = rows.of_others(ledger.head.run, first, after, tenants)
    found.others = sum(group.requests for group in others)
    found.groups = len(_without_empty(expected))
    found.differences += compare_report(expected, others, rows.reported(first, after, tenants))
    return found


def _without_empty(expected: dict[Place, Sums]) -> list[Place]:
    return [place for place, sums in expected.items() if sums.requests or sums.items]


def _span(ledger: Ledger) -> tuple[datetime, datetime]:
    """Returns the range in which rows can have been received, with a margin for clock skew."""
    ends_s = max((line.ended_at_s for line in ledger.lines), default=ledger.head.began_at_s)
    skew = timedelta(seconds=CLOCK_SKEW_S)
    return (
        datetime.fromtimestamp(ledger.head.began_at_s, UTC) - skew - HOUR,
        datetime.fromtimestamp(ends_s, UTC) + skew + HOUR,
    )


if TYPE_CHECKING:
    from infra.load.comparison import Comparison
    from infra.load.replay import Pace
    from infra.load.target import Target

REQUESTS_OF_A_DAY = 1_400_000
TENANTS_WITHOUT_KEYS = 20
SHOWN = 50
FACT_WIDTH = 14
GIB = 1024**3


def load(
    url: Annotated[str, typer.Option(metavar="URL", help="of the API")] = "http://127.0.0.1:8080",
    key: Annotated[
        str, typer.Option(metavar="KEY", help="of every request", envvar="LOAD_KEY")
    ] = "",
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV with the columns tenant and key")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV or JSONL, instead of a day")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="of the day (1,400,000), or the first of a trace")
    ] = 0,
    speed: Annotated[
        float, typer.Option(min=0.001, help="seconds of the day or trace in one second")
    ] = 1.0,
    duration: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="stop sending after this time")
    ] = 0.0,
    tenants: Annotated[int, typer.Option(min=0, help="of the day: 20, or all of --keys")] = 0,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=SHARE]", help="a model of the day (all that are served)"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed sends the same")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=NUMBER", help="of the day: repeat_share=0.2"),
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(min=1, max=50_000, help="what is due beyond it is not sent")
    ] = 1000,
    ledger: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a new file (load-….jsonl)")
    ] = None,
    write_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the arrivals, and send nothing")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="LEDGER", help="compare a ledger with BigQuery")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="how long --check waits for rows")
    ] = 60.0,
    max_gib: Annotated[float, typer.Option(min=0.001, help="GiB that a query may read")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for a program")] = False,
) -> None:
    """Send a day of requests, or a trace, and check what was charged for it."""
    if check is not None:
        raise typer.Exit(_check(check, wait, int(max_gib * GIB), as_json=as_json))
    if find_spec("httptools") is None:
        raise ConfigurationError("sending needs the `api` extra: pip install 'penstock[api]'")
    from infra.load.replay import Pace
    from infra.load.target import Target, read_keys

    if key and keys:
        raise BadInput("key: give --key or --keys, not both", field="key")
    target = Target(url, key, read_keys(keys) if keys else None)
    if trace is not None and (tenants or model or changes):
        raise BadInput("trace: has its own tenants and models", field="trace")
    options = DayOptions(
        requests or REQUESTS_OF_A_DAY,
        tenants or len(target.keys) or TENANTS_WITHOUT_KEYS,
        tuple(model or ()),
        seed,
        _numbers(changes or ()),
    )
    plan = plan_day(target, options) if trace is None else plan_trace(target, trace, requests)
    if write_trace is not None:
        _write(plan, write_trace)
        return
    pace = Pace(speed=speed, most_in_flight=max_in_flight, duration_s=duration)
    raise typer.Exit(_send(target, plan, pace, seed, ledger, as_json=as_json))


def _numbers(changes: Sequence[str]) -> dict[str, float]:
    found = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            found[name] = float(text)
        except ValueError:
            raise BadInput(f"set: {change!r} is not NAME=NUMBER", field="set") from None
    return found


def _write(plan: LoadPlan, path: Path) -> None:
    from infra.load.trace import write_trace

    write_trace(path, plan.arrivals)
    typer.echo(f"wrote {len(plan.arrivals):,} requests to {path}")


def _send(
    target: Target, plan: LoadPlan, pace: Pace, seed: int, ledger: Path | None, *, as_json: bool
) -> int:
    """Returns 130, as a shell does, if it was stopped before its end."""
    run = run_id()
    path = ledger or Path(f"{run}.jsonl")
    summary = replay(target, plan, pace, run=run, seed=seed, path=path)
    _show_summary(summary, as_json=as_json)
    return 130 if summary["was_stopped"] else 0


def _show_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    import json

    if as_json:
        print(json.dumps(summary, indent=2))
        return
    outcomes = ", ".join(f"{name}: {count:,}" for name, count in summary["outcomes"].items())
    _print_facts(
        {
            "requests": f"{summary['due']:,} due, {summary['not_sent']:,} of them not sent",
            "endings": outcomes or "none",
            "rate": f"{summary['rate_per_s']:,} a second, over {summary['took_s']:,} s",
            "answered in": f"{summary['p50_ms']:,} ms at the median, {summary['p95_ms']:,} ms at "
            f"p95, {summary['p99_ms']:,} ms at p99",
            "charged": f"${summary['cost_usd']:.6f}, with {summary['tokens']:,} tokens",
            "ledger": summary["ledger"],
        }
    )
    print(f"\nCompare it with BigQuery: penstock load --check {summary['ledger']}")


def _check(path: Path, wait_s: float, most_bytes: int, *, as_json: bool) -> int:
    """Returns 1 if something differs."""
    import json

    from rich.console import Console

    from infra.load.ledger import read_ledger
    from infra.load.rows import opened_rows
    from shared.settings import Settings, read_settings

    ledger = read_ledger(path)
    if ledger.cut_lines:
        typer.echo(f"{path}: the last line breaks off and is left out", err=True)
    waiting = Console(stderr=True).status("waiting for the rows")
    with waiting, opened_rows(read_settings(Settings), most_bytes) as rows:
        found = check(ledger, rows, wait_s)
    if as_json:
        differences = [one._asdict() for one in found.differences]
        shown = vars(found) | {"differences": differences}
        print(json.dumps(shown, indent=2, default=str))
    else:
        _show_comparison(found)
    return 1 if found.differences else 0


def _show_comparison(found: Comparison) -> None:
    known = ", ".join(f"{name}: {count:,}" for name, count in sorted(found.told_by_rows.items()))
    _print_facts(
        {
            "ledger": f"{found.lines:,} requests, {found.tokens:,} tokens, ${found.cost_usd:.9f}",
            "rows": f"{found.rows:,}, and {found.copies:,} copies, which count once",
            "known from rows only": known or "nothing: all requests were answered",
            "others": f"{found.others:,} requests of others as the same tenants, counted apart",
            "report": f"{found.groups:,} groups of hour, tenant and model",
            "differences": f"{len(found.differences):,}",
        }
    )
    for one in found.differences[:SHOWN]:
        print(f"  {one.kind}: {one.what} ({one.tenant or '-'}, {one.model}): {one.facts}")
    if len(found.differences) > SHOWN:
        print(f"  and {len(found.differences) - SHOWN:,} more: --json has all")


def _print_facts(facts: dict[str, str]) -> None:
    for name, value in facts.items():
        print(f"  {name:<{FACT_WIDTH}}{value}")
