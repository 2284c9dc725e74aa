"""Rollouts exported for other programs, and ATIF trajectories read back."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.engines.messages import NO_POLICY
from agentgym.engines.scripted import Reply, Scripted, Seeing, call, calls, raw, say
from agentgym.errors import Failure
from agentgym.exports.atif import documents
from agentgym.exports.atif_images import take_out
from agentgym.exports.atif_reader import read_atif
from agentgym.samples import demonstrations
from agentgym.store.reader import RolloutStore
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout
from tests.store.test_store import same, segment
from tests.types.messages.pictures import GIF, PNG, URL

TASK = ag.Task(id="t", prompt=(ag.Message(role="system", content="Be brief."), ag.Message(role="user", content="Go.")))
BOTH = calls(("look", {"at": "a"}), ("look", {"at": "b"}))


class Desk(ag.ToolEnv[ag.Task]):
    """Looks, asks a sub-agent, tries two ways, and sums up."""

    context = ag.Compact(at=None, turns=3)

    @ag.tool
    async def look(self, at: str = "") -> str:
        """Look."""
        return f"nothing at {at}"

    @ag.tool
    async def ask(self, what: str) -> str:
        """Ask a sub-agent."""
        async with self.fork("subagent", [ag.Message(role="user", content=what)], tools=[self.look]) as agent:
            return await agent.run()

    @ag.tool
    async def split(self) -> str:
        """Try two ways."""
        texts = []
        for way in ("left", "right"):
            async with self.fork("fork", [ag.Message(role="tool", content=way, name="split")]) as agent:
                texts.append(await agent.run())
        return ", ".join(texts)

    @ag.reward
    def done(self) -> float:
        return float(self.answer == "done")


WHOLE: Sequence[Reply] = [
    BOTH,
    call("ask", what="Well?"),
    *(call("look"), say("found")),
    call("split"),
    *(say("l"), say("r")),
    say("a summary"),
    raw("<tool_call>\nno JSON\n</tool_call>"),
    say("done"),
]
"""A turn with two calls, a sub-agent, two forks, a compaction, and a call that isn't valid JSON."""


async def play(replies: Sequence[Reply] = WHOLE, name: str = "t/0") -> Rollout:
    return await ag.rollout(Desk, TASK, Scripted(replies), rollout_id=name)


def write(folder: Path, *rollouts: Rollout, phase: str = "eval", step: int = 0) -> None:
    with RolloutWriter(folder, done=1) as writer:
        writer.add([Group(group_id="t", rollouts=rollouts, task=TASK)], phase=phase, step=step)


def rollouts_of(folder: Path) -> list[Rollout]:
    with RolloutStore(folder) as store:
        return [stored.rollout for stored in store.find()]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out.splitlines()


def contents(folder: Path, names: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(names)}


def without_ids(rollout: Rollout) -> Rollout:
    """Return the rollout as if its model had given its calls no ids."""

    def bare(message: Any) -> Any:
        kept = {name: value for name, value in message.items() if name != "tool_call_id"}
        if "tool_calls" in kept:
            kept["tool_calls"] = [{n: v for n, v in made.items() if n != "id"} for made in kept["tool_calls"]]
        return kept

    segments = [
        replace(
            s,
            prompt_messages=tuple(map(bare, s.prompt_messages)),
            turns=tuple(
                turn._replace(message=bare(turn.message), env_messages=tuple(map(bare, turn.env_messages)))
                for turn in s.turns
            ),
        )
        for s in rollout.segments
    ]
    return replace(rollout, segments=tuple(segments))


def counted(rollout: Rollout) -> Rollout:
    """Return the rollout as if an endpoint had generated it, which reports token counts but no token ids."""
    segments = [
        replace(
            s,
            token_ids=np.zeros_like(s.token_ids),
            logprobs=np.zeros_like(s.logprobs),
            turns=tuple(turn._replace(versions=(Version(0, NO_POLICY),)) for turn in s.turns),
        )
        for s in rollout.segments
    ]
    return replace(rollout, segments=tuple(segments))


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_segment_contains_the_tools_that_its_model_was_offered(tmp_path: Path) -> None:
    rollout = await play()
    names = [[tool["function"]["name"] for tool in segment.tools] for segment in rollout.segments]
    assert names == [["look", "ask", "split"], ["look"], *[["look", "ask", "split"]] * 3]
    write(tmp_path, rollout)
    (found,) = rollouts_of(tmp_path)
    assert same(found, rollout)


async def test_trajectories_are_read_back_as_the_same_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_endpoint = counted(rollout := await play([call("look"), say("done")], "t/1"))
    odd = replace(rollout, rollout_id="t/2", segments=(segment([(2, 4), (5, 9)], length=12, text="\ud800\x1b"),))
    odd_of_endpoint = replace(counted(odd), rollout_id="t/5")
    failed = replace(await play([say("no")], "t/3"), reward=None, failure=Failure(type="EnvError", message="m"))
    first, again = tmp_path / "first", tmp_path / "again"
    write(first, await play(), of_endpoint, odd, failed, without_ids(await play(name="t/4")), odd_of_endpoint)
    lines = run(capsys, "export", first, "--to", "atif", "--unscored")
    assert lines == [f"6 rollouts, 8 files: {first}/export-atif"]
    run(capsys, "import", first / "export-atif", "--output-dir", again)
    assert all(map(same, rollouts_of(again), rollouts_of(first)))
    assert len(rollouts_of(again)) == 6
    run(capsys, "export", again, "--to", "atif", "--unscored")
    assert contents(again / "export-atif") == contents(first / "export-atif")
    assert "eval" in run(capsys, "show", again)[1]


async def test_trajectories_are_valid_for_harbor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = pytest.importorskip("harbor.models.trajectories", reason="needs the package harbor")
    write(tmp_path, await play())
    run(capsys, "export", tmp_path, "--to", "atif")
    first, second = sorted(contents(tmp_path / "export-atif"), key=len)
    found = [
        models.Trajectory.model_validate_json(contents(tmp_path / "export-atif")[name]) for name in (first, second)
    ]
    assert found[0].schema_version == "ATIF-v1.8"
    assert found[0].continued_trajectory_ref == second
    assert found[0].to_json_dict() == json.loads(contents(tmp_path / "export-atif")[first])


async def test_a_trajectory_has_each_turn_with_its_ids_and_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = await play()
    write(tmp_path, rollout)
    run(capsys, "export", tmp_path, "--to", "atif")
    root = json.loads((tmp_path / "export-atif/trajectory-000001.json").read_text())
    first = root["steps"][2]
    ids = [made["id"] for made in rollout.segments[0].turns[0].message["tool_calls"]]
    assert [made["tool_call_id"] for made in first["tool_calls"]] == ids
    assert [result["source_call_id"] for result in first["observation"]["results"]] == ids
    segment, turn = rollout.segments[0], rollout.segments[0].turns[0]
    assert first["metrics"]["completion_token_ids"] == segment.token_ids[turn.start : turn.stop].tolist()
    assert first["metrics"]["prompt_token_ids"] == segment.token_ids[: turn.start].tolist()
    assert first["metrics"]["logprobs"] == [-0.5] * (turn.stop - turn.start)
    refs = [
        result["subagent_trajectory_ref"][0]["trajectory_id"]
        for step in root["steps"]
        for result in step.get("observation", {"results": []})["results"]
        if "subagent_trajectory_ref" in result
    ]
    assert refs == [inner["trajectory_id"] for inner in root["subagent_trajectories"]] == ["t/0#1", "t/0#2", "t/0#3"]
    assert root["extra"]["reward"] == 1.0
    copied = [step for step in root["subagent_trajectories"][1]["steps"] if step.get("is_copied_context")]
    assert [step["source"] for step in copied] == ["system", "user", "agent", "agent", "agent"]


async def test_sft_lines_are_the_conversations_worth_imitating(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = await ag.rollout(Desk, TASK, Scripted([say("x" * 50)]), rollout_id="t/1", sampling=ag.Sampling(max_tokens=9))
    write(
        tmp_path,
        await play(),
        cut,
        await play([say("no")], "t/2"),
        await play([BOTH, say("done")], "t/3"),
        phase="train",
    )
    write(tmp_path, await play([say("done")], "t/4"), phase="eval_after", step=0)
    lines = run(capsys, "export", tmp_path, "--to", "sft", "--min-reward", "1")
    assert lines == [
        f"2 rollouts, 5 conversations: {tmp_path}/export-sft.jsonl",
        "left out: 1 conversations with a call that isn't valid JSON",
        "left out: 2 rollouts with a reward below 1",
        "left out: 1 rollouts of other phases than train",
    ]
    *_, last = lines_of(tmp_path / "export-sft.jsonl")
    assert [message["role"] for message in last["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert last["messages"][2]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "a"}}
    assert [tool["function"]["name"] for tool in last["tools"]] == ["look", "ask", "split"]
    lines = run(capsys, "export", tmp_path, "--to", "sft", "--phase", "all", "--output", tmp_path / "all.jsonl")
    assert lines[0].startswith("4 rollouts, 7 conversations")
    assert "left out: 1 conversations with a turn that a limit cut off" in lines


@pytest.mark.parametrize("named", [True, False])
async def test_openai_lines_have_a_result_for_each_call_and_weigh_no_message_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    rollout = await play()
    write(tmp_path, rollout if named else without_ids(rollout))
    run(capsys, "export", tmp_path, "--to", "openai")
    root, agent, left, right = lines_of(tmp_path / "export-openai.jsonl")
    for line in (root, agent, left, right):
        asked = [made["id"] for message in line["messages"] for made in message.get("tool_calls", ())]
        answered = [message["tool_call_id"] for message in line["messages"] if message["role"] == "tool"]
        assert asked == answered
        assert len(set(asked)) == len(asked)
        assert all(isinstance(m["content"], str) for m in line["messages"])
    arguments = [made["function"]["arguments"] for made in root["messages"][2]["tool_calls"]]
    assert [json.loads(text) for text in arguments] == [{"at": "a"}, {"at": "b"}]
    weights = [[m.get("weight", 1) for m in of["messages"] if m["role"] == "assistant"] for of in (root, left, right)]
    assert weights == [[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1]]


async def test_the_package_datasets_can_read_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    write(tmp_path, await play([call("look", at="a"), call("split"), say("l"), say("\ud800"), say("done")]))
    run(capsys, "export", tmp_path, "--to", "sft")
    found = datasets.Dataset.from_json(str(tmp_path / "export-sft.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert list(found) == lines_of(tmp_path / "export-sft.jsonl")
    assert len(found) == 3


def trajectory(**changes: Any) -> dict[str, Any]:
    """Return another agent's trajectory, with as little as ATIF allows."""
    return {
        "schema_version": "ATIF-v1.5",
        "session_id": "other",
        "agent": {"name": "claude", "version": "1", "model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "Hi."}]},
            {
                "step_id": 2,
                "source": "agent",
                "message": "",
                "tool_calls": [{"tool_call_id": "c", "function_name": "bash", "arguments": {"cmd": "ls"}}],
                "observation": {"results": [{"source_call_id": "c", "content": "a.py"}]},
            },
            {
                "step_id": 3,
                "source": "agent",
                "message": "Done.",
                "metrics": {"prompt_tokens": 90, "completion_tokens": 7},
            },
        ],
        **changes,
    }


def test_another_agents_trajectory_is_a_rollout_with_token_counts_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(trajectory(continued_trajectory_ref="b.json")))
    (tmp_path / "b.json").write_text(json.dumps(trajectory(session_id=None)))
    (tmp_path / "result.json").write_text("{}")
    lines = run(capsys, "import", tmp_path, "--output-dir", tmp_path / "run")
    assert lines == [
        f"1 rollouts, 1 of them without a reward: {tmp_path}/run",
        "left out: 1 files that aren't trajectories",
    ]
    (found,) = rollouts_of(tmp_path / "run")
    root, following = found.segments
    assert [s.kind for s in found.segments] == ["root", "compaction"]
    assert root.turns[0].message["tool_calls"][0]["function"]["arguments"] == {"cmd": "ls"}
    assert root.turns[0].env_messages == ({"role": "tool", "content": "a.py", "name": "bash", "tool_call_id": "c"},)
    assert (following.turns[1].start, following.turns[1].stop) == (90, 97)
    with pytest.raises(ValueError, match="sampled from an endpoint"):
        demonstrations([found])
    assert run(capsys, "export", tmp_path / "run", "--to", "sft", "--unscored")[0].startswith("1 rollouts, 2 conv")


def test_another_agents_trajectory_with_token_ids_has_turns_of_policy_version_0(tmp_path: Path) -> None:
    first = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -0.25]}
    second = {"prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6], "logprobs": [-1.0]}
    given = trajectory()
    for step, metrics in zip(given["steps"][1:], (first, second), strict=True):
        step["metrics"] = metrics
    (tmp_path / "a.json").write_text(json.dumps(given))
    (root,) = read_atif(tmp_path / "a.json").rollout.segments
    assert root.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert root.sampled.tolist() == [False, False, True, True, False, True]
    assert root.logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1]
    assert [(turn.start, turn.stop, turn.versions) for turn in root.turns] == [
        (2, 4, (Version(0, 0),)),
        (5, 6, (Version(0, 0),)),
    ]


def test_a_sub_agent_in_a_separate_file_is_a_segment_of_the_rollout(tmp_path: Path) -> None:
    given = trajectory()
    ref = {"trajectory_id": "other#1", "trajectory_path": "sub.json"}
    given["steps"][1]["observation"]["results"][0]["subagent_trajectory_ref"] = [ref]
    (tmp_path / "a.json").write_text(json.dumps(given))
    (tmp_path / "sub.json").write_text(json.dumps(trajectory(session_id=None)))
    root, agent = read_atif(tmp_path / "a.json").rollout.segments
    assert [(s.kind, s.parent, len(s.turns)) for s in (root, agent)] == [("root", None, 2), ("subagent", 0, 2)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schema_version": "2.0"}, "schema_version: String should match"),
        ({"steps": []}, "steps: List should have at least 1 item"),
        ({"steps": [{"source": "agent"}]}, "steps.0.message: Field required"),
        ({"steps": [{"source": "user", "message": [{"type": "audio"}]}]}, "step 1: a part has the type 'audio'"),
        ({"extra": {"reward": "high"}}, "extra.reward: must be a finite number, got 'high'"),
        ({"continued_trajectory_ref": "no.json"}, "no.json cannot be read as a JSON file"),
        ({"continued_trajectory_ref": "a.json"}, "a.json twice"),
    ],
)
def test_invalid_trajectories_are_refused_by_field(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(trajectory(**changes)))
    with pytest.raises(ValueError, match=told):
        read_atif(tmp_path / "a.json")


async def test_a_rollouts_images_are_files_next_to_its_trajectory_and_are_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Looks(Desk):
        @ag.tool
        async def look(self, at: str = "") -> Any:
            """Look."""
            return [f"at {at}:", ag.Image(GIF)]

    low = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    task = ag.Task(id="t", prompt=[ag.Message(role="user", content=["Go.", low, ag.Image(GIF)])])
    rollout = await ag.rollout(Looks, task, Seeing(Scripted([*WHOLE])), rollout_id="t/0")
    assert rollout.error is None
    write(tmp_path / "run", rollout)
    run(capsys, "export", tmp_path / "run", "--to", "atif", "--output", tmp_path / "atif")
    assert sorted(path.read_bytes() for path in (tmp_path / "atif/images").iterdir()) == sorted([GIF, PNG])
    assert not any(b"base64" in content for content in contents(tmp_path / "atif", "*.json").values())
    run(capsys, "import", tmp_path / "atif", "--output-dir", tmp_path / "back")
    (back,) = rollouts_of(tmp_path / "back")
    assert same(back, rollout)
    with RolloutStore(tmp_path / "run") as store:
        (stored,) = store.find()
    assert {name for document in documents(stored, "t", None).values() for name in take_out(document)}
    assert same(stored.rollout, rollout)


def shown(path: Any, **source: Any) -> dict[str, Any]:
    part = {"type": "image", "source": {"media_type": "image/png", "path": path, **source}}
    return trajectory(steps=[{"step_id": 1, "source": "user", "message": [{"type": "text", "text": "Look:"}, part]}])


def test_images_of_another_agents_trajectory_are_only_read_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    (folder / "images").mkdir(parents=True)
    (folder / "images/a.png").write_bytes(PNG)
    (folder / "b.png").write_text("no picture")
    (tmp_path / "secret.png").write_bytes(PNG)
    file = folder / "a.json"
    file.write_text(json.dumps(shown("images/a.png")))
    (message,) = read_atif(file).rollout.segments[0].prompt_messages
    assert message == {"role": "user", "content": [{"type": "text", "text": "Look:"}, ag.Image(PNG).part]}
    refused: dict[Any, str] = {
        "../secret.png": "step 1: source.path: '../secret.png': it is not below the folder of the trajectory",
        "images/none.png": "step 1: source.path: 'images/none.png' cannot be read",
        "https://example.com/a.png": "step 1: source.path: .* is a URL, which is not fetched; download the image",
        "b.png": "step 1: source.path: 'b.png': data: starts with b'no pictu'",
        None: "step 1: an image has no source.path",
    }
    for path, told in refused.items():
        file.write_text(json.dumps(shown(path)))
        with pytest.raises(ValueError, match=rf"a\.json: {told}"):
            read_atif(file)


@pytest.mark.parametrize("to", ["atif", "sft", "openai"])
async def test_a_link_in_place_of_an_export_is_refused(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", await play())
    out = tmp_path / "run" / ("export-atif" if to == "atif" else f"export-{to}.jsonl")
    out.symlink_to(tmp_path / "elsewhere")
    assert cli.main(["export", str(tmp_path / "run"), "--to", to, "--phase", "all"]) == 1
    assert capsys.readouterr().err == f"agentgym: output: {out} already exists; choose another one\n"
    assert not (tmp_path / "elsewhere").exists()


def test_an_import_does_not_follow_a_link_at_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(trajectory()))
    (tmp_path / "taken").symlink_to("nothing")
    assert cli.main(["import", str(tmp_path / "a.json"), "--output-dir", str(tmp_path / "taken")]) == 1
    assert "taken already exists; choose another folder" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new.part").symlink_to("elsewhere")
    run(capsys, "import", tmp_path / "a.json", "--output-dir", tmp_path / "new")
    assert (contents(tmp_path / "elsewhere"), len(rollouts_of(tmp_path / "new"))) == ({}, 1)


async def test_a_failed_export_gives_one_line_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, await play([say("no")]))
    refused = {
        ("export", tmp_path / "nothing", "--to", "sft"): "run: there is no folder",
        ("export", tmp_path, "--to", "sft", "--phase", "train"): "--phase: no rollout has the phase 'train'",
        ("export", tmp_path, "--to", "sft", "--output", tmp_path): "output: .* already exists",
        ("export", tmp_path, "--to", "sft", "--min-reward", "1"): "run: .* to export: 1 rollouts with a reward below 1",
        ("export", tmp_path, "--to", "atif", "--step", "9"): "run: .* has nothing to export: no rollout matches",
        ("import", tmp_path, "--output-dir", tmp_path / "new"): "paths: no file is an ATIF trajectory",
        ("import", tmp_path / "none.json", "--output-dir", tmp_path / "new"): "paths: there is no .*none.json",
    }
    for words, told in refused.items():
        assert cli.main([str(word) for word in words]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert re.search(told, said), said
    assert set(contents(tmp_path, "rollouts.sqlite*")) == set(contents(tmp_path))
