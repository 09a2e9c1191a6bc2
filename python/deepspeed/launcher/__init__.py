"""The launcher under DeepSpeed's name."""
