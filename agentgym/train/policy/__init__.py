"""The trained model: LoRA, attention, sharding, and adapter files."""
