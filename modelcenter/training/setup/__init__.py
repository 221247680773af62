"""From flags to a run that can start (prepare.py): ranks, resolved flags, model, optimizer, and the memory needed."""
