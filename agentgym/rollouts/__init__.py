"""One attempt, and many: engines, chat, context, episodes and groups. Knows environments, never torch."""
