"""Names to files, files to models, models to files: the Hugging Face Hub and checkpoint directories."""
