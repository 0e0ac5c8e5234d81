"""`penstock models withdraw` and `withdrawn`: stops a revision from serving requests."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from infra.cli.keys import format_time
from infra.cli.records_redis import run_on
from infra.current_user import current_user
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.models.catalog import Catalog
    from shared.stores.withdrawals import Withdrawals, WithdrawalStore

Done = TypeVar("Done")


def withdraw(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="name of a model in models.yaml")],
    revision: Annotated[
        str, typer.Option(metavar="REVISION", help="revision of the model or its canary")
    ],
    undo: Annotated[bool, typer.Option("--undo", help="serve it again")] = False,
) -> None:
    """Stop a revision: reject new requests, fail waiting ones, and never use its cached results.

    Waiting callers get the error `model_withdrawn`, and are not charged.
    """
    from shared.stores.withdrawals import Withdrawal

    if undo:
        was_there = _run(lambda store, catalog: store.undo(name, revision))
        then = "processes serve it again within 3 s" if was_there else "it was not withdrawn"
    else:

        async def act(store: WithdrawalStore, catalog: Catalog) -> bool:
            _check_served(catalog, name, revision)
            by = current_user()
            return await store.withdraw(Withdrawal(name, revision, time.time(), by))

        then = (
            "withdrawn; processes stop it within 3 s" if _run(act) else ("it is already withdrawn")
        )
    typer.echo(f"{name}, revision {revision}: {then}")


def list_withdrawn(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for use by programs")] = False,
) -> None:
    """List the revisions that have been withdrawn."""
    import msgspec

    from infra.text_table import table

    known: Withdrawals | None = _run(lambda store, catalog: store.read())
    listed = (
        []
        if known is None
        else sorted(known.withdrawn.values(), key=lambda withdrawal: withdrawal.at_s)
    )
    if as_json:
        print(json.dumps([msgspec.to_builtins(withdrawal) for withdrawal in listed], indent=2))
    elif listed:
        rows = [
            (withdrawal.model, withdrawal.revision, format_time(withdrawal.at_s), withdrawal.by)
            for withdrawal in listed
        ]
        print(table(("model", "revision", "since", "by"), rows))
    else:
        typer.echo("no model is withdrawn")


def _check_served(catalog: Catalog, name: str, revision: str) -> None:
    """Rejects a name or revision that isn't in the catalog, because it is most likely misspelled.

    Raises:
        ConfigurationError: the revision belongs neither to the model nor to its canary.
        UnknownModel: there is no such model.
    """
    model = catalog.find(name)
    if model.name != name:
        raise ConfigurationError(f"{name} is an alias; its model is {model.name}", field="model")
    if model.entry_name != name:
        raise ConfigurationError(
            f"{name} is an adapter of {model.entry_name}; withdraw that model, or remove the "
            "adapter from the catalog",
            field="model",
        )
    revisions = [model.revision] + ([model.canary.revision] if model.canary else [])
    if revision not in revisions:
        raise ConfigurationError(
            f"{name} has no revision {revision!r}; the catalog contains {', '.join(revisions)}",
            field="revision",
        )


def _run(act: Callable[[WithdrawalStore, Catalog], Awaitable[Done]]) -> Done:
    from shared.stores.withdrawals import WithdrawalStore

    return run_on(WithdrawalStore, act)
