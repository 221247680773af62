"""From flags to a run that can start: ranks, resolved flags, model, optimizer, and what --dry_run prints of them."""
