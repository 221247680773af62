"""Measurements during training: time, tokens, arithmetic and skipped steps."""
