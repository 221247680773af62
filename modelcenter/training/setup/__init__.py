"""From flags to a run that can start: ranks, resolved flags, model, optimizer, and the memory they take."""
