"""Progress of `agentgym sandbox build`: a bar in a terminal, and lines with timestamps elsewhere."""

import logging
import re

import pytest

from agentgym.cli.sandbox import shown_build

BUILD = logging.getLogger("agentgym.sandboxes")


def test_a_build_prints_lines_if_stderr_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_build():
        BUILD.info("%s", "Step 1/4 : FROM python:3.11-slim")
        BUILD.warning("%s", "the base image cannot be had\x1b[2J")
    first, second, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r" +\d+ s  Step 1/4 : FROM python:3\.11-slim", first)
    assert second.endswith(r"the base image cannot be had\x1b[2J")
    assert re.fullmatch(r"built in \d+ s", last)


def test_a_build_shows_a_progress_bar_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich reads this variable to force terminal output
    monkeypatch.setenv("COLUMNS", "120")
    with shown_build():
        BUILD.warning("%s", "the base image cannot be had")
        BUILD.info("%s", "Step 3/4 : RUN make [bold]all")
    shown = capsys.readouterr().err
    assert "2/4" in shown
    assert "the base image cannot be had" in shown
    assert "make [bold]all" in shown


def test_a_failed_build_leaves_no_log_handler(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        with shown_build():
            raise ValueError("no disk")

    before = list(logging.getLogger("agentgym").handlers)
    with pytest.raises(ValueError, match="no disk"):
        failing()
    assert logging.getLogger("agentgym").handlers == before
    assert "built" not in capsys.readouterr().err
