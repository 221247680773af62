"""`model.generate`: from prompts and arguments to texts."""

import difflib
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from modelcenter.generation.arguments import resolve_settings
from modelcenter.generation.prompts import Prompts, guessed_mask
from modelcenter.generation.search import beam, extend
from modelcenter.generation.settings import Settings, check_whole, with_defaults
from modelcenter.generation.state import State
from modelcenter.generation.stopping import StopStrings
from modelcenter.layers.cache import KVCache
from modelcenter.layers.layout import check_tensor
from modelcenter.layers.modes import evaluating

# Arguments of transformers' generate -> what to use instead.
_INSTEAD = {
    "position_ids": "positions are counted from a prompt's first token, wherever its padding is",
    "length": "attention_mask marks the tokens",
    "decoder_input_ids": "a decoder begins with the checkpoint's decoder_start_token_id",
    "generation_config": "pass its settings as arguments",
    "inputs": "pass the prompts as input_ids",
    "logits_processor": "`banned` are tokens that a row does not get",
}
# Arguments of transformers' Seq2SeqTrainer that generate ignores, there and here.
_PASSED_OVER = {"labels", "synced_gpus"}
# Inputs of forward that `generate` sets itself, or that are not per token of a prompt.
_NOT_OF_TOKENS = {
    "inputs_embeds", "position_ids", "cu_seqlens", "num_items_in_batch", "num_choices", "next_sentence_label",
    "start_positions", "end_positions", "length",
}  # fmt: skip


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | Sequence[int] | None = None,
    *,
    max_length: int | None = None,
    min_new_tokens: int | None = None,
    min_length: int | None = None,
    num_beams: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    top_h: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    epsilon_cutoff: float | None = None,
    eta_cutoff: float | None = None,
    repetition_penalty: float | None = None,
    length_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    num_return_sequences: int | None = None,
    early_stopping: bool | str | None = None,
    renormalize_logits: bool | None = None,
    max_time: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    forced_bos_token_id: int | None = None,
    forced_eos_token_id: int | Sequence[int] | None = None,
    bad_words_ids: Sequence[Sequence[int]] | None = None,
    suppress_tokens: Sequence[int] | None = None,
    begin_suppress_tokens: Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    seed: int | None = None,
    past_key_values: KVCache | None = None,
    token_inputs: Mapping[str, Tensor] | None = None,
    other_inputs: Mapping[str, Tensor] | None = None,
    banned: Tensor | None = None,
    batch_size: int | None = None,
    before_reading: Callable[[], None] | None = None,
    **more: Tensor,
) -> Tensor:
    """Continue prompts, or generate the output texts of an encoder-decoder, as transformers' `generate`.

    A setting that is None has the value that the model was loaded with (from_pretrained(name, num_beams=4)), else that
    of greedy search.

    Args:
        input_ids: (batch, seq). attention_mask: (batch, seq), 0 at padding on either side; None: 0 at the padding
            token, unless that is also an end token.
        max_new_tokens: the maximum number of new tokens, for all rows or for each; default 20 if max_length is not
            given either.
        max_length: the maximum length of the result, including the columns of the prompts or the decoder's start token.
        min_new_tokens, min_length: sequences do not end before these lengths, counted in the same way.
        num_beams: the number of sequences that beam search keeps per row; 1: no beam search. early_stopping: end the
            search of a row as soon as num_beams sequences have ended; "never": only when no longer one could be better.
            length_penalty: a sequence's score is divided by its length to this power; above 0 favours long ones.
        do_sample: sample tokens instead of taking the best. temperature divides the scores; then, in this order, top_h
            keeps, of the 100 best tokens, as many as have this share of their entropy (None: all tokens); top_k keeps
            this many tokens (0: all); top_p keeps the fewest tokens whose total probability reaches it; min_p keeps
            those with at least this share of the highest probability; typical_p keeps the tokens whose information is
            closest to the entropy, until their total probability reaches it; epsilon_cutoff keeps those with at least
            this probability; eta_cutoff the same, or with sqrt(eta_cutoff) * exp(-entropy) if that is less.
        repetition_penalty: divides the scores of tokens that have occurred. no_repeat_ngram_size: n-grams of this size
            do not occur twice.
        renormalize_logits: scores that penalties and truncation changed become log-probabilities again, which only
            beam search notices.
        max_time: seconds after which sequences end as they are, looked at after each token; counted from the call or,
            of a prompt that is read later (batch_size), from then on.
        num_return_sequences: sequences per row, adjacent in the result.
        eos_token_id: tokens that end a sequence; []: none. pad_token_id: fills the row after an end. None: the
            checkpoint's.
        forced_bos_token_id: the first token of a text, after the decoder's start token. forced_eos_token_id: the last
            token of a text that reaches the maximum length. []: none; None: an encoder-decoder's checkpoint decides.
        bad_words_ids: sequences of tokens that do not occur. suppress_tokens: tokens that do not occur.
            begin_suppress_tokens: tokens with which a text does not begin; a token of forced_bos_token_id comes before
            it. []: none; None: none or, of bad_words_ids, those of an encoder-decoder's checkpoint.
        stop_strings: strings that end a sequence, found by decoding with `tokenizer`.
        streamer: receives the prompt and then each new token through `put(tensor)`, and a final `end()`; only for one
            row without beams.
        past_key_values: a cache with the keys of the first tokens of the prompts, which are then not computed again, or
            an empty one (KVCache()). It is changed: afterwards it has all tokens but the last, for a longer prompt that
            begins with them. Only for prompts of one length, one text for each, and see `continues`.
        seed: seeds sampling; None: torch's generator is used.
        token_inputs: further inputs of forward for the prompts' tokens, (batch, seq) each; a new token has the value of
            the last. other_inputs: further inputs of each forward.
        more: token_inputs by name, as a tokenizer returns them:
            generate(**tokenizer(texts, padding=True, return_tensors="pt")). Labels have no effect.
        banned: (batch, vocabulary) bool, True at tokens that a row must not contain.
        batch_size: rows to compute at a time; a row whose texts have ended makes room for the next one. None: all.
        before_reading: called before prompts are read, on all ranks at the same time, so that it may be collective; an
            exception ends the call.

    Returns:
        (batch * num_return_sequences, length): the given prompts with the new tokens or, for an encoder-decoder, the
        decoder's tokens; `pad_token_id` after each end.

    On a sharded model every rank calls this, each with its own rows, and takes steps until all have ended. The ranks of
    a pipeline (pp_size) call it with the same rows and arguments, and return the same tokens.

    Raises:
        ValueError: an argument is out of range or has the wrong type, the model has no language-modelling head, a
            prompt leaves no room in the position table, another rank of the pipeline has other rows, the model's
            scores are NaN or infinite, no token is left to choose from, or past_key_values does not fit.
    """
    began = time.monotonic()
    _check_call(model, input_ids)
    more = {name: value for name, value in more.items() if name not in _PASSED_OVER}
    token_inputs = _inputs_of_tokens(model, {**(token_inputs or {}), **more})
    asked = with_defaults(
        model.generation_defaults,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        min_new_tokens=min_new_tokens,
        min_length=min_length,
        num_beams=num_beams,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        top_h=top_h,
        min_p=min_p,
        typical_p=typical_p,
        epsilon_cutoff=epsilon_cutoff,
        eta_cutoff=eta_cutoff,
        repetition_penalty=repetition_penalty,
        length_penalty=length_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        num_return_sequences=num_return_sequences,
        early_stopping=early_stopping,
        renormalize_logits=renormalize_logits,
        max_time=max_time,
        forced_bos_token_id=forced_bos_token_id,
        forced_eos_token_id=forced_eos_token_id,
        bad_words_ids=bad_words_ids,
        suppress_tokens=suppress_tokens,
        begin_suppress_tokens=begin_suppress_tokens,
        stop_strings=stop_strings,
        seed=seed,
    )
    stop = StopStrings(asked.pop("stop_strings", None), tokenizer)
    limits = _limits(asked, len(input_ids))
    settings = resolve_settings(model, asked, input_ids.shape[1], eos_token_id, pad_token_id, stop)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1)
    for name, value in {"other_inputs": other_inputs, "past_key_values": past_key_values}.items():
        if value is not None and batch_size is not None and batch_size < len(input_ids):
            raise ValueError(f"batch_size: got {batch_size} with {name}, which are for all rows; leave it out")
    if attention_mask is None and settings.tokens.marks_padding:
        attention_mask = guessed_mask(input_ids, settings.tokens.pad)
    if streamer is not None and (settings.num_beams > 1 or len(input_ids) * settings.num_return_sequences > 1):
        raise ValueError("streamer: it shows one growing sequence; use one row, num_beams=1, num_return_sequences=1")
    if past_key_values is not None:
        _check_past(model, past_key_values, settings, token_inputs)
    rng = _generator(model, settings, input_ids.device) if settings.do_sample else None
    with evaluating(model), _uncompiled():
        state = State(
            model,
            Prompts(input_ids, attention_mask, token_inputs, banned),
            settings,
            limits=limits or [settings.max_new_tokens] * len(input_ids),
            batch_size=min(batch_size or len(input_ids), len(input_ids)),
            other_inputs=other_inputs,
            before_reading=before_reading,
            past=past_key_values,
            began=began,
        )
        if streamer is not None:
            streamer.put(state.first_tokens().cpu())
        if settings.num_beams == 1:
            extend(state, settings, stop, streamer, rng)
        else:
            beam(state, settings, stop, rng)
        if streamer is not None:
            streamer.end()
        return state.output()


def _limits(asked: dict[str, Any], rows: int) -> list[int] | None:
    """The maximum of new tokens of each row, of which `asked` then has the largest; None: it is the same for all rows.

    Raises ValueError if there is not one whole number for each row.
    """
    limits = asked.get("max_new_tokens")
    if not isinstance(limits, Sequence) or isinstance(limits, str):
        return None
    if len(limits) != rows:
        raise ValueError(f"max_new_tokens: got {len(limits)} numbers, expected one for each of the {rows} rows")
    for limit in limits:
        check_whole("max_new_tokens", limit, 1)
    asked["max_new_tokens"] = max(limits)
    return list(limits)


def _check_call(model: Any, input_ids: Any) -> None:
    """Raise ValueError if the model cannot generate text, or the prompts are not a tensor of tokens."""
    if not model.writes_text:
        raise ValueError(
            f"generate: a model for the task {model.task!r} cannot generate text; load it for causal-lm or seq2seq-lm"
        )
    check_tensor("input_ids", input_ids, "a tensor of shape (batch, seq)")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}, expected (batch, seq), none of them 0")


def continues(model: Any) -> bool:
    """Whether `generate` of the model takes past_key_values: a decoder's, whole on this rank, whose keys do not depend
    on later tokens, on tuned prompts or on inputs besides the tokens."""
    alone = not getattr(model, "is_encoder_decoder", False) and getattr(model, "pipeline", None) is None
    plain = not model.prefix_tokens and not getattr(model, "input_defaults", {})
    return alone and plain and math.isinf(model.rereads_beyond)


def _check_past(model: Any, past: Any, settings: Settings, token_inputs: Mapping[str, Any]) -> None:
    """Raise ValueError if past_key_values has another type, or the model or the other arguments do not allow it."""
    if not isinstance(past, KVCache):
        raise ValueError(f"past_key_values: got {type(past).__name__}, expected a modelcenter.layers.cache.KVCache")
    if not continues(model):
        raise ValueError(
            f"past_key_values: {type(model).__name__} reads prompts as a whole here, as encoder-decoders, pipelines, "
            "tuned prompts, CPM models and some long contexts do; leave it out"
        )
    if settings.num_beams > 1 or settings.num_return_sequences > 1 or token_inputs:
        raise ValueError(
            "past_key_values: it continues one text for each prompt, of tokens alone; leave it out with num_beams, "
            "num_return_sequences or inputs per token"
        )


def _generator(model: Any, settings: Settings, device: torch.device) -> torch.Generator:
    """The random generator of sampling, in the same state on all stages of a pipeline."""
    seed = int(torch.randint(2**62, ())) if settings.seed is None else settings.seed
    if (pipeline := getattr(model, "pipeline", None)) is not None:  # without this, stages would draw different seeds
        seed = int(pipeline.from_last(torch.tensor([seed], device=device)))
    return torch.Generator(device).manual_seed(seed)


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models eagerly: torch.compile would recompile as the cache grows, for minutes and without a gain in
    steps of few tokens, and inductor compiles T5's attention over a cache incorrectly."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _inputs_of_tokens(model: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without a parameter of their own, which must be inputs of forward for each token of a prompt."""
    known = inspect.signature(model.forward).parameters
    for name, value in more.items():
        of_tokens = name not in _NOT_OF_TOKENS and not name.startswith(("decoder_", "encoder_"))
        if not isinstance(value, Tensor) or name not in known or not of_tokens:
            _refuse(model, name)
    return dict(more)


def _refuse(model: Any, name: str) -> NoReturn:
    names = [
        known for known in inspect.signature(generate).parameters if known not in ("model", "before_reading", "more")
    ]
    close = difflib.get_close_matches(name, names, 1)
    meant = _INSTEAD.get(name) or (f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}")
    raise ValueError(
        f"{name}: neither an argument of generate nor an input of {type(model).__name__} per token; {meant}"
    )
