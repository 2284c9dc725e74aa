"""Runs one attempt at a task: its conversations, segments and limits."""
