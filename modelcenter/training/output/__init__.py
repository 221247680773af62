"""What a run writes to --output_dir and shows on the terminal.

record.py has the rows of metrics.jsonl and what is shown meanwhile (display.py, messages.py, curves.py, trackers.py);
summary.py writes summary.json; folder.py and lock.py say who may write to the folder.
"""
