"""The benchmark of a whole GRPO step, compared with TRL's."""
