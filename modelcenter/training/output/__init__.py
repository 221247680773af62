"""What a run writes to --output_dir and shows on the terminal.

record.py writes metrics.jsonl and shows progress (display.py, messages.py, curves.py, trackers.py); summary.py makes
summary.json; folder.py and lock.py decide who may write to the folder.
"""
