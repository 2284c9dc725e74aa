"""Rollouts, their segments, turns and branches, and groups of rollouts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from agentgym.errors import Failure
from agentgym.types.arrays import Bools, Floats, Ints, require, require_ids, set_vectors
from agentgym.types.completion import FinishReason, Version
from agentgym.types.messages import Message
from agentgym.types.task import Task
from agentgym.types.transcript import SHOWN_CHARACTERS, SegmentTranscript, heading, outcome, plain_text, show, size_text

SegmentKind: TypeAlias = Literal["root", "compaction", "fork", "subagent", "rerender", "branch"]


class StopReason(StrEnum):
    """Why a rollout ended. A tool that returns `Stop("word")` ends it with the reason "word" instead."""

    ANSWER = "answer"
    DONE = "done"
    TURNS = "turns"
    SECONDS = "seconds"
    TOKENS = "tokens"
    CONTEXT = "context"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RolloutBranch:
    """The outcome of one branch: an additional continuation of the rollout from one of its states."""

    turn: int
    """Number of turns that the rollout had sampled before the branch started.

    The branch's own turns are numbered from this number on.
    """
    reward: float | None
    """The reward of the whole path, including the rollout's rewards before the state; None if the branch failed."""
    stop_reason: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards by name, without their weights."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards, by role, of the roles that have a separate reward."""
    failure: Failure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The env's metrics at the branch's end, and what the branch itself used: `turns`, `tokens` and `seconds`."""

    def __post_init__(self) -> None:
        require(self.turn > 0, f"turn: a branch starts after a turn, got {self.turn}")
        require(bool(self.stop_reason), "stop_reason: empty")
        require(
            (self.reward is None) == (self.failure is not None),
            "reward: must be None if, and only if, there is a failure",
        )
        require(self.reward is None or math.isfinite(self.reward), f"reward: {self.reward} is not finite")

    def __repr__(self) -> str:
        return f"<RolloutBranch {self}>"

    def __str__(self) -> str:
        worth = "failed" if self.reward is None else f"reward {self.reward:g}"
        return f"from turn {self.turn}, {worth}, stopped by {self.stop_reason}"

    def reward_of(self, role: str) -> float | None:
        """Return the reward of a role, or None if it has none.

        Args:
            role: The role; "" for the branch's own reward.
        """
        return self.reward if self.reward is None or not role else self.role_rewards.get(role)


def require_roles(trained: Iterable[str], rewards: Mapping[str, float], where: str) -> None:
    """Check the rewards of roles.

    Args:
        trained: The roles whose turns are trained; "" (no role) needs no reward here.
        rewards: The reward of each role.
        where: The start of the message of an error.

    Raises:
        ValueError: If a role in `rewards` is "", if a reward isn't finite, or if a trained role has no reward.
    """
    for role, value in rewards.items():
        require(
            bool(role) and math.isfinite(value),
            f"{where}: role {role!r} has the reward {value}; expected a name and a finite number",
        )
    without = sorted(set(filter(None, trained)) - rewards.keys())
    require(not without, f"{where}: no reward for {', '.join(without)}, whose turns are trained")


class Turn(NamedTuple):
    """One sampled span of a segment: the tokens from `start` to `stop` - 1, sampled under these policy versions."""

    start: int
    stop: int
    finish_reason: FinishReason
    versions: tuple[Version, ...]
    message: Message
    env_messages: tuple[Message, ...] = ()
    """The messages with which the env answered this turn. The last turn of a rollout has them, too.

    If a compaction follows, the instruction to write a summary comes after them. If the answer didn't fit into this
    segment and the compaction moved it to the next one, only the instruction is here.
    """
    seconds: float = 0.0
    """Seconds from the request to the engine until its response."""
    waited: float = 0.0
    """Part of `seconds` in which the request waited and the time limits were paused.

    A request waits for a closed gate (`EngineGate`), for a free slot or the next try at an endpoint, or for an SGLang
    server.
    """
    asked_at: float | None = None
    """Time of the request to the engine, in seconds since the rollout started; None if unknown."""
    env_seconds: float = 0.0
    """Seconds from the turn's message until the env's answer, including forks and sub-agents; 0 without an answer."""
    reward: float = 0.0
    """The reward of the env's step for this turn; it is part of the rollout's reward."""
    number: int = 0
    """Number of turns that the rollout sampled before this one, including those of forks and sub-agents."""

    def __repr__(self) -> str:
        calls = "".join(f", calls {call['function']['name']!r}" for call in self.message.get("tool_calls", ()))
        return f"<Turn {self.number}: {self.stop - self.start} ids, {self.finish_reason}{calls}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Segment:
    """One append-only span of context: ids, which of them were sampled, and their log-probabilities.

    ::

        ids      P  P  a  a  e  a      P prompt, a sampled, e environment
        sampled  0  0  1  1  0  1      exactly the union of the turns' spans
        logprobs 0  0 -x -x  0 -x

    A prefix taken over from a parent segment has sampled 0, so each sampled token is trained in exactly one segment.
    """

    index: int
    parent: int | None
    """Index of the segment that this one continues; None for the root."""
    kind: SegmentKind
    token_ids: Ints
    sampled: Bools
    logprobs: Floats
    turns: tuple[Turn, ...]
    prompt_messages: tuple[Message, ...] = ()
    """The messages that the segment starts with; those of a fork repeat the conversation that it continues."""
    tools: tuple[dict[str, Any], ...] = ()
    """The schemas of the tools in the prompt, in the OpenAI format."""
    role: str = ""
    """The role whose reward its tokens are trained on; "" for the rollout's own."""
    model: str = ""
    """The model role that sampled it; "" for the policy."""
    trained: bool = True
    """Whether its sampled tokens become training samples; those of a model role never do."""
    branch: int | None = None
    """Index of its branch in `Rollout.branches`; None for the rollout's own segments."""

    def __post_init__(self) -> None:
        set_vectors(self, token_ids=np.int64, sampled=np.bool_, logprobs=np.float32)
        require_ids("token_ids", self.token_ids)
        n = len(self.token_ids)
        require(len(self.sampled) == n, f"sampled: got {len(self.sampled)} for {n} token_ids")
        require(len(self.logprobs) == n, f"logprobs: got {len(self.logprobs)} for {n} token_ids")
        require(
            (self.parent is None) == (self.kind == "root"), "parent: must be None for the root, and only for the root"
        )
        require(
            self.kind != "branch" or self.branch is not None,
            "branch: must not be None in a segment that starts a branch",
        )
        union, end = bytearray(n), 0
        for turn in self.turns:
            if not end <= turn.start < turn.stop <= n:
                raise ValueError(
                    f"turns: {turn.start}..{turn.stop} is empty, overlaps another turn or exceeds the {n} token_ids"
                )
            union[turn.start : turn.stop] = b"\1" * (turn.stop - turn.start)
            end = turn.stop
        require(union == self.sampled.tobytes(), "sampled: must be exactly the union of the turns' spans")
        require(
            not np.count_nonzero(self.logprobs[~self.sampled]), "logprobs: must be 0.0 for tokens that were not sampled"
        )
        require(
            not (self.model and self.trained),
            f"trained: the policy cannot be trained on tokens that {self.model!r} sampled",
        )

    def __repr__(self) -> str:
        return f"<Segment {self.index} {self.kind}: {len(self.turns)} turns, {len(self.token_ids)} ids>"

    def transcript(self) -> SegmentTranscript:
        """Return the conversation of this segment, from its first message to the last answer."""
        said = [message for turn in self.turns for message in (turn.message, *turn.env_messages)]
        opened = len(self.prompt_messages)
        who = [f"role {self.role}" if self.role else "", f"by {self.model}" if self.model else ""]
        notes = tuple(filter(None, [*who, "" if self.trained or self.model else "not trained"]))
        return SegmentTranscript(self.index, self.kind, self.parent, (*self.prompt_messages, *said), opened, notes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Rollout:
    """One attempt at a task, with a single outcome reward for all of its segments.

    `reward` is None if the rollout failed and was never scored; `failure` has the reason. `rewards` are without their
    weights. `print(rollout)` prints the conversation, and `rollout.show()` prints it with colors.
    """

    rollout_id: str
    group_id: str
    segments: tuple[Segment, ...]
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str
    failure: Failure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sandbox: str | None = None
    """The image digest, or else the kind, of the sandbox in which the rollout's tools ran; None without a sandbox."""
    failed_cases: Mapping[str, str] = field(default_factory=dict)
    """The hidden test cases (`sandbox.verify`) that did not pass when they last ran, with the reasons."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards, by role, of the roles that have a separate reward (`Segment.role`)."""
    branches: tuple[RolloutBranch, ...] = ()
    """The outcomes of the branches that were run from its states (`Segment.branch`), in the order of the states."""

    def __post_init__(self) -> None:
        for name in ("rollout_id", "group_id", "stop_reason"):
            require(bool(getattr(self, name)), f"{name}: empty")
        require(
            (self.reward is None) == (self.failure is not None),
            "reward: must be None if, and only if, there is a failure",
        )
        require(self.reward is None or math.isfinite(self.reward), f"reward: {self.reward} is not finite")
        self._require_roles(self, None, "role_rewards")
        for place, end in enumerate(self.branches):
            self._require_roles(end, place, f"branches[{place}].role_rewards")
        for i, segment in enumerate(self.segments):
            require(
                segment.branch is None or 0 <= segment.branch < len(self.branches), "branch: there is no such branch"
            )
            in_order = segment.index == i and (segment.parent is None or segment.parent < i)
            require(in_order, "segments: indices must count up from 0, and a parent must come before its children")

    def _require_roles(self, end: "Rollout | RolloutBranch", branch: int | None, name: str) -> None:
        """Check that each role with trained turns has a reward, unless the rollout or branch failed.

        Args:
            end: The rollout or branch.
            branch: Index of the branch; None for the rollout.
            name: The start of an error's message.

        Raises:
            ValueError: As in `require_roles`.
        """
        rollouts = set[str]()
        if end.reward is not None:
            rollouts = {s.role for s in self.segments if s.branch == branch and s.trained and s.turns}
        require_roles(rollouts, end.role_rewards, name)

    def __repr__(self) -> str:
        return f"<Rollout {self._head()}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, full: bool = False) -> str:
        """Return the transcript as plain text, with a heading before it and the outcome after it.

        Args:
            full: Whether long messages are printed completely instead of shortened.
        """
        said = plain_text(self.transcript(), limit=None if full else SHOWN_CHARACTERS)
        foot = outcome(self.rewards, self.metrics, self.failure, self.failed_cases, self.role_rewards)
        return "\n".join(filter(None, [f"rollout {self._head()}", said, foot]))

    def transcript(self) -> tuple[SegmentTranscript, ...]:
        """Return the conversation of every segment, in the order in which they were opened, branches last."""
        shown = [segment.transcript() for segment in self.segments]
        ends = [None if segment.branch is None else self.branches[segment.branch] for segment in self.segments]
        return tuple(s if end is None else s.noted(str(end)) for s, end in zip(shown, ends, strict=True))

    def show(self, *, full: bool = False, console: Any = None) -> None:
        """Print the transcript with colors.

        Args:
            full: Whether long messages are printed completely instead of shortened.
            console: A rich Console; None prints to stdout.
        """
        foot = outcome(self.rewards, self.metrics, self.failure, self.failed_cases, self.role_rewards)
        show(self._head(), self.transcript(), foot, limit=None if full else SHOWN_CHARACTERS, console=console)

    def _head(self) -> str:
        size = _size(self.own_segments)
        if many := len(self.branches):
            of_branches = _size([segment for segment in self.segments if segment.branch is not None])
            size += f", and in {many} {'branch' if many == 1 else 'branches'} {of_branches}"
        return heading(self.rollout_id, self.reward, self.stop_reason, size)

    @property
    def error(self) -> str | None:
        """The failure in one line; None for a rollout that was scored."""
        return None if self.failure is None else str(self.failure)

    @property
    def own_segments(self) -> tuple[Segment, ...]:
        """The rollout's own segments, without those of branches."""
        return tuple(segment for segment in self.segments if segment.branch is None)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled in all segments, including those of branches."""
        return policy_tokens(self.segments)

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens that may become training samples."""
        return int(sum(int(s.sampled.sum()) for s in self.segments if s.trained))

    def reward_of(self, role: str) -> float | None:
        """Return the reward of a role, or None if it has none.

        Args:
            role: The role; "" for the rollout's own reward.
        """
        return self.reward if self.reward is None or not role else self.role_rewards.get(role)

    @property
    def messages(self) -> list[Message]:
        """The model's own messages, turn by turn, without those of branches.

        `transcript()` has the whole conversation.
        """
        return [turn.message for segment in self.own_segments for turn in segment.turns]


def policy_tokens(segments: Iterable[Segment]) -> int:
    """Return the number of tokens that the policy sampled in these segments."""
    return int(sum(int(segment.sampled.sum()) for segment in segments if not segment.model))


def _size(segments: Sequence[Segment]) -> str:
    """Return the numbers of turns, tokens and segments as text."""
    return size_text(sum(len(segment.turns) for segment in segments), policy_tokens(segments), len(segments))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Group:
    """The rollouts of one task.

    Baselines are computed from the rewards of its scored rollouts, one number for each, never from segments or
    samples.
    """

    group_id: str
    rollouts: tuple[Rollout, ...]
    task: Task | None = None
    """The task that the rollouts attempt; None if the group was created without it."""
    place: tuple[str, int] | None = None
    """The name of a run's order of tasks, and the position of the group's task in it; None outside of such an order.

    Each position is trained only once.
    """

    def __post_init__(self) -> None:
        strangers = [r.rollout_id for r in self.rollouts if r.group_id != self.group_id]
        require(not strangers, f"rollouts: {strangers} do not belong to group {self.group_id!r}")
        ids = [r.rollout_id for r in self.rollouts]
        require(len(set(ids)) == len(ids), f"rollouts: a rollout_id appears twice in group {self.group_id!r}")

    def __repr__(self) -> str:
        rewards = ", ".join("failed" if r.reward is None else f"{r.reward:g}" for r in self.rollouts)
        return f"<Group {self.group_id}: {len(self.rollouts)} rollouts, rewards {rewards or 'none'}>"

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that have a reward."""
        return tuple(r for r in self.rollouts if r.reward is not None)
