"""Pretraining on text: modules that its tasks share (base, documents, prompts), and one module per objective."""
