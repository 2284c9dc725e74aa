"""The viewer's API: its responses agree with the run's folder, and every query gets a response."""

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from starlette.testclient import TestClient

from agentgym.files.folder_lock import hold_folder
from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE, TABLES
from agentgym.store.writer import RolloutWriter
from agentgym.types.json_values import whole_characters
from agentgym.view.asked import paging
from agentgym.view.metrics import metric_rows
from agentgym.view.runs import Runs, run_of
from tests.store.test_store import group, rollout
from tests.view.made_runs import HOSTILE, add_rollouts, client, make_run, run_trained_in_part


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mine", said=HOSTILE)


@pytest.fixture(scope="module")
def asked(run: Path) -> Iterator[TestClient]:
    with client(run.parent) as made:
        yield made


@pytest.fixture(scope="module")
def base(run: Path) -> str:
    (found,) = Runs([run]).all()
    return f"/api/runs/{found.key}"


def get(asked: TestClient, address: str, **query: object) -> Any:
    answer = asked.get(address, params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_every_run_below_a_folder_is_listed_with_its_metrics(asked: TestClient, run: Path) -> None:
    (found,) = get(asked, "/api/runs")["runs"]
    assert found["name"] == "mine"
    assert found["folder"] == str(run)
    assert (found["kind"], found["live"], found["steps_done"], found["steps"]) == ("train", False, 3, 3)
    assert (found["rollouts"], found["failed"], found["reward_last"]) == (10, 3, 1.0)
    assert found["env"] == {"Chase": "envs.Chase:Chase, version 1, sha256 abababababab"}


def test_a_run_has_its_settings_and_possible_filters(asked: TestClient, base: str) -> None:
    found = get(asked, base)
    assert found["settings"] == {"recipe": "chase_grpo", "max_steps": 3}
    assert found["versions"] == {"python": "3.11"}
    assert (found["phases"], found["envs"], found["kinds"]) == (["eval_after", "train"], ["Chase"], ["root"])
    assert (found["stop_reasons"], found["steps_range"]) == (["answer", "error"], [0, 3])
    assert found["has_search"] is True
    assert found["summary"] is None


def test_metrics_come_by_line_with_the_steps_time(asked: TestClient, base: str, run: Path) -> None:
    found = get(asked, f"{base}/metrics")
    assert found["lines"] == 4
    assert [row["held_out"] for row in found["rows"]] == [True, False, False, False]
    assert [row["time"] for row in found["rows"]] == [0.0, 1.5, 3.0, 4.5]
    assert found["rows"][1]["metrics"] == {"reward": 0.0, "reward/std": None, "time/step": 1.5, "time/train": 0.5}
    assert get(asked, f"{base}/metrics", after=3)["rows"] == found["rows"][3:]
    assert get(asked, f"{base}/metrics", after=4)["rows"] == []


NUMBERS = st.none() | st.booleans() | st.floats() | st.integers() | st.integers(-(10**400), 10**400)
NAMES_OF_FIGURES = st.sampled_from(["reward", "eval/reward", "time/step", "a b", 'a"b', "é", "\ud800"]) | st.text(
    max_size=4
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(NAMES_OF_FIGURES, NUMBERS | st.text(max_size=3) | st.lists(st.none()), max_size=4), max_size=4
    ),
    steps=st.lists(st.integers(-9, 10**20) | st.text(max_size=1), min_size=4, max_size=4),
)
def test_a_line_that_is_passed_through_equals_one_that_was_parsed(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], steps: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"step": step} | row) for step, row in zip(steps, rows, strict=False)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    found = metric_rows(folder).as_json()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentgym.view.metrics._plain_row", lambda line: None)
        read = metric_rows(folder).as_json()
    same = whole_characters(json.dumps(strictly(found), ensure_ascii=False))  # read back without lone surrogates
    assert json.loads(same) == strictly(read)


def strictly(text: bytes) -> Any:
    """Parse a text as strictly as a browser parses JSON."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize(
    "line", ['{"step": 1, "a": 007}', '{"step": 01}', '{"step": 1, "a": +1}', '{"step": 1, "a": .5}']
)
def test_a_line_that_only_looks_like_json_does_not_affect_others(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n')
    found = json.loads(metric_rows(tmp_path).as_json())
    assert found["rows"] == [{"step": 0, "time": 0.0, "held_out": False, "metrics": {}}]


def test_lines_that_a_resumed_run_repeated_are_distinguished_from_known_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    path = run / "metrics.jsonl"
    with client(run) as asked:
        base = f"/api/runs/{run_of(run).key}/metrics"
        had = get(asked, base)
        first, *_ = path.read_text().splitlines()
        path.write_text(f'{first}\n{{"step": 0, "reward": 0.5}}\n' + '{"step": 1, "reward": 0.75}\n' * 4)
        found = get(asked, base, after=had["lines"], mark=had["mark"])
        assert (found["from"], found["lines"], len(found["rows"])) == (0, 6, 6)
        again = get(asked, base, after=found["lines"], mark=found["mark"])
        assert (again["from"], again["lines"], again["rows"]) == (6, 6, [])
        with path.open("a") as file:
            file.write('{"step": 2, "reward": 1.0}\n')
        more = get(asked, base, after=found["lines"], mark=found["mark"])
    assert (more["from"], [row["step"] for row in more["rows"]]) == (6, [2])


def test_a_line_that_is_still_being_written_is_left_for_the_next_request(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "reward": 0.5}\nno json\n{"step": 4, "rew')
    with client(run) as asked:
        (found,) = get(asked, "/api/runs")["runs"]
        metrics = get(asked, f"/api/runs/{found['run']}/metrics", after=4)
    assert (found["steps_done"], found["reward_last"]) == (4, 0.5)
    assert metrics["lines"] == 6
    assert [row["step"] for row in metrics["rows"]] == [3]


def test_a_page_of_the_table_has_the_requested_rows(asked: TestClient, base: str) -> None:
    found = get(asked, f"{base}/rollouts", phase="train", sort="reward", order="desc", limit=3)
    assert (found["total"], found["offset"], found["indexed"]) == (9, 0, None)
    assert [row["reward"] for row in found["rows"]] == [1.0, 1.0, 1.0]
    assert [row["number"] for row in found["rows"]] == [7, 4, 1]
    row = found["rows"][0]
    assert row["env"] == "Chase"
    assert (row["task"], row["rollout_id"], row["step"], row["turns"], row["tokens"]) == ("task2", "task2/0", 2, 2, 6)
    assert (row["tool_calls"], row["tool_errors"], row["failure"], row["snippet"]) == (0, 0, None, None)
    failed = get(asked, f"{base}/rollouts", failed=1)
    assert {row["reward"] for row in failed["rows"]} == {None}
    assert get(asked, f"{base}/rollouts", env="Chase")["total"] == 10
    assert get(asked, f"{base}/rollouts", env="Nim")["total"] == 0


def test_the_env_of_a_mixtures_rollout_is_the_prefix_of_its_task_id(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", env=["task0", "task1"])
    add_rollouts(run, ["task0/1", "task1/7"], step=5)
    with client(run) as asked:
        base = f"/api/runs/{get(asked, '/api/runs')['runs'][0]['run']}"
        rows = get(asked, f"{base}/rollouts", limit=1000)["rows"]
    assert {row["task"]: row["env"] for row in rows} == {
        "task0": "task0",
        "task1": "task1",
        "task2": None,
        "held": None,
    }


def test_a_rollout_is_complete_and_has_its_neighbors(asked: TestClient, base: str, run: Path) -> None:
    found = get(asked, f"{base}/rollouts/6")
    with RolloutStore(run) as store:
        stored = store.get(6)
    assert stored is not None
    assert (found["rollout_id"], found["reward"], found["rewards"]) == ("task1/2", 0.25, {"right": 0.25})
    assert found["neighbors"] == {"previous": 5, "next": 7, "group": [4, 5, 6]}
    assert found["task_fields"] == {"id": "task1", "prompt": [{"role": "user", "content": "Go."}]}
    (segment,) = found["segments"]
    assert (segment["tokens"], segment["sampled"], segment["trained"]) == (5, 3, True)
    assert [turn["advantage"] for turn in segment["turns"]] == [0.5, -0.5]
    assert [turn["gap"] for turn in segment["turns"]] == [0.25, 0.25]
    assert segment["turns"][0]["versions"] == [[0, 3], [1, 4]]
    assert found["exact"] is True
    first, last = get(asked, f"{base}/rollouts/1"), get(asked, f"{base}/rollouts/10")
    assert first["neighbors"]["previous"] is None
    assert last["neighbors"]["next"] is None


def test_a_failed_rollout_has_its_place_and_error(asked: TestClient, base: str) -> None:
    found = get(asked, f"{base}/rollouts/2")
    assert found["failure"] == {
        "type": "EnvError",
        "message": "KeyError: 'x'",
        "traceback": "Traceback ..\n",
        "where": "reward 'right'",
    }
    failures = get(asked, f"{base}/failures")
    assert (failures["failed"], failures["looked_at"]) == (3, 3)
    (kind,) = failures["groups"]
    assert (kind["count"], kind["steps"], kind["numbers"]) == (3, [0, 2], [2, 5, 8])
    assert kind["traceback"] == "Traceback ..\n"


def test_text_from_models_and_tools_has_no_lone_surrogates(asked: TestClient, base: str) -> None:
    (segment,) = get(asked, f"{base}/rollouts/6")["segments"]
    (opening,) = segment["opening"]
    shown = "".join(block.get("text", "") for block in opening["blocks"])
    assert "<script>alert(1)</script> \x1b[31m\u202e \ufffd \0" in shown
    (answer,) = segment["turns"][0]["answers"]
    assert answer["blocks"][0]["text"] == HOSTILE.replace("\ud800", "\ufffd")


@pytest.mark.parametrize(("start", "count"), [(0, 4000), (0, 2), (1, 3), (3, 1), (4, 9), (5, 1), (99, 5)])
def test_tokens_agree_with_the_store_in_every_window(
    asked: TestClient, base: str, run: Path, start: int, count: int
) -> None:
    whole: dict[str, list[Any]] = {
        "ids": [10, 11, 12, 13, 14],
        "texts": ["<10>", "<11>", "<12>", "<13>", "<14>"],
        "sampled": [0, 1, 1, 0, 1],
        "trained": [0, 1, 1, 0, 1],
        "logprobs": [None, -0.5, -0.5, None, -0.5],
        "ratios": [None, 1.28403, 1.0, None, 0.7788],
        "advantages": [None, 0.5, 0.5, None, -0.5],
        "versions": [None, 3, 4, None, 4],
        "turns": [None, 0, 0, None, 1],
    }
    found = get(asked, f"{base}/rollouts/3/tokens", **{"from": start, "count": count})
    assert (found["total"], found["from"], found["named"]) == (5, min(start, 5), start < 5)
    assert {name: found[name] for name in whole} == {name: of[start : start + count] for name, of in whole.items()}


def test_untrained_tokens_are_labeled(asked: TestClient, base: str) -> None:
    found = get(asked, f"{base}/rollouts/10/tokens")
    assert sum(found["sampled"]) == 6
    assert set(found["trained"]) == {0}
    assert set(found["ratios"]) == set(found["advantages"]) == {None}


def test_it_is_unknown_which_tokens_of_a_segment_trained_in_part_were_trained(tmp_path: Path) -> None:
    folder = run_trained_in_part(tmp_path / "mine")
    with client(folder) as asked:
        (run,) = Runs([folder]).all()
        found = get(asked, f"/api/runs/{run.key}/rollouts/1/tokens")
    assert sum(found["sampled"]) == 6
    assert found["trained"] == [None if sampled else 0 for sampled in found["sampled"]]
    assert set(found["ratios"]) == set(found["advantages"]) == {None}


def test_a_group_has_its_attempts_and_the_baseline(asked: TestClient, base: str) -> None:
    found = get(asked, f"{base}/groups", task="task2", step=2, phase="train")
    assert [row["number"] for row in found["attempts"]] == [7, 8, 9]
    assert [row["advantage"] for row in found["attempts"]] == [0.5, None, 0.5]
    assert found["baseline"] == pytest.approx(0.75)
    assert found["std"] == pytest.approx(0.25)
    assert found["task_fields"]["id"] == "task2"
    assert get(asked, f"{base}/groups", task="task2", step=1)["attempts"] == []


def test_tasks_are_listed_and_each_has_its_visits(asked: TestClient, base: str) -> None:
    found = get(asked, f"{base}/tasks", phase="train", sort="reward_mean", order="desc")
    assert [row["task"] for row in found["rows"]] == ["task2", "task1", "task0"]
    assert found["rows"][0]["env"] == "Chase"
    one = get(asked, f"{base}/task", task="task1")
    assert one["visits"] == [{"step": 1, "phase": "train", "rewards": [1.0, None, 0.25], "numbers": [4, 5, 6]}]


def test_the_reward_histogram_and_the_names_of_metrics_are_served(asked: TestClient, base: str) -> None:
    found = get(asked, f"{base}/reward-histogram", bins=4)
    assert sum(found["counts"]) == 7
    groups = get(asked, "/api/metrics-names")["groups"]
    titles = [group["title"] for group in groups]
    assert {"reward", "held-out", "length", "entropy", "mismatch", "staleness", "drops"} <= set(titles)
    assert all({"title", "names", "unit", "help"} == set(group) for group in groups)


@pytest.mark.parametrize(
    ("address", "status", "sentence"),
    [
        ("/api/runs/nix", 404, "there is no run 'nix'"),
        ("{base}/nix", 404, "it can end in metrics, state"),
        ("{base}/rollouts/99", 404, "there is no rollout 99"),
        ("{base}/rollouts/x", 404, "expected a number such as 12"),
        ("{base}/rollouts/1/nix", 404, "it can end in tokens"),
        ("{base}/rollouts/1/tokens?segment=1", 404, "has 1 segments"),
        ("{base}/rollouts?sort=rewart", 400, "did you mean 'reward'"),
        ("{base}/rollouts?step_from=1.5", 400, "step_from: expected an integer"),
        ("{base}/rollouts?reward_to=nan", 400, "reward_to: expected a number"),
        ("{base}/rollouts?failed=yes", 400, "failed: expected 0 or 1"),
        ("{base}/rollouts?limit=1001", 400, "limit: expected a value from 1 to 1000"),
        ("{base}/rollouts?offset=-1", 400, "offset: expected a value from 0"),
        ("{base}/groups", 400, "task: missing; name the task"),
        ("{base}/task?task=nix", 404, "has the task 'nix'"),
        ("/api/nix", 404, "no such URL"),
        ("/api/runs/", 404, "no such URL"),
    ],
)
def test_an_invalid_url_gives_an_error_message(
    asked: TestClient, base: str, address: str, status: int, sentence: str
) -> None:
    answer = asked.get(address.format(base=base))
    assert answer.status_code == status
    assert sentence in answer.json()["error"]


NAMES = ["phase", "env", "task", "stop", "step_from", "step_to", "reward_from", "reward_to", "failed", "suspicious"]
NAMES += ["tool_errors", "q", "sort", "order", "offset", "limit", "segment", "from", "count", "bins", "after", "step"]
VALUES = st.text(max_size=12) | st.integers().map(str) | st.floats().map(str) | st.sampled_from(["0", "1", "desc"])
PLACES = ["", "/metrics", "/state", "/rollouts", "/rollouts/3", "/rollouts/3/tokens", "/groups", "/tasks", "/task"]
PLACES += ["/failures", "/reward-histogram"]


@settings(max_examples=250, deadline=None)
@given(place=st.sampled_from(PLACES), query=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_every_query_gets_a_response_or_an_error_message(
    asked: TestClient, base: str, place: str, query: dict[str, str]
) -> None:
    sound = {name: value.encode("utf-8", "replace").decode() for name, value in query.items()}
    answer = asked.get(f"{base}{place}", params=sound)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()) == {"error"}


def test_non_finite_metrics_are_null(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 3, "reward": math.nan, "loss": math.inf}) + "\n")
    with client(run) as asked:
        base = f"/api/runs/{get(asked, '/api/runs')['runs'][0]['run']}"
        assert get(asked, f"{base}/metrics", after=4)["rows"][0]["metrics"] == {"reward": None, "loss": None}


def test_a_run_that_starts_after_the_viewer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.view.runs.LOOK_AGAIN_S", 0.0)
    with client(tmp_path) as asked:
        assert get(asked, "/api/runs")["runs"] == []
        make_run(tmp_path / "recipe" / "20260801-101500")
        (found,) = get(asked, "/api/runs")["runs"]
    assert found["name"] == "recipe/20260801-101500"


def test_a_run_without_rollouts_is_shown_with_its_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    for path in run.glob(f"{FILE}*"):
        path.unlink()
    with client(run) as asked:
        (found,) = get(asked, "/api/runs")["runs"]
        base = f"/api/runs/{found['run']}"
        assert (found["rollouts"], found["reward_last"]) == (0, 1.0)
        assert get(asked, base)["phases"] == []
        answer = asked.get(f"{base}/rollouts")
    assert answer.status_code == 409
    assert "has no rollouts yet" in answer.json()["error"]


def test_a_damaged_store_gives_an_error_message_and_other_runs_are_shown(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    (bad / FILE).write_bytes(b"no store at all" * 1000)
    with client(tmp_path) as asked:
        runs = {run["name"]: run for run in get(asked, "/api/runs")["runs"]}
        answer = asked.get(f"/api/runs/{runs['bad']['run']}/rollouts")
        assert get(asked, f"/api/runs/{runs['good']['run']}/rollouts")["total"] == 10
    assert good.exists()
    assert answer.status_code == 409
    assert ".recover" in answer.json()["error"]


def test_an_internal_error_gives_a_message_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "mine")
    with client(run) as asked:
        (found,) = get(asked, "/api/runs")["runs"]
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl").mkdir()
        unreadable = asked.get(f"/api/runs/{found['run']}/metrics")
        monkeypatch.setattr("agentgym.view.api.task_rows", lambda *args, **named: 1 / 0)
        broken = asked.get(f"/api/runs/{found['run']}/tasks")
    assert unreadable.status_code == 409
    assert "metrics.jsonl is a folder, not a regular file" in unreadable.json()["error"]
    assert broken.status_code == 500
    assert "ZeroDivisionError" in broken.json()["error"]
    assert "Traceback" in caplog.text


def test_metrics_are_read_incrementally_and_again_if_the_log_was_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    path = run / "metrics.jsonl"
    before = path.read_bytes()
    with client(run) as asked:
        base = f"/api/runs/{get(asked, '/api/runs')['runs'][0]['run']}"
        assert get(asked, f"{base}/state")["lines"] == 4
        with path.open("a") as file:
            file.write('{"step": 3, "reward": 0.75}\n{"step": 4,')
        assert get(asked, f"{base}/state")["steps_done"] == 4
        with path.open("a") as file:
            file.write(' "reward": null}\n')
        found = get(asked, f"{base}/state")
        assert (found["lines"], found["steps_done"]) == (6, 5)
        assert get(asked, "/api/runs")["runs"][0]["reward_last"] == 0.75
        (run / "fresh").write_bytes(before[: before.index(b"\n") + 1])
        (run / "fresh").replace(path)  # as a resumed run does
        found = get(asked, f"{base}/state")
    assert (found["lines"], found["steps_done"]) == (1, 0)


def test_a_run_is_live_while_a_process_locks_its_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    with client(run) as asked:
        with hold_folder(run):
            assert get(asked, "/api/runs")["runs"][0]["live"] is True
        assert get(asked, "/api/runs")["runs"][0]["live"] is False


def test_a_run_whose_process_was_killed_is_not_live(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    killed = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (run / ".lock").write_bytes(killed.stdout)
    for path in run.iterdir():
        os.utime(path, (0, 0))
    with client(run) as asked:
        assert get(asked, "/api/runs")["runs"][0]["live"] is False


@pytest.mark.parametrize(("refusal", "live"), [(ProcessLookupError, False), (PermissionError, True)])
def test_a_process_of_another_user_counts_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: type[OSError], live: bool
) -> None:
    run = make_run(tmp_path / "mine")
    (run / ".lock").write_text("12345")
    for path in run.iterdir():
        os.utime(path, (0, 0))

    def refused(process: int, number: int) -> None:  # the tests may run as root, who is never refused
        raise refusal

    monkeypatch.setattr("agentgym.view.runs.os.kill", refused)
    with client(run) as asked:
        assert get(asked, "/api/runs")["runs"][0]["live"] is live


def test_an_impossible_process_id_does_not_count_as_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    (run / ".lock").write_text("9" * 30)
    for path in run.iterdir():
        os.utime(path, (0, 0))
    with client(run) as asked:
        assert get(asked, "/api/runs")["runs"][0]["live"] is False


def test_a_link_to_a_run_works_before_the_list_was_requested(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "mine"))
    with client(tmp_path) as asked:
        assert get(asked, f"/api/runs/{run.key}")["name"] == "mine"


def test_a_page_of_the_table_has_200_rows_by_default() -> None:
    assert paging({}) == (0, 200)


def test_an_evaluation_is_listed_with_its_score(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    (run / "metrics.jsonl").unlink()
    (run / "settings.json").write_text('{"env": "envs.chase.env:Chase", "model": "tiny", "versions": {}, "envs": {}}')
    (run / "summary.json").write_text('{"reward": 0.5}')
    with client(run) as asked:
        (found,) = get(asked, "/api/runs")["runs"]
        about = get(asked, f"/api/runs/{found['run']}")
    assert (found["kind"], found["reward_last"], found["steps"]) == ("eval", 0.5, None)
    assert about["settings"] == {"env": "envs.chase.env:Chase", "model": "tiny"}
    assert about["summary"] == {"reward": 0.5}


@pytest.mark.parametrize("summary", [None, '{"reward": "<b>"}'])
def test_an_evaluation_without_a_score_has_the_mean_of_its_rollouts(tmp_path: Path, summary: str | None) -> None:
    with RolloutWriter(tmp_path / "mine") as writer:
        writer.add([group(rollout("t/0", 1.0), rollout("t/1", None), rollout("t/2", 0.5))], phase="eval", step=0)
    (tmp_path / "mine" / "settings.json").write_text('{"env": "envs.chase.env:Chase", "rescored": "elsewhere"}')
    if summary:
        (tmp_path / "mine" / "summary.json").write_text(summary)
    with client(tmp_path) as asked:
        assert get(asked, "/api/runs")["runs"][0]["reward_last"] == 0.75


def test_the_reward_of_a_training_run_is_that_of_its_last_step(tmp_path: Path) -> None:
    (make_run(tmp_path / "mine") / "summary.json").write_text('{"reward_last": 0.5}')  # which is a mean of several
    with client(tmp_path) as asked:
        assert get(asked, "/api/runs")["runs"][0]["reward_last"] == 1.0


@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.json"])
def test_a_run_that_cannot_be_read_does_not_hide_others(tmp_path: Path, name: str) -> None:
    for run in ("one", "two"):
        make_run(tmp_path / run)
    (tmp_path / "one" / name).unlink()
    (tmp_path / "one" / name).mkdir()
    with client(tmp_path) as asked:
        assert [run["name"] for run in get(asked, "/api/runs")["runs"]] == ["one", "two"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every folder")
def test_a_folder_without_permission_does_not_hide_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "mine")
    (tmp_path / "another's").mkdir(mode=0)
    with client(tmp_path) as asked:
        assert [run["name"] for run in get(asked, "/api/runs")["runs"]] == ["mine"]


def test_rewards_near_the_largest_float_have_a_histogram_and_a_group(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "mine") as writer:
        writer.add([group(rollout("t/0", 1e308), rollout("t/1", -1e308), rollout("t/2", 0.0))], step=0)
    with client(tmp_path) as asked:
        base = f"/api/runs/{get(asked, '/api/runs')['runs'][0]['run']}"
        found = get(asked, f"{base}/reward-histogram", bins=4)
        assert (found["edges"], found["counts"]) == ([-1e308, -5e307, 0.0, 5e307, 1e308], [1, 0, 1, 1])
        assert len(get(asked, f"{base}/groups", task="t", step=0)["attempts"]) == 3


def test_metrics_too_large_for_a_float_are_left_out(tmp_path: Path) -> None:
    lines = [f'{{"step": 0, "time/step": 1{"0" * 400}, "reward": 1}}', '{"step": 1, "time/step": NaN, "reward": 2}']
    (make_run(tmp_path / "mine") / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with client(tmp_path) as asked:
        rows = get(asked, f"/api/runs/{get(asked, '/api/runs')['runs'][0]['run']}/metrics")["rows"]
    assert [(row["time"], row["metrics"]["reward"]) for row in rows] == [(0.0, 1), (0.0, 2)]


DAMAGED = [
    ("rollouts", "detail", "/failures"),
    ("rollouts", "detail", "/rollouts/2"),
    ("segments", "messages", "/rollouts/3"),
    ("segments", "trained", "/rollouts/1"),
    ("segments", "trained", "/rollouts/1/tokens"),
    ("segments", "advantages", "/groups?task=task0&step=0"),
    ("tasks", "task", "/task?task=task0"),
    ("vocabulary", "lengths", "/rollouts/3/tokens"),
]


@pytest.mark.parametrize(("table", "column", "address"), DAMAGED)
def test_damaged_bytes_of_the_store_are_reported(tmp_path: Path, table: str, column: str, address: str) -> None:
    folder = make_run(tmp_path / "mine")
    with closing(sqlite3.connect(folder / FILE)) as store, store:
        store.execute("INSERT OR IGNORE INTO tasks VALUES ('task0', x'')")
        store.execute(f"UPDATE {table} SET {column} = x'00'")
    store.close()
    with client(tmp_path) as asked:
        found = asked.get(f"/api/runs/{get(asked, '/api/runs')['runs'][0]['run']}{address}")
    assert (found.status_code, "rollouts.sqlite: the store cannot be read" in found.json()["error"]) == (409, True)


PLACES_OF_ALL = (
    "",
    "/rollouts",
    "/rollouts/1",
    "/rollouts/1/tokens",
    "/groups?task=task0&step=0",
    "/tasks",
    "/failures",
)
KEY = {"rollouts": "number", "segments": "rollout"}
COLUMNS = [
    (table, name, kind)
    for table, key in KEY.items()
    for name, kind in re.findall(
        r"^ {4}(\w+) +(TEXT|INTEGER|REAL|BLOB)", TABLES.partition(f"{table} (")[2].partition("\n)")[0], re.M
    )
    if name != key
]


@pytest.mark.parametrize(("table", "column", "kind"), COLUMNS)
def test_a_value_of_the_wrong_type_is_named_and_is_not_an_internal_error(
    tmp_path: Path, table: str, column: str, kind: str
) -> None:
    folder = make_run(tmp_path / "mine")
    value = "CAST('no bytes' AS TEXT)" if kind == "BLOB" else "x'c0ffee'"
    with closing(sqlite3.connect(folder / FILE)) as store, store:
        store.execute(f"UPDATE {table} SET {column} = {value} WHERE {KEY[table]} = 1")
    store.close()
    with client(tmp_path) as asked:
        base = f"/api/runs/{get(asked, '/api/runs')['runs'][0]['run']}"
        answers = [asked.get(f"{base}{place}") for place in (*PLACES_OF_ALL, "/reward-histogram", "/task?task=task0")]
    assert {answer.status_code for answer in answers} <= {200, 404, 409}
    said = [answer.json()["error"] for answer in answers if answer.status_code == 409]
    assert any(column in sentence for sentence in said), said
