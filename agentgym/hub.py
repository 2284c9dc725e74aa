"""Models that come with the library, by name, and what is said of a model or a GPU that is not to be had."""

import os
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from agentgym.errors.tracebacks import describe

SHIPPED = {"tiny": "chase"}
"""The folder of each shipped model among the checkpoints of a checkout, by the model's name."""

_URL = re.compile("https?:/")  # a Path has one slash of two
HUB = "https://huggingface.co"
REACH_S = 5.0
"""Seconds that the model hub has to take a connection."""
WANTED = "give the folder of a whole model, or a name on the Hugging Face hub"


def find_model(model: Path | str) -> Path | str:
    """Return the folder of a model that comes with the library ("tiny"), and any other folder or hub name unchanged.

    "tiny" is a Qwen3 of 0.4 M parameters that runs on one CPU core. A folder of that name comes first.

    :raises ValueError: where this installation lacks the model.
    """
    name = str(model)  # A command line gives a Path for every model.
    if name not in SHIPPED or _exists(model):
        return model
    here = Path(__file__).parent
    for place in (here / "_models" / name, here.parent / "recipes" / "checkpoints" / SHIPPED[name]):
        if place.is_dir():
            return place
    raise ValueError(f"model: {name!r} is not in this installation ({here / '_models'}); install agentgym again")


def _exists(path: Path | str) -> bool:
    """Whether there is something at a path; False also for a name that no file can have."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for a name that is too long


def is_tiny(model: Path | str) -> bool:
    """Tell whether a model is one of the tiny ones that come with the library or with its recipes."""
    folder = Path(find_model(model)).resolve().parent
    here = Path(__file__).resolve().parent
    return folder in (here / "_models", here.parent / "recipes" / "checkpoints")


def refuse_missing(model: Path | str, field: str = "model") -> None:
    """Raise ValueError, naming the field, for a URL or a path at which there is nothing; a hub name passes."""
    if _URL.match(str(model)):
        raise ValueError(
            f"{field}: {model} is a URL, and weights are read from a folder or the hub; servers of a policy are named "
            "by --engine sglang --engine.urls, and a judge behind an endpoint is opened by an engine of your own, "
            "ag.CustomEngineConfig"
        )
    # A name on the hub is `model` or `owner/model`; anything else can only be a path.
    local = str(model).startswith((".", "/", "~")) or str(model).count("/") > 1
    if local and not _exists(model):
        raise ValueError(
            f"{field}: there is no folder {model}; give one that exists, or a name on the Hugging Face hub"
        )


def refuse_unreachable(model: Path | str, field: str = "model") -> None:
    """Raise ValueError, naming the field, for a path at which there is nothing, and a name that cannot be fetched here.

    A name that is not in the hub's cache is asked of the hub only where that can be reached: the hub's own client tries
    for most of a minute, for each file.
    """
    refuse_missing(model, field)
    if _exists(find_model(model)) or _is_cached(str(model)) or (why_not := why_no_hub()) is None:
        return
    raise ValueError(
        f"{field}: {model} cannot be loaded: there is no such folder here, it is not in the hub's cache, and "
        f"{why_not}; {WANTED}"
    )


def _is_cached(name: str) -> bool:
    """Whether the hub's cache has the config of the model of that name; False for what can be no name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def why_no_hub() -> str | None:
    """Say why no model can be fetched, or None; within seconds, where the hub's own client takes most of a minute."""
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
    """Return the number of the GPU that a process has by a device's name, cuda:N or cuda, of so many that torch sees.

    Under torchrun cuda is that of the process's place on its machine.

    :raises ValueError: where there is no such GPU, and where torchrun started more processes on this machine than that.
    """
    if not gpus:
        raise ValueError(f"device: {device} is asked for, and torch finds no GPU here; set device to auto or cpu")
    place = int(os.environ.get("LOCAL_RANK", "0"))
    processes = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), place + 1)
    there = f"torch sees {gpus} GPU{'s' * (gpus > 1)} here"
    index = device.partition(":")[2]
    if not index and processes > gpus:
        raise ValueError(
            f"device: {processes} processes were started on this machine, each needs a GPU of its own, and {there}; "
            f"start at most {gpus} (torchrun --nproc-per-node {gpus}), show it more (CUDA_VISIBLE_DEVICES), or set "
            "device to cpu"
        )
    if int(index or place) >= gpus:
        raise ValueError(f"device: there is no {device}: {there}, numbered from 0; name another, or set device to auto")
    return int(index or place)


@contextmanager
def of_field(field: str) -> Iterator[None]:
    """Name the field that gave the model, in the place of `model`, in a ValueError of its loading."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("model: "):
            raise
        raise ValueError(f"{field}: {str(error).removeprefix('model: ')}") from error


@contextmanager
def loading(model: Path | str) -> Iterator[None]:
    """Turn what a model's files and the Hugging Face hub raise into ValueError, in one line that says what to give.

    The bars of transformers' loading are not shown: a log has lines of its own.
    RuntimeError and MemoryError pass: they say that the machine is too small, or that a library has a fault.
    """
    from transformers.utils.logging import disable_progress_bar

    refuse_unreachable(model)
    disable_progress_bar()
    try:
        yield
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:  # A broken file raises whatever its reader meets: KeyError, bare Exception.
        said = " ".join(describe(error).split())
        raise ValueError(f"model: {model} cannot be loaded; {WANTED}: {said}") from error
