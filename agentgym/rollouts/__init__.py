"""One attempt at a task: its conversations, segments and limits."""
