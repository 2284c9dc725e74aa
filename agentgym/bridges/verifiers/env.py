"""The env that runs a verifiers environment, and its tasks."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from agentgym.agent_api.api import MODEL, AgentApi
from agentgym.agent_api.env import AgentEnv
from agentgym.agent_api.requests import LimitError, Policy
from agentgym.bridges.verifiers.loaded import close, loaded, scored
from agentgym.bridges.verifiers.policy_client import KEY, client_class
from agentgym.data.chosen import split as parts_of
from agentgym.data.rows import Rows
from agentgym.environments.env import Split
from agentgym.environments.parameters import Parameter
from agentgym.errors import EnvError
from agentgym.errors.extras import install_line, needs_extra
from agentgym.errors.tracebacks import describe
from agentgym.types.messages import Message
from agentgym.types.rollout import StopReason
from agentgym.types.task import Task


class VerifiersTask(Task):
    """One row of a verifiers environment's data set."""

    row: dict[str, JsonValue] = Field(default_factory=dict)
    """The row's columns other than `prompt`, such as `example_id`, `answer` and `info`."""


class VerifiersEnv(AgentEnv[VerifiersTask]):
    """A verifiers environment as an env: every turn that it requests is trained with its rubric's reward.

    The environment is the result of `verifiers.load_environment(env_id, **arguments)`, or of an override of `load`.
    All rollouts share it, and it is torn down with the run. Its metrics are stored as `verifiers/NAME`.
    """

    env_id = Parameter("", doc="the environment's name, which is passed to verifiers.load_environment")
    arguments = Parameter("{}", doc="a JSON object of arguments for the environment's load_environment")
    raised_rewards_are_zero: ClassVar[bool] = False
    """Whether a reward function that raises counts as 0.0, as in verifiers, instead of failing the rollout."""

    def __init__(self, task: VerifiersTask) -> None:
        super().__init__(task)
        self._state: Any = None

    @classmethod
    def load(cls) -> Any:
        """Return a new verifiers environment, the one that `env_id` names.

        Raises:
            EnvError: If `env_id` is empty, or this version of verifiers has no load_environment.
        """
        with needs_extra():
            import verifiers
        if not hasattr(verifiers, "load_environment"):
            raise EnvError(f"verifiers: this version has no load_environment; {install_line('verifiers')}")
        if not cls.env_id:
            raise EnvError("env_id: empty; name the environment, as in `VerifiersEnv.configured(env_id=...)`")
        return verifiers.load_environment(cls.env_id, **json.loads(cls.arguments))

    @classmethod
    def tasks(cls, split: Split) -> Sequence[VerifiersTask]:
        """Return the rows of the environment's data set ("train") or of its evaluation data set ("test").

        If the environment has only one of them, 90 % of its rows are for training.
        """
        environment = loaded(cls, cls.load)
        built = {"train": environment.build_dataset(), "test": environment.build_eval_dataset()}
        rows = {name: _rows(data, name) for name, data in built.items() if data is not None}
        if len(rows) == 2:
            return rows[split]
        return parts_of(*rows.values(), by=lambda task: task.prompt, train=0.9, test=0.1)[split]

    @classmethod
    @asynccontextmanager
    async def open_resources(cls) -> AsyncIterator[Any]:
        environment = loaded(cls, cls.load)
        try:
            yield environment
        finally:
            await close(cls)

    async def play(self, policy: Policy, prompt: Sequence[Message]) -> str:
        """Run the environment's rollout, and return the name of the limit or stop condition that ended it.

        Args:
            policy: The policy that answers the environment's requests.
            prompt: The task's prompt.

        Raises:
            EnvError: If an error ended the rollout, or the environment got no response.
        """
        name, environment = type(self).__name__, self.resources
        api = AgentApi(policy, KEY, name)
        client = client_class()(api)
        row = {**self.task.row, "prompt": [dict(message) for message in prompt]}
        try:
            self._state = await environment.rollout(row, client, MODEL, deepcopy(environment.sampling_args))
        finally:
            self._state = self._state or client.state
            self.metrics |= {"agent_requests": float(api.answered), "agent_requests_refused": float(api.refused)}
        if api.failed.done():
            raise api.failed.result()
        if (error := self._state["error"]) is not None:
            raise EnvError(f"{name}: {describe(error)}") from error
        if not api.answered:
            raise EnvError(f"{name}: the environment got no response: {api.refusal or 'it sent no request'}")
        if isinstance(api.refusal, LimitError):
            return api.refusal.reason
        return self._state["stop_condition"] or StopReason.DONE

    async def score(self) -> dict[str, float]:
        raised = await scored(self.resources, self._state)
        self.metrics |= {f"verifiers/{name}": value for name, value in self._state["metrics"].items()}
        if raised and not self.raised_rewards_are_zero:
            raise EnvError(f"{type(self).__name__}: {'; '.join(raised)}")
        return {"verifiers": self._state["reward"]}

    async def close(self) -> None:
        if self._state is not None:
            await self.resources.rubric.cleanup(self._state)


def _rows(data: Any, name: str) -> Rows[VerifiersTask]:
    def identity(row: Mapping[str, Any]) -> str:
        return f"{name}/{row['example_id']}"

    def others(row: Mapping[str, Any]) -> dict[str, Any]:
        return {column: value for column, value in row.items() if column != "prompt"}

    return Rows(data, VerifiersTask, id=identity, columns={"row": others})
