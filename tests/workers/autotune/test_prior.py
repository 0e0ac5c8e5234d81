"""The backend order derived from the hardware alone, for each kind of hardware."""

import pytest

from workers.autotune.hardware import Machine
from workers.autotune.search import prior_rank
from workers.models.backend import Backend

pytestmark = pytest.mark.slow

EXACT, NARROW = Backend(backend="onnx", precision="fp32"), Backend(precision="bf16")
INT8, TORCH = Backend(backend="onnx", precision="int8"), Backend()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("avx2",), [EXACT, INT8, TORCH]),  # int8 saturates there and is slower
        (("avx2", "avx_vnni"), [INT8, EXACT, TORCH]),
        (("avx2", "avx512_bf16", "avx512_vnni"), [INT8, NARROW, EXACT, TORCH]),
        (("amx_bf16", "amx_int8"), [INT8, NARROW, EXACT, TORCH]),
        (("asimddp", "bf16", "i8mm"), [INT8, NARROW, EXACT, TORCH]),
    ],
)
def test_the_usual_order_on_a_cpu(flags: tuple[str, ...], expected: list[Backend]) -> None:
    machine = Machine("a CPU", flags, 2, (), ())
    listed = sorted(
        reversed(expected), key=lambda backend: prior_rank(backend, machine, is_gpu=False)
    )
    assert listed == expected


def test_on_a_gpu_fewer_bits_go_first() -> None:
    machine = Machine("a CPU", ("avx2",), 8, ("a GPU",), ())
    listed = [TORCH, EXACT, Backend(precision="fp16"), NARROW]
    ordered = sorted(listed, key=lambda backend: prior_rank(backend, machine, is_gpu=True))
    assert [one.name for one in ordered] == ["torch-bf16", "torch-fp16", "onnx-fp32", "torch-fp32"]
