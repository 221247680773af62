"""Pretraining: text into token files, and the objectives trained on them."""
