"""Texts that are written some rows at a time: each is the text of its row alone, and ended ones are not computed."""

import itertools
import types

import pytest
import torch
import transformers
from generation_toys import KINDS, MANY, VOCAB, Letters
from harness import randomize_

import engine
import modelcenter as mc
from modelcenter.layers.cache import KVCache

LENGTHS = (5, 2, 7, 9, 1, 8, 3)  # the longest is not among the first ones that are read
LIMITS = [12, 3, 1, 17, 6, 9, 14]
MORE_KINDS = {
    "a forced beginning": {"forced_bos_token_id": 58, "begin_suppress_tokens": [20, 33, 41]},
    "bad words": {"bad_words_ids": [[n, m] for n in range(VOCAB) for m in range(n % 3, VOCAB, 3)]},
    "beams without bad words": {"num_beams": 3, "bad_words_ids": [[n, m, 50] for n in range(9, 60) for m in range(60)]},
}


def prompts(vocab=VOCAB):
    ids = torch.randint(8, vocab, (len(LENGTHS), 9), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(9) >= 9 - torch.tensor(LENGTHS)[:, None]).long()
    return ids * mask, mask


def of_rows(model, ids, mask, limits=LIMITS, per_token=None, per_row=None, **how):
    """The output of each row alone, without padding tokens behind its text."""
    found, several = [], how.get("num_return_sequences", 1)
    for row, limit in enumerate(limits):
        more = {name: value[row : row + 1] for name, value in {**(per_token or {}), **(per_row or {})}.items()}
        found += list(model.generate(ids[row : row + 1], mask[row : row + 1], limit, **more, **how))
    assert len(found) == len(limits) * several
    return found


def same(together, alone, pad):
    assert together.shape[1] == max(len(text) for text in alone)
    for text, wanted in zip(together, alone, strict=True):
        assert torch.equal(text[: len(wanted)], wanted) and (text[len(wanted) :] == pad).all()


@pytest.mark.parametrize("slots", [2, 7, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 3))])
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_each_text_is_that_of_its_row(pair, kind, slots):
    model = mc.from_pretrained(pair[1])
    ids, mask = prompts()
    how = {"eos_token_id": MANY, "pad_token_id": 5} | (KINDS | MORE_KINDS)[kind]
    if "min_length" in how:  # counts the columns of the prompts, which a row alone has, too
        how["min_length"] += 3
    alone = of_rows(model, ids, mask, **how)
    assert len({len(text) for text in alone}) > 3
    same(model.generate(ids, mask, LIMITS, batch_size=slots, **how), alone, 5)


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_of_texts_of_unequal_lengths(pair, beams):
    model = mc.from_pretrained(pair[1])
    ids, mask = prompts()
    limits = [3 * limit for limit in LIMITS]
    how = {"num_beams": beams, "eos_token_id": [], "pad_token_id": 5, "repetition_penalty": 3.0}
    free = of_rows(model, ids, mask, limits, **how)
    strings = [Letters().decode(free[row][9 + n : 9 + n + 2]) for row, n in ((0, 12), (3, 30), (5, 3), (6, 20))]
    how |= {"stop_strings": strings, "tokenizer": Letters()}
    alone = of_rows(model, ids, mask, limits, **how)
    assert sum(len(a) < len(b) for a, b in zip(alone, free, strict=True)) >= 4
    for slots in (2, 7):
        same(model.generate(ids, mask, limits, batch_size=slots, **how), alone, 5)


FAMILIES = {
    "tiny/llama": {},
    "tiny/mistral": {"sliding_window": 4},
    "tiny/bloom": {},
    "tiny/gemma2": {"sliding_window": 4},
    "tiny/gpt2": {"seed": 3},
    "tiny/t5": {"decoder_start_token_id": 0},
    "tiny/bart": {},
    "tiny/m2m_100": {"forced_bos_token_id": 11},
    "tiny/encoder-decoder": {},
    "tiny/cpmant": {},
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, beams):
    """Positions, windows, biases over distances, encoders' tokens and contexts of a text that took another's slot."""
    fields = {"vocab_size": 131, "pad_token_id": 3, "eos_token_id": 7} | FAMILIES[name]
    if name == "tiny/encoder-decoder":
        fields = {}
    task = "seq2seq-lm" if mc.from_config(name).is_encoder_decoder else "causal-lm"
    model = randomize_(mc.from_config(name, task, **fields)).eval()
    ids, mask = prompts(60)
    context = torch.arange(9) < torch.tensor([7, 9, 7, 9, 9, 7, 7])[:, None]
    per_token = {"context": context.long()} if name == "tiny/cpmant" else {}
    if name == "tiny/gpt2":
        per_token = {"token_type_ids": torch.randint(0, 9, ids.shape, generator=torch.Generator().manual_seed(5))}
    how = {"num_beams": beams, "pad_token_id": 3, "eos_token_id": list(range(4, 60, 5))}
    if task == "seq2seq-lm":
        how["forced_eos_token_id"] = [17]
    alone = of_rows(model, ids, mask, per_token=per_token, **how)
    assert len({len(text) for text in alone}) > 2
    for slots in (3, 7):
        same(model.generate(ids, mask, LIMITS, batch_size=slots, **per_token, **how), alone, 3)


def test_empty_places_of_a_slot_are_in_no_context():
    """Where the text before had context."""
    model = randomize_(mc.from_config("tiny/cpmant", "causal-lm", vocab_size=131)).eval()
    ids = torch.randint(8, 60, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(9) >= torch.tensor([0, 6, 7])[:, None]).long()
    context, limits = torch.ones(3, 9, dtype=torch.long), [2, 30, 25]
    alone = of_rows(model, ids, mask, limits, {"context": context}, eos_token_id=[], pad_token_id=3)
    same(model.generate(ids, mask, limits, context=context, batch_size=2, eos_token_id=[], pad_token_id=3), alone, 3)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_grows_with_the_prompts_that_are_read(pair, beams, monkeypatch):
    monkeypatch.setattr("modelcenter.generation.state._RESERVE", 1)
    model, how = mc.from_pretrained(pair[1]), {"num_beams": beams, "eos_token_id": [], "pad_token_id": 5}
    ids = torch.randint(8, VOCAB, (3, 30), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(30) >= torch.tensor([28, 27, 0])[:, None]).long()
    alone = of_rows(model, ids, mask, [2, 14, 12], **how)
    same(model.generate(ids, mask, [2, 14, 12], batch_size=2, **how), alone, 5)


def test_an_ended_text_goes_on_in_its_place_only_as_far_as_there_are_positions(pair):
    """It stays in the batch until a quarter of the texts have ended."""
    model = mc.from_pretrained(pair[1])
    ids = torch.randint(8, VOCAB, (5, 30), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(30) >= torch.tensor([0, 28, 28, 28, 28])[:, None]).long()
    limits = [1, 60, 60, 60, 60]
    for how in ({"eos_token_id": []}, {"eos_token_id": [], "num_beams": 2}):
        alone = of_rows(model, ids, mask, limits, **how, pad_token_id=5)
        same(model.generate(ids, mask, limits, **how, pad_token_id=5), alone, 5)


def test_encoders_of_rows_that_leave():
    model = randomize_(mc.from_config("tiny/gpt2", "causal-lm", add_cross_attention=True, vocab_size=VOCAB)).eval()
    ids, mask = prompts(60)
    states = torch.randn(7, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    how = {"eos_token_id": [], "pad_token_id": 5}
    alone = of_rows(model, ids, mask, per_row={"encoder_hidden_states": states}, **how)
    same(model.generate(ids, mask, LIMITS, encoder_hidden_states=states, **how), alone, 5)


def test_prompts_of_32_bit_numbers(pair):
    model = mc.from_pretrained(pair[1])
    ids, mask = prompts()
    how = {"batch_size": 2, "eos_token_id": MANY, "pad_token_id": 5}
    assert torch.equal(model.generate(ids.int(), mask, LIMITS, **how), model.generate(ids, mask, LIMITS, **how))


def test_new_tokens_have_the_inputs_of_the_last_one():
    """As where the whole text is computed at each token."""
    model = randomize_(mc.from_config("tiny/gpt2", "causal-lm", vocab_size=VOCAB), 2).eval()
    ids, mask = prompts()
    types = torch.randint(0, 9, ids.shape, generator=torch.Generator().manual_seed(5))
    found = model.generate(ids, mask, 4, token_type_ids=types, eos_token_id=[])
    for row, length in enumerate(LENGTHS):
        text, kinds = found[row : row + 1, 9 - length : 12], types[row : row + 1, 9 - length :]
        kinds = torch.cat((kinds, kinds[:, -1:].expand(1, 3)), 1)
        assert torch.equal(model(text, token_type_ids=kinds).logits[0, -1].argmax(), found[row, 12])


def test_banned_tokens_are_those_of_the_row(pair):
    model = mc.from_pretrained(pair[1])
    ids, mask = prompts()
    banned = torch.rand(7, VOCAB, generator=torch.Generator().manual_seed(1)) < 0.6
    for how in ({}, {"num_beams": 3}):
        alone = of_rows(model, ids, mask, per_row={"banned": banned}, pad_token_id=5, eos_token_id=MANY, **how)
        more = {"banned": banned, "pad_token_id": 5, "eos_token_id": MANY, **how}
        same(model.generate(ids, mask, LIMITS, batch_size=3, **more), alone, 5)


def test_rows_that_are_drawn(pair):
    """Drawing the best token alone is greedy search; a seed repeats what is drawn, in each slot on its own."""
    model = mc.from_pretrained(pair[1])
    ids, mask = prompts()
    how = {"batch_size": 3, "num_return_sequences": 2, "do_sample": True, "eos_token_id": MANY, "pad_token_id": 5}
    greedy = model.generate(ids, mask, LIMITS, eos_token_id=MANY, pad_token_id=5)
    assert torch.equal(model.generate(ids, mask, LIMITS, top_k=1, **how), greedy.repeat_interleave(2, 0))
    same_prompts, same_mask = ids[:1].expand(7, 9), mask[:1].expand(7, 9)
    first, again, other = (model.generate(same_prompts, same_mask, 12, seed=seed, **how) for seed in (1, 1, 2))
    assert torch.equal(first, again) and first.shape != other.shape or not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 14


def counted(model, monkeypatch):
    """The number of new tokens of each forward from now on."""
    seen, begin = [], KVCache.begin
    monkeypatch.setattr(KVCache, "begin", lambda cache, ctx: seen.append(ctx.num_sequences) or begin(cache, ctx))
    return seen


@pytest.mark.parametrize("beams", [1, 2])
def test_ended_texts_leave(pair, beams, monkeypatch):
    """A quarter of the rows may have ended and still be computed."""
    model = mc.from_pretrained(pair[1])
    seen = counted(model, monkeypatch)
    ids = torch.full((8, 4), 9)
    limits = [1, 2, 2, 3, 5, 5, 5, 9]
    model.generate(ids, None, limits, num_beams=beams, eos_token_id=[])
    assert [n // (1 if i == 0 else beams) for i, n in enumerate(seen)] == [8, 8, 5, 5, 5, 1, 1, 1, 1]
    seen.clear()
    model.generate(ids, None, limits, num_beams=beams, eos_token_id=[], batch_size=2)
    # Texts this short are best read when all have ended: pairs of (1, 2), (2, 3), (5, 5) and (5, 9) tokens.
    both = [2 * beams]
    assert seen == [2, *both, 2, *both * 2, 2, *both * 4, 2, *both * 4, *[beams] * 4]
    seen.clear()
    # Among longer ones, the third prompt does not wait for the first text to end.
    model.generate(ids[:3], None, [20, 2, 18], num_beams=beams, eos_token_id=[], batch_size=2)
    assert seen == [2, *both * 6, 1, *both * 13, *[beams] * 4]


@pytest.mark.parametrize("beams", [1, 2])
def test_the_time_of_a_text_begins_where_its_prompt_is_read(pair, beams, monkeypatch):
    """A second passes with each forward. The last prompt takes the place of the text of one token."""
    model, clock, how = mc.from_pretrained(pair[1]), itertools.count(), {"num_beams": beams, "eos_token_id": []}
    for module in ("generate", "state"):
        time = types.SimpleNamespace(monotonic=lambda: next(clock))
        monkeypatch.setattr(f"modelcenter.generation.{module}.time", time)
    ids = torch.randint(8, VOCAB, (4, 3), generator=torch.Generator().manual_seed(2))
    limits = [30, 30, 1, 30]
    for slots in (1, 3):
        found = model.generate(ids, None, limits, batch_size=slots, max_time=12.5, pad_token_id=5, **how)
        same(found, of_rows(model, ids, torch.ones_like(ids), [13, 13, 1, 13], **how), 5)


def test_what_is_called_before_prompts_are_read(pair):
    model, calls = mc.from_pretrained(pair[1]).train(), []
    model.generate(torch.full((5, 4), 9), None, 2, batch_size=2, before_reading=lambda: calls.append(1))
    assert len(calls) == 3

    def stop():
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        model.generate(torch.full((5, 4), 9), None, 2, before_reading=stop)
    assert model.training


def test_arguments_that_cannot_be_followed_are_named(pair):
    model = mc.from_pretrained(pair[1])
    ids = torch.full((2, 4), 9)
    states = {"encoder_hidden_states": torch.zeros(2, 3, 48)}
    for more, message in (
        ({"batch_size": 0}, "batch_size: got 0, expected a whole number of at least 1"),
        ({"batch_size": "2"}, "batch_size: got '2'"),
        ({"batch_size": 1, "other_inputs": states}, "batch_size: got 1 with other_inputs, which are for all rows"),
        ({"max_new_tokens": [3]}, "max_new_tokens: got 1 numbers, expected one for each of the 2 rows"),
        ({"max_new_tokens": [3, 0]}, "max_new_tokens: got 0, expected a whole number of at least 1"),
        ({"max_new_tokens": [3, 61]}, "max_new_tokens: a prompt of 4 tokens and 61 new ones exceed the 64 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, **more)
    assert model.generate(ids, None, [3, 60], eos_token_id=[]).shape == (2, 64)


def longrope(folder):
    rope = {"rope_type": "longrope", "rope_theta": 73.0, "original_max_position_embeddings": 12, "factor": 4.0}
    rope |= {"short_factor": [1.0, 1.3, 1.1, 2.0], "long_factor": [2.0, 1.5, 3.0, 1.2]}
    config = transformers.Phi3Config(
        vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=48, max_position_embeddings=48, original_max_position_embeddings=12, rope_parameters=rope,
        pad_token_id=3, bos_token_id=1, eos_token_id=7, sliding_window=None,
    )  # fmt: skip
    randomize_(transformers.Phi3ForCausalLM(config)).save_pretrained(folder)
    return mc.from_pretrained(folder)


def test_texts_that_are_read_again_do_not_meet_short_ones(tmp_path):
    """Beyond a length, longrope's keys are others: a slot is then free for the next prompt once all have ended."""
    model = longrope(tmp_path)
    ids, mask = torch.full((4, 10), 9), torch.ones(4, 10, dtype=torch.long)
    mask[1:, :5] = 0
    for limits in ([9, 9, 9, 9], [9, 3, 3, 3]):
        alone = of_rows(model, ids, mask, limits, eos_token_id=[], pad_token_id=3)
        found = model.generate(ids, mask, limits, batch_size=1, eos_token_id=[], pad_token_id=3)
        same(found, alone, 3)
        # Rows in one batch are read again together, at the length of the longest.
        pairs = [model.generate(ids[i : i + 2], mask[i : i + 2], limits[i : i + 2], eos_token_id=[]) for i in (0, 2)]
        found = model.generate(ids, mask, limits, batch_size=2, eos_token_id=[], pad_token_id=3)
        for i, wanted in enumerate(pairs):
            assert torch.equal(found[2 * i : 2 * i + 2, : wanted.shape[1]][:, :13], wanted[:, :13])


def of_rank(folder, sizes, task, how):
    """Ranks with other numbers of rows, which end after other numbers of steps, and read at other times."""
    if sizes["zero_level"] is not None:
        engine.init_distributed(**sizes)
    model = mc.from_pretrained(folder, task)
    ids, mask = prompts(60)
    rows = {0: [0, 1, 2, 3, 4], 1: [5]}[engine.data_rank() % 2]
    calls = []
    limits = [LIMITS[row] for row in rows]
    more = {"batch_size": 2, "before_reading": lambda: calls.append(1), "pad_token_id": 3, "eos_token_id": MANY}
    return model.generate(ids[rows], mask[rows], limits, **more, **how), rows, len(calls)


@pytest.mark.parametrize("name", ["tiny/gpt2", "tiny/t5"])
@pytest.mark.parametrize("level", [None, pytest.param(0, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_two_ranks_read_together(name, level, how, tmp_path):
    task = "seq2seq-lm" if name == "tiny/t5" else "causal-lm"
    fields = {"decoder_start_token_id": 0} if name == "tiny/t5" else {}
    model = randomize_(mc.from_config(name, task, vocab_size=VOCAB, **fields)).eval()
    model.save_pretrained(tmp_path)
    ids, mask = prompts(60)
    alone = of_rows(model, ids, mask, pad_token_id=3, eos_token_id=MANY, **how)
    results = engine.testing.run(of_rank, 2, str(tmp_path), {"zero_level": level}, task, how)
    for found, rows, _ in results:
        wanted = [alone[row] for row in rows]
        same(found, wanted, 3)
    assert results[0][2] == results[1][2] > 2


@pytest.mark.parametrize("beams", [1, 3])
def test_where_no_text_can_end_no_token_waits_for_the_device(pair, beams, monkeypatch):
    """Beam search looks at each token whether its texts can still become better."""
    model, waits = mc.from_pretrained(pair[1]), []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        of_tensor = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, of_tensor=of_tensor: waits.append(1) or of_tensor(self))
    counts = []
    for new in (5, 15):
        waits.clear()
        model.generate(torch.full((2, 4), 9), None, new, num_beams=beams, eos_token_id=[])
        counts.append(len(waits))
    # The cache of a beam search reads the order of its beams.
    assert counts[1] - counts[0] == (0 if beams == 1 else 2 * 10)
