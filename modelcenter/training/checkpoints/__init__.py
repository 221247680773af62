"""The checkpoints of a run: where it goes on from, which is the best, how they are written, and the final model."""
