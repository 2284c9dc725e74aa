"""The tutorial: its commands, run in order from the wheel in an empty folder, print the output that the page shows."""

import json
import re
import shlex
import signal
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentgym.cli.envs.new import renamed
from tests.conftest import Installed
from tests.docs.blocks import DOCS, ROOT, blocks_of

PAGE = (DOCS / "tutorial.md").read_text()
SMALL = "--max-steps 2 --prompts-per-step 2 --group-size 4"
"""Flags that make the run short; the slow test uses the page's own."""
NEXT = 6
"""The number of lines after a run that suggest where to look next."""


@dataclass(frozen=True)
class Shown:
    """A command on the page, and the output that the page shows for it."""

    command: str
    lines: list[str]

    @property
    def typed(self) -> str:
        """The lines that the reader types into the command."""
        return "".join(f"{line[2:]}\n" for line in self.lines if line.startswith("> "))

    def pattern(self, steps: int) -> str:
        """Return a regular expression for the output of a run of this many steps."""
        text = re.escape("\n".join(self.lines)).replace(r"\.\.\.", r"[\s\S]*?")
        if not self.command.startswith("agentgym train"):
            return text
        if steps < 20:  # too few steps to learn reliably; the lines below the verdict are indented by its length
            text = text.replace(r"learned:\ ", r"(?:learned|reward\ unchanged|got\ worse|learned\ nothing):\ ").replace(
                r"\ " * 9, r"\ +"
            )
        return text.replace("20", str(steps))


def shown() -> list[Shown]:
    """Return the page's commands in order."""
    blocks = re.findall(r"^```console\n\$ (.*)\n([\s\S]*?)^```", PAGE, re.MULTILINE)
    return [Shown(command, output.splitlines()) for command, output in blocks]


def follow(folder: Path, installed: Installed, *, train: str, steps: int) -> dict[str, object]:
    """Run every command of the page in the folder and compare its output; return the run's summary."""
    summary: dict[str, object] = {}
    time = "TIME"
    for one in shown():
        command = one.command.replace("agentgym train hello", train).replace("TIME", time)
        if one.command.startswith("agentgym view"):
            assert re.fullmatch(one.pattern(steps), served(folder, installed, command))
            continue
        done = installed.run("bash", "-c", command, cwd=folder, typed=one.typed)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        if one.command.startswith("agentgym train"):
            summary = json.loads(done.stdout)
            time = str(summary["output_dir"]).rpartition("/")[2]
            said = done.stderr.splitlines()
            output = "\n".join([*said[:-NEXT], done.stdout.strip(), *said[-NEXT:]])
        else:
            output = f"{done.stdout}{done.stderr}".strip("\n")
        wanted = one.pattern(steps).replace("TIME", time)
        assert re.fullmatch(wanted, output), f"$ {command}\n{output}\n\nis not\n\n" + "\n".join(one.lines)
    return summary


def served(folder: Path, installed: Installed, command: str) -> str:
    """Start the command, fetch the page at the address that it prints, and end it with Ctrl-C; return its output."""
    with installed.start(*shlex.split(command), cwd=folder) as serving:
        assert serving.stdout is not None
        address = serving.stdout.readline().strip()
        try:
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with browser.open(address) as answer:
                assert b"<title>agentgym" in answer.read()
                page = answer.geturl()
            with browser.open(urllib.parse.urljoin(page, "api/runs")) as answer:
                assert len(json.load(answer)["runs"]) == 1
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.stdout.read() == ""
    assert serving.returncode in (0, 130)
    return address


def test_the_commands_cover_all_steps_from_new_to_eval() -> None:
    words = [one.command.split()[:2] for one in shown()]
    named = [second for first, second in words if first == "agentgym"]
    assert named == ["new", "check", "play", "train", "show", "eval", "view", "report"]


def test_the_commands_print_the_output_on_the_page(tmp_path: Path, installed: Installed) -> None:
    summary = follow(tmp_path, installed, train=f"agentgym train hello {SMALL}", steps=2)
    assert summary["optimizer_steps"] is not None
    assert "</html>" in (tmp_path / "report/report.html").read_text()


@pytest.mark.slow
def test_the_run_on_the_page_learns_as_shown(tmp_path: Path, installed: Installed) -> None:
    summary = follow(tmp_path, installed, train="agentgym train hello", steps=20)
    assert isinstance(summary["eval_after"], float)
    assert summary["eval_after"] >= 0.9


def test_the_env_on_the_page_is_the_one_that_new_creates() -> None:
    [block] = blocks_of(DOCS / "tutorial.md")
    made = renamed((ROOT / "templates/tool/env.py").read_text(), "tool", "hello")
    assert made == block.text


def test_the_finding_on_the_page_is_expected_by_the_tests_of_check() -> None:
    finding = PAGE.partition("`return 1.0`, and it says:\n\n```text\n")[2].partition("```")[0].splitlines()
    tests = (ROOT / "tests/cli/test_check.py").read_text()
    assert len(finding) == 3
    assert [line for line in finding if line not in tests] == []
