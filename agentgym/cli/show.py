"""The command `agentgym show`: shows a run's rollouts in the terminal."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from agentgym.cli.output import flush, say
from agentgym.cli.token_text import print_pieces, read_text, token_rows
from agentgym.errors import AgentGymError
from agentgym.store.reader import Order, RolloutStore, RolloutSummary, StoredRollout
from agentgym.store.run_settings import begun_envs, rescored_from
from agentgym.store.schema import FILE, StoreError
from agentgym.store.suspicious import SIGNS
from agentgym.types.transcript import one_line, printable

ROWS = 20
"""Number of table rows without --limit."""
TRANSCRIPTS = 10
"""Number of transcripts if neither the selection nor --limit sets one."""
TRAIN = "train"
"""The phase of the rollouts that a run trains on."""
ALL = "all"
"""The name that selects every phase."""
COLUMNS = ("number", "phase", "step", "rollout", "reward", "stop", "turns", "tokens", "")


class Form(NamedTuple):
    """How a rollout is printed."""

    full: bool
    prompt: bool
    tokens: bool


def show(
    run: tyro.conf.Positional[Path],
    worst: int | None = None,
    best: int | None = None,
    failed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    suspicious: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    id: tuple[str, ...] = (),
    step: int | None = None,
    phase: str | None = None,
    full: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    prompt: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    tokens: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    limit: int | None = None,
) -> int:
    """Show the rollouts of a run, finished or not: a table of the last ones, or transcripts of the selected ones.

    The first lines identify the env: its class, its version and the hash of its files.

    For example:
    $ agentgym show runs/chase_grpo/20260801-101500
    $ agentgym show runs/chase_grpo/20260801-101500 --worst 3 --step 12
    $ agentgym show runs/chase_grpo/20260801-101500 --best 3 --phase eval_after
    $ agentgym show runs/chase_grpo/20260801-101500 --suspicious --phase train
    $ agentgym show runs/chase_grpo/20260801-101500 --id 17 task-3/0 --full | less
    $ agentgym show runs/chase_grpo/20260801-101500 --prompt
    $ agentgym show runs/chase_grpo/20260801-101500 --worst 1 --tokens

    Args:
        run: The folder of the run, which contains rollouts.sqlite.
        worst: Print the transcripts of this many rollouts with the lowest rewards; those of training, if there are
            any. Of equal rewards, the latest step comes first, and within a step the ids are in alphabetical order.
        best: Print the transcripts of this many rollouts with the highest rewards, like --worst.
        failed: Print the transcripts of rollouts without a reward, with their errors, the latest first.
        suspicious: Print the transcripts of rollouts that may have been rewarded for the wrong thing, the latest
            first.
        id: Print the transcripts of these rollouts: numbers of the table, rollout ids, or task ids.
        step: Only the rollouts of this step; the first step is 0, as in metrics.jsonl.
        phase: Only this phase: train, eval_before, eval_after, eval or all. Without it, --worst and --best show train
            if there is any.
        full: Print all messages of a transcript in full; with --tokens, also the tokens that were not sampled.
        prompt: Print the text that the model read and wrote, decoded from its token ids, instead of the transcript: the
            prompt with its tools and special tokens, and each turn. Without a selection, of the latest rollout.
        tokens: Print a table of the sampled tokens instead of the transcript: the engine's log-probability, the
            trainer's probability divided by the engine's, and the advantage. Without a selection, of the latest
            rollout.
        limit: Show at most this many; by default 20 rows of the table, or 10 transcripts.
    """
    for name, number in (("worst", worst), ("best", best), ("limit", limit)):
        if number is not None and number < 1:
            raise AgentGymError(f"--{name}: must be at least 1, got {number}")
    ends: tuple[tuple[Order, int | None], ...] = (("worst", worst), ("best", best))
    asks = [(order, number) for order, number in ends if number is not None]
    chosen: dict[str, Any] = {"failed": failed, "suspicious": suspicious, "step": step, "ids": id}
    chosen["phase"] = None if phase == ALL else phase
    starts_from_train = phase is None and bool(asks) and not id
    if not asks and (failed or suspicious or id):
        asks = [("written" if id else "latest", limit or TRANSCRIPTS)]
    elif not asks and (prompt or tokens):
        asks = [("latest", limit or 1)]
    how = Form(full=full, prompt=prompt, tokens=tokens)
    try:
        with opened(run) as store:
            for name, version in begun_envs(run).items():
                say(printable(f"env {name}: {version}"))
            if (origin := rescored_from(run)) is not None:
                say(printable(f"rescored from {origin}"))
            if starts_from_train and TRAIN in store.phases():
                chosen["phase"] = TRAIN
            code = _show(store, chosen, asks, limit, how)
        flush()
    except (StoreError, FileNotFoundError) as error:
        raise AgentGymError(f"run: {error}") from error
    return code


def _show(
    store: RolloutStore, chosen: dict[str, Any], asks: Sequence[tuple[Order, int]], limit: int | None, how: Form
) -> int:
    phases = store.phases()
    if phases and chosen["phase"] is not None and chosen["phase"] not in phases:
        there = ", ".join([*phases, ALL])
        raise AgentGymError(f"--phase: no rollout has the phase {chosen['phase']!r}; the phases are: {there}")
    if not asks:
        return _show_table(store, chosen, limit or ROWS)
    return max([_show_transcripts(store, chosen, order, number, limit, how) for order, number in asks])


def opened(run: Path) -> RolloutStore:
    """Return the store of the run.

    Raises:
        AgentGymError: If there is no store; the message suggests what to name instead.
    """
    if not run.exists():
        raise AgentGymError(f"run: there is no folder {run}; name the folder of a run, such as runs/RECIPE/TIME")
    if not (run / FILE).is_file():
        within = sorted(run.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
        hint = f"the latest run in it is {within[-1].parent}" if within else "name the folder of a run"
        raise AgentGymError(f"run: {run} contains no {FILE}; {hint}")
    return RolloutStore(run)


def _show_table(store: RolloutStore, chosen: dict[str, Any], limit: int) -> int:
    found = store.summaries(**chosen, limit=limit)[::-1]
    if not found:
        return _say_none(store)
    for line in table(found):
        say(line)
    _say_rest(store.count(**chosen), len(found), "limit")
    return 0


def table(found: list[RolloutSummary]) -> Iterator[str]:
    """Yield the rollouts as lines of aligned columns, starting with the column names."""
    rows = [COLUMNS, *map(_cells, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(found: RolloutSummary) -> tuple[str, ...]:
    reward = "failed" if found.reward is None else f"{found.reward:g}"
    said = found.failure.partition("\n")[0] if found.failure else " ".join(found.suspicious)
    cells = (found.number, found.phase, found.step, found.rollout_id, reward, found.stop_reason)
    return tuple(one_line(str(cell)) for cell in (*cells, found.turns, found.tokens, said))


def _show_transcripts(
    store: RolloutStore, chosen: dict[str, Any], order: Order, number: int, limit: int | None, how: Form
) -> int:
    shown, rewards = 0, list[float | None]()
    for found in store.find(**chosen, order=order, limit=min(number, limit or number)):
        if shown:
            say("")
        with store.sound(f"rollout {found.number}"):
            _show_one(store, found, how)
        rewards.append(found.rollout.reward)
        shown += 1
    if not shown:
        only_failed = chosen["failed"] and order not in ("worst", "best")
        if only_failed and (looked_at := store.count(**chosen | {"failed": False})):
            say(f"none of the {looked_at} selected rollouts failed")
            return 0
        return _say_none(store)
    by_number = order in ("worst", "best") and (limit is None or number < limit)
    _say_rest(store.count(**chosen, order=order), shown, order if by_number else "limit")
    if order in ("worst", "best") and (last := rewards[-1]) is not None:
        _say_tied(last, store.count(**chosen, order=order, reward=last) - rewards.count(last))
    return 0


def _show_one(store: RolloutStore, found: StoredRollout, how: Form) -> None:
    say(one_line(f"number {found.number}, {found.phase}, step {found.step}"))
    for sign in found.suspicious:
        say(one_line(f"suspicious: {sign}: {SIGNS.get(sign, 'a sign that this agentgym does not know')}"))
    if how.prompt or how.tokens:
        say(one_line(f"rollout {found.rollout.rollout_id}"))
        pieces = [*(read_text(store, found) if how.prompt else ())]
        pieces += token_rows(store, found, full=how.full) if how.tokens else ()
        print_pieces(pieces)
        return
    if sys.stdout.isatty():
        found.rollout.show(full=how.full)
    else:
        say(found.rollout.text(full=how.full))
    for line in training_lines(found):
        say(line)


def training_lines(found: StoredRollout) -> Iterator[str]:
    """Yield lines with the advantages and the log-probability gaps of each trained segment, one number per turn."""
    for index, (advantages, gaps) in enumerate(zip(found.advantages, found.turn_gaps, strict=True)):
        if advantages:
            yield f"segment {index}: advantage by turn: {' '.join(f'{value:.4g}' for value in advantages)}"
        if gaps:
            moved = "" if found.logprob_gap is not None else ", after an optimizer step of the same batch"
            said = " ".join(f"{gap:.2g}" for gap in gaps)
            yield f"segment {index}: largest log-probability gap to the trainer by turn, in nats{moved}: {said}"


def _say_none(store: RolloutStore) -> int:
    many = len(store)
    if not many:
        raise AgentGymError(f"run: {store.path} has no rollouts yet; look again when the run has collected some")
    raise AgentGymError(f"none of the {many} rollouts in {store.path} matches; use fewer filters, or see the table")


def _say_rest(many: int, shown: int, option: str) -> None:
    if many > shown:
        flush()  # so that the rollouts come first, also if stdout and stderr are one file
        sys.stderr.write(f"{shown} of {many} rollouts are shown; --{option} N shows more\n")


def _say_tied(reward: float, others: int) -> None:
    """Print how many rollouts have the same reward as the last one shown, but aren't shown."""
    if others > 0:
        more = "1 more rollout has" if others == 1 else f"{others} more rollouts have"
        sys.stderr.write(f"{more} the reward {reward:g} of the last one shown\n")
