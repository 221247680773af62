"""Penalties, bans and truncation against the processors and `generate` of transformers; scores without a token."""

import itertools
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from generation_toys import texts_after
from harness import randomize_

import modelcenter as mc
from modelcenter.generation import search
from modelcenter.generation.arguments import _NO_EFFECT_ON_SAMPLES, _warn_unused
from modelcenter.generation.scores import best_so_far, drawn, narrowed, next_scores
from modelcenter.generation.settings import Settings, SpecialTokens
from modelcenter.training.config.inference import SAMPLING

VOCAB = 131  # more than the 100 tokens at which top_h looks
WARPERS = {
    "temperature": lambda value, keep: transformers.TemperatureLogitsWarper(value),
    "top_h": lambda value, keep: transformers.generation.TopHLogitsWarper(value),
    "top_k": lambda value, keep: transformers.TopKLogitsWarper(value, min_tokens_to_keep=keep),
    "top_p": lambda value, keep: transformers.TopPLogitsWarper(value, min_tokens_to_keep=keep),
    "min_p": lambda value, keep: transformers.MinPLogitsWarper(value, min_tokens_to_keep=keep),
    "typical_p": lambda value, keep: transformers.TypicalLogitsWarper(value, min_tokens_to_keep=keep),
    "epsilon_cutoff": lambda value, keep: transformers.EpsilonLogitsWarper(value, min_tokens_to_keep=keep),
    "eta_cutoff": lambda value, keep: transformers.EtaLogitsWarper(value, min_tokens_to_keep=keep),
}
VALUES = {
    "temperature": (0.3, 0.8, 1.7),
    "top_h": (0.05, 0.5, 0.9, 1.0),
    "top_k": (1, 7, 500),
    "top_p": (1e-6, 0.4, 0.9),
    "min_p": (0.02, 0.5, 1.0),
    "typical_p": (0.05, 0.6, 0.95),
    "epsilon_cutoff": (0.003, 0.05, 0.9),
    "eta_cutoff": (0.003, 0.05, 0.9),
}


@pytest.mark.parametrize("keep", [1, 2, 9])
@pytest.mark.parametrize("name", WARPERS)
def test_each_truncation_keeps_the_tokens_of_transformers(name, keep):
    rng = torch.Generator().manual_seed(keep)
    scores = torch.randn(6, VOCAB, generator=rng) * torch.tensor([0.1, 1, 2, 3, 5, 9])[:, None]
    scores[1, 5:9] = -torch.inf  # banned
    scores[2, 10:20] = scores[2, 11]  # equal ones
    for value in VALUES[name]:
        s = Settings(tokens=SpecialTokens(), do_sample=True, **{name: value})
        assert torch.equal(narrowed(scores, s, keep), WARPERS[name](value, keep)(None, scores)), value


def test_a_mass_that_rounded_sums_do_not_reach_keeps_every_token():
    scores = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    s = Settings(tokens=SpecialTokens(), do_sample=True, typical_p=1 - 1e-9)
    assert torch.equal(narrowed(scores, s), scores)


@pytest.mark.parametrize("text", [[4], [4, 4], [4, 4, 4], [4, 5], [5, 4, 4]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_texts_as_short_as_what_may_not_be_repeated(text, size):
    prompt, scores = torch.tensor([text]), torch.zeros(1, 9)
    s = Settings(tokens=SpecialTokens(), no_repeat_ngram_size=size)
    found = next_scores(scores, texts_after(prompt, torch.zeros(1, 0, dtype=torch.long)), s, [20])
    assert torch.equal(found, transformers.NoRepeatNGramLogitsProcessor(size)(prompt, scores.clone()))


def test_places_without_a_token_keep_no_token_out():
    """Of which one is before a shorter prompt."""
    s = Settings(tokens=SpecialTokens(), no_repeat_ngram_size=1)
    texts = texts_after(torch.tensor([[-1, 4], [5, 4]]), torch.zeros(2, 0, dtype=torch.long))
    found = next_scores(torch.zeros(2, 9), texts, s, [20, 20]).isinf()
    assert [row.nonzero().flatten().tolist() for row in found] == [[4], [4, 5]]


@pytest.mark.parametrize(("forced", "length", "place"), [(5, 1, 1), (None, 1, 0), (5, 2, 0)])
def test_the_first_token_that_may_be_chosen_comes_after_a_forced_one(forced, length, place):
    """Which is forced only after a single token."""
    given = {"forced_bos_token_id": forced, "begin_suppress_tokens": [6]}
    s = Settings(tokens=SpecialTokens.resolve(None, None, {}, 9, False, given))
    prompts = torch.full((1, length), 3)
    texts = [texts_after(prompts, torch.full((1, n), 4)) for n in range(3)]
    found = [next_scores(torch.zeros(1, 9), after, s, [20]).isinf()[0].tolist() for after in texts]
    suppressed = [token == 6 for token in range(9)]
    wanted = [suppressed if n == place else [False] * 9 for n in range(3)]
    if forced is not None and length == 1:
        wanted[0] = [token != forced for token in range(9)]
    assert found == wanted


def test_scores_become_log_probabilities_at_the_end():
    """After penalties and bans or, in sampling, after the truncation."""
    scores = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    none = torch.zeros(2, 0, dtype=torch.long)
    tokens = SpecialTokens.resolve(None, None, {}, VOCAB, False, {"suppress_tokens": [3]})
    banned = scores.index_fill(1, torch.tensor([3]), -torch.inf)
    again = transformers.LogitNormalization()
    for more, wanted, narrow in (
        ({}, again(None, banned), again(None, banned)),
        ({"do_sample": True, "top_k": 7}, banned, again(None, transformers.TopKLogitsWarper(7)(None, banned))),
    ):
        s = Settings(tokens=tokens, renormalize_logits=True, **more)
        found = next_scores(scores, texts_after(none, none), s, [20, 20])
        assert torch.equal(found, wanted)
        assert not s.do_sample or torch.equal(narrowed(found, s), narrow)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A randomised GPT-2 of transformers, and ours."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=7, pad_token_id=7
    )
    theirs = randomize_(transformers.GPT2LMHeadModel(config), 3)
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs, mc.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def seq2seq_pair(tmp_path_factory):
    """A randomised T5 of transformers, whose decoder begins with one token, and ours."""
    folder = tmp_path_factory.mktemp("t5")
    randomize_(mc.from_config("tiny/t5", "seq2seq-lm", vocab_size=VOCAB, num_layers=3), 5).save_pretrained(folder)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    return theirs, mc.from_pretrained(str(folder))


PROMPT = torch.tensor([[9, 14, 33, 8, 40], [11, 9, 9, 71, 3], [20, 21, 22, 23, 24]])


def some_settings(rng):
    """Some settings of every kind, with random values."""
    few = lambda: rng.sample(range(VOCAB), rng.randint(1, VOCAB // 3))  # noqa: E731
    known = {
        **{name: rng.choice(values) for name, values in VALUES.items() if name != "top_h"},
        "top_h": rng.choice((0.5, 0.9)),
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": rng.randint(1, 3),
        "min_new_tokens": 6,
        "bad_words_ids": [[7], *([token] for token in few()), *(rng.sample(range(VOCAB), 2) for _ in range(4000))],
        "suppress_tokens": few(),
        "begin_suppress_tokens": few(),
        "forced_bos_token_id": rng.randrange(VOCAB),
        "forced_eos_token_id": rng.randrange(VOCAB),
        "renormalize_logits": True,
        "eos_token_id": rng.sample(range(VOCAB), 20),
    }
    chosen = {name: known[name] for name in rng.sample(sorted(known), rng.randint(1, 7))}
    # transformers 5.17 does not look for words as long as the text, which begins with 0 in an encoder-decoder.
    if "bad_words_ids" in chosen:
        chosen["bad_words_ids"] = [word for word in chosen["bad_words_ids"] if len(word) == 1 or word[0] != 0]
    # A forced token that is kept out leaves none: transformers then takes the first of the vocabulary.
    forced = {value for name, value in chosen.items() if name.startswith("forced")}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if name in chosen:
            chosen[name] = sorted(set(chosen[name]) - forced) or [0]
    return chosen


def sorted_draws(probs, **options):
    """torch.multinomial, the best first, as only newer versions of transformers sort the draws of beams."""
    index = MULTINOMIAL(probs, **options)
    return index.gather(1, probs.gather(1, index).argsort(dim=1, descending=True))


MULTINOMIAL = torch.multinomial


def check_generation(models, seed, prompts):
    """The same tokens as transformers, with settings and draws from `seed`."""
    theirs, ours = models
    rng = random.Random(seed)
    settings = some_settings(rng)
    settings["num_beams"] = beams = rng.choice((1, 1, 3))
    settings["do_sample"] = rng.random() < 0.7
    if beams > 1:
        settings.pop("top_h", None)  # which may leave fewer tokens than beams
    torch.manual_seed(seed)  # the same draws: both divide by exponentially distributed numbers
    with mock.patch("torch.multinomial", sorted_draws):
        wanted = theirs.generate(prompts, max_new_tokens=9, pad_token_id=7, **{"top_k": 0, **settings})
    with mock.patch("modelcenter.generation.state._LEAVING", 1.0):  # transformers draws for rows that have ended, too
        found = ours.generate(prompts, None, 9, pad_token_id=7, seed=seed, **settings)
    # After an end, beams of transformers have the end token.
    ended = [row.tolist() for row in wanted]
    for row, other in zip(found.tolist(), ended, strict=True):
        assert row == other or (beams > 1 and _cut(row) == _cut(other)), settings


def _cut(row):
    """A row without the padding behind it."""
    end = len(row)
    while end and row[end - 1] == row[-1]:
        end -= 1
    return row[:end]


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.full) for n in range(12, 80))])
def test_random_settings_give_the_tokens_of_transformers(pair, seed):
    check_generation(pair, seed, PROMPT)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 40))])
def test_random_settings_of_an_encoder_decoder(seq2seq_pair, seed):
    check_generation(seq2seq_pair, 1000 + seed, PROMPT)


def test_words_are_kept_out_where_they_would_be_completed():
    """Of one token, of several, longer than the text, and across the prompt; padding is part of none."""
    prompts, new = torch.tensor([[-1, -1, 3], [1, 2, 3]]), torch.tensor([[4], [4]])
    words = [[5], [4, 6], [3, 4, 7], [2, 3, 4, 8], [9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 10], [4, 6]]
    tokens = SpecialTokens.resolve(None, None, {}, 12, False, {"bad_words_ids": words})
    scores = next_scores(torch.zeros(2, 12), texts_after(prompts, new), Settings(tokens=tokens), [20, 20])
    assert [row.isinf().nonzero().flatten().tolist() for row in scores] == [[5, 6, 7], [5, 6, 7, 8, 10]]


@pytest.mark.parametrize("beams", [1, 3])
def test_words_that_the_checkpoint_of_an_encoder_decoder_bans(seq2seq_pair, beams, caplog):
    """They are followed, sequences of several tokens too, unless the caller has others."""
    theirs, ours = seq2seq_pair
    more = {"max_new_tokens": 6, "num_beams": beams, "eos_token_id": []}
    free = ours.generate(PROMPT, **more)
    words = [free[0, 2:4].tolist(), free[1, 1:2].tolist()]
    ours.generation_config = {**ours.generation_config, "bad_words_ids": words}
    try:
        found = ours.generate(PROMPT, **more)
        assert "bad_words_ids" not in caplog.text
        given = ours.generate(PROMPT, **more, bad_words_ids=[])
    finally:
        del ours.generation_config["bad_words_ids"]
    wanted = theirs.generate(PROMPT, bad_words_ids=words, do_sample=False, **{**more, "eos_token_id": None})
    assert torch.equal(found, wanted) and not torch.equal(found, free)
    assert torch.equal(given, free)


def test_settings_of_sampling_in_the_file_are_said_where_the_caller_has_none(pair, caplog):
    _, ours = pair
    ours.generation_config = {"temperature": 0.6, "top_k": 50, "min_p": 0.1, "typical_p": 1.0, "top_h": 0.4}
    asked = "generation_config.json asks for "
    for more, said in (
        ({}, []),
        ({"do_sample": True}, [asked + "temperature=0.6, top_h=0.4, min_p=0.1"]),
        ({"do_sample": True, "temperature": 0.8, "min_p": 0.1}, [asked + "top_h=0.4"]),
    ):
        _warn_unused.cache_clear()
        caplog.clear()
        ours.generate(PROMPT, None, 1, **more)
        assert [record.getMessage().partition(";")[0] for record in caplog.records] == said
    ours.generation_config = {}


def test_the_settings_of_sampling_are_the_same_everywhere():
    assert set(SAMPLING) == set(_NO_EFFECT_ON_SAMPLES) == set(VALUES)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"min_p": 1.5}, r"min_p: got 1.5, expected a share of the highest probability, 0 <= min_p <= 1"),
        ({"min_p": torch.ones(3, 5)}, "(?s)min_p: got .*, expected a number"),
        ({"typical_p": 0.0}, "typical_p: got 0.0, expected a probability, 0 < typical_p <= 1"),
        ({"top_h": 0.0}, "top_h: got 0.0, expected a share of the entropy"),
        ({"top_h": "half"}, "top_h: got 'half', expected a number"),
        ({"epsilon_cutoff": 1.0}, "epsilon_cutoff: got 1.0, expected a probability, 0 <= epsilon_cutoff < 1"),
        ({"eta_cutoff": -0.1}, "eta_cutoff: got -0.1, expected a probability"),
        ({"max_time": 0}, "max_time: got 0, expected a number of seconds above 0"),
        ({"max_time": "8h"}, "max_time: got '8h', expected a number"),
        ({"renormalize_logits": 1}, "renormalize_logits: got 1, expected True or False"),
        ({"bad_words_ids": [5]}, r"bad_words_ids: got \[5\], expected a list of token ids for each word"),
        ({"bad_words_ids": "x"}, "bad_words_ids: got 'x', expected a list of token ids for each word"),
        ({"bad_words_ids": [[]]}, "bad_words_ids: got .*, in which a word has no token"),
        ({"bad_words_ids": [[3, VOCAB]]}, f"bad_words_ids: got {VOCAB}, but the vocabulary has"),
        ({"suppress_tokens": [VOCAB]}, f"suppress_tokens: got {VOCAB}, but the vocabulary has"),
        ({"begin_suppress_tokens": ["x"]}, "begin_suppress_tokens: got .*, expected one or several token ids"),
    ],
)
def test_values_that_are_none_are_named(pair, more, message):
    with pytest.raises(ValueError, match=message):
        pair[1].generate(PROMPT, None, 4, **more)


def test_tokens_to_keep_out_may_be_tensors(pair, caplog):
    """Equal to those of the file, so that no warning says that these have no effect."""
    _, ours = pair
    _warn_unused.cache_clear()
    free = ours.generate(PROMPT, None, 4)
    first = free[:, 5]
    ours.generation_config = {"suppress_tokens": first.tolist(), "forced_eos_token_id": [1, 2]}
    end = torch.tensor([1, 2])
    try:
        found = ours.generate(PROMPT, None, 4, suppress_tokens=first, forced_eos_token_id=end, bad_words_ids=[first])
    finally:
        ours.generation_config = {}
    assert not set(found[:, 5].tolist()) & set(first.tolist()) and not caplog.records


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_end_where_their_time_does(pair, beams, monkeypatch):
    _, ours = pair
    more = {"num_beams": beams, "eos_token_id": []}
    free = ours.generate(PROMPT, None, 5, **more)
    clock = itertools.count()
    for module in ("generate", "state"):  # a second later each time
        monkeypatch.setattr(f"modelcenter.generation.{module}.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert torch.equal(ours.generate(PROMPT, None, 20, max_time=4.5, **more), free)
    assert next(clock) == 6


# -- scores by which no token can be chosen ----------------------------------------------------------------------------


def test_draws_are_those_of_multinomial():
    scores = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    for count in (1, 4):
        wanted = torch.multinomial(scores.softmax(-1), count, generator=torch.Generator().manual_seed(3))
        assert torch.equal(drawn(scores, count, torch.Generator().manual_seed(3)), wanted)


SEARCHES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
}


@pytest.mark.parametrize("ends", [[7], []])
@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_one_clear_error(pair, kind, ends, value):
    _, ours = pair
    weight = ours.final_norm.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[3] = value
        with pytest.raises(ValueError, match="generate: the model's scores for row 0 are NaN or infinite, so no token"):
            ours.generate(PROMPT, None, 4, eos_token_id=ends, **SEARCHES[kind])
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("beam", [0, 1])
def test_scores_of_one_beam_that_are_not_finite_are_seen(beam, do_sample):
    """Whichever tokens are drawn then."""
    logits = torch.zeros(2, VOCAB)
    logits[beam] = torch.nan
    tokens = torch.zeros(2, 1, dtype=torch.long)
    texts, of_slots = texts_after(tokens, tokens[:, :0]), {"scores": torch.zeros(1, 2)}
    state = SimpleNamespace(texts=texts, logits=logits, limits=[20, 20], of_slots=of_slots)
    s = Settings(tokens=SpecialTokens(), num_beams=2, do_sample=do_sample)
    top = search._beam_candidates(state, s, torch.Generator().manual_seed(0))[0]
    assert bool(top.isnan())


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_row_without_a_token_to_choose_is_one_clear_error(pair, kind):
    _, ours = pair
    few = [token for token in range(VOCAB) if token not in (40, 41, 42)]
    more = {"suppress_tokens": few, "no_repeat_ngram_size": 1, "eos_token_id": [], **SEARCHES[kind]}
    prompts = torch.tensor([[9, 14], [40, 41], [9, 40]])
    assert ours.generate(prompts, None, 1, **more).shape[1] == 3
    with pytest.raises(ValueError, match=r"generate: row 1 has no token left to choose from; allow more \(banned, "):
        ours.generate(prompts, None, 2, **more)


def test_rows_that_have_ended_need_no_token(pair):
    """The first row ends with its first token, and could not go on."""
    _, ours = pair
    few = [token for token in range(VOCAB) if token not in (40, 41, 42, 43)]
    banned = torch.zeros(2, VOCAB, dtype=torch.bool)
    banned[1, 40] = True
    more = {"suppress_tokens": few, "no_repeat_ngram_size": 1, "pad_token_id": 0, "banned": banned}
    found = ours.generate(torch.tensor([[41, 42, 43], [9, 8, 7]]), None, 3, eos_token_id=40, **more)
    assert found[0].tolist() == [41, 42, 43, 40, 0, 0] and set(found[1, 3:].tolist()) == {41, 42, 43}


def test_looking_for_scores_that_are_not_finite_waits_for_the_device_once(monkeypatch):
    none, waits, tolist = torch.zeros(2, dtype=torch.bool), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.append(self) or tolist(self))
    for name in ("__bool__", "item", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: waits.append(self))
    best = best_so_far(torch.zeros(2), torch.tensor([1.0, -torch.inf]), torch.tensor([False, True]))
    best = best_so_far(best, torch.tensor([1.0, 2.0]), none)
    state = SimpleNamespace(of_slots={"best": best}, rows=[0, 1])
    assert waits == [] and search._over(state, [0, 1], none) == [] and len(waits) == 1


@pytest.mark.parametrize(("value", "message"), [(torch.nan, "row 8 are NaN"), (-torch.inf, "row 8 has no token left")])
def test_a_row_without_a_token_is_remembered_until_the_search_looks(value, message):
    """Where no text can end, a search looks only at its end."""
    best, none = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    for last in (value, 1.0):
        best = best_so_far(best, torch.tensor([1.0, last]), none)
    state = SimpleNamespace(of_slots={"best": best}, rows=[9, 8])
    with pytest.raises(ValueError, match=message):
        search._over(state, [0, 1], none)
    assert search._over(state, [0], ~none) == [0]  # the slot of an ended row may hold anything
