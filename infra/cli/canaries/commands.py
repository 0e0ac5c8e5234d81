"""`penstock canary`: shows how canaries perform, and carries out the operator's decisions.

Promoting a canary edits the text of models.yaml. Comments and order are preserved.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer
import yaml

from infra.cli.records_redis import run_on
from infra.current_user import current_user
from shared.errors import ConfigurationError

Done = TypeVar("Done")
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for use by programs")]
Name = Annotated[str, typer.Argument(metavar="MODEL", help="name of a model in models.yaml")]

canary = typer.Typer(help="Try new revisions on a fraction of the requests.", no_args_is_help=True)


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def promote(path: Path, name: str) -> None:
    """Sets a model's revision and source to its canary's, and removes the canary.

    Raises:
        ConfigurationError: the file doesn't have the model, the model has no canary, its entry is
            on a single line, or the edited catalog is not valid.
    """
    from shared.models.catalog_file import read_catalog

    text = path.read_text(encoding="utf-8")
    edited = _promote(text, _entry(path, text, name), path)
    # In the same folder, because the paths of interface files are relative to the catalog's.
    tried = path.with_name(f".{path.name}.promoted")
    try:
        tried.write_text(edited, encoding="utf-8")
        read_catalog(tried)
    finally:
        tried.unlink(missing_ok=True)
    path.write_text(edited, encoding="utf-8")


def _entry(path: Path, text: str, name: str) -> yaml.MappingNode:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    entries = _fields(root)["models"][1].value if isinstance(root, yaml.MappingNode) else []
    for entry in entries:
        if _fields(entry)["name"][1].value != name:
            continue
        if entry.flow_style:
            raise ConfigurationError(
                f"{path}:{entry.start_mark.line + 1}: the entry is on a single line; edit it by "
                "hand"
            )
        return entry  # type: ignore[no-any-return]
    raise ConfigurationError(f"{path}: model {name!r} not found", field="model")


def _promote(text: str, entry: yaml.MappingNode, path: Path) -> str:
    fields = _fields(entry)
    if "canary" not in fields:
        raise ConfigurationError(
            f"{path}:{entry.start_mark.line + 1}: the model has no canary", field="canary"
        )
    key, canary = fields["canary"]
    start = text.rindex("\n", 0, key.start_mark.index) + 1
    end = text.find("\n", max(_ends(canary)))
    edits = [_Edit(start, len(text) if end < 0 else end + 1, "")]
    for field in ("revision", "source"):
        if field not in (known := _fields(canary)):
            continue
        node = known[field][1]
        value = text[node.start_mark.index : node.end_mark.index]
        if field in fields:
            old = fields[field][1]
            edits.append(_Edit(old.start_mark.index, old.end_mark.index, value))
        else:
            line = " " * key.start_mark.column + f"{field}: {value}\n"
            edits[0] = edits[0]._replace(text=edits[0].text + line)
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _fields(node: yaml.Node) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    return {key.value: (key, value) for key, value in node.value}


def _ends(node: yaml.Node) -> Iterator[int]:
    """Yields the offset where each of a node's scalars and inline collections ends.

    YAML puts the end of a block where the next block starts, so the block's values count.
    """
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode) and not node.flow_style:
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                yield from _ends(part)
    else:
        yield node.end_mark.index


if TYPE_CHECKING:
    from shared.canary.store import CanaryStore
    from shared.models.catalog import Catalog, Revision


@canary.command("status")
def show_status(as_json: AsJson = False) -> None:
    """Show each canary's share of requests, and its results in the last ten minutes."""
    from infra.text_table import table, yes_or_no

    async def read(canary_store: CanaryStore, catalog: Catalog) -> list[dict[str, Any]]:
        return [await _status(canary_store, canary) for canary in catalog.canaries.values()]

    states = _run(read)
    if as_json:
        print(json.dumps(states, indent=2))
    elif states:
        heads = list(states[0])
        print(table(heads, [[yes_or_no(state[head]) for head in heads] for state in states]))
    else:
        typer.echo("no model has a canary")


@canary.command("take-back")
def take_back(name: Name) -> None:
    """Stop sending requests to a canary. The other revision takes over its jobs."""

    async def act(canary_store: CanaryStore, catalog: Catalog) -> bool:
        return await canary_store.take_back(_find(catalog, name), f"by {current_user()}")

    typer.echo(f"{name}: taken back" if _run(act) else f"{name}: it had already been taken back")


@canary.command("resume")
def resume(name: Name) -> None:
    """Restore the share of a canary that was rolled back, and reset its counts."""

    async def act(canary_store: CanaryStore, catalog: Catalog) -> None:
        await canary_store.resume(_find(catalog, name))

    _run(act)
    typer.echo(
        f"{name}: the canary will get its share again as soon as one of its workers is running"
    )


@canary.command("promote")
def promote_canary(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="even if it was taken back or has no results")
    ] = False,
) -> None:
    """Make a canary its model's revision, in models.yaml. This takes effect when you deploy.

    The canary is rolled back immediately, so that no job is left in its topics when they are
    deleted.
    """
    from shared.settings import Settings, read_settings

    async def act(canary_store: CanaryStore, catalog: Catalog) -> None:
        canary = _find(catalog, name)
        status = await _status(canary_store, canary)
        if not force and status["taken_back"]:
            raise ConfigurationError(f"{name}: it was taken back: {status['taken_back']}")
        if not force and not status["items"]:
            raise ConfigurationError(
                f"{name}: no results yet because it has received no items recently"
            )
        promote(path, canary.public_name)
        await canary_store.take_back(canary, "promoted")

    path = read_settings(Settings).models_file
    _run(act)
    typer.echo(f"{path}: the canary's revision is now the revision of {name}; deploy it")


async def _status(canary_store: CanaryStore, canary: Revision) -> dict[str, Any]:
    from shared.canary.verdict import judge

    state, counts = await asyncio.gather(canary_store.state(canary), canary_store.counts(canary))
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


def _find(catalog: Catalog, name: str) -> Revision:
    canary = catalog.canaries.get(catalog.find(name).name)
    if canary is None:
        raise ConfigurationError(f"the model {name!r} has no canary", field="canary")
    return canary


def _run(act: Callable[[CanaryStore, Catalog], Awaitable[Done]]) -> Done:
    from shared.canary.store import CanaryStore

    return run_on(CanaryStore, act)
