"""The page of metrics: it has every metric that real runs write, and no others."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

import agentgym as ag
from tests.docs.blocks import DOCS, ROOT

PAGE = (DOCS / "metrics.md").read_text()
NAMED = [name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
"""The metrics in the page's tables; words in capitals are placeholders for names."""
ELSEWHERE = {
    "engine/.*": "SGLang servers",
    "cluster/.*": "a Ray cluster",
    "train/(mfu|gpu_memory_gib)": "a GPU",
    "train/skipped_rollouts": "a loss that is not finite",
    "role/.*": "an env with roles",
    "rollout/branch.*": "branches",
    "rollout/held_seconds": "a batch that leaves rollouts in play",
    "rollout/cut_turns": "a turn that a token limit cuts off",
}
"""Metrics of the page that no run in this test writes, and what they require."""
SMALL = ag.RunConfig(
    recipe="small",
    env="tests.docs.metrics_env:Look",
    model="tiny",
    prompts_per_step=4,
    group_size=4,
    max_steps=2,
    max_turn_tokens=20,
    eval_tasks=6,
    save_every=1,
)
TRAIN = ag.TrainConfig(
    temperature=0.7, layout="tree", kl_coef=0.01, importance_sampling="token", max_tokens_per_microbatch=2048
)


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"[A-Z]+", ".*", re.escape(name)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the metrics of three real runs: an asynchronous mixture, one with a teacher, and one with a critic."""
    folder = tmp_path_factory.mktemp("runs")
    envs = {"tests.docs.metrics_env:Look": 1.0, "tests.docs.metrics_env:Fails": 1.0}
    runs = [
        replace(SMALL, recipe="mixed", env=envs, eval_every=1, eval_rollouts=2, max_staleness=1, rest_epochs=1),
        replace(SMALL, recipe="taught", teacher="tiny", train=TRAIN),
        replace(SMALL, recipe="valued", credit="value"),
    ]
    names: set[str] = set()
    for run in runs:
        asyncio.run(ag.train_policy(replace(run, output_dir=folder / run.name)))
        for line in (folder / run.name / "metrics.jsonl").read_text().splitlines():
            names |= json.loads(line).keys() - {"step", "metrics_not_finite"}
    return names


def test_every_metric_that_a_run_writes_is_on_the_page(written: set[str]) -> None:
    assert len(written) > 90
    assert sorted(name for name in written if not any(pattern(known).fullmatch(name) for known in NAMED)) == []


def test_every_metric_on_the_page_is_written(written: set[str]) -> None:
    known = [name for name in NAMED if not any(re.fullmatch(other, name) for other in ELSEWHERE)]
    assert sorted(name for name in known if not any(pattern(name).fullmatch(found) for found in written)) == []


@pytest.mark.parametrize("name", [name for name in NAMED if any(re.fullmatch(one, name) for one in ELSEWHERE)])
def test_metrics_that_these_runs_lack_are_in_the_code(name: str) -> None:
    part = re.sub(r"^\w+/|[A-Z]+$", "", name) or name.partition("/")[0]
    code = "".join(path.read_text() for path in (ROOT / "agentgym").rglob("*.py"))
    assert re.search(rf"\b{re.escape(part)}", code)
