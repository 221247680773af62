"""The checkpoints of a run: resuming, model selection, writing, export, and the final model."""
