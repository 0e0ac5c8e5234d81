"""`penstock canary`: what canaries do, and the decisions of an operator."""

from __future__ import annotations

import asyncio
import getpass
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from shared.errors import ConfigurationError, Unavailable

if TYPE_CHECKING:
    from shared.canary.store import CanaryStore
    from shared.catalog import Catalog, Model

Done = TypeVar("Done")
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for a program")]
Name = Annotated[str, typer.Argument(metavar="MODEL", help="the model in models.yaml")]

canary = typer.Typer(help="New revisions on a share of the requests.", no_args_is_help=True)


@canary.command("status")
def show_status(as_json: AsJson = False) -> None:
    """Show what each canary gets, and what it did in the last ten minutes."""
    from infra.text_table import table

    async def read(canary_store: CanaryStore, catalog: Catalog) -> list[dict[str, Any]]:
        return [await _status(canary_store, canary) for canary in catalog.canaries.values()]

    states = _run(read)
    if as_json:
        print(json.dumps(states, indent=2))
    elif states:
        heads = list(states[0])
        print(table(heads, [[_shown(one[head]) for head in heads] for one in states]))
    else:
        typer.echo("no model has a canary")


@canary.command("take-back")
def take_back(name: Name) -> None:
    """Give a canary no requests any more. Its jobs are done by the other revision."""

    async def act(canary_store: CanaryStore, catalog: Catalog) -> bool:
        return await canary_store.take_back(_find(catalog, name), f"by user {getpass.getuser()}")

    typer.echo(f"{name}: taken back" if _run(act) else f"{name}: it was taken back before")


@canary.command("resume")
def resume(name: Name) -> None:
    """Give a canary that was taken back its share again, and forget what it did."""

    async def act(canary_store: CanaryStore, catalog: Catalog) -> None:
        await canary_store.resume(_find(catalog, name))

    _run(act)
    typer.echo(f"{name}: it gets its share again, as soon as one of its workers lives")


@canary.command("promote")
def promote_canary(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="although it was taken back, or nothing is known of it")
    ] = False,
) -> None:
    """Make a canary the revision of its model, in models.yaml. It takes effect when you deploy.

    The canary is taken back at once, so that no job is left in its topics when they go.
    """
    from infra.cli.canaries.promotion import promote
    from shared.settings import Settings, read_settings

    async def act(canary_store: CanaryStore, catalog: Catalog) -> None:
        canary = _find(catalog, name)
        status = await _status(canary_store, canary)
        if not force and status["taken_back"]:
            raise ConfigurationError(f"{name}: it was taken back: {status['taken_back']}")
        if not force and not status["items"]:
            raise ConfigurationError(f"{name}: nothing is known of it: it had no items lately")
        promote(path, name)
        await canary_store.take_back(canary, "promoted")

    path = read_settings(Settings).models_file
    _run(act)
    typer.echo(f"{path}: the canary is the revision of {name} now; deploy it")


async def _status(canary_store: CanaryStore, canary: Model) -> dict[str, Any]:
    from shared.canary.verdict import judge

    state, counts = await asyncio.gather(canary_store.state(canary), canary_store.counts(canary))
    assert canary.canary is not None, "a canary has the rules of its entry; this is a bug"
    return {
        "model": canary.public_name,
        "revision": canary.revision,
        "share": canary.canary.share if state.is_serving else 0.0,
        "alive": state.is_alive,
        "taken_back": state.taken_back,
        "items": counts.canary.items,
        "failed": counts.canary.failed,
        "p95_s": counts.canary.p95_s,
        "stable_p95_s": counts.stable.p95_s,
        "compared": counts.compared,
        "outside": counts.outside,
        "verdict": judge(counts, canary.canary).reason,
    }


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if value != "" else None


def _find(catalog: Catalog, name: str) -> Model:
    canary = catalog.canaries.get(catalog.find(name).name)
    if canary is None:
        raise ConfigurationError(f"the model {name!r} has no canary", field="canary")
    return canary


def _run(act: Callable[[CanaryStore, Catalog], Awaitable[Done]]) -> Done:
    """Opens the canary_store of the configured Redis and runs `act`.

    Raises:
        Unavailable: Redis did not answer. The message names the setting.
    """
    from shared.canary.store import CanaryStore
    from shared.catalog import read_catalog
    from shared.settings import Settings, read_settings

    settings = read_settings(Settings)

    async def run() -> Done:
        async with CanaryStore(settings.records_redis_url) as canary_store:
            try:
                return await act(canary_store, read_catalog(settings.models_file))
            except Unavailable as error:
                raise Unavailable(
                    f"PENSTOCK_RECORDS_URL, PENSTOCK_REDIS_URL: {error.message}"
                ) from error

    return asyncio.run(run())
