"""A class's output goes to the log of the prediction that printed it."""

from __future__ import annotations

import os

import pytest

from shared.messages import PrintedLogs
from workers.models.custom.printed import PrintedOutput
from workers.models.custom.runner.printing import make_mark


@pytest.mark.parametrize("character", [chr(code) for code in range(1, 128)])
def test_end_of_setup_output_is_in_no_predictions_log(character: str) -> None:
    """In one process out of 256, the last byte of `setup` output used to be taken for the start of
    a mark.
    """
    for _ in range(8):
        reader, writer = os.pipe()
        printed = PrintedOutput(reader)
        printed.set_mark(make_mark())
        os.write(writer, f"set up{character}".encode())
        printed.open_log(1, is_alone=True)
        os.write(writer, b"run")
        os.close(writer)
        printed.close()
        assert printed.take_log(1) == PrintedLogs("run")
