"""The commands `agentgym export` and `agentgym import`, which write rollouts to other formats and read them."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from agentgym.cli.output import flush, say
from agentgym.cli.show import ALL, TRAIN, opened
from agentgym.errors import AgentGymError
from agentgym.files.names import remove

if TYPE_CHECKING:
    from agentgym.exports.atif_reader import Imported


def export_run(
    run: tyro.conf.Positional[Path],
    to: Literal["atif", "sft", "openai"],
    output: Path | None = None,
    min_reward: float | None = None,
    phase: str | None = None,
    step: int | None = None,
    unscored: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Export the rollouts of a run or an evaluation for other programs, and print what was left out.

    - atif: a folder of trajectories in Harbor's ATIF v1.8, one file per rollout, with token ids and log-probabilities.
    - sft: one line of JSON per conversation, with its messages and tools, as TRL's SFTTrainer reads it.
    - openai: one line of JSON per conversation, in the chat format of OpenAI's fine-tuning.

    For example:
    $ agentgym export runs/chase_grpo/20260801-101500 --to sft --min-reward 1
    $ agentgym export runs/eval-pointers/first --to atif --output trajectories
    $ agentgym export runs/chase_grpo/20260801-101500 --to openai --phase all --output chats.jsonl

    Args:
        run: The folder of a run or an evaluation, which contains rollouts.sqlite.
        to: The format.
        output: The file or folder to write; by default export-sft.jsonl, export-openai.jsonl or export-atif in the run.
        min_reward: Leave out rollouts with a lower reward.
        phase: Only this phase: train, eval_before, eval_after, eval or all; by default train if the run has trained.
        step: Only the rollouts of this step.
        unscored: Include rollouts without a reward.
    """
    from agentgym.exports.export import Chosen, export
    from agentgym.store.run_settings import begun_model

    with opened(run) as store:
        phases = store.phases()
        if phase is None:
            phase = TRAIN if TRAIN in phases else ALL
        elif phase not in (*phases, ALL):
            raise AgentGymError(
                f"--phase: no rollout has the phase {phase!r}; the phases are: {', '.join([*phases, ALL])}"
            )
        others = 0 if phase == ALL else store.count(step=step) - store.count(step=step, phase=phase)
    chosen = Chosen(phase=None if phase == ALL else phase, step=step, min_reward=min_reward, unscored=unscored)
    output = output or run / ("export-atif" if to == "atif" else f"export-{to}.jsonl")
    done = export(run, to, output, chosen, model=begun_model(run))
    what = "files" if to == "atif" else "conversations"
    say(f"{done.rollouts} rollouts, {done.pieces} {what}: {done.out}")
    if others:
        done.left_out[f"rollouts of other phases than {phase}"] = others
    for reason, count in done.left_out.items():
        say(f"left out: {count} {reason}")
    flush()
    return 0


def import_atif(paths: tyro.conf.Positional[tuple[Path, ...]], output_dir: Path) -> int:
    """Import ATIF trajectories into a folder that `agentgym show`, `compare` and `export` read like a run's.

    The trajectories may come from any agent. From a folder, every trajectory file below it is read. Only trajectories
    with token ids and log-probabilities can be trained on. The reward is read from a trajectory's `extra.reward`.

    For example:
    $ agentgym import trajectories --output-dir runs/others
    $ agentgym import jobs/*/*/agent/trajectory.json --output-dir runs/claude

    Args:
        paths: Trajectory files, or folders of them.
        output_dir: The folder to create.
    """
    from agentgym.exports.atif_files import continuations, is_atif
    from agentgym.exports.atif_reader import read_atif
    from agentgym.files.foreign.opening import real_path

    if not paths:
        raise AgentGymError("paths: give trajectory files, or folders of them")
    if os.path.lexists(output_dir):
        raise AgentGymError(f"--output-dir: {output_dir} already exists; choose another folder")
    if missing := [path for path in paths if not path.exists()]:
        raise AgentGymError(f"paths: there is no {missing[0]}")
    asked = {
        file: path if path.is_dir() else file.parent
        for path in paths
        for file in (sorted(path.rglob("*.json"), key=_natural) if path.is_dir() else [path])
    }
    files = [file for file, folder in asked.items() if file in paths or is_atif(file, folder)]
    try:
        behind = {real_path(file) for path in files for file in continuations(path)}
        many, unscored = _write((read_atif(file) for file in files if real_path(file) not in behind), output_dir)
    except ValueError as error:
        raise AgentGymError(f"paths: {error}") from error
    say(f"{many} rollouts, {unscored} of them without a reward: {output_dir}")
    if len(asked) > len(files):
        say(f"left out: {len(asked) - len(files)} files that aren't trajectories")
    flush()
    return 0


def _natural(path: Path) -> list[str | int]:
    """Return a sort key that puts 10 after 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _write(read: "Iterable[Imported]", out: Path) -> tuple[int, int]:
    """Write the rollouts to a store, with only one of them in memory at a time.

    The settings next to the store name the rollouts' model if it is the same for all of them.

    Returns:
        The number of rollouts, and the number of those without a reward. The folder appears once everything is
        written.

    Raises:
        ValueError: If there is no rollout, or two have the same name.
    """
    from agentgym.store.run_settings import SETTINGS, versions
    from agentgym.store.writer import RolloutWriter
    from agentgym.types.rollout import Group

    part = out.with_name(f"{out.name}.part")
    remove(part)  # from a killed import, or a link that somebody put there
    seen, models, unscored = set[tuple[str, int, str]](), set[str | None](), 0
    try:
        with RolloutWriter(part) as store:
            for one in read:
                if (key := (one.phase, one.step, one.rollout.rollout_id)) in seen:
                    raise ValueError(f"two trajectories have the session_id {key[2]!r}; import them separately")
                seen.add(key)
                models.add(one.model)
                unscored += one.rollout.reward is None
                group = Group(group_id=one.rollout.group_id, rollouts=(one.rollout,))
                store.add([group], phase=one.phase, step=one.step, whole=False)
                store.flush()
        if not seen:
            raise ValueError("no file is an ATIF trajectory, whose schema_version starts with ATIF-v1.")
        if store.lost:
            raise AgentGymError(
                f"--output-dir: {store.lost} rollouts could not be written to {part}; see the log for the reason"
            )
        _sign(part)
        content = {"versions": versions(), "model": models.pop() if len(models) == 1 else None}
        (part / SETTINGS).write_text(json.dumps(content, indent=2) + "\n")
        part.replace(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(seen), unscored


def _sign(folder: Path) -> None:
    """Store the signs of suspicious rollouts, once all rollouts are in the folder.

    They can't be stored earlier, because they depend on whole groups, and the files of a group may be read in any
    order.
    """
    from agentgym.store.reader import RolloutStore
    from agentgym.store.writer import RolloutWriter
    from agentgym.types.rollout import Group

    with RolloutStore(folder) as store:
        names = {(row.phase, row.step, row.group_id): None for row in store.summaries()}
        with RolloutWriter(folder, done=sys.maxsize) as writer:
            for phase, step, name in names:
                found = store.find(phase=phase, step=step, ids=(name,))
                rollouts = tuple(stored.rollout for stored in found if stored.rollout.group_id == name)
                writer.sign(Group(group_id=name, rollouts=rollouts), phase=phase, step=step)
                writer.flush()
