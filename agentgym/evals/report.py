"""Evaluations and comparisons as lines of text."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from agentgym.evals.comparison import Comparison
from agentgym.evals.evaluation import Evaluation, mean_reward
from agentgym.types.rollout import Group
from agentgym.types.transcript import printable

SIGNIFICANT = 0.05
"""A p below this is commonly considered significant."""
FAILURES = 3
"""Maximum number of kinds of failures to show."""


def score_lines(played: Evaluation) -> Iterator[str]:
    """Yield the scores with their intervals, the failures, and the cost in calls, tokens and money."""
    yield f"{'reward':<10}{played.reward:.3f}  {played.interval()}"
    if len(named := played.named_rewards()) > 1:
        yield from (f"{'':<10}{mean:.3f}  {printable(name)}" for name, mean in named.items())
    for k in sorted({1, played.k}):
        yield f"{f'pass@{k}':<10}{played.pass_at(k):.3f}  {played.pass_at_interval(k)}"
    if played.k > 1:
        yield f"{f'pass^{played.k}':<10}{played.pass_hat(played.k):.3f}  {played.pass_hat_interval(played.k)}"
    if played.solved != 1:
        yield f"{'solved':<10}with a reward of at least {played.solved:g}"
    resumed = "" if played.resumed is None else f", {played.resumed} already done"
    yield f"{'rollouts':<10}{len(played.rollouts)}, {played.failed} failed{resumed}"
    for why, times in played.failures[:FAILURES]:
        yield f"{'':<10}{times} times {printable(why).partition(chr(10))[0]}"
    turns = [turn for rollout in played.rollouts for segment in rollout.segments for turn in segment.turns]
    cut = sum(turn.finish_reason == "length" for turn in turns)
    yield f"{'turns':<10}{len(turns):,}, {cut:,} cut off by a token limit"
    calls = played.calls()
    if calls["tool_calls"] or calls["malformed_calls"]:
        wrong = f"{calls['tool_errors']:.2f} errors, {calls['malformed_calls']:.2f} malformed"
        yield f"{'calls':<10}{calls['tool_calls']:.2f} per rollout, {wrong}"
    if calls["retries"]:
        yield f"{'retries':<10}{calls['retries']:.2f} per rollout"
    account = played.account()
    if "requests" in account:
        cached = f", {account['cached_tokens']:.0f} cached" if "cached_tokens" in account else ""
        yield f"{'tokens':<10}{account.get('prompt_tokens', 0):.0f} in prompts{cached}"
        yield f"{'':<10}{account.get('completion_tokens', 0):.0f} sampled, in {account['requests']:.0f} requests"
        if "uncounted_requests" in account:
            yield f"{'':<10}{account['uncounted_requests']:.0f} requests had no usage counts: estimated, without a cost"
        if "unread_parts" in account:
            yield f"{'':<10}{account['unread_parts']:.0f} parts of replies were neither text nor reasoning: left out"
        if "cost" in account:
            yield f"{'cost':<10}{account['cost']:.4f}"
    else:
        yield f"{'tokens':<10}{account['sampled_tokens']:.0f} sampled"
    yield from _sent_again(account)


def _sent_again(account: Mapping[str, float]) -> Iterator[str]:
    """Yield how many requests to the policy's endpoint, and to that of each model role, were sent again."""
    for name, times in account.items():
        what, _, role = name.partition("/")
        if what.endswith("sent_again"):
            of = f" to the model {printable(role)!r}" if role else ""
            requests = f"request{of} was" if times == 1 else f"requests{of} were"
            yield f"{'':<10}{times:.0f} {requests} sent again after a failure"


def task_lines(played: Evaluation, limit: int) -> Iterator[str]:
    """Yield a table of the tasks with the lowest rewards. Tasks without a score come first; ties are in task order."""
    groups = sorted(played.groups, key=lambda group: mean_reward(group) if group.scored else float("-inf"))
    cells = [_cells(group, played.solved_in(group)) for group in groups[:limit]]
    rows = [("task", "reward", "solved", "failed", "tokens", "ended by"), *cells]
    yield from aligned(rows)
    if len(groups) > limit:
        yield f"showing {limit} of {len(groups)} tasks"


def _cells(group: Group, times_solved: int) -> tuple[str, ...]:
    rollouts = group.rollouts
    stops = Counter(rollout.stop_reason for rollout in rollouts)
    ended = ", ".join(f"{reason} {times}" for reason, times in stops.most_common())
    reward = f"{mean_reward(group):.3f}" if group.scored else "none"
    solved = f"{times_solved} of {len(group.scored)}"
    tokens = str(sum(rollout.sampled_tokens for rollout in rollouts))
    cells = (group.group_id, reward, solved, len(rollouts) - len(group.scored), tokens, ended)
    return tuple(printable(str(cell)) for cell in cells)


def comparison_lines(found: Comparison, limit: int) -> Iterator[str]:
    """Yield the means, their difference with its interval and p, and the tasks that differ most."""
    one, other = found.means
    for name, what in zip(("one", "other"), found.sides, strict=True):
        if what:
            yield f"{name:<12}{what}"
    left_out = f", {found.left_out} left out because one side has no score for them" if found.left_out else ""
    yield f"{'tasks':<12}{len(found.rewards)} in both{left_out}"
    if found.attempts_left_out:
        yield f"{'attempts':<12}{found.attempts_left_out} left out, so that both sides have equally many per task"
    yield f"{'reward':<12}{one:.3f} and {other:.3f}"
    yield f"{'difference':<12}{found.difference:+.3f}  {found.interval}"
    yield f"{'p':<12}{found.p:.4f}, paired sign-flip test, two-sided"
    if found.least_p >= SIGNIFICANT:
        many = sum(by != 0 for by in found.differences.values())
        of = f"{many} of {len(found.rewards)} tasks differ" if many else "no task differs"
        yield f"{'':<12}{of}: too few for a p below {SIGNIFICANT} in any case; evaluate more tasks"
    yield f"{'luck':<12}{found.luck}"
    differ = sorted(found.differences.items(), key=lambda item: -abs(item[1]))
    changed = [(name, found.rewards[name], by) for name, by in differ if by]
    rows = [(printable(name), f"{a:.3f}", f"{b:.3f}", f"{by:+.3f}") for name, (a, b), by in changed[:limit]]
    if rows:
        yield from aligned([("task", "one", "other", "difference"), *rows])
    if len(changed) > limit:
        yield f"showing {limit} of {len(changed)} tasks that differ"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
