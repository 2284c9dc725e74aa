"""The settings of a run."""

from dataclasses import field, replace
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from agentgym.advantages.gae import GAEConfig
from agentgym.advantages.group import Estimator
from agentgym.config_fields import (
    Above0,
    Count,
    Folder,
    FolderOrName,
    Name,
    Positive,
    Seed,
    config,
)
from agentgym.engines.custom import CustomEngineConfig
from agentgym.engines.sglang.engine import SGLangConfig
from agentgym.engines.transformers.engine import TransformersConfig
from agentgym.errors.extras import needs_extra
from agentgym.hub import refuse_unreachable
from agentgym.run.cluster_config import OFF, ClusterConfig
from agentgym.samples import CreditLevel
from agentgym.sandboxes.choose import Kind
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.seeds import seed_for
from agentgym.train.config import WHOLE_SEGMENTS, TrainConfig
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Sampling

Weights = Annotated[dict[Name, Above0], Field(strict=False, min_length=1)]
"""Weights by name."""
Variables = Annotated[dict[str, bool | int | float | str], Field(strict=False)]
"""Plain values by name."""
TrackerName: TypeAlias = Literal["trackio", "wandb", "tensorboard"]
"""The name of a tracker, which is that of its package."""
WHOLE = (
    "training scores each token under the whole distribution, and one that is drawn from a part of it is likelier than "
    "that, so that every ratio would be wrong; leave it out and lower train.temperature, or set it in eval_sampling"
)
"""The reason why training draws from no part of a distribution, and what to do."""


_NOT_IN_TRAINING = {
    "temperature": "set train.temperature, which the trainer scores at, too",
    "max_tokens": "set the run's max_turn_tokens, which holds for evaluations, too",
    **dict.fromkeys(("top_p", "top_k", "min_p"), WHOLE),
}
"""The settings of `Sampling` that train_sampling cannot have otherwise than by default, each with the reason."""


@config(frozen=True, kw_only=True)
class ModelRoleConfig:
    """Names a model that the env asks beside the policy, such as a judge, and what samples from it."""

    model: FolderOrName
    """Folder or Hugging Face name of the model; "tiny" comes with the library."""
    engine: TransformersConfig | SGLangConfig | CustomEngineConfig = TransformersConfig()
    """What samples: the model in this process, SGLang servers, or an engine of your own."""

    def __post_init__(self) -> None:
        servers = self.engine
        if isinstance(servers, SGLangConfig) and servers.colocate != "off":
            raise ValueError("engine.colocate: the servers of a model role lend no memory; give them GPUs of their own")
        if isinstance(servers, SGLangConfig) and not (servers.urls or servers.gpus):
            raise ValueError(
                "engine.gpus: without it the servers of a model role get the policy's GPUs; name others, or give urls"
            )


_VALUE = ("value_lr", "value_epochs", "value_clip")
"""The settings of the trainer's critic."""


@config(frozen=True, kw_only=True)
class RunConfig:
    """Describes one training run, every setting checked: a recipe. `dataclasses.replace` makes others of it."""

    ELSEWHERE: ClassVar = (TrainConfig,)

    def __init_subclass__(cls) -> None:
        """Refuse a subclass: nothing would check its settings, or read them."""
        raise TypeError(
            f"RunConfig: {cls.__name__} is a subclass, whose settings nothing would read; make an instance, as in "
            "`RECIPE = ag.RunConfig(env=..., model=...)`, and derive others of it by `dataclasses.replace`"
        )

    recipe: Name | None = None
    """Name of the run, in its folder and its last line; None: the env's."""
    env: Name | Weights
    """A registered env, or "package.module:Class"; or a mixture of several, each with its weight in a batch, such as
    --env chase 2 bisect 1; --env.MEMBER 2 sets a weight, --env.MEMBER.NAME a parameter."""
    env_args: Variables = field(default_factory=dict)
    """Values of the env's parameters, by name, or of a mixture's by MEMBER.NAME; on the command line also
    --env.NAME VALUE."""
    tasks_from: Folder | None = None
    """A text file with the id of a training task on each line: the run trains on these tasks alone; None: on all."""
    model: FolderOrName
    """Folder or Hugging Face name of the model to sample from and to train; "tiny" comes with the library."""
    chat_template: FolderOrName | None = None
    """A chat template instead of the model's own: a Jinja file, or its text."""
    chat_template_kwargs: Variables = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking False."""
    engine: TransformersConfig | SGLangConfig | CustomEngineConfig = TransformersConfig()
    """What samples: the model in this process, SGLang servers, or an engine of your own."""
    train: TrainConfig = TrainConfig()
    output_dir: Folder | None = None
    """Folder of metrics, rollouts, checkpoints, and the adapter or the model; runs/RECIPE/TIME by default."""
    resume: Folder | None = None
    """Folder of a run that was stopped: go on there after its last whole checkpoint, as if it had not been stopped."""
    save_every: Count = 10
    """Steps from one checkpoint to the next; 0: only at the end and when interrupted."""
    keep_checkpoints: Positive = 2
    """Checkpoints that stay; the oldest goes first."""
    seed: Seed = 0
    """The seed of everything random: the order of tasks, envs, sampling, initial weights, evaluations; from 0 to
    2^63 - 1."""
    ray: Name = OFF
    """The Ray cluster that the run's parts are spread over: auto joins a running one or starts one on this machine,
    HOST:PORT joins that one, off keeps everything in this process and in those that torchrun starts."""
    cluster: ClusterConfig = ClusterConfig()
    max_steps: Count = 30
    """Batches collected and trained on."""
    prompts_per_step: Positive = 8
    """Tasks in a batch."""
    group_size: Positive = 8
    """Rollouts of each task, which are compared with each other; at least 2, or 1 with a teacher or a critic."""
    rest_epochs: Count = 0
    """How often a task is passed over after all its rollouts had the same reward, solved or not; 0: never."""
    sandbox: Kind = "auto"
    """Where the model's code runs; auto is what the env declares."""
    oversample: OversampleConfig = OversampleConfig()
    """Rollouts started beyond need, and when the rest is cut."""
    max_staleness: Count = 0
    """Most policy versions that a group's oldest token may be behind when it is trained on. Above 0, later batches are
    played while one is trained on; 0: one after the other."""
    max_turn_tokens: Positive | None = None
    """Most tokens in one turn; None leaves it to the env's limits."""
    train_sampling: Sampling = Sampling()
    """How rollouts are sampled for training, besides train.temperature and max_turn_tokens: the texts that end a
    turn."""
    eval_sampling: Sampling | None = None
    """How the held-out tasks are sampled; None: as in training. Without max_tokens of its own it has the run's."""
    advantage_estimator: Estimator = "dr_grpo"
    """How a rollout's reward becomes its advantage in its group."""
    credit: CreditLevel = "outcome"
    """What the advantage of a token comes from: its rollout (outcome), the rewards after its turn (turn), the branches
    from the states before and after its turn (branches), or a critic that learns the value of states (value)."""
    gae: GAEConfig = GAEConfig()
    """Discount and lambda of generalized advantage estimation, with credit value."""
    branching: BranchingConfig = BranchingConfig()
    """The states that branches are played from, and how many, with credit branches."""
    teacher: FolderOrName | None = None
    """Folder or Hugging Face name of a model with the same vocabulary to learn from: each token's advantage is its
    log-probability there less its own, and rewards are recorded only. None learns from rewards."""
    teacher_engine: TransformersConfig | SGLangConfig | CustomEngineConfig = TransformersConfig()
    """What scores tokens under the teacher."""
    models: Annotated[dict[Name, ModelRoleConfig], Field(strict=False)] = field(default_factory=dict)
    """Models that the env asks by name (`self.model`), such as a judge; --models.NAME.model MODEL adds one, and its
    other settings are flags under --models.NAME."""
    merge: bool = True
    """One sample per segment rather than per turn: the same gradient, each token computed once."""
    eval_tasks: Count = 128
    """Held-out tasks (the env's split "test") of an evaluation, before training and after it; 0 for none."""
    eval_rollouts: Positive = 1
    """Rollouts of each held-out task; the score is their mean."""
    solved: float = 1.0
    """The least reward that solves a task, in eval/pass@K, groups/solved_by_all and the counts of resting tasks."""
    eval_every: Count = 0
    """Steps from one evaluation to the next; the best policy is kept in best/; 0: only before and after training."""
    eval_seed: Seed | None = None
    """The seed of every evaluation; None derives one from seed."""
    report_to: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """Trackers that get the metrics, beside metrics.jsonl: trackio, wandb, tensorboard."""
    probe_tolerance: Above0 = 1e-3
    """Largest difference of trainer and engine log-probabilities after a sync, in nats, where both compute in float32;
    in a lower precision the proof needs none."""

    def __post_init__(self) -> None:
        if self.recipe is not None and (self.recipe in (".", "..") or "/" in self.recipe):
            raise ValueError(f"recipe: names a folder within runs/; a name without '/', got {self.recipe!r}")
        try:
            self.oversample.fits(group_size=self.group_size, max_staleness=self.max_staleness)
        except ValueError as error:
            raise ValueError(f"oversample.{error}") from None
        if isinstance(self.engine, CustomEngineConfig) and (
            self.chat_template is not None or self.chat_template_kwargs
        ):
            raise ValueError(
                "chat_template, chat_template_kwargs: an engine of your own brings its own tokenizer; set them there "
                "(agentgym.chat.chat_tokenizer takes both), and leave them out here"
            )
        if self.train.dora and isinstance(self.engine, SGLangConfig):
            raise ValueError(
                "train.dora: SGLang serves no DoRA adapter; leave it out, or sample with --engine transformers"
            )
        if isinstance(self.engine, SGLangConfig) and self.engine.colocate != "off" and self.max_staleness:
            raise ValueError(
                "engine.colocate, max_staleness: servers that lend the trainer their memory sample nothing "
                "meanwhile; set "
                "max_staleness=0, or give the servers GPUs of their own"
            )
        if self.train.method == "full" and isinstance(self.engine, SGLangConfig) and self.engine.adapters != "merged":
            raise ValueError(
                f"engine.adapters, train.method: {self.engine.adapters} gives servers an adapter, and full has none; "
                "set engine.adapters='merged', which pushes whole weights"
            )
        if "experts" in self.train.lora_targets and not isinstance(self.engine, CustomEngineConfig):
            raise ValueError("train.lora_targets: only an engine of your own samples from experts; leave experts out")
        if self.train.loss == "sft":
            raise ValueError("train.loss: sft imitates demonstrations, and a run has rollouts of its own; use ppo")
        if self.train.temperature == 0:
            raise ValueError(
                "train.temperature: at 0 every rollout of a group is the same, so none is better than another; use a "
                "temperature above 0"
            )
        if slashed := [name for name in self.models if "/" in name]:
            raise ValueError(f"models: {slashed[0]!r} is no name of a model; write a word without a slash")
        for name, why in _NOT_IN_TRAINING.items():
            if getattr(self.train_sampling, name) != getattr(Sampling(), name):
                raise ValueError(f"train_sampling.{name}: {why}")
        self._check_teacher()
        self._check_branching()
        self._check_value()
        if not self.merge and (whole := {self.train.loss, self.train.importance_sampling} & WHOLE_SEGMENTS.keys()):
            raise ValueError(f"merge: {min(whole)} needs each segment whole in one sample; leave it out")
        if self.ray == OFF and self.cluster != ClusterConfig():
            raise ValueError("cluster: only a run on Ray has a cluster; set ray, or leave cluster out")
        if self.group_size < 2 and self.teacher is None and self.credit != "value":
            raise ValueError("group_size: one rollout has no other of its task to be compared with; use at least 2")
        if self.eval_every and not self.eval_tasks:
            raise ValueError("eval_every: there are no held-out tasks; set eval_tasks, or leave eval_every at 0")
        if self.resume is not None and self.output_dir not in (None, self.resume):
            raise ValueError(f"output_dir: a resumed run goes on in its own folder, {self.resume}; set resume alone")

    def check_files(self) -> None:
        """Raise ValueError, naming the field, where what the run reads is not there; a run begins with it."""
        for name in ("model", "teacher"):
            if getattr(self, name) is not None:
                with needs_extra():
                    refuse_unreachable(getattr(self, name), name)
        for engine in (self.engine, self.teacher_engine, *(named.engine for named in self.models.values())):
            if isinstance(engine, CustomEngineConfig):
                engine.load()
        for name, named in self.models.items():
            if not isinstance(
                named.engine, CustomEngineConfig
            ):  # what makes that knows alone what its model's name means
                with needs_extra():
                    refuse_unreachable(named.model, f"models.{name}.model")

    def _check_branching(self) -> None:
        """Raise ValueError, naming the field, for what means nothing with branches or without them."""
        if self.credit != "branches":
            if self.branching != BranchingConfig():
                raise ValueError("branching: no branches are played; set credit branches, or leave it out")
        elif self.advantage_estimator not in ("dr_grpo", "rloo"):
            raise ValueError(
                f"advantage_estimator: {self.advantage_estimator} has a unit, and branches give differences; use "
                f"dr_grpo"
            )
        elif self.train.loss == "gspo_rollout":
            raise ValueError("train.loss: gspo_rollout is of a whole rollout, and branches are not one; use gspo")

    def _check_value(self) -> None:
        """Raise ValueError, naming the field, for what means nothing with a critic or without one."""
        if self.credit != "value":
            changed = [name for name in _VALUE if getattr(self.train, name) != getattr(TrainConfig(), name)]
            if changed or self.gae != GAEConfig():
                named = f"train.{changed[0]}" if changed else "gae"
                raise ValueError(f"{named}: no critic is trained; set credit value, or leave it out")
            return
        if self.advantage_estimator != "dr_grpo":
            raise ValueError(
                f"advantage_estimator: {self.advantage_estimator} is of a group, and a critic has no group; "
                f"leave it out"
            )
        if not self.merge:
            raise ValueError("merge: a critic reads each segment whole; leave it out")
        if self.oversample.replace:
            raise ValueError("oversample.replace: with a critic equal rewards are a signal; leave it at 0")
        if isinstance(self.engine, SGLangConfig) and self.engine.colocate != "off":
            raise ValueError("engine.colocate: a critic reads the batch before the servers lend memory; set it to off")

    def _check_teacher(self) -> None:
        """Raise ValueError, naming the field, for what means nothing with a teacher or without one."""
        if self.teacher is None:
            if self.teacher_engine != TransformersConfig():
                raise ValueError("teacher_engine: there is no teacher; set teacher, or leave teacher_engine out")
            return
        defaults = RunConfig.__dataclass_fields__
        for name in ("advantage_estimator", "credit"):
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name}: with a teacher no advantage comes from rewards; leave it out")
        if self.oversample.replace:
            raise ValueError("oversample.replace: with a teacher equal rewards are a signal; leave it at 0")
        if isinstance(self.teacher_engine, SGLangConfig):
            self._check_teacher_servers(self.teacher_engine)

    def _check_teacher_servers(self, servers: SGLangConfig) -> None:
        if servers.colocate != "off":
            raise ValueError("teacher_engine.colocate: a teacher's servers lend no memory; give them GPUs of their own")
        launched = isinstance(self.engine, SGLangConfig) and not self.engine.urls and not servers.urls
        if launched and not servers.gpus:
            raise ValueError("teacher_engine.gpus: without it they get the GPUs of the student's servers; name others")

    @property
    def name(self) -> str:
        """The name of the run: its own, or that of its env."""
        envs = [self.env] if isinstance(self.env, str) else self.env
        return self.recipe or "+".join(env.rpartition(":")[2] for env in envs)

    @property
    def sampling(self) -> Sampling:
        """What the engine is told in training; the temperature is the one that training scores at."""
        return replace(self.train_sampling, temperature=self.train.temperature, max_tokens=self.max_turn_tokens)

    @property
    def held_out_seed(self) -> int:
        """The seed of all evaluations, before training, on the way and after it."""
        return seed_for("evaluation", self.seed, bits=31) if self.eval_seed is None else self.eval_seed

    @property
    def held_out_sampling(self) -> Sampling:
        """What the engine is told in an evaluation."""
        own = self.eval_sampling or self.sampling
        return replace(own, max_tokens=self.max_turn_tokens if own.max_tokens is None else own.max_tokens)
