"""The signing keys of the local API and functions, created at the first start and kept."""

from __future__ import annotations

import base64
import json
import os
import secrets
from pathlib import Path

WEBHOOK_KEY_BYTES = 32


def kept_secrets(state_dir: Path) -> dict[str, str]:
    """The secrets of this state folder, by setting, equal at every start.

    Args:
        state_dir: gets the file `secrets.json`, which only its owner may read.
    """
    path = state_dir / "secrets.json"
    if not path.exists():
        key = base64.b64encode(secrets.token_bytes(WEBHOOK_KEY_BYTES)).decode()
        made = {
            "PENSTOCK_SECRET": secrets.token_hex(32),
            "PENSTOCK_WEBHOOK_SECRETS": f"whsec_{key}",
        }
        state_dir.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump(made, file)
        part.rename(path)
    kept: dict[str, str] = json.loads(path.read_text())
    return kept
