"""The benchmark of a whole GRPO step, beside TRL's."""
