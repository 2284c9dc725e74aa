"""Code that the benchmarks share: workloads that a user provides."""

from pathlib import Path

import pytest

from benchmarks.harness import load_workloads


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "^--workloads: expected a Python file, got "),
        ("rl_lengths = 1 / 0", "can't be run: ZeroDivisionError: division by zero$"),
        ("def rl_lengths(:", "can't be run: SyntaxError"),
        ("other = 1", "has no rl_lengths; benchmarks/workloads.py has one to start from$"),
    ],
)
def test_invalid_workloads_end_a_benchmark_with_a_message(tmp_path: Path, code: str | None, said: str) -> None:
    path = tmp_path / "mine.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(SystemExit, match=said):
        _ = load_workloads(path).rl_lengths
