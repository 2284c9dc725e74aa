"""A run's model roles: settings, flags, and engines that the run opens."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.cli.recipe import settings
from agentgym.engines.custom import CustomEngineConfig
from agentgym.engines.scripted import Scripted, say
from agentgym.store.run_settings import refuse_changes, write_settings
from tests.engines.endpoint.chat_server import chat_server, said


class Judged(ag.ToolEnv[ag.Task]):
    """The reward is a judge's score."""

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=f"{split}{n}", prompt=f"{n}?") for n in range(2)]

    @ag.reward
    async def good(self) -> float:
        return float(await self.model("judge").ask("Good?", max_tokens=4) == "yes")


def approving(model: str) -> Scripted:
    """Return a user-defined engine."""
    assert str(model) == "anything"
    return Scripted(lambda text: say("yes"))


def nothing(model: str) -> None:
    """Return no engine."""


async def later(model: str) -> Scripted:
    """Return an engine, but only if it is awaited."""
    return approving(model)


def endpoint(model: str) -> ag.Endpoint:
    """Run a chat endpoint."""
    return ag.Endpoint(os.environ["JUDGE_URL"], model=str(model))


RECIPE = ag.RunConfig(
    recipe="judged",
    env=f"{__name__}:Judged",
    model="tiny",
    max_steps=0,
    eval_tasks=1,
    max_turn_tokens=4,
    models={"judge": ag.ModelRoleConfig(model="anything", engine=CustomEngineConfig(name=f"{__name__}:approving"))},
)


async def test_a_run_opens_its_model_roles_for_the_env(tmp_path: Path) -> None:
    summary = await ag.train_policy(replace(RECIPE, output_dir=tmp_path))
    assert summary["eval_after"] == 1.0
    written = json.loads((tmp_path / "settings.json").read_text())["settings"]
    assert written["models"] == ["judge"]
    assert written["models.judge.model"] == "anything"


async def test_a_runs_judge_may_be_an_endpoint_but_not_its_policy_or_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="agentgym-kit[endpoint] is not installed")
    other = CustomEngineConfig(name=f"{__name__}:endpoint")
    async with chat_server(lambda request, number: said("yes")) as server:
        monkeypatch.setenv("JUDGE_URL", server.url)
        judge = {"judge": ag.ModelRoleConfig(model="tiny", engine=other)}
        summary = await ag.train_policy(replace(RECIPE, output_dir=tmp_path / "run", models=judge))
        assert summary["eval_after"] == 1.0
        with pytest.raises(ValueError, match="engine: Endpoint returns neither token ids"):
            await ag.train_policy(replace(RECIPE, output_dir=tmp_path / "policy", models=judge, engine=other))
        with pytest.raises(ValueError, match=r"^teacher_engine: Endpoint returns neither token ids"):
            await ag.train_policy(
                replace(RECIPE, output_dir=tmp_path / "taught", models=judge, teacher="tiny", teacher_engine=other)
            )


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("nothing", TypeError, "must be an engine, got None"),
        ("later", ValueError, "must be a class or a plain function"),
    ],
)
async def test_the_error_of_a_model_roles_engine_names_its_field(
    name: str, kind: type[Exception], said: str, tmp_path: Path
) -> None:
    judge = ag.ModelRoleConfig(model="anything", engine=CustomEngineConfig(name=f"{__name__}:{name}"))
    with pytest.raises(kind, match=rf"^models\.judge\.engine: {said}"):
        await ag.train_policy(replace(RECIPE, output_dir=tmp_path, models={"judge": judge}))


async def test_a_role_that_no_rollout_of_the_first_batch_uses_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = replace(RECIPE, models={**RECIPE.models, "jugde": RECIPE.models["judge"]}, output_dir=tmp_path)
    await ag.train_policy(replace(run, max_steps=2, prompts_per_step=1, group_size=2, eval_tasks=0))
    warned = "judged: no rollout has queried the model 'jugde'; the env may use another name for it"
    assert capfd.readouterr().err.count(warned) == 1


def test_model_roles_of_a_recipe_have_flags() -> None:
    run = settings(RECIPE, ["--models.judge.model", "other", "--models.judge.engine.slots", "3"])
    assert str(run.models["judge"].model) == "other"
    assert run.models["judge"].engine.slots == 3
    served = settings(RECIPE, ["--models.judge.engine", "sglang", "--models.judge.engine.gpus", "1"])
    assert served.models["judge"].engine == ag.SGLangConfig(gpus=(1,))


def test_a_resumed_run_keeps_its_model_roles_and_may_change_how_they_are_served(tmp_path: Path) -> None:
    write_settings(tmp_path, RECIPE)
    served = ag.ModelRoleConfig(model="anything", engine=ag.SGLangConfig(urls=("http://there",)))
    refuse_changes(tmp_path, replace(RECIPE, models={"judge": served}))
    with pytest.raises(ValueError, match=r'models\.judge\.model: the run has "anything", not "tiny"'):
        refuse_changes(tmp_path, replace(RECIPE, models={"judge": ag.ModelRoleConfig(model="tiny")}))


def test_models_that_cannot_be_opened_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="models: 'judge' must be an instance of ModelRoleConfig"):
        replace(RECIPE, models={"judge": "tiny"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="models: 'a/b' isn't a valid name"):
        replace(RECIPE, models={"a/b": ag.ModelRoleConfig(model="tiny")})
    with pytest.raises(ValueError, match=r"engine\.gpus: without it"):
        ag.ModelRoleConfig(model="tiny", engine=ag.SGLangConfig())
    with pytest.raises(ValueError, match=r"models\.judge\.model: http://a/v1 is a URL, .* a custom engine"):
        replace(RECIPE, models={"judge": ag.ModelRoleConfig(model="http://a/v1")}).check_files()
    with pytest.raises(ValueError, match=r"models\.judge\.model: there is no folder"):
        replace(RECIPE, models={"judge": ag.ModelRoleConfig(model=tmp_path / "none")}).check_files()
