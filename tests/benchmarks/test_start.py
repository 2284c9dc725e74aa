"""The start benchmark measures imports that work."""

import sys

import pytest

from benchmarks.start import CODES, cpu_s


@pytest.mark.parametrize("name", CODES)
def test_each_measured_import_works_and_takes_time(name: str) -> None:
    assert cpu_s([sys.executable, "-c", CODES[name]]) > 0
