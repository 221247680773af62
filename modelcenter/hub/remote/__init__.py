"""Repositories of the Hugging Face Hub: downloading from them and pushing to them."""
