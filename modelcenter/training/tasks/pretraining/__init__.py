"""Pretraining on text: what its tasks share in base.py, where its documents come from, and a file for each objective."""
