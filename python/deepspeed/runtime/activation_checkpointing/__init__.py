"""Activation checkpointing under its old path."""
from deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
