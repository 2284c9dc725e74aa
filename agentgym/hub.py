"""Models that come with the library, by name, and the checks and errors for missing models and GPUs."""

import os
import re
import shlex
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from agentgym.errors import AgentGymError
from agentgym.errors.tracebacks import describe
from agentgym.files.names import whole_path
from agentgym.gguf_files import gguf_folder, is_gguf

SHIPPED = {"tiny": "chase"}
"""The name of each shipped model's folder in `recipes/checkpoints` of a checkout, by the model's name."""

_URL = re.compile("https?:/")  # a Path collapses two slashes into one
HUB = "https://huggingface.co"
REACH_S = 5.0
"""Timeout in seconds for a connection to the model hub."""
ROLLOUTS = "rollouts.sqlite"
"""Name of the rollouts' file, by which a folder of a run or an evaluation that was given as a model is recognized."""
WANTED = "give the folder of a whole model, a GGUF file, or a name on the Hugging Face hub"


def find_model(model: Path | str) -> Path | str:
    """Return the folder of a model that comes with the library ("tiny") or of a GGUF file; return others unchanged.

    "tiny" is a Qwen3 with 0.4 M parameters that runs on one CPU core. A folder with that name takes precedence. A GGUF
    file is converted to a model folder in the user's cache, once, which takes seconds or minutes.

    Raises:
        ValueError: If this installation lacks the model, or if a GGUF file can't be converted.
        MissingPackage: If the model is a GGUF file, and the package gguf isn't installed.
    """
    name = str(model)  # The command line passes a Path for every model.
    if is_gguf(model) and os.path.isfile(model):  # noqa: PTH113 - Path.is_file raises for a name that is too long
        return gguf_folder(Path(model))
    if name not in SHIPPED or exists(model):
        return model
    here = Path(__file__).parent
    for place in (here / "_models" / name, here.parent / "recipes" / "checkpoints" / SHIPPED[name]):
        if place.is_dir():
            return place
    raise ValueError(f"model: {name!r} is not in this installation ({here / '_models'}); install agentgym again")


def absolute_model(model: Path | str) -> Path | str:
    """Return a model as other processes find it, from any working directory: an absolute folder, or a hub name.

    Raises the errors of `find_model`.
    """
    found = find_model(model)
    return whole_path(found) if exists(found) else found


def exists(path: Path | str) -> bool:
    """Return whether something exists at a path, and False for a name that no file can have."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for a name that is too long


def is_tiny(model: Path | str) -> bool:
    """Return whether a model is one of the tiny ones that come with the library or its recipes."""
    found = model if is_gguf(model) else find_model(model)
    folder = Path(os.path.realpath(found)).parent  # Path.resolve raises for links in a circle
    here = Path(__file__).resolve().parent
    return folder in (here / "_models", here.parent / "recipes" / "checkpoints")


def refuse_missing(model: Path | str, field: str = "model") -> None:
    """Raise ValueError that names the field if the model is a URL, a missing folder, or the folder of a run.

    The folder of an evaluation is refused, too. Names on the Hugging Face hub are not checked.
    """
    if _URL.match(str(model)):
        raise ValueError(
            f"{field}: {model} is a URL, but weights are loaded from a folder or the hub; for a policy's servers use "
            "--engine sglang --engine.urls, and for a judge at an endpoint use a custom engine, ag.CustomEngineConfig"
        )
    if is_gguf(model) and not exists(model):
        raise ValueError(f"{field}: there is no file {model}; {WANTED}")
    # A hub name is `model` or `owner/model`; anything else can only be a path.
    local = str(model).startswith((".", "/", "~")) or str(model).count("/") > 1
    if local and not exists(model):
        raise ValueError(
            f"{field}: there is no folder {model}; give one that exists, or a name on the Hugging Face hub"
        )
    if os.path.isdir(model) and (files := _only_gguf(Path(model))):  # noqa: PTH112 - as in `find_model`
        raise ValueError(f"{field}: {model} holds only GGUF files; give one of them, such as {files[0]}")
    if exists(Path(model, ROLLOUTS)) and not exists(Path(model, "config.json")):
        raise ValueError(
            f"{field}: {model} is the folder of a run or an evaluation, not of a model; {_instead(Path(model))}"
        )


def _only_gguf(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder that isn't the folder of a model or an adapter."""
    if any(exists(folder / name) for name in ("config.json", "adapter_config.json")):
        return []
    return sorted(file for file in folder.iterdir() if is_gguf(file))


def _instead(folder: Path) -> str:
    """Return the part of a message that says what to give instead of the folder of a run or an evaluation."""
    if (folder / "model").is_dir():
        return f"did you mean {folder / 'model'}?"
    if (folder / "adapter").is_dir():
        merge = shlex.join(["agentgym", "merge", str(folder / "adapter"), "MODEL"])
        return f"merge its trained adapter with `{merge}`, and give MODEL"
    resume = shlex.join(["--resume", str(folder)])
    return (
        f"if it is a run, finish it with {resume}, which writes what it trained; if it is an evaluation, give "
        f"the model that it evaluated; or {WANTED}"
    )


def refuse_unreachable(model: Path | str, field: str = "model") -> None:
    """Raise ValueError that names the field, for a path that doesn't exist or a name that can't be fetched here.

    This includes the errors of `refuse_missing`. If a name isn't in the hub's cache, this first checks that the hub can
    be reached, because the hub's own client retries for almost a minute per file.
    """
    refuse_missing(model, field)
    if is_gguf(model) or exists(find_model(model)) or _is_cached(str(model)) or (why_not := why_no_hub()) is None:
        return
    raise ValueError(
        f"{field}: {model} cannot be loaded: there is no such folder here, it is not in the hub's cache, and "
        f"{why_not}; {WANTED}"
    )


def _is_cached(name: str) -> bool:
    """Return whether the hub's cache has the config of the model with that name; False for an invalid name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def why_no_hub() -> str | None:
    """Return why no model can be fetched from the hub, or None if the hub can be reached.

    This check takes seconds, while the hub's own client takes almost a minute.
    """
    hub = os.environ.get("HF_ENDPOINT") or HUB
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(hub)
    url = urlsplit(urllib.request.getproxies().get(url.scheme, hub))
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), REACH_S).close()
    except OSError as error:
        return f"{hub} cannot be reached ({error.strerror or error})"
    return None


def gpu_number(device: str, gpus: int) -> int:
    """Return the number of the GPU that a process uses for a device name, cuda:N or cuda.

    Under torchrun, cuda is the GPU with the process's local rank.

    Args:
        device: The device name.
        gpus: Number of GPUs that torch finds.

    Raises:
        ValueError: If there is no such GPU, or if torchrun started more processes on this machine than it has GPUs.
    """
    if not gpus:
        raise ValueError(f"device: {device} was requested, but torch finds no GPU here; set device to auto or cpu")
    place = int(os.environ.get("LOCAL_RANK", "0"))
    processes = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), place + 1)
    there = f"torch sees {gpus} GPU{'s' * (gpus > 1)} here"
    index = device.partition(":")[2]
    if not index and processes > gpus:
        raise ValueError(
            f"device: {processes} processes were started on this machine and each needs its own GPU, but {there}; "
            f"start at most {gpus} (torchrun --nproc-per-node {gpus}), make more visible (CUDA_VISIBLE_DEVICES), or "
            "set device to cpu"
        )
    if int(index or place) >= gpus:
        raise ValueError(f"device: there is no {device}: {there}, numbered from 0; use another, or set device to auto")
    return int(index or place)


@contextmanager
def of_field(*, model: str = "model", engine: str = "engine") -> Iterator[None]:
    """Replace the leading `model` or `engine` in errors about opening a model with the field that named it.

    Args:
        model: The field that names the model.
        engine: The field that names the model's engine.
    """
    try:
        yield
    except (AgentGymError, TypeError, ValueError) as error:
        field, colon, said = str(error).partition(": ")
        if colon and field in ("model", "engine"):
            error.args = (f"{model if field == 'model' else engine}: {said}",)
        raise


@contextmanager
def loading(model: Path | str) -> Iterator[None]:
    """Convert errors of a model's files and the Hugging Face hub to a one-line ValueError that says what to specify.

    This also disables the progress bars of transformers, because they would clutter a log. RuntimeError and MemoryError
    propagate, because they mean that the machine is too small, or that a library has a bug.
    """
    from transformers.utils.logging import disable_progress_bar

    refuse_unreachable(model)
    disable_progress_bar()
    try:
        yield
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:  # A broken file raises anything that its reader raises: KeyError, plain Exception.
        said = " ".join(describe(error).split())
        raise ValueError(f"model: {model} cannot be loaded; {WANTED}: {said}") from error
