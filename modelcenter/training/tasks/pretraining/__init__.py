"""Pretraining on text: what its tasks share (base, documents, prompts), and a module for each objective."""
