"""The engine of an evaluation: a given one, or one that is opened for a model or a URL."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from agentgym.chat.template_input import ToolsIn
from agentgym.chat.tokenizer import ChatTokenizer, chat_tokenizer
from agentgym.engines.base import Engine, check_engine, model_name
from agentgym.engines.endpoint.endpoint import Endpoint
from agentgym.engines.messages import MessageEngine
from agentgym.engines.transformers.engine import TransformersEngine
from agentgym.environments.env import Env
from agentgym.environments.mixture import member_of
from agentgym.files.foreign.adapter import CONFIG, adapter_config, adapter_template
from agentgym.files.foreign.opening import is_file
from agentgym.files.names import command
from agentgym.hub import exists, find_model, refuse_missing
from agentgym.tools.images import image_in
from agentgym.types.messages import SEE_ELSEWHERE
from agentgym.types.task import Task

Model: TypeAlias = Engine | Path | str
"""An open engine; a model's folder or hub name, or an adapter's folder; or an endpoint's URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How a model's chats are rendered, if not as its files say."""

    template: Path | str | None = None
    """A chat template, as a file or its text, that replaces the model's own."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    tools: ToolsIn = "auto"
    """What describes the tools to the model; see `agentgym.chat.chat_tokenizer`."""

    def refuse_for(self, model: Model) -> None:
        """Raise ValueError if a model brings its own tokenizer, or renders chats elsewhere, but settings are given."""
        if self != ChatSettings() and (not isinstance(model, str | Path) or is_url(model)):
            raise ValueError(
                "chat_template, chat_template_kwargs, tools: only a model that the evaluation opens takes them; set "
                "them for the engine, which agentgym.chat.chat_tokenizer helps with, or at the endpoint"
            )


OWN_CHAT = ChatSettings()
"""Chats are rendered as the model's files say."""


@asynccontextmanager
async def open_engine(model: Model, chat: ChatSettings = OWN_CHAT) -> AsyncIterator[Engine]:
    """Open the engine of a model or a URL, and close it when the `async with` ends; yield a given engine unchanged.

    For an adapter's folder, or the folder of a run that has an adapter, the base model is opened and the adapter is
    loaded. Chats are then rendered with the adapter's chat template if it has one.

    Args:
        model: The model.
        chat: How its chats are rendered.

    Raises:
        TypeError: If `model` isn't an engine, a path or a name.
        ValueError: If a URL serves more than one model, or if `chat` has settings for an engine or a URL.
    """
    chat.refuse_for(model)
    if not isinstance(model, str | Path):
        check_engine(model)
        yield model
    elif is_url(model):
        async with Endpoint(str(model)) as endpoint:
            yield endpoint
    elif (adapter := adapter_folder(Path(model))) is not None:
        base, tokenizer = base_of(adapter), await asyncio.to_thread(_tokenizer, base_of(adapter), adapter, chat)
        async with TransformersEngine(base, tokenizer=tokenizer) as local:
            await local.load_adapter(adapter, version=1)
            yield local
    else:
        found = await asyncio.to_thread(find_model, model)
        tokenizer = await asyncio.to_thread(_tokenizer, found, None, chat)
        async with TransformersEngine(found, tokenizer=tokenizer) as local:
            yield local


def _tokenizer(model: Path | str, adapter: Path | None, chat: ChatSettings) -> ChatTokenizer | None:
    """Return the tokenizer with the chat settings, or with the adapter's template; None if the model's own is used."""
    template = chat.template
    if template is None and adapter is not None:
        template = adapter_template(adapter)
    if template is None and not chat.variables and chat.tools == "auto":
        return None
    return chat_tokenizer(model, template=template, template_kwargs=chat.variables, tools=chat.tools)


def refuse_images(model: Model, env: type[Env[Any]], tasks: Iterable[Task]) -> None:
    """Raise ValueError if the env shows images but the model reads token ids and so can't see them."""
    reads = is_url(model) if isinstance(model, str | Path) else isinstance(model, MessageEngine)
    if reads:
        return
    for task in tasks:
        if (found := image_in(member_of(env, task), [task])) is not None:
            raise ValueError(f"model: {name_of(model)} reads only text, but {found}; {SEE_ELSEWHERE}")


def name_of(model: Model) -> str:
    """Return a model's name as stored by its evaluation."""
    if isinstance(model, Endpoint):
        return model.name_as_given
    return _whole(model if isinstance(model, str | Path) else model_name(model))


def opened_name(model: Model) -> str:
    """Return the name that a model has after its engine was opened, with the path of its files."""
    if not isinstance(model, str | Path) or is_url(model):
        return name_of(model)
    adapter = adapter_folder(Path(model))
    opened = find_model(model if adapter is None else base_of(adapter))
    return _whole(opened) if adapter is None else f"{_whole(opened)} with {_whole(adapter)}"


def _whole(name: str | Path) -> str:
    """Return the absolute path of a folder or file, valid from every working directory, and other names unchanged."""
    return str(Path(name).resolve() if exists(name) else name)


def is_url(model: str | Path) -> bool:
    """Return whether a model's name is the URL of an endpoint."""
    return str(model).startswith(("http://", "https://"))


def adapter_folder(folder: Path) -> Path | None:
    """Return the adapter's folder: `folder` itself, or `adapter` in a run's folder; None if neither is an adapter's."""
    return next((path for path in (folder, folder / "adapter") if is_file(path / CONFIG)), None)


def base_of(adapter: Path) -> str:
    """Return an adapter's base model.

    Raises:
        ValueError: If the adapter's config names none, or one that isn't there.
    """
    base = adapter_config(adapter).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"model: the adapter {adapter} names no base model; open an engine and load the adapter into it"
        )
    try:
        refuse_missing(str(base))
    except ValueError as error:
        merge = command("merge", adapter, "FOLDER", "--base", "MODEL")
        raise ValueError(
            f"{error}; it is the base model of the adapter {adapter}: if it was moved, merge the two with `{merge}`, "
            "and give FOLDER"
        ) from error
    return str(base)
