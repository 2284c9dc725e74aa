"""Chat templates: what a policy was trained with is what its evaluation uses, unless the evaluation sets another."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import agentgym as ag
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.cli import main as cli
from agentgym.evals.opening import open_engine
from agentgym.hub import find_model
from agentgym.testing import Scripted, say
from agentgym.train.trainer import Trainer


@pytest.fixture(scope="module")
def own() -> str:
    """Return the tiny model's chat template."""
    template: str = chat_tokenizer("tiny").tokenizer.chat_template
    return template


def marked(template: str) -> str:
    """Return a template that writes "LOUD", or the value of the variable `loud`, in front of each conversation."""
    return f"{{{{ 'LOUD' if loud is not defined else loud }}}}{template}"


class Greet(ag.ToolEnv[ag.Task]):
    """A task that ends with the first turn."""

    limits = ag.Limits(turns=1, turn_tokens=4)

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=f"{split}{number}", prompt="Hi") for number in range(2)]

    @ag.reward
    def said(self) -> float:
        return 1.0


def prompt_of(evaluation: Any) -> str:
    """Return the text of the first prompt that the tiny model read."""
    segment = evaluation.rollouts[0].segments[0]
    return chat_tokenizer("tiny").decode(segment.token_ids.tolist())


@pytest.fixture(scope="module", params=["lora", "full"])
def trained(request: pytest.FixtureRequest, own: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the policy's folder of a run without steps that has its own chat template."""
    out = tmp_path_factory.mktemp("run")
    learning = ag.TrainConfig(method=request.param)
    run = ag.RunConfig(env="nim", model="tiny", max_steps=0, eval_tasks=0, output_dir=out, train=learning)
    asyncio.run(ag.train_policy(replace(run, chat_template=marked(own))))
    return out / ("adapter" if request.param == "lora" else "model")


async def test_a_trained_policy_has_the_template_it_was_trained_with_and_is_evaluated_with_it(
    trained: Path, own: str
) -> None:
    assert (trained / "chat_template.jinja").read_text() == marked(own)
    evaluation = await ag.evaluate(Greet, trained, n=1)
    assert prompt_of(evaluation).startswith("LOUD")


def test_a_merged_model_has_the_template_of_its_adapter(trained: Path, own: str, tmp_path: Path) -> None:
    if trained.name == "model":
        pytest.skip("a full model has nothing to merge")
    assert cli.main(["merge", str(trained), str(tmp_path / "merged")]) == 0
    assert chat_tokenizer(tmp_path / "merged").tokenizer.chat_template == marked(own)


async def test_an_adapter_without_a_template_is_evaluated_with_its_base_models(tmp_path: Path, own: str) -> None:
    with Trainer("tiny", ag.TrainConfig()) as trainer:
        trainer.save(tmp_path / "adapter")
    async with open_engine(tmp_path / "adapter") as engine:
        assert engine.tokenizer.tokenizer.chat_template == own  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
def test_peft_loads_an_adapter_from_any_folder_although_its_model_was_named_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM

    tiny = Path(find_model("tiny"))
    monkeypatch.chdir(tiny.parent)
    with Trainer(tiny.name, ag.TrainConfig()) as trainer:
        trainer.save(tmp_path / "adapter", files={"chat_template.jinja": "{{ messages }}"})
    base = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(tiny)
    monkeypatch.chdir(tmp_path)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert loaded.get_input_embeddings().num_embeddings == 512


async def test_an_evaluation_uses_the_template_and_the_variables_it_is_given(own: str, tmp_path: Path) -> None:
    (file := tmp_path / "loud.jinja").write_text(marked(own))
    given: dict[str, Any] = {"chat_template": file, "chat_template_kwargs": {"loud": "QUIET"}}
    evaluation = await ag.evaluate(Greet, "tiny", n=1, output_dir=tmp_path / "eval", **given)
    assert prompt_of(evaluation).startswith("QUIET")
    kept = json.loads((tmp_path / "eval/settings.json").read_text())
    assert (kept["chat_template"], kept["chat_template_kwargs"]) == (marked(own), {"loud": "QUIET"})
    again: dict[str, Any] = {"n": 1, "output_dir": tmp_path / "eval", "resume": True}
    await ag.evaluate(Greet, "tiny", **again, **given)
    with pytest.raises(ValueError, match=r"^chat_template: .* was started with another one; use the same"):
        await ag.evaluate(Greet, "tiny", **again, chat_template=own, chat_template_kwargs={"loud": "QUIET"})
    with pytest.raises(ValueError, match=r"^chat_template_kwargs: .* was started with .*'QUIET'"):
        await ag.evaluate(Greet, "tiny", **again, chat_template=file)


async def test_an_open_engine_and_an_endpoint_refuse_a_template() -> None:
    for model in (Scripted([say("hi")]), "http://localhost:1/v1"):
        with pytest.raises(
            ValueError, match=r"^chat_template, chat_template_kwargs, tools: only a model that the evaluation"
        ):
            await ag.evaluate(Greet, model, chat_template="{{ messages }}")
        with pytest.raises(ValueError, match=r"^chat_template, chat_template_kwargs, tools: only a model"):
            await ag.evaluate(Greet, model, tools="prompt")


@pytest.mark.parametrize(
    ("model", "tools", "possible"),
    [
        (["--model", "tiny"], "api", "auto, template, prompt, refuse"),
        (["--url", "http://localhost:1/v1"], "template", "api, prompt"),
    ],
)
def test_the_command_eval_says_which_ways_to_show_tools_fit_the_model(
    model: list[str], tools: str, possible: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "nim", *model, "--tools", tools]) == 1
    assert capsys.readouterr().err.endswith(f"it is one of {possible}, got {tools}\n")


def test_the_command_eval_takes_a_template_and_its_variables(own: str, tmp_path: Path) -> None:
    (file := tmp_path / "loud.jinja").write_text(marked(own))
    words = ["--model", "tiny", "--n", "1", "--max-tokens", "4", "--output-dir", str(tmp_path / "eval")]
    words += ["--tools", "template", "--chat-template", str(file), "--chat-template-kwargs", "loud", "False", "n", "3"]
    assert cli.main(["eval", "nim", *words]) == 0
    kept = json.loads((tmp_path / "eval/settings.json").read_text())
    assert (kept["chat_template"], kept["chat_template_kwargs"]) == (marked(own), {"loud": False, "n": 3})
    assert kept["tools"] == "template"
