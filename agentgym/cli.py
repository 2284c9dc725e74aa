"""The command line: `agentgym doctor | gc | ls | merge | sandbox build`.

What a command needs is imported when it runs: asking for help loads neither torch nor Docker's client.
"""

import importlib
import json
import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from agentgym.errors import AgentGymError, EngineError, SandboxError, boundary
from agentgym.owners import dead_folders, is_dead

PACKAGES = {"torch": "train", "transformers": "train", "peft": "train", "docker": "docker"}
"""What the extras bring that a user asks about first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is there or is not, and then how to get it."""

    name: str
    ok: bool
    detail: str
    get: str = ""
    otherwise: str = "missing"
    """The word for what is not ok."""

    def __str__(self) -> str:
        line = f"{'ok' if self.ok else self.otherwise:<9}{self.name:<16}{self.detail}".rstrip()
        return line if self.ok or not self.get else f"{line}\n{'':<25}-> {self.get}"


# ---------------------------------------------------------------------------------------------------- doctor


def doctor(model: str | None = None) -> int:
    """Say what runs here and how to get the rest; the exit code is 0 where a box can be had.

    Args:
        model: Look at the tokenizer of this folder or hub name instead: whether its chat template only ever appends,
            keeps the turn separators and reads tool calls back; 0 where it does the last two.
    """
    if model is not None:
        return _doctor_of(model)
    for finding in findings():
        _say(str(finding))
    box = _box()
    _say(str(box))
    return 0 if box.ok else 1


def _doctor_of(model: str) -> int:
    traits = list(model_findings(model))
    for trait in traits:
        _say(str(trait))
    return 0 if all(trait.ok for trait in traits if trait.name in ("separators", "tool calls")) else 1


def model_findings(model: str) -> Iterator[Finding]:
    """One finding a line of `agentgym doctor --model`; EngineError where there is no such tokenizer."""
    from transformers import AutoTokenizer

    from agentgym.rollouts.chat import HuggingFaceTokenizer
    from agentgym.rollouts.examine import examine

    with boundary(EngineError, f"model {model!r}"):
        tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(model))
    family, shipped = tokenizer.family, getattr(tokenizer.tokenizer, "response_template", None) is not None
    detail = "a response_template of its own" if shipped else f"read as {family}"
    known = shipped or family is not None
    yield Finding(
        name="family", ok=known, detail=detail if known else "its tool calls are read as text", otherwise="no"
    )
    for trait in examine(tokenizer):
        yield Finding(name=trait.name, ok=trait.ok, detail=trait.detail, otherwise="no")


def findings() -> Iterator[Finding]:
    """One finding a line of `agentgym doctor`, but for the last, which is the verdict."""
    yield Finding(name="python", ok=sys.version_info >= (3, 11), detail=platform.python_version())
    yield from (_package(name, extra) for name, extra in PACKAGES.items())
    yield from _docker()
    yield _bubblewrap()
    yield _runsc()
    yield _gpus()


def _package(name: str, extra: str) -> Finding:
    try:
        return Finding(name=name, ok=True, detail=version(name))
    except PackageNotFoundError:
        return Finding(name=name, ok=False, detail="not installed", get=f"pip install 'agentgym[{extra}]'")


def _docker() -> Iterator[Finding]:
    engine = Finding(name="docker engine", ok=False, detail="", get="install Docker, start it, and let this user in")
    try:
        from agentgym.sandboxes.docker import default_image, image_digest
        from agentgym.sandboxes.docker_client import connect

        client = connect(timeout_s=5)
    except (SandboxError, ImportError) as error:
        yield Finding(name=engine.name, ok=False, detail=str(error), get=engine.get)
        return
    try:
        yield Finding(name=engine.name, ok=True, detail=str(client.version()["Version"]))
        image = default_image()
        yield Finding(name="sandbox image", ok=True, detail=f"{image} {image_digest(client, image)[:19]}")
    except SandboxError as error:
        why_not = str(error).rpartition(": ")[0] or str(error)
        yield Finding(name="sandbox image", ok=False, detail=why_not, get="agentgym sandbox build")
    except Exception as error:  # What the engine and the connection to it raise has no common name.
        yield Finding(name=engine.name, ok=False, detail=f"{type(error).__name__}: {error}", get=engine.get)
    finally:
        client.close()


def _bubblewrap() -> Finding:
    from agentgym.sandboxes.local import why_no_bubblewrap

    why_not = why_no_bubblewrap()
    get = "apt-get install bubblewrap (0.8 or newer), and let users have namespaces"
    return Finding(name="bubblewrap", ok=why_not is None, detail=why_not or shutil.which("bwrap") or "", get=get)


def _runsc() -> Finding:
    """gVisor counts where the engine knows it, which a remote one may without a runsc here."""
    path = shutil.which("runsc")
    get = "install gVisor (https://gvisor.dev), and name it to the engine as in sandbox/README.md"
    if "runsc" in _runtimes():
        return Finding(name="runsc", ok=True, detail="a runtime of the Docker engine")
    detail = f"{path}, but the Docker engine does not know it" if path else "not installed"
    return Finding(name="runsc", ok=False, detail=detail, get=get)


def _runtimes() -> set[str]:
    """The names that a box's `runtime` may have; none where no engine answers."""
    try:
        from agentgym.sandboxes.docker_client import connect

        client = connect(timeout_s=5)
    except (SandboxError, ImportError):
        return set()
    try:
        return set(client.info()["Runtimes"])
    except Exception:  # What the engine and the connection to it raise has no common name.
        return set()
    finally:
        client.close()


def _gpus() -> Finding:
    """By the driver's own tool: loading torch for this would take seconds."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return Finding(
            name="gpus", ok=False, detail="none seen by nvidia-smi", get="not needed: the recipes run on a CPU"
        )
    names = [line.split(" (UUID")[0] for line in listed.stdout.splitlines()]
    return Finding(name="gpus", ok=bool(names), detail="; ".join(names))


def _box() -> Finding:
    from agentgym.sandboxes.choose import auto

    try:
        return Finding(name="a box", ok=True, detail=type(auto()).__name__)
    except SandboxError:
        return Finding(name="a box", ok=False, detail="", get="either Docker with its image, or bubblewrap")


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
    found = dict(registered()) | {name: find_env(name) for name in envs}
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
    """Run one command; its exit code. Errors of ours are one line on stderr."""
    try:
        return int(tyro.cli(_parser(COMMANDS), prog="agentgym", description=__doc__, args=args))
    except AgentGymError as error:
        sys.stderr.write(f"agentgym: {error}\n")
        return 1


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
