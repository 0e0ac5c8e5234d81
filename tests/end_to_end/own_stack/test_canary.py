"""Two revisions of a model as real processes: the revision with different weights is rolled
back.
"""

import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery
from safetensors.torch import load_file, save_file

from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.end_to_end.rows import Rows, eventually
from tests.infra.running_up import SMALLEST
from tests.limits import WAIT_LIMIT_S
from tests.workers.optimize.tiny_bert import make_tiny_bert
from workers.optimize.calibration import calibration_texts

pytestmark = pytest.mark.slow(about_s=30)

ENTRY = """\
models:
  - name: tiny
    task: embedding
    source: local:{folder}/old
    revision: "1"
    backend: torch
    precision: fp32
    dimensions: 64
    batch: {{max_tokens: 2048}}
    canary: {{revision: "2", source: "local:{folder}/new", share: 0.5, compare_share: 1}}
"""
WORDS = sorted({word for text in calibration_texts() for word in re.findall(r"\w+", text.lower())})


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Stack]:
    """A stack with a model and its canary, whose weights differ."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    make_tiny_bert(old)
    shutil.copytree(old, new)
    weights = load_file(new / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, found in weights.items():
        if found.dim() == 2:
            weights[name] = found + 0.2 * torch.randn(found.shape, generator=noise)
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "models.yaml").write_text(ENTRY.format(folder=tmp_path))
    settings = SMALLEST | {"PENSTOCK_MODELS_FILE": str(tmp_path / "models.yaml")}
    with Stack(tmp_path / "state", ports=Ports.free(2), settings=settings) as running:
        yield running


def text() -> str:
    return " ".join(random.sample(WORDS, 12))


def test_other_weights_are_taken_back_and_no_request_fails(pair: Stack) -> None:
    revisions: list[str] = []
    with httpx.Client(base_url=pair.api_url, timeout=WAIT_LIMIT_S) as http:

        def ask() -> str:
            answer = http.post("/v1/embeddings", json={"model": "tiny", "input": text()})
            assert answer.status_code == 200, answer.text
            revisions.append(answer.headers["x-penstock-revision"])
            return revisions[-1]

        eventually(lambda: ask() == "2")
        until_s = time.monotonic() + WAIT_LIMIT_S
        # With a share of one half, 40 in a row come from the same revision only once in 10^12
        # tries.
        while "2" in revisions[-40:]:
            assert time.monotonic() < until_s, f"not taken back: {Counter(revisions)}"
            ask()
        log = "\n".join(path.read_text() for path in pair.log_dir.iterdir())
        assert "canary taken back" in log
        assert "results were outside the tolerance" in log
    client = bigquery.Client(
        project=pair.settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": pair.settings.bigquery_endpoint},
    )
    rows = Rows(client, pair.settings.dataset)
    sql = (
        "SELECT model, revision, COUNT(*) AS items, SUM(cost_usd) AS usd "
        "FROM `{dataset}.rows_deduplicated` "
        "WHERE received_at > TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 DAY) "
        "AND tenant = 'default' GROUP BY model, revision"
    )
    eventually(lambda: sum(row["items"] for row in rows.query(sql)) == len(revisions))
    found = {row["revision"]: row["items"] for row in rows.query(sql)}
    client.close()
    assert found == Counter(revisions)
    assert {row["model"] for row in rows.query(sql)} == {"tiny"}
