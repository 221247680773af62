"""What a run writes to --output_dir and shows on the terminal."""
