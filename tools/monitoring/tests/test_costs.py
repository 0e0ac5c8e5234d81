"""Values in the cost panels for two models with several pods each. promtool evaluates them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_monitoring.files import TERMS as GOOGLE
from penstock_monitoring.grafana import TERMS as GRAFANA
from penstock_monitoring.panels import Terms, sections
from tests.limits import START_LIMIT_S

pytestmark = pytest.mark.slow

PRICES = " or ".join(
    f"label_replace(vector({usd}), 'worker', '{worker}', '', '')"
    for worker, usd in (("texts", 0.5), ("images", 2))
)
"""The hourly price of one worker in dollars, formatted the way Terraform writes it."""


def query(terms: Terms, title: str) -> str:
    (panel,) = [
        panel for section in sections(terms) for panel in section.panels if panel.title == title
    ]
    return (
        panel.queries[0]
        .promql.replace("${worker_hour_usd}", PRICES)
        .replace("$worker_hour_usd", "0.5")
    )


def series() -> list[dict[str, str]]:
    """Returns two hours of series.

    Three pods of `texts` take 0.25 s per item, and one pod of `images` takes 4 s.

    A text takes 0.375 s in the model, 0.125 s of which are spare.

    The cache serves 2 texts per second and no images.
    """
    pods = [("texts", "MiniLM", n, 40, 15, 5) for n in range(3)]
    pods += [("images", "SD", 0, 15, 60, 0)]
    values_of = {}
    for worker, model, pod, items, seconds, spare in pods:
        labels = f'worker="{worker}",pod="{pod}"'
        of_model = f'{labels},model="{model}"'
        values_of[f"penstock_worker_items_waiting{{{labels}}}"] = "0x120"
        values_of[f"penstock_worker_batch_items_sum{{{of_model}}}"] = f"0+{items}x120"
        values_of[f"penstock_worker_inference_seconds_sum{{{of_model}}}"] = f"0+{seconds}x120"
        values_of[f"penstock_worker_spare_seconds_total{{{of_model}}}"] = f"0+{spare}x120"
    for cache, hits in (("memory", 60), ("redis", 60), ("none", 120)):
        labels = f'model="MiniLM",cache="{cache}",status="succeeded"'
        values_of[f"penstock_api_items_total{{{labels}}}"] = f"0+{hits}x120"
    return [{"series": name, "values": values} for name, values in values_of.items()]


@pytest.mark.parametrize(
    ("title", "google", "grafana"),
    [
        ("Workers' cost per hour", {"texts": 1.5, "images": 2}, {"texts": 1.5, "images": 0.5}),
        (
            "7200 texts and 900 images per hour.",
            # 7,200 texts and 900 images per hour.
            {"texts": 1500 / 7200, "images": 2000 / 900},
            {"texts": 1500 / 7200, "images": 500 / 900},
        ),
        # 2 texts/s at 0.25 s each take half a worker.
        ("Saved by the cache per hour", {"texts": 0.25}, {"texts": 0.25}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_costs(
    tmp_path: Path, title: str, google: dict[str, float], grafana: dict[str, float]
) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")

    def expected(terms: Terms, usd: dict[str, float]) -> dict[str, object]:
        # promtool compares doubles exactly, and rates are extrapolated.
        rounded = f"round({query(terms, title)}, 0.001)"
        samples = [
            {"labels": f'{{worker="{worker}"}}', "value": round(round(value / 0.001) * 0.001, 3)}
            for worker, value in usd.items()
        ]
        return {"expr": rounded, "eval_time": "100m", "exp_samples": samples}

    tests = {
        "tests": [
            {
                "interval": "1m",
                "input_series": series(),
                "promql_expr_test": [expected(GOOGLE, google), expected(GRAFANA, grafana)],
            }
        ]
    }
    (tmp_path / "tests.yaml").write_text(json.dumps(tests), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
