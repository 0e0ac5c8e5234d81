"""Checks the KEDA objects in a rendered file against KEDA's models.

check.sh runs this in the checkers' environment.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

# Installed only in the checkers' environment.
from cloudcoil.models.keda.v1alpha1 import ScaledObject, TriggerAuthentication  # type: ignore[import-not-found]

NEWER = {"ScaledObject.spec.fallback": {"behavior"}}
"""Fields added in KEDA 2.17. The published models are for 2.16, and there are no newer ones."""
KINDS = {"ScaledObject": ScaledObject, "TriggerAuthentication": TriggerAuthentication}


def main() -> None:
    """Prints how many objects were checked.

    Exits with the field and reason if an object is invalid or if there are none.
    """
    checked = 0
    for document in yaml.safe_load_all(Path(sys.argv[1]).read_text(encoding="utf-8")):
        if document and document["kind"] in KINDS:
            _refuse_unknown(
                document,
                KINDS[document["kind"]].model_validate(document).model_dump(by_alias=True),
                document["kind"],
            )
            checked += 1
    if not checked:
        raise SystemExit(f"{sys.argv[1]}: no KEDA objects")
    print(f"{checked} objects match KEDA's models")


def _refuse_unknown(document: object, known: Any, where: str) -> None:
    # The models silently drop unknown fields, so any dropped field must be unknown.
    if isinstance(document, dict):
        newer = NEWER.get(where, set())
        unknown = document.keys() - known.keys() if isinstance(known, dict) else document.keys()
        if unknown - newer:
            raise SystemExit(f"{where}: unknown fields {sorted(unknown - newer)}")
        for name in document.keys() - newer:
            _refuse_unknown(document[name], known[name], f"{where}.{name}")
    elif isinstance(document, list) and isinstance(known, list):
        for number, (element, other) in enumerate(zip(document, known, strict=True)):
            _refuse_unknown(element, other, f"{where}[{number}]")


if __name__ == "__main__":
    main()
