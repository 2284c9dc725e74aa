"""The command `agentgym doctor`: reports what works on this machine, and what is missing, or checks a tokenizer."""

import asyncio
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agentgym.chat.template_input import ToolsIn
from agentgym.cli.finding import Finding
from agentgym.cli.output import flush, say
from agentgym.errors import AgentGymError, SandboxError
from agentgym.errors.extras import DISTRIBUTION, install_line
from agentgym.sandboxes.protocol import SandboxSpec

PACKAGES = {
    "torch": install_line("train"),
    "transformers": install_line("train"),
    "peft": install_line("train"),
    "docker": install_line("docker"),
    "sglang": "not needed on a CPU; needs a separate virtual environment: docs/sglang.md of a checkout",
    "pytest-asyncio": "pip install pytest pytest-asyncio, for tests of an environment",
}
"""The packages to look for, and how to install each."""
START_DOCKER = "install Docker, start it, and give this user access"


def doctor(model: str | None = None, chat_template: str | None = None, tools: ToolsIn = "auto") -> int:
    """Report what works on this machine and how to install the rest.

    The exit code is 0 if a sandbox is available.

    For example:
    $ agentgym doctor
    $ agentgym doctor --model Qwen/Qwen3-0.6B
    $ agentgym doctor --model my_model --chat-template with_tools.jinja

    Args:
        model: Print a prompt as this model reads it, and check its chat template instead: whether it shows tools to the
            model, which tokens end a turn, how calls are read, whether it only ever appends text, and whether it keeps
            the separators between turns. Give a folder, a GGUF file, a hub name, "tiny", or an adapter's folder. The
            exit code is 0 if a stop token ends each turn, the separators are kept, and calls are read as they were
            written.
        chat_template: With --model, a chat template that replaces the model's: a Jinja file or its text.
        tools: With --model, what describes the tools to the model: template, prompt, refuse or auto, as in training.
    """
    if model is not None:
        from agentgym.cli.model_report import report_model

        found = list(report_model(model, chat_template, tools))
        for line in found:
            say(str(line))
        needed = ("stop token", "separators", "tool calls")
        return 0 if all(line.ok for line in found if isinstance(line, Finding) and line.name in needed) else 1
    if chat_template is not None or tools != "auto":
        raise AgentGymError("--chat-template, --tools: these flags are for checking a model; add --model")
    for finding in findings():
        say(str(finding))
        flush()  # the next finding may take seconds, and its log lines go to stderr
    sandbox = _sandbox()
    say(str(sandbox))
    return 0 if sandbox.ok else 1


def findings() -> Iterator[Finding]:
    """Yield one finding per part of this machine, without the verdict, which `agentgym doctor` prints last."""
    own = installed(DISTRIBUTION) or "a checkout that is not installed"
    yield Finding(name="agentgym", ok=True, detail=f"{own}, in {Path(__file__).parents[1]}")
    yield Finding(
        name="python", ok=sys.version_info >= (3, 11), detail=f"{platform.python_version()}, {sys.executable}"
    )
    yield _machine()
    yield from (_package(name, get) for name, get in PACKAGES.items())
    yield from _docker()
    yield _bubblewrap()
    yield _podman()
    yield _runsc()
    yield _gpus()


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None if it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return Finding(
        name="machine", ok=True, detail=f"{cores} cores, {gigabytes:.0f} GiB of memory, {platform.machine()}"
    )


def _package(name: str, get: str) -> Finding:
    found = installed(name)
    if found is None:
        return Finding(name=name, ok=False, detail="not installed", get=get)
    return Finding(name=name, ok=True, detail=f"{found}{_built_for() if name == 'torch' else ''}")


def _built_for() -> str:
    """Return what torch was built for, read from its version file, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    if file is None or not file.is_file():
        return ""
    cuda = re.search(r"^cuda\b.*= '(.*)'", file.read_text(), re.MULTILINE)
    return f", for CUDA {cuda[1]}" if cuda else ", for the CPU"


def _docker() -> Iterator[Finding]:
    from agentgym.sandboxes.docker.client import NoDockerPackage, address, connect
    from agentgym.sandboxes.docker.docker import Docker
    from agentgym.sandboxes.docker.images.names import default_image, image_digest

    engine = Finding(name="docker engine", ok=False, detail="", get=START_DOCKER)
    try:
        client = connect(timeout_s=5)
    except NoDockerPackage as error:
        detail, get = str(error).split(": ", 1)
        yield Finding(name=engine.name, ok=False, detail=f"one responds at {address()}, but {detail}", get=get)
        return
    except Exception as error:  # Docker's errors and those of the connection share no base class.
        yield Finding(name=engine.name, ok=False, detail=str(error), get=engine.get)
        return
    try:
        yield Finding(name=engine.name, ok=True, detail=str(client.version()["Version"]))
        image = default_image()
        found = Finding(name="sandbox image", ok=True, detail=f"{image} {image_digest(client, image)[:19]}")
        yield _with_reset(found, Docker())
    except SandboxError as error:
        why_not = str(error).rpartition(": ")[0] or str(error)
        yield Finding(name="sandbox image", ok=False, detail=why_not, get="agentgym sandbox build")
    except Exception as error:  # Docker's errors and those of the connection share no base class.
        yield Finding(name=engine.name, ok=False, detail=f"{type(error).__name__}: {error}", get=engine.get)
    finally:
        client.close()


def _bubblewrap() -> Finding:
    from agentgym.sandboxes.local.local import Bubblewrap, why_no_bubblewrap

    why_not = why_no_bubblewrap()
    get = "apt-get install bubblewrap (0.8 or newer), and allow user namespaces"
    found = Finding(name="bubblewrap", ok=why_not is None, detail=why_not or shutil.which("bwrap") or "", get=get)
    return found if why_not else _with_reset(found, Bubblewrap())


def _with_reset(found: Finding, spec: SandboxSpec) -> Finding:
    """Return the finding with a description of how its sandboxes are reset; a sandbox is started to find out."""
    from agentgym.sandboxes.choose import how_it_resets

    try:
        return replace(found, detail=f"{found.detail}; {asyncio.run(how_it_resets(spec))}")
    except SandboxError as error:
        return replace(found, ok=False, detail=str(error))


def _podman() -> Finding:
    """Return whether podman, whose service can replace a Docker engine, is installed."""
    path = shutil.which("podman")
    start = "podman system service --time=0 unix:///run/podman/podman.sock"
    get = (
        f"not needed with Docker: apt-get install podman; then `{start}` and DOCKER_HOST=unix:///run/podman/podman.sock"
    )
    return Finding(name="podman", ok=path is not None, detail=path or "not installed", get=get)


def _runsc() -> Finding:
    """Return whether the Docker engine has gVisor as a runtime.

    An engine on another machine may have it even if runsc isn't installed on this one.
    """
    path = shutil.which("runsc")
    get = "install gVisor (https://gvisor.dev), and register it with the engine as in sandbox/README.md of a checkout"
    if "runsc" in _runtimes():
        from agentgym.sandboxes.docker.settings import GVISOR_LACKS

        detail = f"a runtime of the Docker engine; episodes are reset in place; {GVISOR_LACKS}"
        return Finding(name="runsc", ok=True, detail=detail)
    detail = f"{path}, but the Docker engine does not have it as a runtime" if path else "not installed"
    return Finding(name="runsc", ok=False, detail=detail, get=get)


def _runtimes() -> set[str]:
    """Return the Docker engine's runtimes (values of a sandbox's `runtime`), or an empty set if none responds."""
    from agentgym.sandboxes.docker.client import connect

    try:
        with closing(connect(timeout_s=5)) as client:
            return set(client.info()["Runtimes"])
    except Exception:  # Docker's errors and those of the connection share no base class.
        return set()


def _gpus() -> Finding:
    """Return the GPUs that nvidia-smi lists. torch isn't asked, because importing it takes seconds."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        get = "not needed: the recipes run on a CPU"
        return Finding(name="gpus", ok=False, detail="none seen by nvidia-smi", get=get)
    rows = [row.split(", ") for row in listed.stdout.splitlines()]
    names = "; ".join(f"{row[0]} {row[1]}" for row in rows)
    return Finding(name="gpus", ok=bool(rows), detail=f"{names}; driver {rows[0][-1]}" if rows else "none")


def _sandbox() -> Finding:
    from agentgym.sandboxes.choose import auto

    try:
        return Finding(name="a sandbox", ok=True, detail=type(auto()).__name__)
    except SandboxError:
        return Finding(name="a sandbox", ok=False, detail="", get="either Docker with its image, or bubblewrap")
