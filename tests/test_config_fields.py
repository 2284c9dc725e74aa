"""Every field of every config refuses, by name and at creation, values that would fail or mislead later."""

import inspect
import re
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import agentgym as ag


class Verdict(BaseModel):
    """A judge's verdict."""


CONFIGS: dict[type[Any], dict[str, Any]] = {
    ag.RunConfig: {"recipe": "r", "env": "chase", "model": "tiny"},
    ag.TrainConfig: {},
    ag.TransformersConfig: {},
    ag.SGLangConfig: {},
    ag.OversampleConfig: {},
    ag.Sampling: {},
    ag.Service: {"image": "x"},
}
"""The configs, each with its required fields."""
ALL = [pytest.param(cls, f, id=f"{cls.__name__}.{f.name}") for cls in CONFIGS for f in fields(cls)]


def make(cls: type[Any], **changes: Any) -> Any:
    return cls(**CONFIGS[cls] | changes)


def is_flag(cls: type[Any], field: Field[Any]) -> bool:
    return isinstance(getattr(make(cls), field.name), bool)


@pytest.mark.parametrize(("cls", "field"), ALL)
def test_true_is_neither_a_number_nor_a_string(cls: type[Any], field: Field[Any]) -> None:
    if is_flag(cls, field):
        assert getattr(make(cls, **{field.name: True}), field.name) is True
        return
    with pytest.raises(ValueError, match=rf"^{field.name}: .*, got True$"):
        make(cls, **{field.name: True})


@pytest.mark.parametrize(("cls", "field"), ALL)
def test_a_nul_character_is_refused_in_every_string_and_path(cls: type[Any], field: Field[Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{field.name}(\.0)?: "):
        make(cls, **{field.name: ("x\0",) if isinstance(getattr(make(cls), field.name), tuple) else "x\0"})


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *((ag.RunConfig, name) for name in ("recipe", "env", "model", "output_dir", "resume")),
        (ag.TrainConfig, "device"),
        (ag.TransformersConfig, "device"),
    ],
)
def test_a_name_or_a_folder_must_not_be_empty(cls: type[Any], name: str, empty: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: must not be empty(, or must be a mapping)?, got '{empty}'"):
        make(cls, **{name: empty})


@pytest.mark.parametrize("seed", [10**30, 2**63, -1, 1.0, "1"])
def test_a_seed_that_a_generator_would_refuse_is_refused_immediately(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"^seed: must be "):
        make(ag.RunConfig, seed=seed)


def test_the_largest_seed_and_folders_as_strings_are_accepted() -> None:
    run = make(ag.RunConfig, seed=2**63 - 1, output_dir="runs/x", model=Path("model"))
    assert (run.seed, run.output_dir, run.model) == (2**63 - 1, Path("runs/x"), Path("model"))


@pytest.mark.parametrize(
    ("cls", "changes", "said"),
    [
        (ag.TransformersConfig, {"slots": 0}, "slots: must be at least 1, got 0"),
        (
            ag.TransformersConfig,
            {"dtype": "int8"},
            "dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'",
        ),
        (ag.SGLangConfig, {"urls": ["http://a", ""]}, r"urls\.1: must not be empty"),
        (ag.SGLangConfig, {"stall_s": float("inf")}, "stall_s: must be a finite number"),
        (ag.OversampleConfig, {"stop": "soon"}, "stop: must be 'all', 'target' or 'deadline', got 'soon'"),
        (ag.TrainConfig, {"loss_agg": -1}, "loss_agg: must be 'token', 'sample' or 'rollout', or must be above 0"),
        (ag.RunConfig, {"train": {"lr": 1e-3}}, "train: must be an instance of TrainConfig"),
        (ag.RunConfig, {"env": {"chase": 0}}, "env: 'chase' must be above 0, got 0$"),
        (ag.Service, {"env": {"SECRET": "s", "A": 1}}, "env: 'A' must be text, got 1$"),
        (ag.Service, {"env": {1: "a"}}, "env: the name 1 must be text, got 1$"),
        (ag.Service, {"env": ["A"]}, r"env: must be a mapping, got \['A'\]$"),
    ],
)
def test_the_message_says_what_the_field_accepts(cls: type[Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        make(cls, **changes)


@pytest.mark.parametrize(
    ("made", "name", "said"),
    [
        (ag.TrainConfig, "lora_rnk", "did you mean 'lora_rank'?"),
        (ag.TrainConfig, "learning_rate", "did you mean 'lr'?"),
        (ag.TrainConfig, "no_such_field", "there are: balance, betas, "),
        (ag.RunConfig, "out", "did you mean 'output_dir'?"),
        (ag.RunConfig, "lr", "ag.TrainConfig has it"),
        (ag.Limits, "turn", "did you mean 'turns'?"),
        (ag.TransformersConfig, "slot", "did you mean 'slots'?"),
        (ag.SGLangConfig, "url", "did you mean 'urls'?"),
        (ag.RunConfig, "max_step", "did you mean 'max_steps'?"),
        (ag.Sampling, "temprature", "did you mean 'temperature'?"),
        (ag.Docker, "memroy_mb", "did you mean 'memory_mb'?"),
        (ag.Bubblewrap, "memroy_mb", "did you mean 'memory_mb'?"),
        (ag.AnySandbox, "memroy_mb", "did you mean 'memory_mb'?"),
        (ag.Process, "memory", "did you mean 'memory_mb'?"),
        (ag.Service, "enviroment", "there are: "),
        (ag.Service, "comand", "did you mean 'command'?"),
        (ag.AnySandbox, "image", "ag.Docker has it"),
        (ag.AnySandbox, "python", "ag.Bubblewrap has it"),
        (ag.Bubblewrap, "apt", "ag.Docker has it"),
    ],
)
def test_an_unknown_field_error_suggests_the_closest_field(made: Any, name: str, said: str) -> None:
    with pytest.raises(TypeError) as refused:
        made(**{name: 1})
    assert str(refused.value).startswith(f"{made.__name__}: there is no field {name!r}; {said}")


@pytest.mark.parametrize(
    ("function", "name", "said"),
    [
        (ag.tool, "timeout", "tool: there is no argument 'timeout'; did you mean 'timeout_s'?"),
        (ag.reward, "wieght", "reward: there is no argument 'wieght'; did you mean 'weight'?"),
    ],
)
def test_an_unknown_decorator_argument_error_suggests_the_closest_one(function: Any, name: str, said: str) -> None:
    with pytest.raises(TypeError) as refused:
        function(**{name: 1})
    assert str(refused.value) == said


def test_a_class_that_names_its_fields_keeps_its_signature_and_its_copies() -> None:
    assert list(inspect.signature(ag.Limits).parameters)[:2] == ["turns", "seconds"]
    assert replace(ag.Limits(turns=3), seconds=2.0) == ag.Limits(turns=3, seconds=2.0)


def test_a_list_of_strings_becomes_a_tuple() -> None:
    assert ag.Endpoint("http://localhost/v1", model="m", leave_out=["n"]).leave_out == ("n",)  # type: ignore[arg-type]


def test_a_configs_own_check_is_a_value_error_that_starts_with_its_field() -> None:
    with pytest.raises(ValueError, match=r"^group_size: a single rollout can't be compared with others of its task"):
        ag.RunConfig(env="chase", model="tiny", group_size=1)


def test_a_subclass_of_run_config_is_refused_because_its_fields_would_be_ignored() -> None:
    with pytest.raises(
        TypeError, match=r"^RunConfig: Mine is a subclass, and nothing would read its settings; make an in"
    ):

        class Mine(ag.RunConfig):
            max_steps = 3


def test_a_value_with_a_missing_part_names_the_part() -> None:
    with pytest.raises(ValueError, match=r"^betas.1: is missing, got "):
        ag.TrainConfig(betas=(0.9,))  # type: ignore[arg-type]


def test_a_subclass_that_sets_a_field_in_its_body_is_refused_because_it_is_ignored() -> None:
    for bases, body in (((ag.TrainConfig,), {"lr": 5.0}), ((type("Mix", (), {"lr": 5.0}), ag.TrainConfig), {})):
        made = type("Mine", bases, body)
        with pytest.raises(TypeError, match=r"^TrainConfig: Mine\.lr has no effect; .* as in Mine\(lr=\.\.\.\)$"):
            made()
    assert type("Mine", (ag.Limits,), {"own": 1})(turns=3).turns == 3

    @dataclass(frozen=True, kw_only=True)
    class Own(ag.TrainConfig):  # it reads its fields itself
        threads: int = 2
        extra: int = 5

    assert (Own().threads, Own().extra) == (2, 5)

    class Typed(ag.Judge[Verdict]):
        """A subclass of a generic config."""

    assert (len(ag.Judge.__parameters__), Typed.__parameters__) == (1, ())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "ag.TrainConfig has it"),
        ("learning_rate", "ag.TrainConfig has 'lr'"),
        ("micro_tokens", "ag.TrainConfig has 'max_tokens_per_microbatch'"),
        ("out", "did you mean 'output_dir'?"),
        ("advantage_level", "did you mean 'credit'?"),
        ("max_tokens", "did you mean 'max_turn_tokens'?"),
    ],
)
def test_an_alias_of_a_field_error_names_the_right_field_and_config(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"^RunConfig: there is no field '{name}'; {re.escape(meant)}$"):
        ag.RunConfig(env="a", model="tiny", **{name: 1})  # type: ignore[arg-type]


def test_a_string_is_kept_unchanged() -> None:
    assert ag.Sampling(stop=["a b", "\n"]).stop == ("a b", "\n")  # type: ignore[arg-type]
