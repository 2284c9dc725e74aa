"""Tests of polyglot, with three images built from the env's folders."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.environments.task_sandboxes import open_sandboxes
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.docker.images import build as image
from agentgym.sandboxes.docker.images.folder import folder_digest
from agentgym.sandboxes.docker.images.names import IMAGE, SERVER_LABEL, default_image, find
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling import run_groups
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.polyglot.env import TEST, TRAIN, WANTED, Polyglot, PolyglotTask, make_task, oracle

IMAGES = Path(__file__).parent / "images"
AS_PLAIN_DEBIAN = f"""\
USER 0:0
ENTRYPOINT []
LABEL {SERVER_LABEL}=""
RUN rm -rf /agentgym /usr/bin/python3* /usr/local/bin/python3*
"""
"""Dockerfile that removes the sandbox's server and Python from the local image, like the env's base image."""
LOOK = call("bash", cmd="command -v perl python3; head -1 program")
SUBMIT = call("submit")


def build(language: str, folder: Path) -> str:
    """Build an image from the env's folder on top of the local image, under a new name."""
    tag = f"agentgym-test-polyglot:{language}-{secrets.token_hex(4)}"
    shutil.copytree(IMAGES / language, folder)
    first, _, rest = (folder / "Dockerfile").read_text().partition("\n")
    assert first.startswith("FROM ")
    plain = "" if language == "python" else AS_PLAIN_DEBIAN
    (folder / "Dockerfile").write_text(f"FROM {default_image()}\n{plain}{rest}ENV BUILT={tag}\n")
    image.build(tag, dockerfile=str(folder))
    return tag


def remove(tag: str, folder: Path) -> None:
    """Remove the image under all its names, and the image that it is based on."""
    with ExitStack() as stack:
        client = connect()
        stack.callback(client.close)
        found = find(client, tag)
        assert found is not None
        names = {*found["RepoTags"], f"{IMAGE}:folder-{folder_digest(folder)[:12]}"}
        for name in sorted(names, key=lambda name: "folder-" in name):
            client.remove_image(name)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PolyglotTask]]:
    """Yield a task of each language, in separate images that exist until the last test."""
    if (why_not := why_no_docker()) is not None:
        pytest.skip(f"docker: {why_not}")
    with ExitStack() as stack:
        made = {}
        for language in WANTED:
            folder = tmp_path_factory.mktemp("images") / language
            tag = build(language, folder)
            stack.callback(remove, tag, folder)
            made[language] = make_task("train", language).model_copy(update={"image": tag})
        yield made


async def play(sandboxes: SandboxPool | None, task: PolyglotTask, *script: Reply) -> ag.Rollout:
    played = await ag.rollout(Polyglot, task, Scripted(script), sandboxes=sandboxes)
    assert played.error is None
    return played


@pytest.mark.docker
@pytest.mark.slow
async def test_each_task_runs_in_the_image_of_its_language_and_a_fix_is_rewarded(
    tasks: dict[str, PolyglotTask],
) -> None:
    replies = {task.id: [LOOK, *oracle(task)] for task in tasks.values()}
    async with open_sandboxes(Polyglot, 2) as sandboxes:
        played = {name: await play(sandboxes, task, *replies[task.id]) for name, task in tasks.items()}
    assert [rollout.reward for rollout in played.values()] == [1.0, 1.0, 1.0]
    assert len({rollout.sandbox for rollout in played.values()}) == 3
    for language, first in (("python", "#!/usr/bin/env python3"), ("perl", "#!/usr/bin/perl"), ("shell", "#!/bin/sh")):
        said = str(played[language])
        assert first in said
        assert ("/usr/bin/python3\n" in said.replace(" ", "")) == (language == "python")


@pytest.mark.docker
@pytest.mark.slow
async def test_a_batch_of_tasks_with_three_images_shares_two_sandboxes(tasks: dict[str, PolyglotTask]) -> None:
    groups = await run_groups(Polyglot, list(tasks.values()), Scripted([SUBMIT]), n=1, concurrency=2)
    rewards = {rollout.group_id: rollout.reward for rollout in groups.rollouts}
    assert all(reward is not None and 0.0 < reward < 1.0 for reward in rewards.values()), rewards


@pytest.mark.docker
@pytest.mark.slow
async def test_polyglot_keeps_the_contract_of_an_env(tasks: dict[str, PolyglotTask]) -> None:
    await check_env(Polyglot, tasks["python"], oracle=oracle(tasks["python"]))


@pytest.mark.docker
@pytest.mark.slow
async def test_work_that_was_not_submitted_is_not_rewarded(tasks: dict[str, PolyglotTask]) -> None:
    played = await play(None, tasks["perl"], oracle(tasks["perl"])[0], say("Done."))
    assert played.reward == 0.0


@pytest.mark.docker
@pytest.mark.slow
async def test_an_image_without_a_program_is_named_in_the_error(tasks: dict[str, PolyglotTask]) -> None:
    other = tasks["python"].model_copy(update={"image": default_image()})
    played = await ag.rollout(Polyglot, other, Scripted([SUBMIT]))
    assert f"the image {default_image()!r} has no /task/program" in str(played.failure)


def test_each_image_has_hidden_inputs_and_they_differ_between_the_splits() -> None:
    assert {path.name for path in IMAGES.iterdir()} == set(WANTED) == set(TRAIN) == set(TEST)
    assert {task.id for task in Polyglot.tasks("train")}.isdisjoint(task.id for task in Polyglot.tasks("test"))
