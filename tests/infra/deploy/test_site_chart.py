"""For a deployment off Google, the chart renders the same objects as the site's overlay, and Helm
rejects invalid values by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.kubernetes.site import SelfHostedSite
from infra.kubernetes.site_chart import default_values, main, write_site_chart
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from tests.infra.deploy.helm import Answer, lint, templates
from tests.infra.deploy.manifests import Objects
from tests.infra.deploy.site_values import SITES, WRONG
from tests.infra.deploy.sites import MODELS, example, rendered

pytestmark = pytest.mark.slow(about_s=60)


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("helm") / "penstock"
    try:
        write_site_chart(out, read_catalog(MODELS), MODELS, version="1.2.3")
    except ConfigurationError as error:
        if "kubectl is not installed" in error.message:
            pytest.skip("kubectl, which has Kustomize built in, is not installed")
        raise
    return out


@pytest.fixture(scope="module")
def answers(chart: Path) -> dict[str, Answer]:
    """Helm's results for SITES and WRONG."""
    changes = SITES | WRONG
    values = [example(**one) for one in changes.values()]
    return dict(zip(changes, templates(chart, values), strict=True))


def by_name(objects: Objects) -> dict[tuple[str, str], dict[str, Any]]:
    made = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(made) == len(objects)
    return made


@pytest.mark.parametrize("site", SITES)
def test_chart_makes_what_the_overlay_makes(
    answers: dict[str, Answer], tmp_path: Path, site: str
) -> None:
    made, wanted = answers[site], rendered(tmp_path / "site", **SITES[site])
    assert made.refusal == ""
    assert by_name(made.objects).keys() == by_name(wanted).keys()
    for key, one in by_name(wanted).items():
        assert by_name(made.objects)[key] == one


@pytest.mark.parametrize("field", WRONG)
def test_helm_refuses_wrong_values_by_name(answers: dict[str, Answer], field: str) -> None:
    refusal = answers[field].refusal
    assert answers[field].objects == []
    # For missing and unknown fields, the name is separate from the location.
    where, _, name = field.rpartition(".")
    places = (f"'/{field.replace('.', '/')}'", f"/{field.replace('.', '/')}")
    assert any(place in refusal for place in places) or f"'{name}'" in refusal, refusal
    assert where == "" or f"/{where.replace('.', '/')}" in refusal, refusal


def test_helm_has_nothing_against_the_chart(chart: Path) -> None:
    assert lint(chart, example()) == []


def test_defaults_are_those_of_the_models(chart: Path) -> None:
    defaults = default_values()
    required = {name: example()[name] for name in ("images", "broker", "rows", "redis", "objects")}
    assert SelfHostedSite.model_validate(required | defaults) == SelfHostedSite.model_validate(
        required
    )
    (made,) = templates(chart, [required])
    (full,) = templates(chart, [required | defaults])
    assert made.refusal == ""
    assert by_name(made.objects) == by_name(full.objects)


def test_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    assert main(["--out", str(tmp_path)]) == 2
    assert "something other than a chart" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
