"""Traces: one format for the simulator and for `penstock load`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_load.trace import (
    MAX_ITEMS,
    MAX_SIZE,
    Arrival,
    read_times,
    read_trace,
    write_trace,
)
from shared.errors import ConfigurationError

arrivals = st.builds(
    Arrival,
    at_s=st.floats(0, 1e6),
    tenant=st.text(max_size=8),
    model=st.text(max_size=8),
    input=st.text(max_size=20),
    size=st.integers(0, MAX_SIZE),
    group=st.text(max_size=4),
    items=st.integers(1, MAX_ITEMS),
    deadline_s=st.none() | st.floats(0.001, 1e4),
    cancel_after_s=st.none() | st.floats(0, 1e4),
    priority=st.sampled_from(["", "interactive", "batch"]),
)


@given(st.lists(arrivals, max_size=5))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, made: list[Arrival]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "day.jsonl"
    write_trace(path, made)
    assert read_trace(path) == sorted(made, key=lambda arrival: arrival.at_s)
    assert read_times(path) == sorted(arrival.at_s for arrival in made)


def test_csv_is_read_with_its_types_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "at_s,tenant,model,size,group,items,deadline_s,cancel_after_s,lane,comment\n"
        "3,acme,minilm,12,a,2,60,0.5,batch,why\n"
        "1.5,,,,,,,,,\n"
    )
    assert read_trace(path) == [
        Arrival(1.5),
        Arrival(3, "acme", "minilm", "", 12, "a", 2, 60, 0.5, "batch"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"at_s": 1}\n{"at_s": -1}\n', r"line 2: .*>= 0.*`at_s`"),
        ('{"at_s": 1, "items": 0}\n', r"line 1: .*>= 1.*`items`"),
        ('{"at_s": 1, "items": 100000}\n', r"line 1: .*<= 256.*`items`"),
        ('{"at_s": 1, "lane": "fast"}\n', r"line 1: .*'fast'.*`lane`"),
        ('{"tenant": "a"}\n', r"line 1: .*at_s"),
        ('{"at_s": 1}\nnothing\n', "line 2: "),
        ('{"at_s": 1}\n[]\n', "line 2: "),
        ('{"at_s": "nan"}\n', "line 1: "),
        ('{"at_s": 1e999}\n', "line 1: at_s must be a number of seconds"),
        ('{"at_s": 1, "deadline_s": 1e999}\n', "line 1: deadline_s must be a number of seconds"),
        ('{"at_s": 1, "cancel_after_s": "inf"}\n', "line 1: cancel_after_s must be a number"),
        ("[" * 5000, "line 1: "),
    ],
    ids=lambda text: text[:40],
)
def test_wrong_lines_are_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"trace\.jsonl: {reason}"):
        read_trace(path)


@pytest.mark.parametrize("at_s", ["nan", "inf", "-1", "soon"])
def test_times_are_seconds_from_the_start(tmp_path: Path, at_s: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"at_s\n1\n{at_s}\n")
    with pytest.raises(ConfigurationError, match="every line must have a number at_s"):
        read_times(path)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.csv: No such file"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        write_trace(tmp_path / "no" / "trace.jsonl", [])
