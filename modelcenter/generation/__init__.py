"""Text generation: greedy, sampling and beam search, one code for decoder-only and encoder-decoder models."""
