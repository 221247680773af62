"""Pretraining data: converting text to token files, and training objectives."""
