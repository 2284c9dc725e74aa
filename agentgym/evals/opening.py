"""The engine of an evaluation: the one that is given, or one that is opened for a model or a URL."""

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from agentgym.engines.base import Engine, check_engine, model_name
from agentgym.engines.endpoint.endpoint import Endpoint
from agentgym.engines.messages import MessageEngine
from agentgym.engines.transformers.engine import TransformersEngine
from agentgym.environments.env import Env
from agentgym.environments.mixture import member_of
from agentgym.files.foreign.adapter import CONFIG, adapter_config
from agentgym.files.foreign.opening import is_file
from agentgym.hub import find_model
from agentgym.tools.images import image_in
from agentgym.types.messages import SEE_ELSEWHERE
from agentgym.types.task import Task

Model: TypeAlias = Engine | Path | str
"""An engine that is open; the folder or hub name of a model, or the folder of an adapter; or the URL of an endpoint."""


@asynccontextmanager
async def open_engine(model: Model) -> AsyncIterator[Engine]:
    """Open the engine of a model or a URL, and close it at the end; an engine that is given stays as it is.

    An adapter's folder is a model: its base is opened and takes the adapter; so is the folder of a run that has one.
    Raises TypeError for anything else, and ValueError for a URL that serves more than one model.
    """
    if not isinstance(model, str | Path):
        check_engine(model)
        yield model
    elif is_url(model):
        async with Endpoint(str(model)) as endpoint:
            yield endpoint
    elif (adapter := adapter_folder(Path(model))) is not None:
        async with TransformersEngine(base_of(adapter)) as local:
            await local.load_adapter(adapter, version=1)
            yield local
    else:
        async with TransformersEngine(model) as local:
            yield local


def refuse_images(model: Model, env: type[Env[Any]], tasks: Iterable[Task]) -> None:
    """Raise ValueError if the env shows images but the model reads token ids, so that it would see none."""
    reads = is_url(model) if isinstance(model, str | Path) else isinstance(model, MessageEngine)
    if reads:
        return
    for task in tasks:
        if (found := image_in(member_of(env, task), [task])) is not None:
            raise ValueError(f"model: {name_of(model)} reads text alone, and {found}; {SEE_ELSEWHERE}")


def name_of(model: Model) -> str:
    """Name a model as its evaluation keeps it."""
    if isinstance(model, Endpoint):
        return model.name_as_given
    return _whole(model if isinstance(model, str | Path) else model_name(model))


def opened_name(model: Model) -> str:
    """Name a model as its engine does when it is open."""
    if not isinstance(model, str | Path) or is_url(model):
        return name_of(model)
    adapter = adapter_folder(Path(model))
    opened = find_model(model if adapter is None else base_of(adapter))
    return _whole(opened) if adapter is None else f"{_whole(opened)} with {_whole(adapter)}"


def _whole(name: str | Path) -> str:
    """Return the whole path of a folder, which is the same from every working folder, and any other name as it is."""
    is_folder = os.path.isdir(name)  # noqa: PTH112 - Path.is_dir raises for a name that is too long
    return str(Path(name).resolve() if is_folder else name)


def is_url(model: str | Path) -> bool:
    """Whether the name of a model is the URL of an endpoint."""
    return str(model).startswith(("http://", "https://"))


def adapter_folder(folder: Path) -> Path | None:
    """Return the folder of an adapter: this one, or `adapter` in the folder of a run; None if neither is one."""
    return next((path for path in (folder, folder / "adapter") if is_file(path / CONFIG)), None)


def base_of(adapter: Path) -> str:
    """Return the base model of an adapter; ValueError if its config names none."""
    base = adapter_config(adapter).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"model: the adapter {adapter} names no base model; open an engine and give it the adapter")
    return str(base)
