"""Export of a run's stored rollouts to other formats, with a count of the skipped ones."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agentgym.errors import AgentGymError
from agentgym.exports.atif import documents
from agentgym.exports.atif_images import take_out
from agentgym.exports.conversations import openai_line, sft_line, why_not
from agentgym.files.names import remove
from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.types.rollout import Segment

Format: TypeAlias = Literal["atif", "sft", "openai"]
LINES: Mapping[str, Callable[[Segment], dict[str, Any]]] = {"sft": sft_line, "openai": openai_line}
"""The formats with one line per conversation."""
UNSCORED = "rollouts without a reward"
EMPTY = "rollouts without a turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Selects the rollouts to export."""

    phase: str | None = None
    """Only this phase; None means all."""
    step: int | None = None
    min_reward: float | None = None
    unscored: bool = False
    """Whether to include rollouts without a reward."""


@dataclass(slots=True)
class Exported:
    """The result of an export, with counts of the skipped items by reason."""

    out: Path
    rollouts: int = 0
    pieces: int = 0
    """Number of files (ATIF) or lines (other formats) that were written."""
    left_out: Counter[str] = field(default_factory=Counter)


def export(run: Path, to: Format, out: Path, chosen: Chosen, *, model: str | None = None) -> Exported:
    """Write the chosen rollouts of a run or an evaluation, in the order in which they were stored.

    ATIF is a folder of files; the other formats are a single file of lines.

    Args:
        run: The folder of the run or evaluation.
        to: The format.
        out: The file or folder to write.
        chosen: Which rollouts to export.
        model: Name of the policy's model, if known.

    Raises:
        AgentGymError: If `out` already exists, or if no rollout is left to write. In both cases, nothing is written.
    """
    if os.path.lexists(out):
        raise AgentGymError(f"output: {out} already exists; choose another one")
    done = Exported(out)
    with RolloutStore(run) as store:
        found = _chosen(store, chosen, done.left_out)
        part = out.with_name(f"{out.name}.part")
        out.parent.mkdir(parents=True, exist_ok=True)
        remove(part)  # from a killed export, or a link that somebody put there
        try:
            if to == "atif":
                _write_documents(store, found, part, done, model)
            else:
                _write_lines(store, found, part, done, to)
        except BaseException:
            remove(part)
            raise
    if not done.pieces:
        remove(part)
        why = ", ".join(f"{count} {what}" for what, count in done.left_out.items()) or "no rollout matches"
        raise AgentGymError(f"run: {run} has nothing to export: {why}")
    part.replace(out)
    return done


def _chosen(store: RolloutStore, chosen: Chosen, left_out: Counter[str]) -> Iterator[StoredRollout]:
    """Yield the rollouts to export, and count the others in `left_out` by reason."""
    for stored in store.find(step=chosen.step, phase=chosen.phase):
        reward = stored.rollout.reward
        if reward is None and not chosen.unscored:
            left_out[UNSCORED] += 1
        elif reward is not None and chosen.min_reward is not None and reward < chosen.min_reward:
            left_out[f"rollouts with a reward below {chosen.min_reward:g}"] += 1
        elif not any(segment.turns for segment in stored.rollout.segments):
            left_out[EMPTY] += 1
        else:
            yield stored


def _write_documents(
    store: RolloutStore, found: Iterator[StoredRollout], folder: Path, done: Exported, model: str | None
) -> None:
    folder.mkdir()
    for number, stored in enumerate(found, 1):
        with store.sound(f"rollout {stored.number}"):
            made = documents(stored, f"trajectory-{number:06d}", model)
            written = {name: (take_out(document), json.dumps(document)) for name, document in made.items()}
        for name, (images, text) in written.items():
            _write_images(images, folder)
            (folder / name).write_text(f"{text}\n")
            done.pieces += 1
        done.rollouts += 1


def _write_images(images: Mapping[str, bytes], folder: Path) -> None:
    for name, data in images.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)


def _write_lines(
    store: RolloutStore, found: Iterator[StoredRollout], file: Path, done: Exported, to: Literal["sft", "openai"]
) -> None:
    line_of = LINES[to]
    with file.open("x") as lines:
        for stored in found:
            with store.sound(f"rollout {stored.number}"):
                wanted = [(segment, why_not(segment, images=to == "openai")) for segment in stored.rollout.segments]
                written = [json.dumps(line_of(segment)) for segment, why in wanted if why is None]
            done.left_out.update(why for _, why in wanted if why is not None)
            lines.writelines(f"{line}\n" for line in written)
            done.pieces += len(written)
            done.rollouts += bool(written)
