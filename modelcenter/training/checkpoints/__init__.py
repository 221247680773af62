"""The checkpoints of a run: which one it goes on from, which one is the best, and their export."""
