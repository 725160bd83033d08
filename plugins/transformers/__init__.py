"""What expertmesh changes in Transformers: loading, and the checkpoints of its Trainer."""
