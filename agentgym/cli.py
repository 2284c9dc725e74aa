"""The command line: `agentgym doctor | gc | ls | merge | sandbox build`.

What a command needs is imported when it runs: asking for help loads neither torch nor Docker's client.
"""

import difflib
import importlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from agentgym.doctor import doctor, installed
from agentgym.errors import AgentGymError, EngineError, SandboxError, boundary
from agentgym.extras import needs_extra
from agentgym.owners import dead_folders, is_dead

HEADER = """Look after agentgym on this machine: what runs here, which environments there are, what killed runs left.

Each command says more with --help. Training itself is a Python program: see the recipes and docs/training.md.
"""
EXTRAS = {"docker": "docker", "torch": "train", "transformers": "train", "peft": "train", "gymnasium": "gymnasium"}
"""The extra that brings a package, for who asks for a command without it."""


# ---------------------------------------------------------------------------------------------------- gc


def gc(dry_run: bool = False) -> int:
    """Remove what killed runs left on this machine: containers, and folders with their sockets.

    Args:
        dry_run: Say what would be removed, and remove nothing.
    """
    verb = "would remove" if dry_run else "removed"
    left = [*_dead_containers(), *_dead_folders()]
    for what, remove in left:
        if not dry_run:
            remove()
        _say(f"{verb} {what}")
    if not left:
        _say("nothing of ours is left over")
    return 0


def _dead_containers() -> Iterator[tuple[str, Callable[[], object]]]:
    """What each dead owner's container is called, and how to remove it; nothing where no engine runs."""
    from agentgym.sandboxes.docker_client import connect

    try:
        client = connect(timeout_s=30)
    except (SandboxError, ImportError) as error:
        _say(f"containers not looked at: {error}")
        return
    try:
        for container in client.containers(all=True, filters={"label": "agentgym.owner"}):
            if is_dead(container["Labels"]["agentgym.owner"]):
                name = f"container {container['Id'][:12]} ({container['State']})"
                yield name, partial(_remove, client, container["Id"])
    finally:
        client.close()


def _remove(client: Any, container: str) -> None:
    from docker.errors import APIError

    try:
        client.remove_container(container, v=True, force=True)
    except APIError as error:
        if error.status_code not in (404, 409):  # Gone, or being removed.
            raise


def _dead_folders() -> Iterator[tuple[str, Callable[[], object]]]:
    for folder in dead_folders():
        yield f"folder {folder}", partial(shutil.rmtree, folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------- ls


def ls(envs: tyro.conf.Positional[tuple[str, ...]] = ()) -> int:
    """List the environments that the files envs/*/env.py register, and those named.

    Args:
        envs: More of them, as module:Class.
    """
    from agentgym.env import find_env, registered

    # An installed command does not have the working folder on its path.
    sys.path[:0] = [str(Path.cwd())] if str(Path.cwd()) not in sys.path else []
    broken = [line for name in _env_modules() if (line := _import(name))]
    found = dict(registered())
    for name in envs:
        try:
            found[name] = find_env(name)
        except (ValueError, AgentGymError) as error:
            broken.append(str(error))
    for name, cls in sorted(found.items()):
        where = f"{cls.__module__}:{cls.__qualname__}"
        _say(f"{name:<20}  {where:<40}  {_first_line(cls)}".rstrip())
    for line in broken:
        _say(line)
    if not found and not broken:
        _say("no environments: there is no envs/*/env.py below this folder, and none was named")
    return 1 if broken else 0


def _env_modules() -> list[str]:
    return [f"envs.{path.parent.name}.env" for path in sorted(Path("envs").glob("*/env.py"))]


def _import(module: str) -> str | None:
    """What went wrong, in one line."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{module}: {type(error).__name__}: {error}"
    return None


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


# ---------------------------------------------------------------------------------------------------- merge


def merge(adapter: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path], base: str | None = None) -> int:
    """Write a base model and an adapter that was trained on it as one plain model, with its tokenizer.

    Args:
        adapter: The folder of an adapter in PEFT's format, such as a run's adapter/.
        out: The folder to write.
        base: The base's folder or hub name; by default the one that the adapter names.
    """
    with boundary(EngineError, f"adapter {str(adapter)!r}"):
        config = json.loads((adapter / "adapter_config.json").read_text())
    base = base or config.get("base_model_name_or_path")
    if base is None:
        raise EngineError(f"adapter {str(adapter)!r} names no base model; give one with --base")
    from agentgym.train.weights import write_merged

    with boundary(EngineError, f"merge into {base!r}"):
        write_merged(base, adapter, out)
    _say(str(out))
    return 0


# ---------------------------------------------------------------------------------------------------- sandbox


def build(
    from_debootstrap: bool = False,
    base: str | None = None,
    pip: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    tag: str | None = None,
) -> int:
    """Build the image that Docker boxes run, and print its id.

    Args:
        from_debootstrap: Stand on a minimal Debian; for machines that reach no registry. Needs root.
        base: The image to stand on; it needs a python3.
        pip: A package that code in the box can import; may be given several times.
        tag: The image's name; by default the one that Docker boxes use.
    """
    from agentgym.sandboxes import image

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _say(image.build(tag, base=base, from_debootstrap=from_debootstrap, pip=pip))
    return 0


COMMANDS: Mapping[str, Any] = {
    "doctor": doctor,
    "gc": gc,
    "ls": ls,
    "merge": merge,
    "sandbox": {"build": build},
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors of ours, and a package that is not installed, are one line on stderr."""
    args = sys.argv[1:] if args is None else list(args)
    if args[:1] in (["--version"], ["-V"]):
        _say(f"agentgym {installed('agentgym') or 'of a checkout that is not installed'}")
        return 0
    if (unknown := _unknown(args, COMMANDS)) is not None:
        sys.stderr.write(f"agentgym: {unknown}\n")
        return 2
    try:
        with needs_extra():
            return int(tyro.cli(_parser(COMMANDS), prog="agentgym", description=HEADER, args=args))
    except AgentGymError as error:
        sys.stderr.write(f"agentgym: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        if (extra := EXTRAS.get(str(error.name).partition(".")[0])) is None:
            raise
        sys.stderr.write(f"agentgym: {error.name} is not installed: pip install 'agentgym[{extra}]'\n")
        return 1


def _unknown(args: Sequence[str], commands: Mapping[str, Any]) -> str | None:
    """What is wrong with the command's name; None where it is one, or none was given."""
    if not args or args[0].startswith("-"):
        return None
    name = args[0]
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(commands)}"
        return f"there is no command {name!r}; {hint}"
    given = commands[name]
    return _unknown(args[1:], given) if isinstance(given, Mapping) else None


def _parser(commands: Mapping[str, Any]) -> Any:
    """A union of subcommands, as tyro understands it; a nested mapping is a command with commands of its own."""
    made = [_subcommand(name, given) for name, given in commands.items()]
    # A union needs two members, also where there is one command.
    return Union[(*made, Annotated[None, tyro.conf.Suppress])]


def _subcommand(name: str, given: Any) -> Any:
    if not isinstance(given, Mapping):
        return Annotated[Any, tyro.conf.subcommand(name=name, constructor=given)]
    words = f"One of: {', '.join(given)}."
    return Annotated[Any, tyro.conf.subcommand(name=name, constructor=_parser(given), description=words)]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
