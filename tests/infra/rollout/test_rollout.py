"""A rollout on a Cloud Run that tracks its traffic: which revisions serve at every moment, and
after every failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials

from infra.rollout.__main__ import main
from infra.rollout.google import GoogleClient
from infra.rollout.judge import CanaryJudge
from infra.rollout.rollout import Rollout, smoke
from infra.rollout.service import CloudRunService
from shared.errors import ConfigurationError, Unavailable
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from tests.infra.rollout.google_apis import KEY, PROJECT, SERVICE, GoogleApis, Region, serving

WEST, EAST = "europe-west4", "us-east1"
ENTRY = """models:
  - {name: minilm, task: embedding, source: "hf:org/name", dimensions: 3, batch: {max_tokens: 512}, replicas: {min: 1}}
  - {name: sleeper, task: embedding, source: "hf:org/other", dimensions: 3, batch: {max_tokens: 512}}
"""  # noqa: E501


@pytest.fixture
def apis() -> Iterator[GoogleApis]:
    made = GoogleApis()
    with serving(made) as url:
        made.regions = {WEST: Region(url), EAST: Region(url)}
        yield made


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    file = tmp_path / "models.yaml"
    file.write_text(ENTRY)
    return read_catalog(file)


def rollout(
    apis: GoogleApis,
    catalog: Catalog,
    said: list[str] | None = None,
    on_pause: Callable[[], None] = lambda: None,
) -> Rollout:
    google = GoogleClient(
        AnonymousCredentials(), dict.fromkeys(("run", "monitoring", "secretmanager"), apis.url)
    )
    services = {
        region: CloudRunService(
            google, f"projects/{PROJECT}/locations/{region}/services/{SERVICE}", lambda _: None
        )
        for region in apis.regions
    }
    judge = CanaryJudge(google, PROJECT, SERVICE, error_ratio=0.02, least_requests=50)

    def check(url: str) -> list[str]:
        return smoke(url, google.secret(PROJECT, "penstock-release-key").strip(), catalog)

    return Rollout(
        services,
        judge,
        check,
        {region: apis.url for region in apis.regions},
        pause=lambda _: on_pause(),
        say=(said if said is not None else []).append,
    )


def test_hold_names_what_serves_so_that_an_apply_moves_nobody(
    apis: GoogleApis, catalog: Catalog
) -> None:
    rolling = rollout(apis, catalog)
    with pytest.raises(ConfigurationError, match="hold"):
        rolling.require_held()
    rolling.hold()
    rolling.require_held()
    apis.regions[WEST].deploy("api-2")
    assert apis.regions[WEST].shares == {"api-1": 100}


def test_no_service_yet_is_held(apis: GoogleApis, catalog: Catalog) -> None:
    rolling = rollout(apis, catalog)
    apis.regions.clear()
    rolling.require_held()
    rolling.hold()
    assert apis.regions == {}


def test_candidate_is_asked_before_it_gets_traffic(apis: GoogleApis, catalog: Catalog) -> None:
    rolling = rollout(apis, catalog)
    rolling.hold()
    for region in apis.regions.values():
        region.deploy("api-2")
    rolling.try_candidate()
    assert all(region.shares == {"api-1": 100} for region in apis.regions.values())
    assert len(apis.asked) == len(set(apis.asked)) == 2


def test_bad_answer_of_the_candidate_is_told(apis: GoogleApis, catalog: Catalog) -> None:
    rolling = rollout(apis, catalog)
    rolling.hold()
    apis.regions[WEST].deploy("api-2")
    apis.dimensions = 4
    with pytest.raises(Unavailable, match="not a unit vector"):
        rolling.try_candidate()


def test_candidate_gets_all_step_by_step_in_one_region_after_the_other(
    apis: GoogleApis, catalog: Catalog
) -> None:
    rolling = rollout(apis, catalog)
    rolling.hold()
    for region in apis.regions.values():
        region.deploy("api-2")
        region.history.clear()
        region.counts["api-2"] = {"2xx": 990, "4xx": 200, "5xx": 10}
    rolling.roll()
    for region in apis.regions.values():
        assert [shares["api-2"] for shares in region.history] == [5, 25, 50, 100]
        assert region.history[0] == {"api-1": 95, "api-2": 5}
        assert region.shares == {"api-2": 100}


def test_too_many_failures_give_everything_back_in_every_region(
    apis: GoogleApis, catalog: Catalog
) -> None:
    rolling = rollout(apis, catalog)
    rolling.hold()
    for region in apis.regions.values():
        region.deploy("api-2")
    apis.regions[EAST].counts["api-2"] = {"2xx": 900, "5xx": 100}
    with pytest.raises(Unavailable, match="us-east1: api-2 at 5 %: 100 of 1000 requests failed"):
        rolling.roll()
    assert {name: region.shares for name, region in apis.regions.items()} == {
        WEST: {"api-1": 100},
        EAST: {"api-1": 100},
    }
    assert {"api-2": 100} in apis.regions[WEST].history


def test_few_requests_say_nothing(apis: GoogleApis, catalog: Catalog) -> None:
    rolling = rollout(apis, catalog)
    rolling.hold()
    apis.regions[WEST].deploy("api-2")
    apis.regions[WEST].counts["api-2"] = {"5xx": 49}
    rolling.roll()
    assert apis.regions[WEST].shares == {"api-2": 100}


def test_bad_answer_at_the_public_url_gives_everything_back(
    apis: GoogleApis, catalog: Catalog
) -> None:
    def break_it() -> None:
        apis.dimensions = 4

    rolling = rollout(apis, catalog, on_pause=break_it)
    rolling.hold()
    apis.regions[WEST].deploy("api-2")
    with pytest.raises(Unavailable):
        rolling.roll()
    assert apis.regions[WEST].shares == {"api-1": 100}


def test_end_of_the_step_gives_everything_back(apis: GoogleApis, catalog: Catalog) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    said: list[str] = []
    rolling = rollout(apis, catalog, said, on_pause=stop)
    rolling.hold()
    apis.regions[WEST].deploy("api-2")
    with pytest.raises(KeyboardInterrupt):
        rolling.roll()
    assert apis.regions[WEST].shares == {"api-1": 100}
    assert f"{WEST}: back to api-1 100 %" in said


def test_candidate_whose_responses_break_off_is_rolled_back(
    apis: GoogleApis, catalog: Catalog
) -> None:
    rolling = rollout(apis, catalog)
    rolling.hold()
    apis.regions[WEST].deploy("api-2")
    apis.cuts_off = True
    with pytest.raises(Unavailable, match="IncompleteRead"):
        rolling.roll()
    assert {"api-1": 95, "api-2": 5} in apis.regions[WEST].history
    assert apis.regions[WEST].shares == {"api-1": 100}


def test_rollout_that_was_cut_off_goes_on_from_what_callers_know(
    apis: GoogleApis, catalog: Catalog
) -> None:
    rolling = rollout(apis, catalog)
    region = apis.regions[WEST]
    rolling.hold()
    region.deploy("api-2")
    region.traffic = [{"revision": "api-1", "percent": 75}, {"revision": "api-2", "percent": 25}]
    region.deploy("api-3")
    rolling.roll()
    assert {"api-1": 95, "api-3": 5} in region.history
    assert region.shares == {"api-3": 100}


def test_back_to_a_revision_by_name(apis: GoogleApis, catalog: Catalog) -> None:
    del apis.regions[EAST]
    rolling = rollout(apis, catalog)
    apis.regions[WEST].deploy("api-2")
    rolling.go_back("api-1")
    assert apis.regions[WEST].shares == {"api-1": 100}
    with pytest.raises(Unavailable, match="does not exist"):
        rolling.go_back("api-9")


def test_smoke_needs_the_right_key(apis: GoogleApis, catalog: Catalog) -> None:
    assert smoke(apis.url, KEY, catalog)[1] == "minilm: a unit vector of 3"
    with pytest.raises(Unavailable, match="401"):
        smoke(apis.url, "wrong", catalog)


@pytest.mark.parametrize("steps", [(), (5, 50), (50, 25, 100), (5, 5, 100)])
def test_steps_rise_to_100(apis: GoogleApis, steps: tuple[int, ...]) -> None:
    google = GoogleClient(AnonymousCredentials())
    judge = CanaryJudge(google, PROJECT, SERVICE, error_ratio=0.02, least_requests=50)
    with pytest.raises(ConfigurationError, match="increase to 100"):
        Rollout({}, judge, lambda url: [], {}, steps_percent=steps)


def test_first_release_is_asked_too(apis: GoogleApis, catalog: Catalog) -> None:
    rolling = rollout(apis, catalog)
    rolling.roll()
    assert len(apis.asked) == len(apis.regions)
    apis.dimensions = 4
    with pytest.raises(Unavailable, match="not a unit vector"):
        rolling.roll()


def test_response_of_google_that_is_no_json_gives_everything_back(
    apis: GoogleApis, catalog: Catalog
) -> None:
    rolling = rollout(apis, catalog)
    rolling.hold()
    for region in apis.regions.values():
        region.deploy("api-2")
    apis.garbled = "/timeSeries"
    with pytest.raises(Unavailable, match="the response is not JSON"):
        rolling.roll()
    assert apis.regions[WEST].shares == {"api-1": 100}
    apis.garbled = ":access"
    with pytest.raises(Unavailable, match="the response is not JSON"):
        rolling.try_candidate()


@pytest.mark.parametrize("data", ["/w==", "not base64!"])
def test_secret_that_is_no_text_is_told(apis: GoogleApis, catalog: Catalog, data: str) -> None:
    apis.secret = data
    with pytest.raises(Unavailable, match="secret penstock-release-key: not a text"):
        rollout(apis, catalog).roll()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--steps", "5,all"], "argument --steps: invalid _steps value: '5,all'"),
        (["--steps", "5,101"], "argument --steps: must be percentages from 1 to 100, got 5,101"),
        (["--watch-s", "nan"], "argument --watch-s: must be a finite number of at least 0"),
        (["--error-ratio", "-1"], "argument --error-ratio: must be a finite number of at least 0"),
        (["--urls-file", "missing.json"], "rollout: missing.json: "),
        (["--urls-file", "outputs.json"], "rollout: outputs.json: Expected `str`, got `object`"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_asked(
    words: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`outputs.json` contains all of Terraform's outputs, rather than one."""
    monkeypatch.chdir(tmp_path)
    Path("outputs.json").write_text('{"api_urls": {"value": {"here": "https://a"}}}')
    with suppress(SystemExit):
        assert main(["roll", "--project", PROJECT, "--regions", WEST, *words]) == 1
    assert reason in capsys.readouterr().err
