"""The flags `--models.NAME.FIELD` of an evaluation, for models that the env queries by name, such as a judge."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from agentgym.cli.output import RefusedWords
from agentgym.config_fields import nearest
from agentgym.errors import AgentGymError

PREFIX = "--models."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """The model of a model role, either in this process or at a chat endpoint."""

    model: str | None = None
    """The folder or hub name of a model, the folder of an adapter, or "tiny"; with a url, its name at the endpoint."""
    url: str | None = None
    api_key_env: str | None = None
    """The environment variable with the endpoint's API key."""
    tools: Literal["api", "prompt"] = "api"
    concurrency: int = 32
    """Maximum number of concurrent requests."""
    prompt_price: float = 0.0
    cached_price: float | None = None
    completion_price: float = 0.0


_FIELDS = tuple(ModelFlags.__dataclass_fields__)


def models_in(flags: Mapping[str, str], command: str) -> dict[str, ModelFlags]:
    """Return the models of `--models.NAME.FIELD` flags by name.

    Raises:
        RefusedWords: If a flag is wrong; the message names it.
    """
    given: dict[str, dict[str, str]] = {}
    for flag, value in flags.items():
        if not flag.startswith(PREFIX):
            continue
        name, dot, written = flag.removeprefix(PREFIX).rpartition(".")
        field = written.replace("-", "_")
        if not dot or not name or field not in _FIELDS:
            like = nearest(field, _FIELDS)
            raise RefusedWords(f"{command}: {flag}: write {PREFIX}NAME.FIELD, as in {PREFIX}judge.url URL/v1; {like}")
        given.setdefault(name, {})[field] = value
    return {name: _read(name, fields, command) for name, fields in given.items()}


def _read(name: str, fields: Mapping[str, str], command: str) -> ModelFlags:
    try:
        return TypeAdapter(ModelFlags).validate_python(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"{PREFIX}{name}.{str(first['loc'][0]).replace('_', '-')}"
        raise RefusedWords(f"{command}: {flag}: {first['msg']}, got {first['input']!r}") from None


@asynccontextmanager
async def opened_models(models: Mapping[str, ModelFlags], *, elsewhere: bool = False) -> AsyncIterator[dict[str, Any]]:
    """Open an engine for each name, and close them at the end.

    Args:
        models: The models by name.
        elsewhere: Whether other processes open the models. If so, model names are yielded instead of engines.

    Yields:
        The engines, or model names, by role name.

    Raises:
        AgentGymError: If an engine can't be opened; the message names the role.
    """
    from agentgym.engines.endpoint.endpoint import Endpoint
    from agentgym.evals.opening import open_engine

    async with AsyncExitStack() as stack:
        found: dict[str, Any] = {}
        for name, flags in models.items():
            if flags.model is None and flags.url is None:
                raise AgentGymError(f"{PREFIX}{name}: give {PREFIX}{name}.model or {PREFIX}{name}.url")
            if elsewhere and flags.url is None and flags.model is not None:
                found[name] = flags.model
                continue
            fields = {field: getattr(flags, field) for field in _FIELDS if field != "url"}
            try:
                asked = open_engine(flags.model) if flags.url is None else Endpoint(flags.url, **fields)  # type: ignore[arg-type]
                found[name] = await stack.enter_async_context(asked)
            except ValueError as error:
                raise AgentGymError(f"{PREFIX}{name}.{error}") from error
        yield found
