"""What a local stack needs once other machines can reach its API: keys, and no local webhooks."""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.loopback import is_loopback
from shared.stores.key_stores import key_store
from shared.tenants.administration import Administration, KeyRequest
from shared.tenants.directory import Document
from shared.tenants.key_store import NoDirectory

KEYS_FILE = "keys.json"
FIRST_KEY = KeyRequest("default", "first")
PLAIN = (
    "others can reach the API without TLS, so keys travel as plain text: give --tls-cert and "
    "--tls-key, or put a proxy before it (docs/self-hosting.md)"
)


def exposed_settings(
    state_dir: Path,
    given: Mapping[str, str],
    say: Callable[[str], None],
    *,
    may_show_key: bool,
) -> dict[str, str]:
    """The settings of a stack, with what its API needs where others can reach it.

    On loopback they are those given. Elsewhere keys are required: where no directory of keys is
    given, one is kept in the state's folder. The first start makes a key, or says how to.

    Args:
        state_dir: gets keys.json.
        given: `PENSTOCK_*` variables.
        say: gets each line for a person.
        may_show_key: whether a person alone reads these lines. Else no key is made, because logs
            would keep it.

    Raises:
        PenstockError: the directory of keys can't be read or made.
    """
    if is_loopback(given.get("PENSTOCK_HOST", "127.0.0.1")):
        return dict(given)
    settings = {"PENSTOCK_WEBHOOKS_PRIVATE": "0", **given}
    if not given.get("PENSTOCK_TLS_CERT"):
        say(PLAIN)
    if not settings.get("PENSTOCK_KEYS_URL"):
        state_dir.mkdir(parents=True, exist_ok=True)
        settings["PENSTOCK_KEYS_URL"] = url = (state_dir / KEYS_FILE).resolve().as_uri()
        asyncio.run(_first_key(url, say, may_show_key=may_show_key))
    return settings


async def _first_key(url: str, say: Callable[[str], None], *, may_show_key: bool) -> None:
    async with key_store(url, is_writable=True) as store:
        admin = Administration(
            store, actor=f"user {getpass.getuser()}", address=socket.gethostname()
        )
        try:
            has_keys = bool((await admin.read()).keys)
        except NoDirectory:
            await admin.start_directory(Document())
            has_keys = False
        if has_keys:
            return
        if may_show_key:
            issued = await admin.create_key(FIRST_KEY)
            say(f"the first key, of the tenant {FIRST_KEY.tenant}; note it, it is not shown again:")
            say(f"  {issued.key.text}")
        else:
            command = f"penstock keys create --tenant {FIRST_KEY.tenant} --name {FIRST_KEY.name}"
            say("there is no key yet, so nobody is let in; make one:")
            say(f"  PENSTOCK_KEYS_URL={url} {command}")
