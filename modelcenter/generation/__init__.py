"""Text generation: greedy, sampling and beam search, one code for decoder-only and encoder-decoder models.

generate.py    `model.generate`: from the arguments to the texts
settings.py    the arguments, checked
search.py      greedy search, sampling and beam search
scores.py      penalties, and what sampling cuts off
state.py       the model between two tokens: its cache and its next scores
stopping.py    ends of a text beside its end token
"""
