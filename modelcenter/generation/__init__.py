"""Text generation: greedy search, sampling and beam search, for decoder-only and encoder-decoder models.

generate.py    `model.generate`: from the arguments to the texts
arguments.py   combining the arguments with the checkpoint's settings
settings.py    checking the settings
search.py      greedy search, sampling and beam search
scores.py      penalties and bans, the truncation before sampling, and the check of scores
prompts.py     the prompts, and the tokens of the texts that continue them
state.py       the model between two tokens: its cache, the rows in it, and the scores of the next token
stopping.py    stop strings
"""
