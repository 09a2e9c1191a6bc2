"""Checkpoints: what a saved folder holds, how Python's own state is written without pickle, and how folders of DeepSpeed's are read."""
