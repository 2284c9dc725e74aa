"""Paths on a command line that the system refuses: every command reports them in one line."""

from pathlib import Path

import pytest

from agentgym.cli import main as cli
from agentgym.store.writer import RolloutWriter
from tests.store.test_store import group, rollout

LONG = "n" * 300
BAD = {
    "a folder whose name is too long": f"{LONG}/run",
    "a path that is too long": "abc/" * 1500 + "run",
    "a file in place of a folder": "file/run",
    "links in a circle": "circle/run",
}
COMMANDS = [
    ["check", "PATH/env.py"],
    ["compare", "PATH", "RUN"],
    ["compare", "RUN", "PATH"],
    ["eval", "chase", "--model", "tiny", "--output-dir", "PATH"],
    ["export", "PATH", "--to", "sft"],
    ["export", "RUN", "--to", "sft", "--output", "PATH"],
    ["export", "RUN", "--to", "atif", "--output=PATH"],
    ["import", "PATH", "--output-dir", "imported"],
    ["import", "trajectories", "--output-dir", "PATH"],
    ["merge", "PATH", "merged"],
    ["merge", "adapter", "PATH"],
    ["new", "PATH"],
    ["report", "PATH"],
    ["report", "RUN", "--output-dir", "PATH"],
    ["rescore", "PATH"],
    ["rescore", "RUN", "--env", "chase", "--output-dir", "PATH"],
    ["sandbox", "build", "--dockerfile", "PATH"],
    ["show", "PATH"],
    ["train", "chase", "--model", "PATH"],
    ["train", "chase", "--output-dir", "PATH"],
    ["train", "chase", "--resume", "PATH"],
    ["train", "chase", "--tasks-from", "PATH"],
    ["view", "PATH", "--no-browser"],
]
WRITERS = [words for words in COMMANDS if "RUN" in words or words[0] == "import"]
CASES = [
    *(pytest.param(words, LONG, id=f"{' '.join(words)}: a name that is too long") for words in COMMANDS),
    *(pytest.param(words, bad, id=f"{' '.join(words)}: {what}") for words in WRITERS for what, bad in BAD.items()),
]
"""Every command with a name that is too long, and those that read or write a run with every bad path."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Change to a folder with a file, a link to itself, a run, exported trajectories, and half an adapter."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("circle").symlink_to("circle")
    with RolloutWriter(Path("RUN")) as writer:
        writer.add([group(rollout("a/0", 0.5), rollout("a/1", 1.0))], step=0)
    assert cli.main(["export", "RUN", "--to", "atif", "--output", "trajectories"]) == 0
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "tiny"}')
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize(("words", "bad"), CASES)
@pytest.mark.usefixtures("folder")
def test_a_path_that_the_system_refuses_gives_one_line(
    words: list[str], bad: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = [word.replace("PATH", bad) for word in words]
    monkeypatch.setattr("sys.argv", ["agentgym", *typed])
    try:
        code: object = cli.main(typed)
    except SystemExit as stopped:
        code = stopped.code
    lines = [*capsys.readouterr().err.splitlines(), *([code] if isinstance(code, str) else [])]
    assert code not in (0, None)
    if words[0] == "train":
        assert lines.pop(0).startswith(("starting: chase on ", "resuming: chase on "))
    assert len(lines) == 1
    assert lines[0].startswith("agentgym")


@pytest.mark.usefixtures("folder")
def test_the_line_names_the_path_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "RUN", "--to", "sft", "--output", "file/out"]) == 1
    said = "agentgym: export: file cannot be used (a file is in its way); give another path\n"
    assert capsys.readouterr().err == said
    assert cli.main(["show", LONG]) == 1
    said = f"agentgym: show: {LONG} cannot be used (File name too long); give another path\n"
    assert capsys.readouterr().err == said


def test_an_error_about_a_path_that_was_not_typed_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(run: Path) -> object:
        return (tmp_path / LONG).stat()

    monkeypatch.setattr("agentgym.cli.show.opened", opened)
    monkeypatch.chdir("/")
    with pytest.raises(OSError, match="File name too long"):
        cli.main(["show", "somewhere"])
