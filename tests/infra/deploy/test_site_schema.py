"""A site's JSON schema accepts the same sites as the models do, and errors name the same field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from infra.kubernetes.site import read_site, site_schema
from shared.errors import ConfigurationError
from tests.infra.deploy.site_values import SITES, WRONG
from tests.infra.deploy.sites import example


@pytest.fixture(scope="module")
def validator() -> jsonschema_rs.Draft202012Validator:
    schema = site_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    return jsonschema_rs.Draft202012Validator(schema)


@pytest.mark.parametrize("site", SITES)
def test_right_sites_are_right_for_both(
    validator: jsonschema_rs.Draft202012Validator, tmp_path: Path, site: str
) -> None:
    values = example(**SITES[site])
    read_site(written(tmp_path, values))
    validator.validate(values)


@pytest.mark.parametrize("field", WRONG)
def test_wrong_sites_are_wrong_for_both(
    validator: jsonschema_rs.Draft202012Validator, tmp_path: Path, field: str
) -> None:
    values = example(**WRONG[field])
    with pytest.raises(ConfigurationError) as refused:
        read_site(written(tmp_path, values))
    errors = list(validator.iter_errors(values))
    assert errors
    *_, name = field.split(".")
    for one in errors:
        # For a missing or unknown field, the message has its name in quotes.
        assert name in [*map(str, one.instance_path), *re.findall(r"[\w.]+", one.message)]
    assert name in str(refused.value)


def written(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "site.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file
