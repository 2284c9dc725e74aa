"""A run in which the model and the tools attack the reader's browser and terminal, written by the real writer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from agentgym.errors import Failure
from agentgym.run.metrics_logger import METRICS
from agentgym.store.training_step import Trained
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.types.task import Task

SCRIPT = "<script>alert('model')</script><img src=x onerror=\"alert('image')\"><svg onload=alert(1)>"
STEAL = '<link rel=stylesheet href="https://evil.example/a.css"><img src="https://evil.example/b.png">'
ANSI = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2Jcleared\x00\x08"
BIDI = "user\u202egnp.exe\u202c \u2066isolated\u2069 zero\u200bwidth\ufeff tag\U000e0041"
BROKEN = b"half \xf0\x9f text \xff".decode("utf-8", "replace") + " \ud800 lone"
EVERYTHING = "\n".join((SCRIPT, STEAL, ANSI, BIDI, BROKEN, "javascript:alert(2)", "{{7*7}} ${7*7}"))
TOKENS: Sequence[bytes] = (
    b"<script>alert(3)</script>",
    b"\x1b[31m",
    "\u202e".encode(),
    b"\xf0\x9f",
    b"\xff\xfe",
    b"\x00",
    b" plain",
    b"\n",
    "\u200b".encode(),
    b"",
)


def token_bytes(model: str, ids: Sequence[int]) -> Mapping[int, bytes]:
    return {number: TOKENS[number] for number in ids}


def segment() -> Segment:
    """Return a segment with every token once as context, then once sampled."""
    count = len(TOKENS)
    sampled = np.arange(2 * count) >= count
    call = {"id": EVERYTHING, "function": {"name": SCRIPT, "arguments": {"code": EVERYTHING, "path": "x.py"}}}
    turn = Turn(
        start=count,
        stop=2 * count,
        finish_reason="stop",
        versions=(Version(0, 0),),
        message=Message(role="assistant", content=EVERYTHING, reasoning_content=EVERYTHING, tool_calls=[call]),  # type: ignore[list-item]
        env_messages=(Message(role="tool", name=SCRIPT, content=EVERYTHING + "\n```html\n" + SCRIPT + "\n```"),),
    )
    return Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.tile(np.arange(count), 2),
        sampled=sampled,
        logprobs=np.where(sampled, -0.5, 0.0),
        turns=(turn,),
        prompt_messages=(Message(role="system", content=EVERYTHING), Message(role="user", content=EVERYTHING)),
        tools=({"function": {"name": SCRIPT, "description": EVERYTHING}},),
    )


def rollouts() -> tuple[Rollout, ...]:
    """Return a scored rollout and a failed one."""
    failure = Failure(type=SCRIPT, message=EVERYTHING, where=SCRIPT, traceback=EVERYTHING)
    scored = Rollout(
        rollout_id=f"{SCRIPT}/0",
        group_id=SCRIPT,
        segments=(segment(),),
        reward=1.0,
        rewards={SCRIPT: 1.0},
        stop_reason=SCRIPT,
        metrics={SCRIPT: 1.0, "seconds": 1.0},
        sandbox=EVERYTHING,
        failed_cases={SCRIPT: EVERYTHING},
    )
    failed = Rollout(
        rollout_id=f"{SCRIPT}/1",
        group_id=SCRIPT,
        segments=(segment(),),
        reward=None,
        stop_reason="error",
        failure=failure,
    )
    return scored, failed


def write_hostile(folder: Path) -> Path:
    """Write the run to the folder."""
    task = Task(id=SCRIPT, prompt=EVERYTHING.replace("\ud800", ""))
    with RolloutWriter(folder, token_bytes=token_bytes) as writer:
        writer.add([Group(group_id=SCRIPT, rollouts=rollouts(), task=task)], step=0)
        made = Trained(
            rollout_id=f"{SCRIPT}/0",
            segment=0,
            logprobs=np.full(len(TOKENS), -0.4, np.float32),
            advantages=[0.5],
            gap=0.1,
        )
        writer.add_step([made], step=0)
    settings = {"versions": {SCRIPT: EVERYTHING}, "envs": {}, "settings": {SCRIPT: EVERYTHING, "recipe": SCRIPT}}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / METRICS).write_text(
        json.dumps({"step": 0, "reward": 1.0, SCRIPT: 1.0, f"tools/{BIDI}/calls": 2.0}) + "\n"
    )
    return folder
