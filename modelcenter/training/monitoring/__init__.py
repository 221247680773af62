"""What is measured while a run trains: time, tokens, arithmetic and skipped steps."""
