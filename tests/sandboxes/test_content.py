"""Calls that meet unusable content raise SandboxContentError immediately, whatever code in the sandbox left there."""

import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgym.errors import SandboxContentError, SandboxError, WireError
from agentgym.sandboxes.protocol import Sandbox
from agentgym.sandboxes.remote import files
from agentgym.sandboxes.remote.refusals import MACHINE, raise_refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPOIL = """
mkdir folder; mkfifo pipe; ln -s /dev/zero zero; ln -s nowhere dangling; ln -s loop loop; ln -s /etc/passwd out
truncate -s 1T sparse 2>/dev/null || truncate -s 3M sparse; echo x > closed; chmod 000 closed; printf '\\377' > latin
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
"""
NO_FILES = ["folder", "pipe", "zero", "dangling", "loop", "out", "socket", "none", "none/x", "folder/x", "latin/x", "."]
NO_PATHS = ["../x", "/etc/passwd", "n" * 300, "d/" * 3000, "a\0b", "\ud800", "\x00"]


CAN_BE_WRITTEN = ["none", "none/x", "folder/x", "sparse"]


def content_of(path: str, sandbox: Sandbox, here: Path) -> dict[str, Any]:
    """Return the calls that take a file out of the sandbox."""
    return {
        "read": lambda: sandbox.read(path),
        "read_text": lambda: sandbox.read_text(path),
        "get": lambda: sandbox.get(path, here / "got", limit=1 << 20),
        "archive": lambda: sandbox.archive(path, limit=1 << 20),
    }


def names_in(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=ascii)


async def is_refused(call: Any) -> bool:
    """Return whether a call raises SandboxContentError."""
    try:
        await call
    except SandboxContentError:
        return True
    return False


async def test_whatever_code_leaves_in_a_sandbox_raises_sandbox_content_error(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec(SPOIL)
    taken = []
    for path in [*NO_FILES, *NO_PATHS, "sparse"]:
        is_folder = path in ("folder", ".")
        calls = content_of(path, sandbox, tmp_path)
        if not is_folder:
            calls["list"] = lambda path=path: sandbox.list(path)
        if path not in CAN_BE_WRITTEN:
            calls["write"] = lambda path=path: sandbox.write({path: "x"})
        for name, call in calls.items():
            if not (is_folder and name in ("get", "archive")) and not await is_refused(call()):
                taken.append((name, path[:20]))
    assert taken == []
    with pytest.raises(SandboxContentError, match="not UTF-8"):
        await sandbox.read_text("latin")
    assert await sandbox.read("latin") == b"\xff"
    if (await sandbox.exec("cat closed")).exit_code:  # Root may read it.
        assert all([await is_refused(call()) for call in content_of("closed", sandbox, tmp_path).values()])
    assert (await sandbox.exec("echo goes on")).stdout == "goes on\n"


async def test_text_that_cannot_be_passed_to_a_program_raises_sandbox_content_error(sandbox: Sandbox) -> None:
    taken = []
    for number, work in enumerate(
        [
            sandbox.exec(["echo", "x" * (2 << 20)]),
            sandbox.exec("x" * (2 << 20)),
            sandbox.python("x" * (2 << 20)),
            sandbox.exec("true", env={"ANSWER": "a\0b"}),
            sandbox.verify(command="./solve 'unclosed"),
            sandbox.verify(command="./solve a\0b"),
            sandbox.verify(code="def test_(): \ud800"),
            sandbox.verify(code="this is no Python"),
            sandbox.verify(code="pass", expect={"f" * (2 << 20): 1}),
        ]
    ):
        if not await is_refused(work):
            taken.append(number)
    assert taken == []
    assert not (await sandbox.exec(["echo", "a\0b"])).ok


async def test_an_empty_folder_is_copied_out_as_an_empty_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir -p empty links/inner tree/none; ln -s /etc/passwd links/out; echo x > tree/f")
    assert await sandbox.get("empty", tmp_path / "empty") == []
    assert names_in(tmp_path / "empty") == []
    assert await sandbox.get("links", tmp_path / "links") == ["out"]
    assert names_in(tmp_path / "links") == ["inner"]
    await sandbox.get("tree", tmp_path / "tree")
    assert names_in(tmp_path / "tree") == ["f", "none"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="in the way"):
        await sandbox.get("empty", tmp_path / "file")


async def test_a_tree_that_no_host_could_remove_stays_in_the_sandbox(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shutil.rmtree` recurses once per level of nested folders."""
    await sandbox.exec("mkdir -p " + "d/" * 400)
    with pytest.raises(SandboxContentError, match="folders deep"):
        await sandbox.get(".", tmp_path / "deep")
    await sandbox.exec("rm -r d; mkdir many; cd many; seq 101 | xargs mkdir")
    monkeypatch.setattr(files, "MAX_FILES", 100)
    with pytest.raises(SandboxContentError, match="more than 100 files and folders"):
        await sandbox.get("many", tmp_path / "many")
    assert names_in(tmp_path) == []


async def test_every_call_accepts_any_file_name_that_list_returned(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec(
        "printf one > \"$(printf 'a\\377b')\"; printf two > \"$(printf 'a\\nb')\"; mkdir \"$(printf 'd\\200')\""
    )
    names = await sandbox.list()
    assert names == ["a\nb", "a\udcffb", "d\udc80/"]
    assert [await sandbox.read(name) for name in names[:2]] == [b"two", b"one"]
    assert await sandbox.list(names[2]) == []
    await sandbox.write({f"{names[2]}f": "in it", names[1]: "again"})
    assert (await sandbox.exec(["cat", names[1], f"{names[2]}f"])).stdout == "againin it"
    await sandbox.get(names[1], tmp_path / "got")
    assert (tmp_path / "got").read_text() == "again"
    await sandbox.get(".", tmp_path / "all")
    assert names_in(tmp_path / "all") == ["a\nb", "a\udcffb", "d\udc80"]
    (tmp_path / "t.tar").write_bytes(await sandbox.archive(names[1]))
    with tarfile.open(tmp_path / "t.tar") as packed:
        assert packed.getnames() == [names[1]]


@pytest.mark.parametrize(
    "answer",
    [
        {"error": ""},
        {"error": 5},
        {"error": ["x"]},
        {"errno": 2},
        {"error": "x", "errno": "2"},
        {"error": None, "errno": True},
    ],
)
async def test_an_answer_of_wrong_types_is_a_wire_error(answer: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="invalid answer"):
        raise_refusal(answer, {})


@pytest.mark.parametrize("number", MACHINE)
async def test_errors_of_the_machine_are_not_content_errors(number: int) -> None:
    with pytest.raises(SandboxError):
        raise_refusal({"error": "x", "errno": number}, {})


async def test_a_sandbox_that_sends_answers_of_wrong_types_is_cut(sandbox: Sandbox) -> None:
    link = getattr(sandbox, "link")  # noqa: B009  # Only this kind of sandbox has it.
    frame = SimpleNamespace(envelope={"id": 1, "error": ""}, body=b"")
    with pytest.raises(SandboxError, match="sandbox_lost: the sandbox sent an invalid answer"):
        link._check_refusal(frame, {})
    assert link.broken
