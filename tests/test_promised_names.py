"""Routes, settings, metrics and reports that users rely on still exist, or CHANGELOG.md names them.

They are listed in `promised_names.json`. Add new names when they are released. Commands and their
options are in tests/infra/commands.json.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from api.app import create_app
from shared import settings
from shared.models.catalog_file import read_catalog
from tests.test_metric_names import metrics

ROOT = Path(__file__).resolve().parents[1]
PROMISED: dict[str, list[str]] = json.loads(
    (ROOT / "tests/promised_names.json").read_text(encoding="utf-8")
)


def list_routes() -> set[str]:
    """Returns the method and path of every endpoint in the OpenAPI document."""
    nothing: Any = nullcontext()
    catalog = read_catalog(ROOT / "models.yaml")
    app = create_app(settings.ApiSettings(), catalog, nothing, nothing, nothing)
    return {
        f"{method.upper()} {path}"
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }


def list_settings() -> set[str]:
    """Returns the environment variables for all settings."""
    names = set[str]()
    for kind in vars(settings).values():
        if isinstance(kind, type) and issubclass(kind, settings.Settings):
            for name, field in kind.model_fields.items():
                aliases: Any = field.validation_alias
                choices = aliases.choices if aliases else [f"PENSTOCK_{name}"]
                names |= {str(choice).upper() for choice in choices}
    return names


def list_metrics() -> set[str]:
    """Returns the metrics that the sources declare."""
    return {name for _, name in metrics()}


def list_reports() -> set[str]:
    """Returns the reports that `penstock report` runs."""
    return {path.stem for path in (ROOT / "shared/reports/queries").glob("*.sql")}


LISTS = {
    "routes": list_routes,
    "settings": list_settings,
    "metrics": list_metrics,
    "reports": list_reports,
}


def test_each_kind_of_name_is_checked() -> None:
    assert PROMISED.keys() == LISTS.keys()


@pytest.mark.parametrize("kind", LISTS)
def test_no_promised_name_is_gone_without_a_word(kind: str) -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    gone = set(PROMISED[kind]) - LISTS[kind]()
    assert [name for name in sorted(gone) if f"`{name}`" not in changes] == []
