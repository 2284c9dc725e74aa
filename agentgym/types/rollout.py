"""The ends of rollouts: the reasons, and those of the branches that were played from one of their states."""

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
    """The reasons for which rollouts end; a tool that returns `Stop("word")` adds its own word."""

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
    """The end of one branch: the rollout played on from one of its states, beside the way that it went itself."""

    turn: int
    """The number of turns of the rollout that were sampled before the state; its first own turn has this number."""
    reward: float | None
    """The reward of the whole way, what the rollout had in the state included; None where the branch failed."""
    stop_reason: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards by name, without their weights."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of the roles that have one of their own."""
    failure: Failure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The env's numbers at its end, and what the branch used: its own `turns`, `tokens` and `seconds`."""

    def __post_init__(self) -> None:
        require(self.turn > 0, f"turn: a branch begins after a turn, got {self.turn}")
        require(bool(self.stop_reason), "stop_reason: empty")
        require((self.reward is None) == (self.failure is not None), "reward: None exactly when failure says why")
        require(self.reward is None or math.isfinite(self.reward), f"reward: {self.reward} is not finite")

    def __repr__(self) -> str:
        return f"<RolloutBranch {self}>"

    def __str__(self) -> str:
        worth = "failed" if self.reward is None else f"reward {self.reward:g}"
        return f"from turn {self.turn}, {worth}, stopped by {self.stop_reason}"

    def reward_of(self, role: str) -> float | None:
        """Return the reward of a role, "" for the branch's own; None where it has none."""
        return self.reward if self.reward is None or not role else self.role_rewards.get(role)


def require_roles(rollouts: Iterable[str], rewards: Mapping[str, float], where: str) -> None:
    """Raise ValueError where a role's reward has no name or is not finite, or a role with turns to train has none."""
    for role, value in rewards.items():
        require(bool(role) and math.isfinite(value), f"{where}: {role!r} is {value}; name it, and be finite")
    without = sorted(set(filter(None, rollouts)) - rewards.keys())
    require(not without, f"{where}: none of {', '.join(without)}, whose turns are to be trained")


class Turn(NamedTuple):
    """One sampled stretch of a segment: tokens `start` to `stop`, under these policy versions."""

    start: int
    stop: int
    finish_reason: FinishReason
    versions: tuple[Version, ...]
    message: Message
    env_messages: tuple[Message, ...] = ()
    """The env's answer, the last too, then the instruction of a summary; one carried over opens the next segment."""
    seconds: float = 0.0
    """The time from asking the engine to its answer."""
    waited: float = 0.0
    """The part of `seconds` that passed in front of the engine: at the shut gate, or for a place at an endpoint."""
    asked_at: float | None = None
    """When the engine was asked, in seconds from the rollout's begin; None where that is not known."""
    env_seconds: float = 0.0
    """The time from the turn's message to the env's answer, forks and sub-agents included; 0 without an answer."""
    reward: float = 0.0
    """The reward of the env's step for this turn; it is part of the rollout's reward."""
    number: int = 0
    """The number of turns of the rollout, forks and sub-agents included, that were sampled before it."""

    def __repr__(self) -> str:
        calls = "".join(f", calls {call['function']['name']!r}" for call in self.message.get("tool_calls", ()))
        return f"<Turn {self.number}: {self.stop - self.start} ids, {self.finish_reason}{calls}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Segment:
    """One append-only stretch of context: ids, which of them were sampled, and their log-probabilities.

    ::

        ids      P  P  a  a  e  a      P prompt, a sampled, e environment
        sampled  0  0  1  1  0  1      exactly the union of the turns' spans
        logprobs 0  0 -x -x  0 -x

    A prefix taken over from a parent segment is carried with sampled 0: each sampled token is trained
    in exactly one segment.
    """

    index: int
    parent: int | None
    """Index of the segment this one continues; None for the root."""
    kind: SegmentKind
    token_ids: Ints
    sampled: Bools
    logprobs: Floats
    turns: tuple[Turn, ...]
    prompt_messages: tuple[Message, ...] = ()
    """The messages that the segment opened with; those of a fork repeat the conversation that it goes on from."""
    tools: tuple[dict[str, Any], ...] = ()
    """The schemas of the tools that the model was shown, in the OpenAI shape."""
    role: str = ""
    """The role whose reward its tokens are trained on; "" for the rollout's own."""
    model: str = ""
    """The model role that sampled it; "" for the policy."""
    trained: bool = True
    """Whether its sampled tokens become samples; those of a model role never do."""
    branch: int | None = None
    """The place of its branch in `Rollout.branches`; None for what the rollout itself went through."""

    def __post_init__(self) -> None:
        set_vectors(self, token_ids=np.int64, sampled=np.bool_, logprobs=np.float32)
        require_ids("token_ids", self.token_ids)
        n = len(self.token_ids)
        require(len(self.sampled) == n, f"sampled: {len(self.sampled)} for {n} token_ids")
        require(len(self.logprobs) == n, f"logprobs: {len(self.logprobs)} for {n} token_ids")
        require((self.parent is None) == (self.kind == "root"), "parent: None for the root, and only for it")
        require(self.kind != "branch" or self.branch is not None, "branch: None in a segment that begins a branch")
        union, end = bytearray(n), 0
        for turn in self.turns:
            if not end <= turn.start < turn.stop <= n:
                raise ValueError(f"turns: {turn.start}..{turn.stop} holds no token, overlaps another or passes {n}")
            union[turn.start : turn.stop] = b"\1" * (turn.stop - turn.start)
            end = turn.stop
        require(union == self.sampled.tobytes(), "sampled: must be exactly the union of the turns' spans")
        require(not np.count_nonzero(self.logprobs[~self.sampled]), "logprobs: must be 0.0 where nothing was sampled")
        require(not (self.model and self.trained), f"trained: the policy is not trained on what {self.model!r} sampled")

    def __repr__(self) -> str:
        return f"<Segment {self.index} {self.kind}: {len(self.turns)} turns, {len(self.token_ids)} ids>"

    def transcript(self) -> SegmentTranscript:
        """The conversation of this segment, from what it opened with to the last answer."""
        said = [message for turn in self.turns for message in (turn.message, *turn.env_messages)]
        opened = len(self.prompt_messages)
        who = [f"role {self.role}" if self.role else "", f"by {self.model}" if self.model else ""]
        notes = tuple(filter(None, [*who, "" if self.trained or self.model else "not trained"]))
        return SegmentTranscript(self.index, self.kind, self.parent, (*self.prompt_messages, *said), opened, notes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Rollout:
    """One attempt at a task: ONE outcome reward, however many segments it fanned out into.

    `reward` None means that it failed and was never scored (`failure` says why); `rewards` are without their weights.
    `print(rollout)` shows what was said, `rollout.show()` the same with colors.
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
    """The digest of the image or the kind of the sandbox that its tools ran in."""
    failed_cases: Mapping[str, str] = field(default_factory=dict)
    """The cases of hidden tests (`sandbox.verify`) that have not passed when they last ran, with the reasons."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of the roles that have one of their own (`Segment.role`)."""
    branches: tuple[RolloutBranch, ...] = ()
    """What became of the branches that were played from its states (`Segment.branch`), in the order of the states."""

    def __post_init__(self) -> None:
        for name in ("rollout_id", "group_id", "stop_reason"):
            require(bool(getattr(self, name)), f"{name}: empty")
        require((self.reward is None) == (self.failure is not None), "reward: None exactly when failure says why")
        require(self.reward is None or math.isfinite(self.reward), f"reward: {self.reward} is not finite")
        self._require_roles(self, None, "role_rewards")
        for place, end in enumerate(self.branches):
            self._require_roles(end, place, f"branches[{place}].role_rewards")
        for i, segment in enumerate(self.segments):
            require(segment.branch is None or 0 <= segment.branch < len(self.branches), "branch: of none")
            in_order = segment.index == i and (segment.parent is None or segment.parent < i)
            require(in_order, "segments: indices must count from 0 and a parent must come first")

    def _require_roles(self, end: "Rollout | RolloutBranch", branch: int | None, name: str) -> None:
        """Require the reward of each role that has turns to train in what came to this end, unless it failed."""
        rollouts = set[str]()
        if end.reward is not None:
            rollouts = {s.role for s in self.segments if s.branch == branch and s.trained and s.turns}
        require_roles(rollouts, end.role_rewards, name)

    def __repr__(self) -> str:
        return f"<Rollout {self._head()}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, full: bool = False) -> str:
        """The transcript as plain text, with what became of the rollout before and after it; `full` cuts no message."""
        said = plain_text(self.transcript(), limit=None if full else SHOWN_CHARACTERS)
        foot = outcome(self.rewards, self.metrics, self.failure, self.failed_cases, self.role_rewards)
        return "\n".join(filter(None, [f"rollout {self._head()}", said, foot]))

    def transcript(self) -> tuple[SegmentTranscript, ...]:
        """The whole conversation of every segment, in the order of their opening; those of branches come last."""
        shown = [segment.transcript() for segment in self.segments]
        ends = [None if segment.branch is None else self.branches[segment.branch] for segment in self.segments]
        return tuple(s if end is None else s.noted(str(end)) for s, end in zip(shown, ends, strict=True))

    def show(self, *, full: bool = False, console: Any = None) -> None:
        """Print the transcript with colors; `full` cuts no message, `console` is a rich Console instead of stdout."""
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
        """What the rollout itself went through: its segments without those of branches."""
        return tuple(segment for segment in self.segments if segment.branch is None)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy wrote, over all segments, those of branches too."""
        return policy_tokens(self.segments)

    @property
    def trained_tokens(self) -> int:
        """How many of its sampled tokens may become samples."""
        return int(sum(int(s.sampled.sum()) for s in self.segments if s.trained))

    def reward_of(self, role: str) -> float | None:
        """Return the reward of a role, "" for the rollout's own; None where it has none."""
        return self.reward if self.reward is None or not role else self.role_rewards.get(role)

    @property
    def messages(self) -> list[Message]:
        """The messages of the model, turn by turn, without those of branches."""
        return [turn.message for segment in self.own_segments for turn in segment.turns]


def policy_tokens(segments: Iterable[Segment]) -> int:
    """Count the tokens that the policy wrote in these segments."""
    return int(sum(int(segment.sampled.sum()) for segment in segments if not segment.model))


def _size(segments: Sequence[Segment]) -> str:
    """Say how many turns, tokens and segments these are."""
    return size_text(sum(len(segment.turns) for segment in segments), policy_tokens(segments), len(segments))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Group:
    """The rollouts of one task; a baseline sees `len(scored)` numbers, never segments or samples."""

    group_id: str
    rollouts: tuple[Rollout, ...]
    task: Task | None = None
    """The task that they attempt; None where the group was made without it."""
    place: tuple[str, int] | None = None
    """Name of a schedule's order of tasks, and the place in it, which is trained on once; None outside a schedule."""

    def __post_init__(self) -> None:
        strangers = [r.rollout_id for r in self.rollouts if r.group_id != self.group_id]
        require(not strangers, f"rollouts: {strangers} belong to another group than {self.group_id!r}")
        ids = [r.rollout_id for r in self.rollouts]
        require(len(set(ids)) == len(ids), f"rollouts: a rollout_id appears twice in group {self.group_id!r}")

    def __repr__(self) -> str:
        rewards = ", ".join("failed" if r.reward is None else f"{r.reward:g}" for r in self.rollouts)
        return f"<Group {self.group_id}: {len(self.rollouts)} rollouts, rewards {rewards or 'none'}>"

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that have a reward."""
        return tuple(r for r in self.rollouts if r.reward is not None)
