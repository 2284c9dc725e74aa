"""The command line: the output of each command and the meaning of its exit code."""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli import main as cli
from agentgym.environments.registry import gallery
from agentgym.errors import SandboxError
from agentgym.errors.extras import install_line
from agentgym.machine import process_identity as owners
from agentgym.machine.process_identity import owner
from agentgym.sandboxes.docker import client as docker_client, heartbeat
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.docker.images import build as image, names as docker_image

ROOT = Path(__file__).parents[2]


def say(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = cli.main(args)
    return code, capsys.readouterr().out


def dead_owner() -> str:
    """Return the owner name of a process of this boot that has ended: this process's name with another start time."""
    *same, _ = owner().split("/")
    return "/".join([*same, "1"])


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_help_names_every_command_and_imports_no_large_package() -> None:
    code = (
        "import sys\nfrom agentgym.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'docker', 'transformers', 'pytest') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert len(done.stdout.splitlines()) < 4 * len(cli.COMMANDS)  # one sentence each; a command's own help has the rest
    assert "imported" not in done.stdout  # Which modules are imported is of no interest to a user.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("docter",), "there is no command 'docter'; did you mean 'doctor'?"),
        (("sandbox", "biuld"), "there is no command 'biuld'; did you mean 'build'?"),
        (
            ("nonsense",),
            f"there is no command 'nonsense'; there are: {', '.join(cli.COMMANDS)}",
        ),
    ],
)
def test_an_unknown_command_is_refused_in_one_line_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"agentgym: {said}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), f"choose a command: {', '.join(cli.COMMANDS)}; see `agentgym --help`"),
        (("sandbox",), "choose a command: build; see `agentgym sandbox --help`"),
        (("--foo",), "there is no option --foo; see `agentgym --help`"),
        (
            ("show", "runs", "--wurst", "3"),
            "show: there is no option --wurst; did you mean --worst?; see `agentgym show --help`",
        ),
        (
            ("gc", "--drry-run"),
            "gc: there is no option --drry-run; did you mean --dry-run?; see `agentgym gc --help`",
        ),
        (
            ("sandbox", "build", "--tga", "x"),
            "sandbox build: there is no option --tga; did you mean --tag?; see `agentgym sandbox build --help`",
        ),
        (("show", "one", "two"), "show: unexpected argument 'two'; see `agentgym show --help`"),
        (
            ("show",),
            "show: RUN is missing: the folder of the run, which contains rollouts.sqlite; see `agentgym show --help`",
        ),
        (
            ("compare",),
            "compare: ONE is missing: the folder of an evaluation or a training run, which contains rollouts.sqlite; "
            "see `agentgym compare --help`",
        ),
        (
            ("play",),
            "play: ENV is missing: a registered name, the folder of an env.py, module:Class, or path/env.py:Class; "
            "see `agentgym play --help`",
        ),
        (
            ("export", "run"),
            "export: --to {atif,sft,openai} is missing: the format; see `agentgym export --help`",
        ),
        (
            ("import",),
            "import: --output-dir PATH is missing: the folder to create; see `agentgym import --help`",
        ),
        (
            ("show", "run", "--", "--limit=3"),
            "show: --limit: expected before `--`, which ends the options; move the option there; "
            "see `agentgym show --help`",
        ),
        (
            ("show", "run", "--", "--help"),
            "show: --help: expected before `--`, which ends the options; move the option there; "
            "see `agentgym show --help`",
        ),
        (
            ("serve", "hello", "--", "--no-token"),
            "serve: --no-token: expected before `--`, which ends the options; move the option there; "
            "see `agentgym serve --help`",
        ),
        (
            ("show", "run", "--", "--bset", "3"),
            "show: there is no option --bset; did you mean --best?; see `agentgym show --help`",
        ),
        (
            ("eval", "hello", "--env.note", "--", "--n", "5"),
            "eval: --env.note: expected a value; see `agentgym eval --help`",
        ),
        (("play", "hello", "--env", "x"), "play: there is no option --env; see `agentgym play --help`"),
        (
            ("eval", "hello", "--models", "x"),
            "eval: there is no option --models; did you mean --model?; see `agentgym eval --help`",
        ),
        (
            ("show", "run", "--worst", "a"),
            "show: error parsing --worst: no type matching INT could be instantiated from ['a']; "
            "see `agentgym show --help`",
        ),
        (
            ("doctor", "--model"),
            "doctor: missing value for argument '--model'. Expected 1 values; see `agentgym doctor --help`",
        ),
    ],
)
def test_unexpected_words_are_refused_in_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"agentgym: {said}\n"


def test_words_after_two_dashes_are_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "--limit", "3", "--", "-run"]) == 1
    assert capsys.readouterr().err.startswith("agentgym: run: there is no folder -run; ")


def commands(known: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    for name, given in known.items():
        if isinstance(given, Mapping):
            yield from commands(given, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("words", [(), *commands(cli.COMMANDS)], ids=" ".join)
def test_the_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--help"])
    example = " ".join(("\n$ agentgym", *words))
    assert example in capsys.readouterr().out


@pytest.mark.parametrize("words", [one for one in commands(cli.COMMANDS) if one != ("train",)], ids=" ".join)
def test_help_names_a_default_only_if_there_is_one(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not [odd for odd in ("{None}", "(default: )", "(default: None)") if odd in said]


def test_help_describes_commands_with_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "`sandbox build`: Build the image" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_package_runs_as_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "agentgym", "sho"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == "agentgym: there is no command 'sho'; did you mean 'show'?\n"


def test_the_usage_of_ls_names_its_argument_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["ls", "--help"])
    usage = capsys.readouterr().out.partition("\n")[0]
    assert usage == "usage: agentgym ls [-h] [ENV ...]"


@pytest.mark.parametrize(
    ("command", "arguments"), [("eval", "ENV"), ("new", "FOLDER"), ("show", "RUN"), ("compare", "ONE OTHER")]
)
def test_the_usage_of_a_command_calls_its_arguments_by_their_names(
    command: str, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f" {arguments}" in capsys.readouterr().out.partition("\n")[0]


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert say(capsys, "--version") == (0, f"agentgym {version('agentgym-kit')}\n")


def command(script: str, stdout: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    """Run a command line of bash, in which {} stands for agentgym."""
    words = ["bash", "-c", script.format(f"{sys.executable} -m agentgym")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=environment)


@pytest.mark.parametrize("where", ["> /dev/full", ">&-"])
def test_a_version_that_cannot_be_printed_is_an_error_of_one_line(where: str) -> None:
    done = command(f"{{}} --version {where}")
    assert done.returncode == 1
    assert re.fullmatch(r"agentgym: stdout (is closed|cannot be written)[^\n]*\n", done.stderr)


def test_nothing_is_said_if_nobody_reads_the_version() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = command("{} --version", write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def without(package: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as if that package were not installed, with no container engine running."""
    code = (
        f"import sys; sys.modules[{package!r}] = None; from agentgym.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("package", "args", "extra"),
    [
        ("docker", ("sandbox", "build"), "docker"),
        ("transformers", ("doctor", "--model", "recipes/checkpoints/chase"), "train"),
        ("torch", ("merge", "ADAPTER", "out"), "train"),
    ],
)
def test_a_command_with_a_missing_extra_prints_the_install_command_in_one_line(
    package: str, args: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    done = without(package, *(str(tmp_path) if word == "ADAPTER" else word for word in args))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert install_line(extra) in done.stderr


def test_gc_removes_only_folders_of_dead_owners(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scratch: Path, no_engine: None
) -> None:
    ours = owners.new_folder("run").name
    with monkeypatch.context() as dead:
        dead.setattr(owners, "owner", dead_owner)
        names = [owners.new_folder(kind).name for kind in ("run", "sandbox")] + [ours]
    for name in [*names, "agentgym-run-odd", "somebody-else"]:
        (scratch / name / "0").mkdir(parents=True)
        (scratch / name / "0" / "sandbox.sock").touch()
    code, said = say(capsys, "gc", "--dry-run")
    assert code == 0
    assert all(f"would remove folder {scratch / name}" in said for name in names[:2])
    assert len(list(scratch.iterdir())) == 5
    code, said = say(capsys, "gc")
    assert code == 0
    assert all(f"removed folder {scratch / name}" in said for name in names[:2])
    assert {left.name for left in scratch.iterdir()} == {ours, "agentgym-run-odd", "somebody-else"}
    assert "containers were not checked: no Docker engine answers" in said
    assert "nothing to remove" in say(capsys, "gc")[1]


def labeled(client: Any, stack: contextlib.ExitStack, who: str) -> str:
    """Create a container of that owner, which is removed when the stack ends, and return its id."""
    labels = {heartbeat.OWNER_LABEL: who, heartbeat.RUN_LABEL: secrets.token_hex(6)}
    made: str = client.create_container(docker_image.default_image(), labels=labels)["Id"]
    stack.callback(heartbeat.remove_container, client, made)
    return made


@pytest.mark.docker
def test_gc_removes_only_containers_of_dead_owners(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    if (why_not := why_no_docker()) is not None:
        pytest.skip(f"docker: {why_not}")
    # An owner on another machine: no sweep that happens to run here at the same time takes it for dead.
    elsewhere = "elsewhere/boot/1/1/1"
    monkeypatch.setattr(heartbeat, "state_of", lambda who: "ended" if who == elsewhere else "alive")
    client = docker_client.connect()
    with contextlib.ExitStack() as stack:
        stack.callback(client.close)
        ours, dead = (labeled(client, stack, who) for who in (owner(), elsewhere))
        said = say(capsys, "gc", "--dry-run")[1]
        assert f"would remove container {dead[:12]} (created)" in said
        assert ours[:12] not in said
        assert f"removed container {dead[:12]} (created)" in say(capsys, "gc")[1]
        left = {container["Id"] for container in client.containers(all=True)}
        assert left & {ours, dead} == {ours}


def test_ls_lists_envs_with_class_and_description() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentgym", "ls", "envs.chase.env:Chase"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert lines["chase"][0] == "envs.chase.env:Chase"
    assert lines["chase"][1].startswith("Reward 1 for the right answer")
    assert {"code_repair", "python_math", "envs.chase.env:Chase"} <= set(lines)


def test_ls_continues_if_an_env_does_not_load(tmp_path: Path) -> None:
    for name, text in (
        ("good", "import agentgym as ag\n@ag.register('good')\nclass Good(ag.Env):\n    '''Fine.'''\n"),
        ("bad", "1 / 0\n"),
    ):
        (tmp_path / "envs" / name).mkdir(parents=True)
        (tmp_path / "envs" / name / "env.py").write_text(text)
    code = "import sys; from agentgym.cli.main import main; sys.path.remove(''); sys.exit(main(['ls']))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    lines = done.stdout.splitlines()
    assert ["good", "envs.good.env:Good", "Fine."] in [line.split() for line in lines]
    assert lines[-1] == "envs/bad/env.py: ZeroDivisionError: division by zero, at env.py:1 in <module>"
    assert done.returncode == 1


def test_ls_with_an_unknown_name_prints_one_line_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = say(capsys, "ls", "my_env", "no.such.module:Env")
    assert code == 1
    unknown, missing = said.splitlines()[-2:]
    assert unknown.startswith("there is no environment 'my_env'; ")
    assert "create one with `agentgym new`, or give a class as module:Class or path/env.py:Class" in unknown
    assert unknown.endswith(" (the name in its @ag.register is known only after its module is imported)")
    assert missing == "env 'no.such.module:Env': ModuleNotFoundError: No module named 'no'"


def test_ls_lists_the_gallery_in_any_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, said = say(capsys, "ls")
    assert code == 0
    assert (
        {line.split()[0] for line in said.splitlines()} >= gallery().keys() > {"chase", "search", "judge_essay_pairs"}
    )


def test_sandbox_build_passes_its_arguments_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def build(tag: str | None, **options: object) -> str:
        asked.append((tag, options))
        return "sha256:abc"

    monkeypatch.setattr(image, "build", build)
    assert say(capsys, "sandbox", "build", "--pip", "numpy>=2", "--pip", "attrs", "--apt", "git", "--tag", "mine") == (
        0,
        "sha256:abc\n",
    )
    assert say(capsys, "sandbox", "build", "--from-debootstrap")[0] == 0
    nothing = {"base": None, "dockerfile": None, "from_debootstrap": False, "pip": (), "apt": ()}
    assert asked == [
        ("mine", {**nothing, "pip": ("numpy>=2", "attrs"), "apt": ("git",)}),
        (None, {**nothing, "from_debootstrap": True}),
    ]


def test_an_agentgym_error_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> str:
        raise SandboxError("the Docker engine: it is gone")

    monkeypatch.setattr(image, "build", build)
    assert cli.main(["sandbox", "build"]) == 1
    assert capsys.readouterr().err == "agentgym: the Docker engine: it is gone\n"


def test_a_full_disk_is_one_line_on_stderr_and_other_system_errors_are_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> str:
        raise OSError(code, os.strerror(code), "image.tar")

    monkeypatch.setattr(image, "build", build)
    code = errno.ENOSPC
    assert cli.main(["sandbox", "build"]) == 1
    said = "agentgym: sandbox: [Errno 28] No space left on device: 'image.tar'; free space on its disk, or use another "
    assert capsys.readouterr().err == f"{said}one\n"
    code = errno.ECHILD
    with pytest.raises(ChildProcessError):
        cli.main(["sandbox", "build"])


def test_merge_writes_a_model_without_peft_and_finds_the_base_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from agentgym.train.trainer import TrainConfig, Trainer

    base = ROOT / "recipes/checkpoints/chase"
    with Trainer(base, TrainConfig(device="cpu")) as trainer:
        trainer.save(tmp_path / "adapter")  # untrained, so the merged model equals the base
    code, out = say(capsys, "merge", str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert (code, out) == (0, f"{tmp_path / 'merged'}\n")
    tensors = [load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())  # both bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 1
    assert "already exists; choose a new folder" in capsys.readouterr().err
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "again"), "--base", "tiny"]) == 0
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "no"), "--base", "./nowhere"]) == 1
    assert "base: there is no folder ./nowhere; give one that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [(None, "contains no adapter_config.json; give the folder of an adapter"), ("{}", "names no base model")],
)
def test_merge_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str | None, said: str
) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    assert cli.main(["merge", str(tmp_path), str(tmp_path / "merged")]) == 1
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an untrained adapter of "tiny"."""
    from agentgym.train.trainer import TrainConfig, Trainer

    folder = tmp_path_factory.mktemp("tiny") / "adapter"
    with Trainer("tiny", TrainConfig(device="cpu")) as trainer:
        trainer.save(folder)
    return folder


def name_base(adapter: Path, base: str, into: Path) -> Path:
    """Copy an adapter into a folder, with another base model in its config."""
    shutil.copytree(adapter, into)
    config = json.loads((into / "adapter_config.json").read_text())
    (into / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    return into


def test_a_base_that_an_adapter_names_as_tiny_is_found_by_merge(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_adapter: Path
) -> None:
    adapter = name_base(tiny_adapter, "tiny", tmp_path / "adapter")
    code, out = say(capsys, "merge", str(adapter), str(tmp_path / "merged"))
    assert (code, out) == (0, f"{tmp_path / 'merged'}\n")


def test_a_moved_base_is_named_together_with_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_adapter: Path
) -> None:
    adapter = name_base(tiny_adapter, "/gone/model", tmp_path / "adapter")
    missing = "there is no folder /gone/model; give one that exists, or a name on the Hugging Face hub"
    assert cli.main(["merge", str(adapter), str(tmp_path / "merged")]) == 1
    assert capsys.readouterr().err.startswith(
        f"agentgym: base: {missing} (named by {adapter}; give its new place with --base)"
    )
    for words in (
        ["doctor", "--model", str(adapter)],
        ["eval", "envs.chase.env:Chase", "--n", "1", "--model", str(adapter)],
    ):
        assert cli.main(words) == 1
        said = capsys.readouterr().err
        assert f"model: {missing}; it is the base model of the adapter {adapter}: if it was moved" in said
        assert f"merge {adapter} FOLDER --base MODEL`, and give FOLDER" in said


def test_a_missing_base_of_a_merge_is_refused_by_its_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["merge", str(tmp_path), str(tmp_path / "merged"), "--base", "./nowhere"]) == 1
    assert capsys.readouterr().err.startswith("agentgym: base: there is no folder ./nowhere; give one that exists")
