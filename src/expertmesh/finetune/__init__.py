"""Supervised fine-tuning: `python -m expertmesh.finetune recipe.yaml`, alone or under `accelerate launch`."""
