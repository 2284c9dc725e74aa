"""agentgym envs in TRL's trainer: driven by hand as TRL does, and one real GRPO step."""

import inspect
from pathlib import Path
from typing import Any, Literal

import pytest

import agentgym as ag
from agentgym.bridges import trl as bridge
from agentgym.errors import SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.tools import DynamicTool
from envs.chase.env import Chase, ChaseTask
from envs.nim.env import Nim

ROOT = Path(__file__).parents[2]
TASK = ChaseTask(
    id="t",
    prompt=(ag.Message(role="user", content="Start at key 31. What is the value?"),),
    store={"31": "see 52", "52": "value 17"},
    value=17,
)
ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": TASK.prompt[0]["content"]}],
    "task": TASK.model_dump_json(),
}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class Odd(ag.ToolEnv[ag.Task]):
    """Rewards the picked number; its tool `lose` breaks the env, and `done` ends the episode."""

    limits = ag.Limits(turns=3)
    system = "You pick."

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.number = 0

    @ag.tool
    def pick(self, number: int, how: Literal["slow", "fast"] = "fast", notes: list[str] | None = None) -> int:
        """Pick
        a number."""
        self.number = number
        return number

    @ag.tool
    def done(self) -> ag.Stop:
        """End it."""
        return ag.Stop("enough", "good bye")

    @ag.tool
    def lose(self) -> str:
        """Lose the sandbox."""
        raise SandboxError("gone")

    @ag.reward
    def worth(self) -> float:
        return float(self.number)

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=str(i), prompt=f"Pick {i}.") for i in range(3)]


def row(number: int = 0) -> dict[str, Any]:
    task = Odd.tasks("train")[number]
    prompt = [{"role": "system", "content": "You pick."}, {"role": "user", "content": f"Pick {number}."}]
    return {"prompt": prompt, "task": task.model_dump_json()}


@pytest.mark.usefixtures("no_leaks")
def test_an_oracle_earns_its_reward_and_each_episode_has_a_new_sandbox() -> None:
    sandboxes = FakeSandboxPool()
    with bridge.environment_factory(Chase, sandboxes=sandboxes) as make:
        places: list[Any] = [make(), make()]
        assert [place.reset(**ROW) for place in places] == [None, None]
        assert places[0].python(code="get(31)") == "'see 52'"
        assert len(sandboxes.leased) == 2
        completions = [[said("Answer: 17")], [said("Answer: 16")]]
        assert bridge.reward(completions=completions, environments=places, prompts=[]) == [1.0, 0.0]
        places[0].reset(**ROW)
        assert bridge.reward([[said("Answer: 17")]], places[:1]) == [1.0]
        places[1].reset(**ROW)
    assert (len(sandboxes.made), len(sandboxes.leased)) == (4, 0)


def test_trl_reads_the_tools_from_signatures_and_docstrings() -> None:
    with bridge.environment_factory(Odd) as make:
        place: Any = make()
        public = [name for name, _ in inspect.getmembers(type(place), inspect.isfunction) if not name.startswith("_")]
        assert public == ["done", "lose", "pick", "reset"]
        signature = inspect.signature(place.pick)
        assert str(signature).startswith("(*, number: int, how: Literal['slow', 'fast'] = None, notes: ")
        assert (
            inspect.getdoc(place.pick) == "Pick a number.\n\nArgs:\n    number: number\n    how: how\n    notes: notes"
        )
        assert inspect.getdoc(place.done) == "End it."


def test_only_rollouts_of_the_same_row_and_step_share_the_env_seed() -> None:
    seen: list[int] = []

    class Seeded(Odd):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            assert seed is not None
            seen.append(seed)
            return await super().reset(seed=seed, options=options)

    for seed in (0, 1):
        with bridge.environment_factory(Seeded, seed=seed) as make:
            places: list[Any] = [make() for _ in range(2)]
            for number in (0, 0, 1):
                for place in places:
                    place.reset(**row(number))
    assert seen[::2] == seen[1::2]
    assert len(set(seen)) == 6


def test_the_models_mistakes_get_a_message() -> None:
    with bridge.environment_factory(Odd) as make:
        place: Any = make()
        place.reset(**row())
        assert place.pick(number="x").startswith("error: wrong arguments for tool 'pick': number")


def test_a_completion_without_an_answer_is_scored_as_it_is() -> None:
    with bridge.environment_factory(Odd) as make:
        place: Any = make()
        place.reset(**row())
        place.pick(number=4)
        assert bridge.reward([[said("", tool_calls=[{}])]], [place]) == [4.0]


def test_calls_after_the_end_have_no_effect() -> None:
    with bridge.environment_factory(Odd) as make:
        place: Any = make()
        place.reset(**row())
        place.pick(number=4)
        assert place.done() == "good bye"
        assert place.pick(number=7) == "error: the task has ended"
        assert bridge.reward([[said("bye")]], [place]) == [4.0]
        place.reset(**row())
        for number in range(5):
            place.pick(number=number)
        assert bridge.reward([[said("bye")]], [place]) == [2.0], "the turn limit ended the episode"


def test_an_env_that_fails_has_no_reward() -> None:
    with bridge.environment_factory(Odd) as make:
        place: Any = make()
        place.reset(**row())
        place.pick(number=4)
        with pytest.raises(SandboxError, match="gone"):
            place.lose()
        assert bridge.reward([[said("bye")]], [place]) == [None]
        place.reset(**row())
        assert bridge.reward([[said("bye")]], [place]) == [0.0]


def test_tools_of_forks_alone_are_left_out() -> None:
    class Delegating(Odd):
        @ag.tool(root=False)
        def look(self) -> str:
            """Look closer; only forks may."""
            return ""

    with bridge.environment_factory(Delegating) as make:
        place: Any = make()
        assert not hasattr(place, "look")
        assert place.reset(**row()) is None


def test_an_env_whose_instances_add_tools_is_refused() -> None:
    class Adding(Odd):
        async def extra_tools(self) -> list[DynamicTool]:
            schema = {"type": "object", "properties": {}}
            return [DynamicTool("more", "Do more.", schema, lambda: "")]

    with bridge.environment_factory(Adding) as make, pytest.raises(ValueError, match="TRL uses the tools of a class"):
        make().reset(**row())


def test_messages_of_the_env_after_the_prompt_are_passed_to_trl() -> None:
    task = Nim.tasks("train")[0]
    prompt = [{"role": "user", "content": task.prompt[0]["content"]}]
    with bridge.environment_factory(Nim) as make:
        beyond = make().reset(task=task.model_dump_json(), prompt=prompt)  # type: ignore[arg-type]
        assert beyond is not None
        assert beyond.startswith("\n\n")
        with pytest.raises(ValueError, match=r"Nim\.reset: its first messages must start with those of the row's"):
            make().reset(task=task.model_dump_json(), prompt=[ag.Message(role="user", content="Play.")])


def test_the_data_set_has_the_prompts_and_the_tasks() -> None:
    pytest.importorskip("datasets", reason="needs the extra agentgym-kit[trl]")
    rows = bridge.dataset(Odd, n=2)
    assert [dict(one) for one in rows] == [row(0), row(1)]
    assert len(bridge.dataset(Odd)) == 3


def test_an_env_that_trl_cannot_play_is_refused() -> None:
    class Reset(ag.ToolEnv[ag.Task]):
        @ag.tool(name="reset")
        def again(self) -> str:
            """Begin again."""
            return ""

        @ag.reward
        def nothing(self) -> float:
            return 0.0

    with pytest.raises(ValueError, match="env: TRL does not accept 'reset' of Reset as a tool"), _made(Reset):
        raise AssertionError
    mixed = ag.mix({"odd": ag.Member(Odd, 1), "chase": ag.Member(Chase, 1)})
    with pytest.raises(ValueError, match=r"is a mixture or an ag\.AgentEnv"), _made(mixed):
        raise AssertionError


def test_a_tool_may_have_the_name_env() -> None:
    class Shell(ag.ToolEnv[ag.Task]):
        @ag.tool
        def env(self) -> str:
            """Print the variables."""
            return "HOME=/"

        @ag.reward
        def nothing(self) -> float:
            return 0.0

    with _made(Shell) as make:
        environment = make()
        environment.reset(
            task=ag.Task(id="a", prompt="Go.").model_dump_json(), prompt=[ag.Message(role="user", content="Go.")]
        )
        assert environment.env() == "HOME=/"


def _made(env: type[ag.Env[Any]]) -> Any:
    return bridge.environment_factory(env)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_one_grpo_step_of_trl_trains_the_tiny_model_on_our_env(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra agentgym-kit[trl]")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    folder = ROOT / "recipes/checkpoints/chase"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template  # TRL recognizes known templates by their text only.
    before = [parameter.detach().clone() for parameter in model.parameters()]
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=200,
        max_steps=1,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=1,
    )
    sandboxes = FakeSandboxPool()
    with bridge.environment_factory(Chase, sandboxes=sandboxes) as make:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=bridge.reward,
            environment_factory=make,
            train_dataset=bridge.dataset(Chase, n=4),
            processing_class=tokenizer,
            args=settings,
        )
        trainer.train()
    (logged, *_) = trainer.state.log_history
    assert logged["tools/call_frequency"] > 0
    assert logged["tools/failure_frequency"] == 0
    assert 0 < logged["reward"] < 1, "the rewards must differ, or the step trains nothing"
    changed = [bool((old != new).any()) for old, new in zip(before, model.parameters(), strict=True)]
    assert all(changed)
    assert (len(sandboxes.made), len(sandboxes.leased)) == (8, 0)
