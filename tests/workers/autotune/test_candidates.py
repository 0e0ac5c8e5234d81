import pytest

from shared.models.catalog import Model
from workers.autotune.candidates import (
    candidates,
    choose_layout,
    choose_shared_layout,
    choose_unmeasured_layout,
)
from workers.autotune.choice import Layout
from workers.autotune.hardware import Machine, detect_machine

pytestmark = pytest.mark.slow

ENTRY = Model.model_validate(
    {
        "name": "tiny",
        "task": "embedding",
        "source": "local:tiny",
        "dimensions": 4,
        "batch": {"max_tokens": 512},
    }
)


def machine_of(cores: int = 2, *, flags: tuple[str, ...] = (), gpus: int = 0) -> Machine:
    return Machine("a CPU", flags, cores, ("a GPU",) * gpus, ())


@pytest.mark.parametrize(
    ("machine", "precision", "names"),
    [
        (machine_of(), "auto", ["torch-fp32"]),
        (machine_of(flags=("avx512_bf16",)), "auto", ["torch-bf16", "torch-fp32"]),
        (machine_of(flags=("amx_bf16",)), "fp32", ["torch-fp32"]),
        (machine_of(), "bf16", ["torch-bf16"]),
        (machine_of(gpus=1), "auto", ["torch-bf16", "torch-fp16", "torch-fp32"]),
        (machine_of(gpus=1), "fp16", ["torch-fp16"]),
        (machine_of(), "int8", []),
    ],
)
def test_torch_in_what_the_machine_computes_itself(
    machine: Machine, precision: str, names: list[str]
) -> None:
    entry = ENTRY.model_copy(update={"precision": precision})
    listed, left_out = candidates(entry, None, machine, is_gpu=bool(machine.gpus))
    assert [backend.name for backend in listed] == names
    assert left_out == []


@pytest.mark.parametrize(
    ("processes", "threads", "machine", "expected"),
    [
        (0, 0, machine_of(1), (1, 1)),
        (0, 0, machine_of(2), (2, 1)),
        (0, 0, machine_of(16), (4, 4)),
        (1, 0, machine_of(2), (1, 2)),
        (3, 0, machine_of(2), (3, 1)),
        (0, 2, machine_of(8), (4, 2)),
        (2, 3, machine_of(2), (2, 3)),
        (0, 0, machine_of(8, gpus=2), (2, 1)),
        (3, 0, machine_of(8, gpus=1), (3, 1)),
    ],
)
def test_layouts_fill_the_cores_and_leave_what_is_given(
    processes: int, threads: int, machine: Machine, expected: tuple[int, int]
) -> None:
    found = choose_layout(processes, threads, machine, is_gpu=bool(machine.gpus))
    assert found == Layout(*expected)


@pytest.mark.parametrize(
    ("processes", "threads", "cores", "expected"),
    [
        (0, 0, 1, (1, 1)),
        (0, 0, 2, (2, 2)),
        (0, 0, 16, (4, 8)),
        (0, 0, 64, (4, 16)),
        (1, 0, 2, (1, 2)),
        (0, 1, 2, (2, 1)),
        (2, 3, 2, (2, 3)),
    ],
)
def test_processes_of_onnx_runtime_may_each_have_all_cores(
    processes: int, threads: int, cores: int, expected: tuple[int, int]
) -> None:
    found = choose_layout(processes, threads, machine_of(cores), is_gpu=False, backend="onnx")
    assert found == Layout(*expected)


def test_processes_of_several_models_divide_the_cores() -> None:
    assert choose_shared_layout(Layout(2, 2), machine_of(2)) == Layout(2, 1)
    assert choose_shared_layout(Layout(1, 2), machine_of(2)) == Layout(1, 2)
    assert choose_shared_layout(Layout(4, 16), machine_of(16)) == Layout(4, 4)


@pytest.mark.parametrize(
    ("processes", "threads", "wide", "narrow"),
    [
        (0, 0, (0, 8), (0, 1)),
        (2, 0, (2, 4), (2, 1)),
        (16, 0, (16, 1), (16, 1)),
        (0, 3, (0, 3), (0, 3)),
        (2, 3, (2, 3), (2, 3)),
    ],
)
def test_a_layout_without_measurements_is_one_process_with_all_cores_or_threads_of_one(
    processes: int, threads: int, wide: tuple[int, int], narrow: tuple[int, int]
) -> None:
    for is_wide, expected in ((True, wide), (False, narrow)):
        found = choose_unmeasured_layout(processes, threads, machine_of(8), is_wide=is_wide)
        assert found == Layout(*expected)


def test_what_onednn_is_kept_from_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    machine = detect_machine()
    assert not machine.has_bf16
    assert not [flag for flag in machine.flags if flag.startswith(("avx512", "amx"))]


def test_this_machine_is_described() -> None:
    machine = detect_machine()
    assert machine.cores >= 1
    assert machine.cpu.strip()
    assert dict(machine.libraries)["torch"]
    assert machine == detect_machine()
    assert machine.computes_on_gpu("cuda:1")
    assert not machine.computes_on_gpu("cpu")
