"""The files of trajectories of ATIF: found, checked, and read with those that they refer to, and no others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from agentgym.exports.atif_images import put_back
from agentgym.files.foreign.allowance import Allowance
from agentgym.files.foreign.content import read_json, read_object
from agentgym.files.foreign.opening import is_file, real_path, size_of

FAMILY = "ATIF-v1."
"""The beginning of the versions that are read."""
MOST_FILES = 1000
"""The most files that a trajectory refers to."""
MOST_TOKENS = 1 << 24
"""The most tokens of a rollout, its continuations and sub-agents included; a count of a file becomes so many ids."""
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
    """What is read of a document; other fields of ATIF are let be."""

    schema_version: str = Field(pattern=rf"^{FAMILY.replace('.', '[.]')}")
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: _Agent
    steps: list[_Step] = Field(min_length=1)
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list["_Trajectory"] | None = None


def is_atif(path: Path, folder: Path) -> bool:
    """Whether a file of JSON below a folder says that it is a trajectory."""
    try:
        found = read_json(path, within=folder)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and str(found.get("schema_version")).startswith(FAMILY)


def continuations(path: Path) -> set[Path]:
    """Return the files that a trajectory says it is continued in, or that hold its sub-agents, where they are there.

    ValueError for a file that is no trajectory, as of `read_atif`, and for one that names files elsewhere.
    """
    document = _checked(path, None, Allowance())
    named = [document.get("continued_trajectory_ref"), *(ref.get("trajectory_path") for ref in refs_of(document))]
    files = [below(path, path.parent, name) for name in named if name]
    return {file for file in files if is_file(file)}


def below(path: Path, folder: Path, name: str) -> Path:
    """The file that a trajectory names; ValueError for one that is not below the folder of the first trajectory."""
    file = path.parent / name
    try:
        is_below = real_path(file).is_relative_to(real_path(folder))
    except ValueError:
        raise ValueError(f"{path}: no file can have the name {name!r:.200} of a reference; correct it") from None
    if not is_below:
        raise ValueError(f"{path}: {name!r:.200} is not below the folder of the trajectory; put it there")
    return file


def _checked(path: Path, folder: Path | None, allowance: Allowance) -> dict[str, Any]:
    """The document of a file, checked, as it stands there; `folder` as of `opened`."""
    try:
        size = size_of(path, within=folder)
        allowance.take(path, size)
        found: dict[str, Any] = read_object(path, within=folder, most=size)
    except OSError as error:
        raise ValueError(f"{path}: no JSON file can be read there ({error.strerror})") from error
    try:
        _Trajectory.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return found


def loaded(path: Path, folder: Path | None, allowance: Allowance) -> dict[str, Any]:
    """The document of a file, checked, with its images in it; all of them count toward the allowance."""
    found = _checked(path, folder, allowance)
    try:
        put_back(found, path.parent, allowance)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def refs_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The references of a document's steps to sub-agents."""
    return [
        ref
        for step in document.get("steps") or ()
        for result in (step.get("observation") or {"results": ()})["results"]
        for ref in result.get("subagent_trajectory_ref") or ()
    ]
