"""`penstock dead-letters`: lists, replays, and discards jobs that no worker could finish."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from infra.amounts import check_amount
from shared.errors import BadInput

if TYPE_CHECKING:
    from infra.cli.dead_letters.letters import HeldLetters, Letter

Done = TypeVar("Done")
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for use by programs")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="name of a model in models.yaml")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="IDs from `dead-letters list`")]
All = Annotated[bool, typer.Option("--all", help="all dead letters instead of specific IDs")]
Most = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="maximum number to read")]

dead_letters = typer.Typer(
    help="Show, replay or discard jobs that no worker could finish.",
    no_args_is_help=True,
)


@dead_letters.command("list")
def list_letters(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="default: all models in the catalog"),
    ] = None,
    limit: Most = 100,
    as_json: AsJson = False,
) -> None:
    """List models' dead letters, without removing them."""
    from infra.text_table import table, yes_or_no

    rows = [fact for facts in _run(_models(models or []), limit, _facts) for fact in facts]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        heads = ("model", "id", "request_id", "tenant", "age_s", "bytes", "awaited", "reason")
        print(table(heads, [[yes_or_no(row[head]) for head in heads] for row in rows]))
    else:
        typer.echo("no dead letters")


@dead_letters.command("show")
def show(
    model: Model,
    letter_id: Annotated[str, typer.Argument(metavar="ID")],
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write the message body to")
    ] = None,
    limit: Most = 100,
) -> None:
    """Show a dead letter: its attributes, its size, and whether a caller is waiting for it."""

    async def act(held: HeldLetters) -> tuple[dict[str, Any], bytes]:
        letter = held.find(letter_id)
        return _fact(held.model, letter) | {
            "answered": letter.answered,
            "attributes": dict(sorted(letter.message.attributes.items())),
        }, letter.message.data

    ((fact, body),) = _run(_models([model]), limit, act)
    print(json.dumps(fact, indent=2))
    if data is not None:
        try:
            data.write_bytes(body)
        except OSError as error:
            raise BadInput(f"data: {data}: {error.strerror}", field="data") from error


@dead_letters.command("replay")
def replay(
    model: Model,
    ids: Ids = None,
    every: All = False,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            callback=check_amount,
            help="new deadline, counted from now (default: the longest allowed)",
        ),
    ] = None,
    limit: Most = 1000,
) -> None:
    """Run jobs again if their callers are still waiting. Each caller gets exactly one response.

    With --all, jobs whose callers have already received a response are left alone. Choosing such a
    job by ID is an error.
    """
    from shared.models.catalog_file import read_catalog
    from shared.settings import Settings, read_settings

    (name,) = _models([model])
    catalog = read_catalog(read_settings(Settings).models_file)
    deadline_s = deadline or catalog.find_deployed(name).deadline.longest_s

    async def act(held: HeldLetters) -> tuple[int, int]:
        chosen = _choose(held, ids, every=every, refusal=lambda letter: letter.answered)
        for letter in chosen:
            await held.replay(letter, deadline_s)
        return len(chosen), len(held.letters) - len(chosen)

    ((done, remaining),) = _run([name], limit, act)
    typer.echo(f"{model}: {done} run again, {remaining} left")


@dead_letters.command("discard")
def discard(
    model: Model,
    ids: Ids = None,
    every: All = False,
    force: Annotated[
        bool, typer.Option("--force", help="even if callers are still waiting")
    ] = False,
    limit: Most = 1000,
) -> None:
    """Delete dead letters permanently.

    With --all, dead letters whose callers are still waiting are kept unless --force is given.
    """

    async def act(held: HeldLetters) -> tuple[int, int]:
        waiting = "its caller is still waiting; replay it or add --force"
        chosen = _choose(
            held,
            ids,
            every=every,
            refusal=lambda letter: waiting if letter.is_awaited and not force else "",
        )
        for letter in chosen:
            held.discard(letter)
        return len(chosen), len(held.letters) - len(chosen)

    ((done, remaining),) = _run(_models([model]), limit, act)
    typer.echo(f"{model}: {done} discarded, {remaining} left")


def _choose(
    held: HeldLetters,
    ids: Sequence[str] | None,
    *,
    every: bool,
    refusal: Callable[[Letter], str],
) -> list[Letter]:
    """Returns the letters with these IDs, each once, or `every` letter that may be changed.

    Args:
        refusal: returns the reason a letter must stay as it is. Empty if it may be changed.

    Raises:
        BadInput: a letter chosen by ID must stay as it is or is unknown, or not exactly one of
            `ids` and `every` is given.
    """
    if bool(ids) == every:
        raise BadInput("specify the IDs of dead letters or use --all", field="id")
    if every:
        return [letter for letter in held.letters if not refusal(letter)]
    chosen = [held.find(letter_id) for letter_id in dict.fromkeys(ids or ())]
    for letter in chosen:
        if reason := refusal(letter):
            raise BadInput(f"{letter.id}: {reason}", field="id")
    return chosen


async def _facts(held: HeldLetters) -> list[dict[str, Any]]:
    return [_fact(held.model, letter) for letter in held.letters]


def _fact(model: str, letter: Letter) -> dict[str, Any]:
    envelope = letter.envelope
    return {
        "model": model,
        "id": letter.id,
        "request_id": envelope.request_id if envelope else "",
        "tenant": envelope.tenant if envelope else "",
        "age_s": round(time.time() - letter.message.publish_time_s),
        "bytes": len(letter.message.data),
        "awaited": letter.is_awaited,
        "reason": letter.reason,
    }


def _models(names: Sequence[str]) -> list[str]:
    """Returns the names used in topics: the given ones with aliases resolved, or all models.

    Raises:
        UnknownModel: there is no such model in the catalog.
    """
    from shared.models.catalog_file import read_catalog
    from shared.settings import Settings, read_settings

    catalog = read_catalog(read_settings(Settings).models_file)
    if not names:
        return [model.name for model in catalog.deployed]
    return [catalog.find_deployed(name).deployed_name for name in names]


def _run(
    models: Sequence[str], limit: int, act: Callable[[HeldLetters], Awaitable[Done]]
) -> list[Done]:
    """Holds models' dead letters, and runs `act` with each model's letters.

    Raises:
        PenstockError: raised by `act`, or because the broker or Redis is unreachable.
    """
    from infra.cli.dead_letters.letters import hold_letters
    from shared.brokers import transport_of
    from shared.settings import Settings, read_settings
    from shared.stores.records import Records
    from shared.stores.records_redis import RecordsRedis

    settings = read_settings(Settings)

    async def run() -> list[Done]:
        async with (
            RecordsRedis(settings.records_redis_url) as redis,
            transport_of(settings) as broker,
        ):
            records = Records(redis)

            async def of(model: str) -> Done:
                async with hold_letters(broker, records, model, max_letters=limit) as held:
                    return await act(held)

            return await asyncio.gather(*map(of, models))

    return asyncio.run(run())
