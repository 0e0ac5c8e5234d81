"""`penstock keys`, `penstock tenants`, and `penstock plans`: changes to the key directory."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from infra.current_user import current_user
from shared.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from shared.settings import ApiSettings
    from shared.tenants.administration import Administration, IssuedKey
    from shared.tenants.key_store import KeyStore
    from shared.tenants.rules import Served

Done = TypeVar("Done")
Made = TypeVar("Made")
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for use by programs")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="the public part of the key")]
Fields = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="as in docs/how-to/keys.md")
]
DEFAULT_OVERLAP = "24h"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<place>[^`]*)`)?")
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")

keys = typer.Typer(help="API keys.", no_args_is_help=True)
tenants = typer.Typer(help="Tenants and their plans.", no_args_is_help=True)
plans = typer.Typer(help="Plans: limits and weights.", no_args_is_help=True)


@keys.command("init")
def start_directory(
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="start from an exported directory",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Create the key directory. Fails if it already exists."""
    from shared.tenants.directory import Document, decode_document

    document = Document() if source is None else decode_document(source.read_bytes(), str(source))
    _administer(lambda admin, store: admin.start_directory(document))
    typer.echo(f"created a key directory with {len(document.keys)} keys")


@keys.command("export")
def export_directory(
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="URL", help="write a new object to this store, such as gs://BUCKET"
        ),
    ] = "",
) -> None:
    """Print the directory: hashes, tenants, and plans."""
    from shared.tenants.directory import encode_document

    document = _administer(lambda admin, store: admin.read())
    if not to:
        typer.echo(encode_document(document))
        return
    key = asyncio.run(_put(to, encode_document(document)))
    typer.echo(f"exported {len(document.keys)} keys to {to.rstrip('/')}/{key}")


async def _put(url: str, document: bytes) -> str:
    """Writes an object named after the current time. Returns the name."""
    from shared.stores.objects import ObjectStore

    try:
        objects = ObjectStore(url, setting="to")
    except ConfigurationError as error:
        raise BadInput(f"--to: {error.message.partition(': ')[2]}", field="to") from error
    key = f"keys-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.json"
    # Not `put`: the scheduled export's account may only add objects.
    await objects.create(key, document, "application/json")
    return key


@keys.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="owner of the key")],
    name: Annotated[str, typer.Option(help="purpose of the key")],
    scope: Annotated[list[str] | None, typer.Option(help="allowed scope (default: all)")] = None,
    model: Annotated[list[str] | None, typer.Option(help="allowed model")] = None,
    expires_in: Annotated[
        str, typer.Option(metavar="TIME", help="lifetime, such as 90d or 12h")
    ] = "",
    limit: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="a limit for this key only")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. It is shown once."""
    from shared.tenants.administration import KeyRequest
    from shared.tenants.directory import SCOPES
    from shared.tenants.plan import Limits

    if unknown := set(scope or ()) - set(SCOPES):
        raise BadInput(f"scope: must be one of {', '.join(SCOPES)}, got {unknown.pop()!r}")
    request = KeyRequest(
        tenant,
        name,
        tuple(allowed_scope for allowed_scope in SCOPES if allowed_scope in (scope or ("all",))),
        tuple(model) if model else None,
        _struct(Limits, limit) if limit else None,
        _seconds(expires_in, "expires-in") if expires_in else None,
    )
    _show_issued(_administer(lambda admin, store: admin.create_key(request)), as_json=as_json)


@keys.command("list")
def list_keys(
    tenant: Annotated[str, typer.Option(help="only the keys of this tenant")] = "",
    as_json: AsJson = False,
) -> None:
    """List keys, without their secrets."""
    from shared.tenants.administration import format_key, redact_key_id, state_of

    async def read(admin: Administration, store: KeyStore) -> list[dict[str, Any]]:
        document, uses = await admin.read(), await store.uses()
        return [
            format_key(key) | {"state": state_of(key, time.time()), "last_used_s": uses.get(key.id)}
            for key in document.keys
            if tenant in ("", key.tenant)
        ]

    directory = _administer(read)
    heads = ("key", "tenant", "name", "scopes", "models", "state", "created", "expires", "used")
    rows = [
        (
            redact_key_id(key["id"]),
            key["tenant"],
            key["name"],
            " ".join(key.get("scopes", ("all",))),
            " ".join(key.get("models", ())) or "all",
            key["state"],
            *(format_time(key.get(name)) for name in ("created_s", "expires_s", "last_used_s")),
        )
        for key in directory
    ]
    _print(directory, heads, rows, as_json=as_json)


@keys.command("rotate")
def rotate_key(
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="how long the old secret keeps working")
    ] = DEFAULT_OVERLAP,
    as_json: AsJson = False,
) -> None:
    """Create a new secret for a key. It is shown once."""
    overlap_s = _seconds(overlap, "overlap")
    issued = _administer(lambda admin, store: admin.rotate_key(key_id, overlap_s))
    _show_issued(issued, as_json=as_json)


@keys.command("revoke")
def revoke_key(key_id: KeyId) -> None:
    """Revoke a key permanently."""
    _administer(lambda admin, store: admin.revoke_key(key_id))
    typer.echo(f"{key_id} has been revoked; all instances will reject it within 5 s")


@keys.command("audit")
def list_acts(
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 50, as_json: AsJson = False
) -> None:
    """List administrative audit events, newest first."""
    import msgspec

    events = _administer(lambda admin, store: store.audit_events(limit))
    audit_events = [msgspec.to_builtins(noted.act) for noted in events]
    heads = ("when", "who", "from", "act", "of", "before", "after")
    rows = [
        (
            format_time(act["at_s"]),
            *(act[name] for name in ("actor", "address", "action", "target")),
            *(json.dumps(act[name]) if act[name] else None for name in ("before", "after")),
        )
        for act in audit_events
    ]
    _print(audit_events, heads, rows, as_json=as_json)


@tenants.command("list")
def list_tenants(as_json: AsJson = False) -> None:
    """List tenants that have keys or an assigned plan."""
    from shared.tenants.directory import StoredTenant

    document = _administer(lambda admin, store: admin.read())
    names = sorted(document.tenants.keys() | {key.tenant for key in document.keys})
    stored = [document.tenants.get(name, StoredTenant()) for name in names]
    listed = [
        {"tenant": name, "plan": tenant.plan or None, "frozen_s": tenant.frozen_s}
        for name, tenant in zip(names, stored, strict=True)
    ]
    rows = [
        (name, tenant.plan or "default", format_time(tenant.frozen_s))
        for name, tenant in zip(names, stored, strict=True)
    ]
    _print(listed, ("tenant", "plan", "frozen"), rows, as_json=as_json)


@tenants.command("set")
def set_tenant(
    tenant: str,
    plan: Annotated[str, typer.Option(help="the tenant's plan (empty: the default plan)")],
) -> None:
    """Assign a plan to a tenant."""
    _administer(lambda admin, store: admin.set_tenant(tenant, plan or None))
    typer.echo(f"{tenant} is now on {f'the {plan} plan' if plan else 'the default plan'}")


@tenants.command("freeze")
def freeze_tenant(tenant: str) -> None:
    """Reject all of a tenant's keys, and hold its batches, until it is thawed."""
    _administer(lambda admin, store: admin.freeze_tenant(tenant, is_frozen=True))
    typer.echo(f"{tenant} is now frozen; all instances will reject its keys within 5 s")


@tenants.command("thaw")
def thaw_tenant(tenant: str) -> None:
    """Accept a frozen tenant's keys again, and continue its batches."""
    _administer(lambda admin, store: admin.freeze_tenant(tenant, is_frozen=False))
    typer.echo(f"{tenant} is no longer frozen; all instances will accept its keys within 5 s")


@plans.command("list")
def list_plans(as_json: AsJson = False) -> None:
    """List plans and their limits."""
    import msgspec

    document = _administer(lambda admin, store: admin.read())
    by_name = {name: msgspec.to_builtins(plan) for name, plan in document.plans.items()}
    rows = [(name, json.dumps(plan)) for name, plan in by_name.items()]
    _print(by_name, ("plan", "fields"), rows, as_json=as_json)


@plans.command("set")
def set_plan(name: str, fields: Fields = None) -> None:
    """Create or replace a plan (--set weight=2 --set requests_per_min=600)."""
    from shared.tenants.plan import Plan

    plan = _struct(Plan, fields or [])
    _administer(lambda admin, store: admin.set_plan(name, plan))
    typer.echo(f"plan {name} has been saved")


@plans.command("remove")
def remove_plan(name: str) -> None:
    """Remove a plan that is not assigned to any tenant."""
    _administer(lambda admin, store: admin.set_plan(name, None))
    typer.echo(f"plan {name} has been removed")


def _administer(act: Callable[[Administration, KeyStore], Awaitable[Done]]) -> Done:
    """Opens the configured store and runs `act` on behalf of the current user."""
    from shared.settings import ApiSettings, read_settings
    from shared.stores.key_stores import key_store
    from shared.tenants.administration import Administration

    settings = read_settings(ApiSettings)
    url, served = settings.keys_url, _read_served(settings)
    if not url:
        raise ConfigurationError(
            "PENSTOCK_KEYS_URL is not set: set it to the key directory, such as "
            "file:///srv/penstock/keys.json or redis://HOST, or run this in the folder "
            "where penstock up is running",
            field="keys_url",
        )

    async def run() -> Done:
        async with key_store(url, is_writable=True) as store:
            who, where = current_user(), socket.gethostname()
            admin = Administration(store, actor=who, address=where, served=served)
            return await act(admin, store)

    return asyncio.run(run())


def _read_served(settings: ApiSettings) -> Served | None:
    from shared.models.catalog_file import read_catalog
    from shared.stores.key_stores import list_served_names

    if not settings.models_file.exists():
        return None
    return list_served_names(
        read_catalog(settings.models_file), allow_private=settings.webhooks_private
    )


def _show_issued(issued: IssuedKey, *, as_json: bool) -> None:
    from shared.tenants.administration import format_key

    if as_json:
        print(json.dumps(format_key(issued.stored) | {"value": issued.key.text}, indent=2))
        return
    typer.echo("Save the key now. It will not be shown again:", err=True)
    typer.echo(issued.key.text)


def _struct(kind: type[Made], assignments: Sequence[str]) -> Made:
    import msgspec

    fields: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if not sign:
            raise BadInput(f"{assignment!r} must have the form FIELD=VALUE", field=name)
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            raise BadInput(_unknown_field(kind, unknown["name"], unknown["place"] or "")) from error
        raise BadInput(str(error).replace(" - at `$.", " at `")) from error


def _unknown_field(kind: type[Any], name: str, place: str) -> str:
    """Returns an error about a field that `kind` doesn't have, with the closest existing ones.

    Args:
        place: location of the field, such as `per_model[...]`. Empty means the struct itself.
    """
    from difflib import get_close_matches

    import msgspec

    from shared.tenants.plan import Rates

    known = [field.name for field in msgspec.structs.fields(Rates if place else kind)]
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    where = f"{place}: " if place else ""
    return f"{where}unknown field {name}; {hint}accepted fields: {', '.join(sorted(known))}"


def _seconds(text: str, option: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise BadInput(f"--{option}: must be a duration such as 30m, 24h or 90d, got {text!r}")
    return int(match[1]) * _UNITS_S[match[2]]


def format_time(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _print(
    document: object, heads: Sequence[str], rows: Sequence[Sequence[object]], *, as_json: bool
) -> None:
    from infra.text_table import table

    print(json.dumps(document, indent=2) if as_json else table(heads, rows))
