"""Pretraining: text into token files, and what is asked of the tokens."""
