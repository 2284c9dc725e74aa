"""Environments for TRL's GRPOTrainer made from an env class, with their reward function and data set."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from agentgym.agent_api.env import AgentEnv
from agentgym.bridges.episode_player import EpisodePlayer
from agentgym.bridges.loop_thread import LoopThread
from agentgym.bridges.trl.tool_methods import tool_method
from agentgym.environments.env import Env, Split
from agentgym.environments.mixture import Mixture
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import split_tasks, task_type
from agentgym.errors.extras import needs_extra
from agentgym.sandboxes.protocol import SandboxPool, SandboxSpec
from agentgym.seeds import seed_for
from agentgym.tools.tool import Tool, class_tools
from agentgym.types.messages import Function, Message, ToolCall
from agentgym.types.rollout import StopReason
from agentgym.types.task import Task


class TRLEnvironment:
    """Runs an env's episodes, one after another, for TRL's `environment_factory`; its public methods are the tools.

    TRL calls `reset` with a row of the data set before each rollout, and then the tools. If the env raises, the model
    reads the error, and the rollout has no reward.
    """

    _env: ClassVar[Any]
    """The env class whose episodes are run."""

    def __init__(self, spec: SandboxSpec | None, sandboxes: SandboxPool | None, seed: int) -> None:
        self._thread, self._player = LoopThread(), EpisodePlayer(self._env, spec, sandboxes)
        self._seed, self._episodes = seed, 0
        self._earned: float | None = None
        self._over = False

    def reset(self, task: str, prompt: Sequence[Message], **columns: Any) -> str | None:
        """Start the episode of a row.

        Args:
            task: The task as JSON.
            prompt: The row's prompt.
            **columns: Other columns, which are ignored.

        Returns:
            The text that the env's first messages add to the row's prompt, or None.

        Raises:
            ValueError: If the env has tools that its class doesn't, or its first messages don't start with the row's
                prompt.
        """
        made: Task = task_type(self._env).model_validate_json(task, by_alias=True, by_name=True)
        self._earned, self._over = None, True  # If the reset fails, there is no episode to continue.
        # TRL doesn't identify groups. But all envs that get a row in the same step have had equally many episodes.
        seed = seed_for("episode", self._seed, made.id, self._episodes, bits=31)
        self._episodes += 1
        messages, info = self._thread.run(lambda: self._player.reset(made, seed=seed, options=None))
        self._earned, self._over = 0.0, False
        if {schema["function"]["name"] for schema in info["tools"]} != _root_tools(self._env).keys():
            raise ValueError(
                f"{self._env.__name__}: TRL uses the tools of a class, not those of an instance; declare each with "
                "@ag.tool"
            )
        return _beyond(messages, prompt, self._env.__name__)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, as a separate turn."""
        if self._over:
            return "error: the task has ended"
        called = ToolCall(type="function", function=Function(name=name, arguments=arguments))
        messages = self._step(lambda: self._player.step(Message(role="assistant", content="", tool_calls=[called])))
        return "\n".join(_text(message, f"{self._env.__name__}: tool {name!r}") for message in messages)

    def _finish(self, completion: Sequence[Any]) -> float | None:
        """End the episode with a completion's last message, and return its reward, or None if it failed."""
        last = completion[-1]
        if not self._over and last["role"] == "assistant" and not last.get("tool_calls"):
            self._step(lambda: self._player.step(Message(role="assistant", content=str(last["content"] or ""))))
        if not self._over:
            self._step(lambda: self._player.stop(StopReason.TOKENS))
        return self._earned

    def _step(self, step: Callable[[], Any]) -> list[Message]:
        try:
            messages, reward, terminated, truncated, _ = self._thread.run(step)
        except Exception:
            self._earned, self._over = None, True
            raise
        self._earned = (self._earned or 0.0) + float(reward)
        self._over = bool(terminated or truncated)
        return list(messages)

    def _close(self) -> None:
        try:
            self._thread.run(self._player.close)
        finally:
            self._thread.close()


def _root_tools(env: type) -> dict[str, Tool]:
    """Return the class's tools that the main conversation may call, by name."""
    return {name: tool for name, tool in class_tools(env).items() if tool.root}


@contextmanager
def environment_factory(
    env: str | type[Env[Any]], *, spec: SandboxSpec | None = None, sandboxes: SandboxPool | None = None, seed: int = 0
) -> Iterator[Callable[[], TRLEnvironment]]:
    """Create the `environment_factory` of GRPOTrainer; the envs of all its rollouts are closed when the block ends.

    Args:
        env: The env, as a class or a name.
        spec: A sandbox that replaces the one the env declares; None uses the env's.
        sandboxes: An open pool of sandboxes; None opens a new pool for each environment.
        seed: The seed from which the envs' seeds are derived; the rollouts of one row in one step share theirs.

    Yields:
        A function that creates an environment.

    Raises:
        ValueError: If the env is a mixture or an ag.AgentEnv, or a tool has a name that TRL uses itself.
    """
    cls: Any = find_env(env)
    if issubclass(cls, Mixture | AgentEnv):
        raise ValueError(
            f"env: {cls.__name__} is a mixture or an ag.AgentEnv, which TRL can't run; instead of a mixture, "
            "give TRL a dict of factories, one per env"
        )
    tools = {name: tool.schema["function"] for name, tool in _root_tools(cls).items()}
    if taken := [name for name in tools if name in ("reset", "get_reward") or name.startswith("_")]:
        raise ValueError(f"env: TRL does not accept {taken[0]!r} of {cls.__name__} as a tool; rename it")
    methods = {name: tool_method(name, schema) for name, schema in tools.items()}
    made: Any = type(cls.__name__, (TRLEnvironment,), {"_env": cls, **methods})
    with ExitStack() as stack:

        def make() -> TRLEnvironment:
            environment: TRLEnvironment = made(spec, sandboxes, seed)
            stack.callback(environment._close)
            return environment

        yield make


def reward(completions: Sequence[Any], environments: Sequence[TRLEnvironment], **columns: Any) -> list[float | None]:
    """Return each rollout's reward, or None if its env failed; pass this function to GRPOTrainer's `reward_funcs`.

    Args:
        completions: The completions of the rollouts.
        environments: The environment of each rollout.
        **columns: Other columns, which are ignored.
    """
    pairs = zip(completions, environments, strict=True)
    return [environment._finish(completion) for completion, environment in pairs]


def dataset(env: str | type[Env[Any]], split: Split = "train", n: int | None = None) -> Any:
    """Return the first tasks of a split as a `datasets.Dataset` with the columns `prompt` and `task`.

    Args:
        env: The env, as a class or a name.
        split: The split.
        n: The number of tasks; None means all.

    Raises:
        ValueError: If a prompt contains a tool call or an image.
    """
    with needs_extra():
        import datasets

    cls = find_env(env)
    tasks = split_tasks(cls, split)
    count = len(tasks) if n is None else min(n, len(tasks))
    rows = [{"prompt": _prompt(cls, tasks[i]), "task": tasks[i].model_dump_json()} for i in range(count)]
    return datasets.Dataset.from_list(rows)


def _prompt(cls: type[Env[Any]], task: Task) -> list[dict[str, str]]:
    system = [{"role": "system", "content": cls.system}] if cls.system and task.prompt[0]["role"] != "system" else []
    if any("tool_calls" in message for message in task.prompt):
        raise ValueError(f"prompt: task {task.id!r} contains tool calls, which TRL's prompts can't contain")
    where = f"prompt: task {task.id!r}"
    return [*system, *({"role": message["role"], "content": _text(message, where)} for message in task.prompt)]


def _text(message: Message, where: str) -> str:
    """Return a message's text.

    Raises:
        ValueError: If the message contains an image, which can't be trained on here.
    """
    content = message["content"]
    if not isinstance(content, str):
        raise ValueError(f"{where} has an image, but TRL gets only text; evaluate the env with ag.Endpoint")
    return content


def _beyond(messages: Sequence[Message], prompt: Sequence[Message], name: str) -> str | None:
    """Return the text with which the env's first messages continue the row's prompt, so that TRL can append it.

    Args:
        messages: The env's first messages.
        prompt: The row's prompt.
        name: The env's name, for the error.

    Returns:
        The text, or None if the first messages are the row's prompt unchanged.

    Raises:
        ValueError: If the first messages don't start with those of the row's prompt.
    """
    said, given = ([(message["role"], message["content"]) for message in some] for some in (messages, prompt))
    if said[:-1] != given[:-1] or said[-1][0] != given[-1][0] or not said[-1][1].startswith(given[-1][1]):
        raise ValueError(
            f"{name}.reset: its first messages must start with those of the row's prompt, which TRL has already used"
        )
    return said[-1][1].removeprefix(given[-1][1]) or None
