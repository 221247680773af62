"""Rows of tokens into packed batches: what goes into a batch, and how it is laid out."""
