"""Downloading from repositories of the Hugging Face Hub, and pushing to them."""
