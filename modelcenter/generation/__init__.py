"""Text generation: greedy search, sampling and beam search, for decoder-only and encoder-decoder models.

generate.py    `model.generate`: from the arguments to the texts
arguments.py   combining the arguments with the checkpoint's settings
settings.py    checking the settings
search.py      greedy search, sampling and beam search
scores.py      penalties, and the truncation before sampling
state.py       the model between two tokens: its cache and the scores of the next token
stopping.py    stop strings
"""
