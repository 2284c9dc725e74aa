"""Trajectories and adapters from strangers: they use little memory, and refer only to files next to them."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgym.engines.adapter_files import read_adapter
from agentgym.exports import atif_images
from agentgym.exports.atif_reader import read_atif
from agentgym.files.foreign.opening import UnreadableFileError
from agentgym.hub import find_model
from agentgym.store.reader import RolloutStore
from agentgym.types.messages import Image
from tests.files.foreign.attacks import deep
from tests.files.foreign.commands import Worker, worker, wrong_with
from tests.types.messages.pictures import PNG


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("cache")) as made:
        yield made


def document(*steps: dict[str, Any], **fields: Any) -> dict[str, Any]:
    asked = {"source": "user", "message": "Say it."}
    said = {"source": "agent", "message": "It."}
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "other"}, "steps": [asked, *(steps or (said,))]} | fields


def counted(**metrics: Any) -> dict[str, Any]:
    return {"source": "agent", "message": "It.", "metrics": metrics}


def kept(**fields: Any) -> dict[str, Any]:
    return {"extra": {"agentgym": fields}}


WITH_IDS = counted(prompt_token_ids=[1], completion_token_ids=[2], logprobs=[-0.5])
HOSTILE: dict[str, tuple[Any, str]] = {
    **{
        f"{name} {count:g}": (document(counted(**{name: count})), "16777216")
        for name in ("prompt_tokens", "completion_tokens")
        for count in (2 * 10**8, 2 * 10**9, 10**11, 2**70)
    },
    "last_tokens 2e9": (document(**kept(last_tokens=2 * 10**9)), "it has 2,000,000"),
    "last_tokens 2**70": (document(**kept(last_tokens=2**70)), "last_tokens: must be a 64-bit integer"),
    "last_tokens below 0": (document(**kept(last_tokens=-(10**6))), "it has -9"),
    "many small counts": (
        document(
            subagent_trajectories=[document(counted(prompt_tokens=10**7), trajectory_id=f"t{n}") for n in range(3)]
        ),
        "a rollout may have at most 16,777,216",
    ),
    "ids of 2**70": (
        document(counted(prompt_token_ids=[1], completion_token_ids=[2**70], logprobs=[-0.5])),
        "metrics.completion_token_ids.0: Input should be less than 2147483648",
    ),
    "last ids of 2**70": (
        document(WITH_IDS, **kept(last_token_ids=[2**70])),
        "last_token_ids: must be a 64-bit integer",
    ),
    "last ids of text": (document(WITH_IDS, **kept(last_token_ids=["a"])), "last_token_ids: must be a 64-bit integer"),
    "a step of 2**70": (document(**kept(rollout={"step": 2**70})), "step: must be a 64-bit integer"),
    "a phase that is a list": (document(**kept(rollout={"phase": []})), "phase: must be text"),
    "metrics of text": (document(**kept(rollout={"metrics": {"seconds": "x"}})), "metrics.seconds: must be a number"),
    "a reward of 2**70": (
        document(extra={"reward": 2**70}),
        "extra.reward: must be a finite number, got an integer that does not fit in 64 bits",
    ),
    "a failure of other fields": (document(**kept(rollout={"failure": {"x": "y"}})), "unexpected keyword argument"),
    "an index of 2**70": (document(**kept(index=2**70)), "index: must be a 64-bit integer"),
    "seconds of text": (
        document({"source": "agent", "message": "It.", **kept(seconds="x")}),
        "seconds: must be a finite number, got 'x'",
    ),
    "a list": ([1], "must contain a JSON object, got list"),
    "an object of nothing": ({}, "schema_version: Field required"),
    "an id of a reference that is a list": (
        document(
            {
                "source": "agent",
                "message": "",
                "observation": {"results": [{"subagent_trajectory_ref": [{"trajectory_id": [1]}]}]},
            }
        ),
        "subagent_trajectory_ref.0.trajectory_id: Input should be a valid string",
    ),
    "an embedded continuation that is not a document": (
        document(continued=5, **kept(index=2**70)),
        "index: must be a 64-bit integer",
    ),
    "references that are numbers": (
        document({"source": "agent", "message": "", "observation": {"results": [{"subagent_trajectory_ref": [3]}]}}),
        "Input should be a valid dictionary",
    ),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_trajectorys_memory_is_bounded_by_its_file_size(hostile: str, tmp_path: Path, commands: Worker) -> None:
    content, told = HOSTILE[hostile]
    (tmp_path / "a.json").write_text(json.dumps(content))
    (found,) = commands.run(["import", str(tmp_path / "a.json"), "--output-dir", str(tmp_path / "out")])
    assert wrong_with(found) == []
    assert (found["code"], found["error"].startswith(f"agentgym: paths: {tmp_path / 'a.json'}")) == (1, True)
    assert told in found["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (deep(), "it nests more than 200 levels"),
        ('{"steps": %s}' % ("9" * 5000), "4300 digits"),
        ("{" * 300, "contains no readable JSON"),
        ("[" * 300 + "]" * 300, "it nests more than 200 levels"),
    ],
    ids=["100,000 levels", "5,000 digits", "cut", "300 levels"],
)
def test_json_that_parsers_reject_gives_an_error_message(
    content: str, told: str, tmp_path: Path, commands: Worker
) -> None:
    (tmp_path / "a.json").write_text(content)
    (found,) = commands.run(["import", str(tmp_path / "a.json"), "--output-dir", str(tmp_path / "out")])
    assert wrong_with(found) == []
    assert (found["code"], told in found["error"]) == (1, True), found["error"]


def referring(to: str, how: str) -> dict[str, Any]:
    if how == "continued":
        return document(continued_trajectory_ref=to)
    if how == "image":
        return document({"source": "user", "message": [{"type": "image", "source": {"path": to}}]})
    ref = {"subagent_trajectory_ref": [{"trajectory_path": to}]}
    return document({"source": "agent", "message": "It.", "observation": {"results": [ref]}})


@pytest.mark.parametrize("how", ["continued", "sub-agent", "image"])
@pytest.mark.parametrize(
    "to",
    [
        *("../secret.json", "{absolute}", "/dev/zero", "pipe", "link", "down/link", "folder", "a\0b"),
        *("circle", "n" * 300, "n" * 5000, "n/" * 2500, "\ud800"),
    ],
    ids=lambda to: f"{to[:20]}, {len(to)}",
)
def test_a_trajectory_can_only_refer_to_files_next_to_it(to: str, how: str, tmp_path: Path, commands: Worker) -> None:
    folder = tmp_path / "one"
    (folder / "down").mkdir(parents=True)
    (folder / "folder").mkdir()
    (tmp_path / "secret.json").write_text(json.dumps(document({"source": "agent", "message": "SECRET"})))
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("../secret.json")
    (folder / "down/link").symlink_to("/dev/zero")
    (folder / "circle").symlink_to("circle")
    named = to.replace("{absolute}", str(tmp_path / "secret.json"))
    (folder / "a.json").write_text(json.dumps(referring(named, how)))
    (found,) = commands.run(["import", str(folder / "a.json"), "--output-dir", str(tmp_path / "out")])
    assert wrong_with(found) == []
    assert found["code"] == 1
    assert str(folder) in found["error"]
    assert not (tmp_path / "out").exists()


def shown(count: int) -> dict[str, Any]:
    """Return a trajectory that names one image this many times."""
    image = {"type": "image", "source": {"path": "a.png"}}
    return document({"source": "user", "message": [image] * count}, {"source": "agent", "message": "It."})


def test_an_image_counts_once_per_reference(tmp_path: Path, commands: Worker) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    os.truncate(tmp_path / "a.png", 19_000_000)
    (tmp_path / "a.json").write_text(json.dumps(shown(100)))
    (found,) = commands.run(["import", str(tmp_path / "a.json"), "--output-dir", str(tmp_path / "out")])
    assert wrong_with(found) == []
    assert found["code"] == 1
    assert "source.path: 'a.png': " in found["error"]
    assert "more than 134,217,728 bytes would be read for one trajectory" in found["error"]


def test_an_image_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted_read(path: Path, **given: Any) -> bytes:
        read.append(path)
        return PNG

    monkeypatch.setattr(atif_images, "read_bytes", counted_read)
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "a.json").write_text(json.dumps(shown(3)))
    asked = read_atif(tmp_path / "a.json").rollout.segments[0].prompt_messages[-1]
    assert asked["content"] == [Image(PNG).part] * 3
    assert read == [tmp_path / "a.png"]


def bulky(folder: Path, many: int, size: int) -> Path:
    """Return a trajectory with this many sub-agents in files of that size, which are all one file."""
    (folder / "b0.json").write_text(json.dumps(document(extra={"bulk": "x" * size})))
    for number in range(1, many):
        (folder / f"b{number}.json").hardlink_to(folder / "b0.json")
    refs = [{"trajectory_path": f"b{number}.json"} for number in range(many)]
    step = {"source": "agent", "message": "", "observation": {"results": [{"subagent_trajectory_ref": refs}]}}
    (folder / "a.json").write_text(json.dumps(document(step)))
    return folder / "a.json"


def test_all_files_of_a_trajectory_share_one_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"b4\.json: with this file, more than 134,217,728 bytes would be read"):
        read_atif(bulky(tmp_path, 10, 30_000_000))


def test_only_one_document_of_a_trajectory_is_in_memory_at_a_time(tmp_path: Path) -> None:
    file = bulky(tmp_path, 8, 15_000_000)
    tracemalloc.start()
    try:
        assert len(read_atif(file).rollout.segments) == 9
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_a_file_with_any_name_is_imported(tmp_path: Path, commands: Worker) -> None:
    for name in ("1²2.json", "1².json", "٣.json", "10.json", "9.json"):
        (tmp_path / name).write_text(json.dumps(document(session_id=name)))
    (found,) = commands.run(["import", str(tmp_path), "--output-dir", str(tmp_path / "out")])
    assert (wrong_with(found), found["code"]) == ([], 0)
    with RolloutStore(tmp_path / "out") as store:
        assert [row.rollout_id for row in store.summaries(order="written")][-2:] == ["9.json", "10.json"]


def test_entries_that_are_not_files_are_counted_and_the_others_read(tmp_path: Path, commands: Worker) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text(json.dumps(document(session_id=name, extra={"reward": 1})))
    os.mkfifo(folder / "pipe.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "elsewhere.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "secret.json").write_text(json.dumps(document()))
    (folder / "deep.json").write_text(deep())
    (found,) = commands.run(["import", str(folder), "--output-dir", str(tmp_path / "out")])
    assert wrong_with(found) == []
    assert found["out"].splitlines() == [
        f"2 rollouts, 0 of them without a reward: {tmp_path / 'out'}",
        "left out: 4 files that aren't trajectories",
    ]
    with RolloutStore(tmp_path / "out") as store:
        assert len(store) == 2


def test_a_trajectory_split_into_subfolders_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "down").mkdir()
    (tmp_path / "down/b.json").write_text(json.dumps(document(continued_trajectory_ref="../c.json")))
    (tmp_path / "c.json").write_text(json.dumps(document()))
    (tmp_path / "a.json").write_text(json.dumps(document(continued_trajectory_ref="down/b.json")))
    assert len(read_atif(tmp_path / "a.json").rollout.segments) == 3


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (deep(), "it nests more than 200 levels"),
        ("[1]", "must contain a JSON object, got list"),
        (None, "is a pipe, not a regular file"),
    ],
    ids=["100,000 levels", "a list", "a pipe"],
)
def test_an_invalid_adapter_config_is_refused_with_a_message(
    config: str | None, told: str, tmp_path: Path, commands: Worker
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if config is None:
        os.mkfifo(tmp_path / "adapter_config.json")
    else:
        (tmp_path / "adapter_config.json").write_text(config)
        with pytest.raises(ValueError, match=told):
            read_adapter(tmp_path)
    (found,) = commands.run(["merge", str(tmp_path), str(tmp_path / "out")])
    assert wrong_with(found) == []
    assert (found["code"], told in found["error"]) == (1, True), found["error"]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("what", ["a pipe", "a device", "100,000 levels", "a number"])
def test_a_foreign_tokenizer_is_checked_or_refused(file: str, what: str, tmp_path: Path, commands: Worker) -> None:
    shutil.copytree(find_model("tiny"), tmp_path / "model")
    path = tmp_path / "model" / file
    path.unlink()
    match what:
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case _:
            path.write_text(deep() if what == "100,000 levels" else "7")
    (found,) = commands.run(["doctor", "--model", str(tmp_path / "model")])
    assert wrong_with(found) == []
    assert found["code"] == 1


def test_the_error_is_also_a_value_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    assert issubclass(UnreadableFileError, ValueError)
    with pytest.raises(ValueError, match="has no adapter_config"):
        read_adapter(tmp_path)
