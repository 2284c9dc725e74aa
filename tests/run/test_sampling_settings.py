"""How a run samples: training from the whole distribution, evaluations as configured, with its chat template."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.chat import chat_tokenizer
from agentgym.cli.output import RefusedWords
from agentgym.cli.recipe import settings
from agentgym.engines.scripted import Scripted, say
from agentgym.run import Collector, open_collector as opening
from agentgym.scheduling import Schedule
from agentgym.types.completion import Completion, Sampling
from recipes import chase_grpo
from tests.run.test_resume import SETTINGS

SHOUTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper if loud else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("part", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
def test_training_refuses_to_sample_from_a_part_of_the_distribution(part: dict[str, Any]) -> None:
    (name,) = part
    with pytest.raises(ValueError, match=rf"^train_sampling\.{name}: training scores .* eval_sampling"):
        replace(chase_grpo.RECIPE, train_sampling=Sampling(**part))


async def test_a_collector_also_refuses_partial_sampling() -> None:
    collector = Collector(ag.find_env("terse"), Scripted([say("1")]), None, None, Sampling(top_p=0.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^sampling: training scores tokens"):
        async with collector.schedule(Schedule(prompts_per_step=1, group_size=2)):
            pass


def test_sampling_that_has_its_own_training_setting_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"^train_sampling\.temperature: set train\.temperature"):
        replace(chase_grpo.RECIPE, train_sampling=Sampling(temperature=0.5))
    with pytest.raises(ValueError, match=r"^train_sampling\.max_tokens: set the run's max_turn_tokens"):
        replace(chase_grpo.RECIPE, train_sampling=Sampling(max_tokens=5))


def test_the_refused_flag_is_named() -> None:
    with pytest.raises(RefusedWords, match=r"^--train-sampling\.top-k: training scores tokens"):
        settings(chase_grpo.RECIPE, ["--train-sampling.top-k", "20"])


def test_an_evaluation_has_its_own_sampling_with_defaults_from_training() -> None:
    flags = ["--eval-sampling.top-p", "0.9", "--eval-sampling.temperature", "0.2", "--train-sampling.stop", "END"]
    run = settings(
        chase_grpo.RECIPE, [*flags, "--max-turn-tokens", "9", "--chat-template-kwargs", "enable_thinking", "False"]
    )
    assert run.sampling == Sampling(temperature=run.train.temperature, max_tokens=9, stop=("END",))
    assert run.held_out_sampling == Sampling(temperature=0.2, max_tokens=9, top_p=0.9, stop=("END",))
    assert run.chat_template_kwargs == {"enable_thinking": False}
    silent = replace(run, eval_sampling=Sampling(max_tokens=5))
    assert silent.held_out_sampling == Sampling(max_tokens=5)


class Watched(ag.TransformersEngine):
    """Records the sampling of each request."""

    asked: list[tuple[Sampling, str, Completion]]

    async def generate(self, token_ids: Any, **how: Any) -> Completion:
        done = await super().generate(token_ids, **how)
        self.asked.append((how["sampling"], self.tokenizer.decode(list(token_ids)), done))
        return done


async def test_training_and_evaluation_sample_as_configured_with_the_runs_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Sampling, str, Completion]] = []

    @asynccontextmanager
    async def opened(run: ag.RunConfig, trainer: Any, progress: Any, tokenizer: Any) -> AsyncIterator[Watched]:
        async with Watched(run.model, run.engine, tokenizer=tokenizer) as engine:  # type: ignore[arg-type]
            engine.asked = asked
            yield engine

    monkeypatch.setattr(opening, "open_engine", opened)
    template = tmp_path / "loud.jinja"
    template.write_text(SHOUTING)
    run = replace(
        SETTINGS,
        output_dir=tmp_path / "run",
        max_steps=1,
        chat_template=template,
        chat_template_kwargs={"loud": True},
        tools="template",
        eval_rollouts=2,
        train_sampling=ag.Sampling(stop=("nam", "Answ")),
        eval_sampling=ag.Sampling(temperature=0.3, top_k=5),
    )
    await ag.train_policy(run)
    assert {how for how, _, _ in asked} == {run.sampling, run.held_out_sampling}
    assert run.held_out_sampling == Sampling(temperature=0.3, max_tokens=12, top_k=5)
    assert all("START AT KEY" in prompt for _, prompt, _ in asked)
    assert sum(how.top_k == 5 and "<|im_end|>\n<|im_start|>user" not in prompt for how, prompt, _ in asked) >= 8
    assert "stop_text" in {done.finish_reason for how, _, done in asked if how.stop}


def test_a_template_that_is_neither_a_file_nor_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^chat_template: .*gone\.jinja cannot be read \(FileNotFoundError\)"):
        chat_tokenizer("tiny", template=tmp_path / "gone.jinja")
    assert chat_tokenizer("tiny", template=SHOUTING).opening == "<|im_start|>assistant\n"


def test_a_template_that_cannot_be_rendered_is_refused_by_name_and_line() -> None:
    with pytest.raises(ValueError, match=r"^chat_template: cannot be rendered in line 2: .*end of statement block"):
        chat_tokenizer("tiny", template="{{ messages }}\n{% for m in %}")
    with pytest.raises(ValueError, match=r"^chat_template: cannot be rendered: only for robots"):
        chat_tokenizer("tiny", template="{{ raise_exception('only for robots') }}")


def test_a_variable_that_the_template_does_not_use_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    chat_tokenizer("tiny", template=SHOUTING, template_kwargs={"loud": True})
    assert not caplog.messages
    chat_tokenizer("tiny", template=SHOUTING, template_kwargs={"loud": True, "lou": True, "louder": 1})
    assert caplog.messages == ["chat_template_kwargs: the chat template does not use lou, louder; check the spelling"]
