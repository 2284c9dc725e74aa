"""TRL's side of `benchmarks.train`, run by the interpreter of an environment that has trl and no agentgym.

`python -m benchmarks.train.theirs MODEL_FOLDER WORK.json`; the last line on stdout is JSON: CPU seconds of each step,
peak MiB, and what was done, by which `benchmarks.train` checks that both sides did the same work.
"""

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MODEL, WORK = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
DICE = random.Random(0)


class Clock(TrainerCallback):  # type: ignore[misc]
    """CPU seconds from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self.began or time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        at = time.process_time()
        self.steps.append(at - self.began)
        self.began = at


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Return random rewards, because only the work is measured."""
    return [DICE.random() for _ in completions]


def config(folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=WORK["batch"],
        num_generations=WORK["group"],
        max_completion_length=WORK["new_tokens"],
        generation_kwargs={"min_new_tokens": WORK["new_tokens"]},
        max_steps=WORK["steps"],
        temperature=1.0,
        learning_rate=WORK["lr"],
        adam_beta2=0.95,
        beta=0.0,
        max_grad_norm=1.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        logging_strategy="steps",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def done(trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the fields of `benchmarks.train.ours.Done` for a run."""
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    rows = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    return {
        "trained_weights": sum(weight.numel() for weight in trained),
        "dtypes": sorted({str(weight.dtype) for weight in trainer.model.parameters()}),
        "sampled_tokens": [round(row["completions/mean_length"] * WORK["batch"]) for row in rows],
        "tokens": round(rows[-1]["num_tokens"]),
        "optimizer_steps": trainer.state.global_step,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    torch.set_num_threads(1)
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in WORK["prompts"]]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config(folder),
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            callbacks=[clock],
            peft_config=lora if WORK["lora"] else None,
        )
        trainer.train()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
    print(json.dumps({"cpu_s": clock.steps, "peak_mib": peak, "done": done(trainer)}))


main()
