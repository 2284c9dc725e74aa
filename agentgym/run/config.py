"""Settings of a training run."""

from dataclasses import field, replace
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from agentgym.advantages.gae import GAEConfig
from agentgym.advantages.group import Estimator
from agentgym.chat.template_input import ToolsIn
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
from agentgym.hub import of_field, refuse_unreachable
from agentgym.run.cluster_config import OFF, ClusterConfig
from agentgym.samples import CreditLevel
from agentgym.sandboxes.choose import Kind
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.seeds import seed_for
from agentgym.train.config import WHOLE_SEGMENTS, TrainConfig
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Sampling

Weights = Annotated[dict[Name, Above0], Field(strict=False, min_length=1)]
"""Positive weights by name; at least one."""
Variables = Annotated[dict[str, bool | int | float | str], Field(strict=False)]
"""Plain values by name."""
TrackerName: TypeAlias = Literal["trackio", "wandb", "tensorboard"]
"""Name of an experiment tracker, which is also its package's name."""
WHOLE = (
    "training scores tokens under the full distribution, but truncated sampling renormalizes it, so every ratio would "
    "be wrong; remove the setting and lower train.temperature, or set it in eval_sampling"
)
"""Why training can't sample from a truncated distribution, and what to do instead."""


_NOT_IN_TRAINING = {
    "temperature": "set train.temperature instead, which the trainer also uses for scoring",
    "max_tokens": "set the run's max_turn_tokens instead, which applies to evaluations too",
    **dict.fromkeys(("top_p", "top_k", "min_p"), WHOLE),
}
"""The `Sampling` settings that train_sampling must leave at their defaults, each with the reason."""


@config(frozen=True, kw_only=True)
class ModelRoleConfig:
    """A model that the env uses in addition to the policy, such as a judge, and the engine that runs it."""

    model: FolderOrName
    """Folder or Hugging Face name of the model; "tiny" comes with the library."""
    engine: TransformersConfig | SGLangConfig | CustomEngineConfig = TransformersConfig()
    """Engine that samples from the model: transformers in this process, SGLang servers, or a custom engine."""

    def __post_init__(self) -> None:
        servers = self.engine
        if isinstance(servers, SGLangConfig) and servers.colocate != "off":
            raise ValueError("engine.colocate: a model role's servers can't lend memory; give them their own GPUs")
        if isinstance(servers, SGLangConfig) and not (servers.urls or servers.gpus):
            raise ValueError(
                "engine.gpus: without it, a model role's servers would use the policy's GPUs; set other GPUs, or urls"
            )


_VALUE = ("value_lr", "value_epochs", "value_clip")
"""The settings in `train` that only a critic uses."""


@config(frozen=True, kw_only=True)
class RunConfig:
    """Validated settings of one training run (a recipe). Derive variants with `dataclasses.replace`."""

    ELSEWHERE: ClassVar = (TrainConfig,)

    def __init_subclass__(cls) -> None:
        """Raise TypeError, because nothing would validate or read a subclass's settings."""
        raise TypeError(
            f"RunConfig: {cls.__name__} is a subclass, and nothing would read its settings; make an instance, as in "
            "`RECIPE = ag.RunConfig(env=..., model=...)`, and derive variants with `dataclasses.replace`"
        )

    recipe: Name | None = None
    """Name of the run, which is part of its folder's path and of the last line that it prints. It can't contain "/".
    None uses the env's name.
    """
    env: Name | Weights
    """Env to train on: a registered name or "package.module:Class". For a mixture, name several envs, each followed by
    its weight in a batch, such as --env chase 2 bisect 1; --env.MEMBER 2 sets one weight, and --env.MEMBER.NAME sets a
    parameter.
    """
    env_args: Variables = field(default_factory=dict)
    """Values of the env's parameters by name, or by MEMBER.NAME for a mixture. On the command line, --env.NAME
    VALUE also sets one.
    """
    tasks_from: Folder | None = None
    """Text file with one training task id per line; the run trains on these tasks only. None trains on all tasks."""
    model: FolderOrName
    """Folder or Hugging Face name of the model to sample from and train; "tiny" comes with the library."""
    chat_template: FolderOrName | None = None
    """Chat template that replaces the model's: a Jinja file or its text. None uses the model's template."""
    chat_template_kwargs: Variables = field(default_factory=dict)
    """Variables passed to the chat template, such as enable_thinking False."""
    tools: ToolsIn = "auto"
    """What describes the env's tools to the model: the chat template (template) or text in the system prompt (prompt).
    auto uses the template if it shows tools and the format of its calls is known, otherwise the prompt; refuse raises
    an error instead.
    """
    engine: TransformersConfig | SGLangConfig | CustomEngineConfig = TransformersConfig()
    """Engine that samples from the policy: transformers in this process, SGLang servers, or a custom engine."""
    train: TrainConfig = TrainConfig()
    output_dir: Folder | None = None
    """Folder for metrics, rollouts, checkpoints, and the trained adapter or model. None creates runs/RECIPE/TIME."""
    resume: Folder | None = None
    """Folder of a stopped run to resume from its last complete checkpoint, as if it had not stopped. None starts a
    new run.
    """
    save_every: Count = 10
    """Number of steps between checkpoints; 0 writes one only at the end and when the run is interrupted."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints to keep; the oldest is deleted first."""
    seed: Seed = 0
    """Seed of everything random: task order, envs, sampling, initial weights, evaluations. From 0 to 2^63 - 1."""
    ray: Name = OFF
    """Ray cluster to spread the run's parts over: auto joins a running cluster or starts one on this machine, HOST:PORT
    joins the cluster at that address, and off keeps everything in this process and in the processes that torchrun
    starts.
    """
    cluster: ClusterConfig = ClusterConfig()
    max_steps: Count = 30
    """Number of training steps; each collects a batch and trains on it."""
    prompts_per_step: Positive = 8
    """Number of tasks in a batch."""
    group_size: Positive = 8
    """Number of rollouts per task, to compare with each other. At least 2, or 1 with a teacher or a critic."""
    rest_epochs: Count = 0
    """How many times to skip a task after all its rollouts got the same reward, solved or not; 0 never skips."""
    sandbox: Kind = "auto"
    """Sandbox that runs the model's code; auto uses the one the env declares."""
    oversample: OversampleConfig = OversampleConfig()
    """How many extra rollouts to start, and when to cut those that are still running."""
    max_staleness: Count = 0
    """Maximum age, in policy versions, of a group's oldest token when the group is trained on. Above 0, later batches
    are collected during training; 0 alternates between collecting and training.
    """
    max_turn_tokens: Positive | None = None
    """Maximum number of tokens per turn. None applies only the env's limits."""
    train_sampling: Sampling = Sampling()
    """Sampling settings of training rollouts. Only stop, the texts that end a turn, can be set here. Set the
    temperature with train.temperature and the token limit with max_turn_tokens; the other settings keep their
    defaults.
    """
    eval_sampling: Sampling | None = None
    """Sampling settings of held-out evaluations; if max_tokens isn't set, max_turn_tokens applies. None samples as in
    training.
    """
    advantage_estimator: Estimator = "dr_grpo"
    """How a rollout's reward becomes an advantage within its group."""
    credit: CreditLevel = "outcome"
    """Source of a token's advantage: the rollout's reward (outcome), the rewards after its turn (turn), branches
    from the states before and after its turn (branches), or a critic that learns state values (value).
    """
    gae: GAEConfig = GAEConfig()
    """Discount and lambda of generalized advantage estimation; used with credit value."""
    branching: BranchingConfig = BranchingConfig()
    """States to branch from, and the number of branches; used with credit branches."""
    teacher: FolderOrName | None = None
    """Folder or Hugging Face name of a model with the same vocabulary to distill from: a token's advantage is the
    teacher's log-probability minus the policy's, and rewards are only recorded. None learns from rewards.
    """
    teacher_engine: TransformersConfig | SGLangConfig | CustomEngineConfig = TransformersConfig()
    """Engine that scores tokens under the teacher."""
    models: Annotated[dict[Name, ModelRoleConfig], Field(strict=False)] = field(default_factory=dict)
    """Models that the env uses by name (`self.model`), such as a judge. --models.NAME.model MODEL adds one; its
    other settings are flags under --models.NAME.
    """
    merge: bool = True
    """Whether to train on one sample per segment instead of one per turn. The gradient is the same, but each token is
    computed only once.
    """
    eval_tasks: Count = 128
    """Number of held-out tasks (split "test") per evaluation, before and after training; 0 disables evaluations."""
    eval_rollouts: Positive = 1
    """Number of rollouts per held-out task; the score is their mean reward."""
    solved: float = 1.0
    """Minimum reward that counts as solved, for eval/pass@K, groups/solved_by_all and the counts of resting tasks."""
    eval_every: Count = 0
    """Number of steps between evaluations; the best policy is saved in best/. 0 evaluates only before and after
    training.
    """
    eval_seed: Seed | None = None
    """Seed of every evaluation. None derives one from seed."""
    report_to: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """Experiment trackers that receive the metrics in addition to metrics.jsonl: trackio, wandb, tensorboard."""
    probe_tolerance: Above0 = 1e-3
    """Maximum difference, in nats, between trainer and engine log-probabilities after a sync if both compute in
    float32. In lower precisions, the check allows for rounding instead.
    """

    def __post_init__(self) -> None:
        if self.recipe is not None and (self.recipe in (".", "..") or "/" in self.recipe):
            raise ValueError(f"recipe: expected a folder name within runs/, without '/', got {self.recipe!r}")
        try:
            self.oversample.fits(group_size=self.group_size, max_staleness=self.max_staleness)
        except ValueError as error:
            raise ValueError(f"oversample.{error}") from None
        if isinstance(self.engine, CustomEngineConfig) and (
            self.chat_template is not None or self.chat_template_kwargs or self.tools != "auto"
        ):
            raise ValueError(
                "chat_template, chat_template_kwargs, tools: a custom engine brings its own tokenizer; set them there "
                "(agentgym.chat.chat_tokenizer accepts all three), and leave them out here"
            )
        if self.train.dora and isinstance(self.engine, SGLangConfig):
            raise ValueError(
                "train.dora: SGLang can't serve DoRA adapters; leave it out, or sample with --engine transformers"
            )
        if isinstance(self.engine, SGLangConfig) and self.engine.colocate != "off" and self.max_staleness:
            raise ValueError(
                "engine.colocate, max_staleness: servers can't sample while they lend their memory to the trainer; "
                "set max_staleness=0, or give the servers their own GPUs"
            )
        if self.train.method == "full" and isinstance(self.engine, SGLangConfig) and self.engine.adapters != "merged":
            raise ValueError(
                f"engine.adapters, train.method: {self.engine.adapters} sends adapters to the servers, but full trains "
                "none; set engine.adapters='merged', which pushes full weights"
            )
        if "experts" in self.train.lora_targets and not isinstance(self.engine, CustomEngineConfig):
            raise ValueError(
                "train.lora_targets: only a custom engine can sample with trained experts; leave experts out"
            )
        if self.train.loss == "sft":
            raise ValueError("train.loss: sft imitates demonstrations, but a run trains on its own rollouts; use ppo")
        if self.train.temperature == 0:
            raise ValueError(
                "train.temperature: at 0, all rollouts of a group are the same, so none is better than another; use a "
                "temperature above 0"
            )
        if slashed := [name for name in self.models if "/" in name]:
            raise ValueError(f"models: {slashed[0]!r} isn't a valid name of a model role; use a name without '/'")
        for name, why in _NOT_IN_TRAINING.items():
            if getattr(self.train_sampling, name) != getattr(Sampling(), name):
                raise ValueError(f"train_sampling.{name}: {why}")
        self._check_teacher()
        self._check_branching()
        self._check_value()
        if not self.merge and (whole := {self.train.loss, self.train.importance_sampling} & WHOLE_SEGMENTS.keys()):
            raise ValueError(f"merge: {min(whole)} needs each whole segment in one sample; leave merge on")
        if self.ray == OFF and self.cluster != ClusterConfig():
            raise ValueError("cluster: these settings apply only to a run on Ray; set ray, or leave cluster out")
        if self.group_size < 2 and self.teacher is None and self.credit != "value":
            raise ValueError("group_size: a single rollout can't be compared with others of its task; use at least 2")
        if self.eval_every and not self.eval_tasks:
            raise ValueError("eval_every: there are no held-out tasks; set eval_tasks, or leave eval_every at 0")
        if self.resume is not None and self.output_dir not in (None, self.resume):
            raise ValueError(f"output_dir: a resumed run continues in its own folder, {self.resume}; set only resume")

    def check_files(self) -> None:
        """Raise ValueError, naming the field, if a model or engine class that the run needs can't be found.

        A run makes this check when it starts, before it loads a model.
        """
        for name in ("model", "teacher"):
            if getattr(self, name) is not None:
                with needs_extra():
                    refuse_unreachable(getattr(self, name), name)
        roles = {f"models.{name}.engine": named.engine for name, named in self.models.items()}
        for name, engine in {"engine": self.engine, "teacher_engine": self.teacher_engine, **roles}.items():
            if isinstance(engine, CustomEngineConfig):
                with of_field(engine=name):
                    engine.load()
        for name, named in self.models.items():
            if not isinstance(named.engine, CustomEngineConfig):  # only a custom engine knows what its model name means
                with needs_extra():
                    refuse_unreachable(named.model, f"models.{name}.model")

    def _check_branching(self) -> None:
        """Raise ValueError, naming the field, if a setting doesn't work with branching, or only works with it."""
        if self.credit != "branches":
            if self.branching != BranchingConfig():
                raise ValueError("branching: only used with credit branches; set credit to branches, or leave it out")
        elif self.advantage_estimator not in ("dr_grpo", "rloo"):
            raise ValueError(
                f"advantage_estimator: {self.advantage_estimator} rescales rewards, but branches give differences of "
                f"rewards; use dr_grpo"
            )
        elif self.train.loss == "gspo_rollout":
            raise ValueError(
                "train.loss: gspo_rollout needs whole rollouts, but branches are only parts of rollouts; use gspo"
            )

    def _check_value(self) -> None:
        """Raise ValueError, naming the field, if a setting doesn't work with a critic, or only works with one."""
        if self.credit != "value":
            changed = [name for name in _VALUE if getattr(self.train, name) != getattr(TrainConfig(), name)]
            if changed or self.gae != GAEConfig():
                named = f"train.{changed[0]}" if changed else "gae"
                raise ValueError(f"{named}: only used with a critic; set credit to value, or leave it out")
            return
        if self.advantage_estimator != "dr_grpo":
            raise ValueError(
                f"advantage_estimator: {self.advantage_estimator} compares rollouts of a group, but a critic doesn't; "
                f"leave it out"
            )
        if not self.merge:
            raise ValueError("merge: a critic reads whole segments; leave merge on")
        if self.oversample.replace:
            raise ValueError("oversample.replace: with a critic, equal rewards are a signal too; leave it at 0")
        if isinstance(self.engine, SGLangConfig) and self.engine.colocate != "off":
            raise ValueError(
                "engine.colocate: a critic reads the batch before the servers lend their memory; set it to off"
            )

    def _check_teacher(self) -> None:
        """Raise ValueError, naming the field, if a setting doesn't work with a teacher, or only works with one."""
        if self.teacher is None:
            if self.teacher_engine != TransformersConfig():
                raise ValueError("teacher_engine: there is no teacher; set teacher, or leave teacher_engine out")
            return
        defaults = RunConfig.__dataclass_fields__
        for name in ("advantage_estimator", "credit"):
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name}: with a teacher, advantages don't come from rewards; leave it out")
        if self.oversample.replace:
            raise ValueError("oversample.replace: with a teacher, equal rewards are a signal too; leave it at 0")
        if isinstance(self.teacher_engine, SGLangConfig):
            self._check_teacher_servers(self.teacher_engine)

    def _check_teacher_servers(self, servers: SGLangConfig) -> None:
        if servers.colocate != "off":
            raise ValueError("teacher_engine.colocate: a teacher's servers can't lend memory; give them their own GPUs")
        launched = isinstance(self.engine, SGLangConfig) and not self.engine.urls and not servers.urls
        if launched and not servers.gpus:
            raise ValueError("teacher_engine.gpus: without it, the teacher would use the policy's GPUs; set other GPUs")

    @property
    def name(self) -> str:
        """The run's name: `recipe`, or the env's name without its module (a mixture's joined by "+")."""
        envs = [self.env] if isinstance(self.env, str) else self.env
        return self.recipe or "+".join(env.rpartition(":")[2] for env in envs)

    @property
    def sampling(self) -> Sampling:
        """The training rollouts' sampling settings, at the temperature at which the trainer scores."""
        return replace(self.train_sampling, temperature=self.train.temperature, max_tokens=self.max_turn_tokens)

    @property
    def held_out_seed(self) -> int:
        """The seed of all evaluations: before, during and after training."""
        return seed_for("evaluation", self.seed, bits=31) if self.eval_seed is None else self.eval_seed

    @property
    def held_out_sampling(self) -> Sampling:
        """The sampling settings of evaluations."""
        own = self.eval_sampling or self.sampling
        return replace(own, max_tokens=self.max_turn_tokens if own.max_tokens is None else own.max_tokens)
