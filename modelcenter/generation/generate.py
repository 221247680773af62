"""The door: `model.generate`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelcenter.generation.search import beam, extend
from modelcenter.generation.settings import Settings, config_tokens
from modelcenter.generation.state import State, unpadded
from modelcenter.generation.stopping import StopStrings


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 20,
    *,
    num_beams: int = 1,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    length_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    num_return_sequences: int = 1,
    early_stopping: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    seed: int | None = None,
    token_inputs: Mapping[str, Tensor] | None = None,
    other_inputs: Mapping[str, Tensor] | None = None,
    banned: Tensor | None = None,
) -> Tensor:
    """Continue prompts, or write what an encoder-decoder makes of its input; as transformers' `generate`.

    Args:
        input_ids: (batch, seq). attention_mask: (batch, seq), 0 at padding, which may stand on either side; None: at
            the padding token, unless that ends sequences, too.
        max_new_tokens: tokens to add at most.
        num_beams: sequences that beam search keeps for each row; 1: none. early_stopping: end a row's search when
            num_beams have ended, whatever might still come. length_penalty: exponent of the length that divides a
            sequence's score; above 0 favours long ones.
        do_sample: draw tokens instead of taking the best; temperature divides the scores, top_k keeps so many (0: all),
            top_p the fewest whose probabilities reach it.
        repetition_penalty: divides the score of tokens that came already. no_repeat_ngram_size: n: no n tokens twice.
        num_return_sequences: of each row, neighbours in the result.
        eos_token_id: tokens that end a sequence, [] for none; pad_token_id: after an end. None: the checkpoint's.
        stop_strings: texts that end a sequence, found by decoding with `tokenizer`.
        streamer: is given the prompt and then each new token by `put(tensor)`, and `end()`; one row, no beams.
        seed: of the draws; None: torch's generator decides.
        token_inputs: what else the model's forward takes of the prompts' tokens, (batch, seq) each; a new token has
            that of the last. other_inputs: what it takes in each forward. Neither with pp_size > 1.
        banned: (batch, vocabulary) bool, True at tokens that a row does not get.

    Returns:
        (batch * num_return_sequences, length): the prompts as they came and the new tokens, or for an encoder-decoder
        the decoder's tokens; `pad_token_id` after each end.

    On a sharded model every rank calls it, each with rows of its own, and takes steps until all have ended. The ranks
    of a pipeline (pp_size) call it with the same rows and arguments, and return the same tokens.

    Raises:
        ValueError: an argument out of range or of the wrong kind, a model without a language-model head, a prompt that
            leaves no room in the position table, or other rows on another rank of the pipeline.
    """
    if model.task not in ("causal-lm", "seq2seq-lm"):
        raise ValueError(f"generate: task {model.task!r} writes no text; load the model with causal-lm or seq2seq-lm")
    if not isinstance(input_ids, Tensor):
        hint = "; pass the parts of a batch by name: generate(**batch)" if isinstance(input_ids, Mapping) else ""
        raise ValueError(f"input_ids: got {type(input_ids).__name__}, expected a tensor of shape (batch, seq){hint}")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}, expected (batch, seq), none of them 0")
    tensors = ("model", "input_ids", "attention_mask", "token_inputs", "other_inputs", "banned")
    given = {k: v for k, v in locals().items() if k not in (*tensors, "tensors")}
    config = model.config
    s = Settings.make(given, {**config_tokens(config), **model.generation_config}, config.vocab_size)
    if attention_mask is None and s.marks_padding:
        attention_mask = unpadded(input_ids, s.pad)
    stop = StopStrings(stop_strings, tokenizer)
    if streamer is not None and (num_beams > 1 or len(input_ids) * num_return_sequences > 1):
        raise ValueError("streamer: shows one sequence as it grows; use one row, num_beams=1, num_return_sequences=1")
    rng = None
    if s.do_sample:
        number = int(torch.randint(2**62, ())) if seed is None else seed
        if (pipeline := getattr(model, "pipeline", None)) is not None:  # whose stages draw different numbers
            number = int(pipeline.from_last(torch.tensor([number], device=input_ids.device)))
        rng = torch.Generator(input_ids.device).manual_seed(number)
    was_training = model.training
    model.eval()
    try:
        state = State(model, input_ids, attention_mask, s, token_inputs, other_inputs, banned)
        if streamer is not None:
            streamer.put(state.tokens.cpu())
        tokens = extend(state, s, stop, streamer, rng) if num_beams == 1 else beam(state, s, stop, rng)
        if streamer is not None:
            streamer.end()
        while not state.all_done(True):
            state.idle()
        return tokens
    finally:
        model.train(was_training)
