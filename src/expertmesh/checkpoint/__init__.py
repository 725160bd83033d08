"""Checkpoints that are ordinary Hugging Face models and that any mesh can resume."""
