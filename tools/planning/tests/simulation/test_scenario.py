"""Scenario files: errors name the field, and shipped scenarios run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock_planning.simulation.scenario import SHIPPED, read_scenario
from penstock_planning.simulation.streams import Burst, Constant, StepArrivals, Wave, arrival_times
from penstock_planning.simulation.world import simulate
from shared.errors import ConfigurationError

GIVEN = """
duration_s: 100
models:
  all-MiniLM-L6-v2:
    arrivals: [{kind: constant, per_s: 1}]
    seconds_per_item: 0.1
    measured: made up
catalog: models.yaml
"""


def written(folder: Path, text: str = GIVEN) -> str:
    (folder / "models.yaml").write_text(Path("models.yaml").read_text(encoding="utf-8"))
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("duration_s=0", "duration_s"),
        ("models.all-MiniLM-L6-v2.seconds_per_item=-1", "all-MiniLM-L6-v2.seconds_per_item"),
        ("models.all-MiniLM-L6-v2.arrivals.0.per_s=often", "arrivals.0.constant.per_s"),
        ("cluster.nodes=3", "cluster.nodes: unknown field; accepted here: buffer, node_idle_s"),
        (
            "duration=3",
            "duration: unknown field; accepted here: about, api, broker, catalog, cluster",
        ),
        (
            "models.all-MiniLM-L6-v2.work_per_items=3",
            "work_per_items: unknown field; accepted here: ",
        ),
        (
            "models.all-MiniLM-L6-v2.seconds_per_work=3",
            "seconds_per_work and seconds_per_item are mutually",
        ),
        ("regions.us-east4.share=0.5", "regions' shares"),
        ("events=[{kind: region_loss, at_s: 1, for_s: 1, region: mars}]", "mars"),
        ("events=[{kind: rollout, at_s: 1, model: other}]", "other"),
        ("events=[{kind: flood, at_s: 1}]", "events.0"),
        ("models.all-MiniLM-L6-v2.arrivals.7.per_s=1", "the field does not exist"),
        ("duration_s", "KEY=VALUE"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: str, field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_scenario(written(tmp_path), (change,))
    assert field in caught.value.message


def test_a_scenario_that_is_not_there_tells_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="sd-constant"):
        read_scenario(str(tmp_path / "none.yaml"))


def test_a_model_that_is_not_in_the_catalog_is_named(tmp_path: Path) -> None:
    text = GIVEN.replace("all-MiniLM-L6-v2", "unknown-model")
    with pytest.raises(ConfigurationError, match="unknown-model"):
        simulate(read_scenario(written(tmp_path, text)))


def test_a_base_is_completed(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "other.yaml"
    path.write_text("base: ../mine.yaml\nseed: 5\ncluster: {buffer: 3}\n")
    scenario = read_scenario(str(path), ("cluster.node_start_s=7",))
    assert (scenario.duration_s, scenario.seed) == (100, 5)
    assert (scenario.cluster.buffer, scenario.cluster.node_start_s) == (3, 7)
    assert simulate(scenario).summary.models[0].arrived > 50


def test_a_base_of_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text("base: loop.yaml\n")
    with pytest.raises(ConfigurationError, match="base"):
        read_scenario(str(path))


@pytest.mark.slow(about_s=20)
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_scenarios_run(path: Path) -> None:
    short = ("duration_s=120", "settle_s=0")
    result = simulate(read_scenario(path.stem, short))
    for model in result.summary.models:
        assert (
            model.arrived == model.served + model.refused + model.expired + model.lost + model.open
        )
    assert result.summary.dollars is not None


def times_of(stream: Constant | Wave | StepArrivals | Burst, duration_s: float) -> list[float]:
    chunks = arrival_times(stream, duration_s, np.random.default_rng(1))
    return [at_s for times in chunks for at_s in times.tolist()]


def test_even_arrivals_keep_their_distance() -> None:
    times_s = times_of(Constant(per_s=4, spacing="even"), 100)
    assert np.diff(times_s) == pytest.approx([0.25] * 399)


@pytest.mark.parametrize(
    ("stream", "count"),
    [
        (Constant(per_s=50), 50_000),
        (Constant(per_s=50, from_s=200, until_s=500), 15_000),
        (Wave(kind="wave", least_per_s=10, most_per_s=90, period_s=1000), 50_000),
        (StepArrivals(kind="step", before_per_s=10, after_per_s=100, at_s=995), 10_450),
        (Burst(kind="burst", base_per_s=10, burst_per_s=500, at_s=333, for_s=1.5), 10_735),
    ],
)
def test_streams_have_their_rates(
    stream: Constant | Wave | StepArrivals | Burst, count: int
) -> None:
    times_s = times_of(stream, 1000)
    assert times_s == sorted(times_s)
    # Five standard deviations of the Poisson distribution.
    assert len(times_s) == pytest.approx(count, abs=5 * count**0.5)
    assert all(stream.from_s <= at_s < (stream.until_s or 1000) for at_s in times_s)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.csv", "at_s,user\n3,a\n1.5,b\n200,c\n"),
        ("trace.jsonl", '{"at_s": 3}\n{"at_s": 1.5}'),
    ],
)
def test_a_trace_is_replayed(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    stream = f"arrivals: [{{kind: trace, file: {name}}}]"
    document = GIVEN.replace("arrivals: [{kind: constant, per_s: 1}]", stream)
    result = simulate(read_scenario(written(tmp_path, document)))
    assert sorted(result.recorder.models["all-MiniLM-L6-v2"].arrived_s) == [1.5, 3.0]


def test_a_broken_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time\n3\n")
    document = GIVEN.replace("kind: constant, per_s: 1", "kind: trace, file: trace.csv")
    with pytest.raises(ConfigurationError, match=r"trace\.csv: every line must have a number at_s"):
        simulate(read_scenario(written(tmp_path, document)))
