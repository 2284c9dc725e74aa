"""The trained model: LoRA, attention, sharding, adapter files."""
