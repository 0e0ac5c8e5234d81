"""The benchmark measures exactly the stack that `penstock up` starts. These tests start nothing."""

from dataclasses import replace
from pathlib import Path

from bench.peers.roster import OURS
from bench.peers.serving import stack_of
from bench.pipeline import MODEL, MODELS_FILE, read_shipped_models, write_catalog
from infra.local.up import build_stack
from shared.models.catalog_file import read_catalog

SHIPPED, FP32, *_ = OURS


def test_penstock_is_measured_as_penstock_up_serves_it(tmp_path: Path) -> None:
    measured = stack_of(SHIPPED, tmp_path)
    served = build_stack(tmp_path, measured.ports, {})
    assert measured.environment == served.environment
    assert measured.settings.models_file == MODELS_FILE
    assert vars(measured).keys() == vars(served).keys()
    differing = {name for name, value in vars(measured).items() if value != vars(served)[name]}
    assert differing <= {"_make", "_say", "_undo"}
    assert vars(measured._make) == vars(served._make)


def test_a_changed_entry_changes_nothing_else(tmp_path: Path) -> None:
    shipped = read_catalog(MODELS_FILE)
    changed = read_catalog(write_catalog(tmp_path, read_shipped_models(FP32.entry)))
    assert [model.name for model in changed.models] == [model.name for model in shipped.models]
    assert changed.find(MODEL).precision == "fp32"
    others = [model for model in shipped.models if model.name != MODEL]
    assert [model for model in changed.models if model.name != MODEL] == others
    environment = stack_of(replace(FP32), tmp_path).environment
    plain = build_stack(tmp_path, stack_of(FP32, tmp_path).ports, {}).environment
    assert environment.keys() - plain.keys() == {"PENSTOCK_ARTIFACTS_DIR"}
