"""Finds, checks and reads ATIF trajectory files, together with the files that they refer to, and no others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from agentgym.exports.atif_images import put_back
from agentgym.files.foreign.allowance import Allowance
from agentgym.files.foreign.content import read_json, read_object
from agentgym.files.foreign.opening import is_file, real_path, size_of

FAMILY = "ATIF-v1."
"""Prefix of the ATIF versions that can be read."""
MOST_FILES = 1000
"""Maximum number of files that a trajectory may refer to."""
MOST_TOKENS = 1 << 24
"""Maximum number of token ids of a rollout, including its continuations and sub-agents.

If a file has only the number of tokens, that many ids are created.
"""
_Id: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Call(BaseModel):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class _Ref(BaseModel):
    trajectory_id: str | None = None
    trajectory_path: str | None = None


class _Result(BaseModel):
    source_call_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    subagent_trajectory_ref: list[_Ref] | None = None
    extra: dict[str, Any] | None = None


class _Observation(BaseModel):
    results: list[_Result]


class _Metrics(BaseModel):
    prompt_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    completion_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    prompt_token_ids: list[_Id] | None = None
    completion_token_ids: list[_Id] | None = None
    logprobs: list[FiniteFloat] | None = None


class _Step(BaseModel):
    source: Literal["system", "user", "agent"]
    message: str | list[dict[str, Any]]
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class _Agent(BaseModel):
    name: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class _Trajectory(BaseModel):
    """The fields of a document that are read; other ATIF fields are ignored."""

    schema_version: str = Field(pattern=rf"^{FAMILY.replace('.', '[.]')}")
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: _Agent
    steps: list[_Step] = Field(min_length=1)
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list["_Trajectory"] | None = None


def is_atif(path: Path, folder: Path) -> bool:
    """Return whether a JSON file below a folder declares itself an ATIF trajectory."""
    try:
        found = read_json(path, within=folder)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and str(found.get("schema_version")).startswith(FAMILY)


def continuations(path: Path) -> set[Path]:
    """Return the existing files that continue a trajectory or contain its sub-agents.

    Raises:
        ValueError: If the file isn't a trajectory (as in `read_atif`), or names files elsewhere.
    """
    document = _checked(path, None, Allowance())
    named = [document.get("continued_trajectory_ref"), *(ref.get("trajectory_path") for ref in refs_of(document))]
    files = [below(path, path.parent, name) for name in named if name]
    return {file for file in files if is_file(file)}


def below(path: Path, folder: Path, name: str) -> Path:
    """Return the path of a file that a trajectory refers to.

    Args:
        path: The trajectory's file, to whose folder the name is relative.
        folder: The folder of the first trajectory.
        name: The name as written in the file.

    Raises:
        ValueError: If the file isn't below `folder`, or no file can have this name.
    """
    file = path.parent / name
    try:
        is_below = real_path(file).is_relative_to(real_path(folder))
    except ValueError:
        raise ValueError(f"{path}: no file can have the referenced name {name!r:.200}; correct it") from None
    if not is_below:
        raise ValueError(f"{path}: {name!r:.200} is not below the folder of the trajectory; move it there")
    return file


def _checked(path: Path, folder: Path | None, allowance: Allowance) -> dict[str, Any]:
    """Return a file's document as stored, after checking it.

    Args:
        path: The file.
        folder: The folder that a symbolic link must not lead out of; None lets links lead anywhere.
        allowance: Limit on the bytes read, to which the file counts.

    Raises:
        ValueError: If the file can't be read, or isn't a trajectory.
    """
    try:
        size = size_of(path, within=folder)
        allowance.take(path, size)
        found: dict[str, Any] = read_object(path, within=folder, most=size)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a JSON file ({error.strerror})") from error
    try:
        _Trajectory.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return found


def loaded(path: Path, folder: Path | None, allowance: Allowance) -> dict[str, Any]:
    """Return a file's checked document with its images inserted.

    Args:
        path: The file.
        folder: The folder that a symbolic link must not lead out of; None lets links lead anywhere.
        allowance: Limit on the bytes read, to which the file and the images count.

    Raises:
        ValueError: If the file or an image can't be read, or the file isn't a trajectory.
    """
    found = _checked(path, folder, allowance)
    try:
        put_back(found, path.parent, allowance)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def refs_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the references of a document's steps to sub-agents."""
    return [
        ref
        for step in document.get("steps") or ()
        for result in (step.get("observation") or {"results": ()})["results"]
        for ref in result.get("subagent_trajectory_ref") or ()
    ]
