"""The bases of the images: the build gives them, by digest."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.infra.deploy.dockerfiles import FOLDER, IMAGES, run, stages


@pytest.mark.parametrize("name", IMAGES)
def test_every_base_is_given_by_the_build(name: str) -> None:
    text = (FOLDER / f"{name}.Dockerfile").read_text(encoding="utf-8")
    base = "CUDA_BASE" if name == "worker" else "PYTHON_BASE"
    names = {stage.name for stage in stages(name)}
    # `scratch` is empty, and no image.
    assert all(stage.base in names | {f"${{{base}}}", "scratch"} for stage in stages(name))
    assert len(stages(name)) > 1
    # Without a default: nobody builds on what a tag happens to be.
    assert f"\nARG {base}\n" in text
    assert f"ARG {base}=" not in text


def test_base_without_digest_is_refused(tmp_path: Path) -> None:
    bases, digest = tmp_path / "bases.env", f"sha256:{'a' * 64}"
    bases.write_text("PYTHON_BASE=docker.io/library/python:3.11\n")
    refused = run(FOLDER / "build.sh", "api", "api:1", BUILDER="echo", BASES=str(bases))
    assert refused.returncode == 2
    assert "pin.sh" in refused.stderr
    bases.write_text(f"PYTHON_BASE=docker.io/library/python:3.11@{digest}\n")
    built = run(
        FOLDER / "build.sh",
        "api",
        "api:1",
        "--push",
        BUILDER="echo",
        BASES=str(bases),
        REVISION="abc",
    )
    words = built.stdout.split()
    assert f"PYTHON_BASE=docker.io/library/python:3.11@{digest}" in words
    assert "REVISION=abc" in words
    assert "VERSION=0.1.0" in words
    assert words[-2:] == ["--push", "."]


def test_worker_is_not_built_on_a_base_without_digest() -> None:
    assert (
        run(
            FOLDER / "build.sh", "worker", "worker:1", BUILDER="echo", CUDA_BASE="r/cuda:1"
        ).returncode
        == 2
    )
    base = f"r/cuda@sha256:{'b' * 64}"
    assert (
        f"CUDA_BASE={base}"
        in run(FOLDER / "build.sh", "worker", "w:1", BUILDER="echo", CUDA_BASE=base).stdout
    )


def test_pinning_puts_todays_digest_behind_the_tag(tmp_path: Path) -> None:
    digest = f"sha256:{'c' * 64}"
    docker = tmp_path / "docker"
    docker.write_text(
        '#!/bin/sh\n[ "$3" = inspect ] && [ "$4" = "docker.io/library/python:3.11-slim-bookworm" ]'
        f" && echo {digest}\n"
    )
    docker.chmod(0o755)
    out = tmp_path / "bases.env"
    done = run(FOLDER / "pin.sh", out, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"^PYTHON_BASE=docker.io/library/python:3\.11-slim-bookworm@{digest}$",
        out.read_text(),
        re.M,
    )
