"""Generation against transformers' `generate`: the same tokens."""

import io
import json
import math
import sys
import types

import pytest
import torch
import transformers
from generation_toys import KINDS, MANY, VOCAB, Letters, texts_after
from harness import randomize_

import engine
import modelcenter as mc
from modelcenter.generation import search
from modelcenter.generation.arguments import _warn_unused
from modelcenter.generation.prompts import positions_left
from modelcenter.generation.scores import narrowed, penalised
from modelcenter.generation.settings import Settings, SpecialTokens
from modelcenter.generation.stopping import StopStrings
from modelcenter.layers.cache import KVCache


def prompts(side):
    rng = torch.Generator().manual_seed(4)
    ids = torch.randint(8, VOCAB, (4, 9), generator=rng)
    mask = torch.ones_like(ids)
    for row, n in enumerate((0, 5, 2, 8)):
        columns = slice(0, n) if side == "left" else slice(9 - n, 9)
        ids[row, columns], mask[row, columns] = 0, 0
    return ids, mask


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_transformers(pair, kind):
    theirs, folder = pair
    ours = mc.from_pretrained(folder)
    ids, mask = prompts("left")
    if {"repetition_penalty", "no_repeat_ngram_size"} & set(KINDS[kind]):
        ids = filled(ours, ids, mask)
        wanted = alone(theirs, ids, mask, 25, **KINDS[kind])
    else:
        wanted = theirs.generate(ids, attention_mask=mask, max_new_tokens=25, **{**KINDS[kind], "do_sample": False})
    found = ours.generate(ids, mask, 25, **KINDS[kind])
    assert torch.equal(found, wanted), (found, wanted)


def filled(ours, ids, mask):
    """The prompts with what comes behind them for padding: penalties that saw it would show."""
    free = ours.generate(ids, mask, ids.shape[1], eos_token_id=[])[:, ids.shape[1] :]
    return torch.where(mask.bool(), ids, free)


def alone(theirs, ids, mask, new, **more):
    """What transformers writes for each prompt without padding, which its penalties take for tokens that came."""
    rows = []
    for prompt, kept in zip(ids, mask.bool(), strict=True):
        n = int(kept.sum())
        found = theirs.generate(prompt[kept][None], max_new_tokens=new, **{**more, "do_sample": False})
        rows += [torch.cat((prompt, line[n:])) for line in found]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=5)


def test_a_batch_without_a_mask_is_padded_where_transformers_takes_it_to_be(pair):
    theirs, folder = pair
    ours = mc.from_pretrained(folder)
    ids, mask = prompts("left")
    ids[mask == 0] = 5  # the checkpoint's padding token
    free = {"no_repeat_ngram_size": 1}
    for more in ({}, {"num_beams": 3}):
        assert torch.equal(ours.generate(ids, None, 9, **free, **more), alone(theirs, ids, mask, 9, **free, **more))
    for more in ({"eos_token_id": [5, 7]}, {"pad_token_id": 11}):  # 5 is a token as any other
        wanted = theirs.generate(ids, max_new_tokens=9, do_sample=False, **free, **more)
        assert torch.equal(ours.generate(ids, None, 9, **free, **more), wanted), more
    found = ours.generate(ids, None, 9, **free)
    assert not torch.equal(found, ours.generate(ids, torch.ones_like(ids), 9, **free))
    assert torch.equal(found, ours.generate(ids, mask.float(), 9, **free))  # a mask of any type
    only = torch.full((1, 1), 5)  # a prompt, as it is all there is
    assert torch.equal(ours.generate(only, None, 3), ours.generate(only, torch.ones_like(only), 3))


@pytest.mark.parametrize("value", ["</s>", 1.5, [[1]]])
def test_a_checkpoint_whose_tokens_are_no_numbers_is_one_clear_error(pair, value):
    ours = mc.from_pretrained(pair[1])
    ours.generation_config = {"eos_token_id": value}
    with pytest.raises(ValueError, match="eos_token_id of the checkpoint's generation_config.json .*, expected one or"):
        ours.generate(*prompts("left"), 2)


@pytest.mark.parametrize(("beams", "n"), [(2, 0), (1, 1), (1, 2), (2, 3)])
def test_padding_on_the_right_gives_the_same_texts(pair, beams, n):
    ours = mc.from_pretrained(pair[1])
    ids, mask = prompts("right")
    ids = filled(ours, ids, mask)
    more = {"num_beams": beams, "no_repeat_ngram_size": n, "repetition_penalty": 1.7 if n != 1 else 1.0}
    found = ours.generate(ids, mask, 12, **more)[:, 9:]
    for row, size in enumerate(mask.sum(1).tolist()):
        single = ours.generate(ids[row : row + 1, :size], None, 12, **more)[0, size:]
        assert torch.equal(found[row, : len(single)], single) and (found[row, len(single) :] == 5).all()


def test_a_prompt_shorter_than_the_n_grams_bans_no_token_for_its_empty_places():
    scores = torch.zeros(2, 4)
    texts = texts_after(torch.tensor([[2, 1, 3], [-1, -1, 3]]), torch.zeros(2, 0, dtype=torch.long))
    s = types.SimpleNamespace(
        repetition_penalty=2.0, no_repeat_ngram_size=1, min_new_tokens=0, tokens=SpecialTokens(eos=(1,))
    )
    found = penalised(scores + 1, texts, s)
    assert found.tolist() == [[1, -torch.inf, -torch.inf, -torch.inf], [1, 1, 1, -torch.inf]]


def test_sampling_follows_the_distribution(pair):
    """The next token of one prompt, drawn many times, against the softmax of transformers' warped logits."""
    theirs, folder = pair
    ours = mc.from_pretrained(folder)
    ids = torch.tensor([[9, 14, 33]])
    more = {"temperature": 1.4, "top_k": 9, "top_p": 0.85}
    drawn = ours.generate(ids, None, 1, do_sample=True, num_return_sequences=4000, seed=0, **more)[:, 3]
    warpers = [
        transformers.TemperatureLogitsWarper(1.4),
        transformers.TopKLogitsWarper(9),
        transformers.TopPLogitsWarper(0.85),
    ]
    scores = theirs(ids).logits[:, -1]
    for warp in warpers:
        scores = warp(ids, scores)
    expected = scores.softmax(-1)[0]
    counts = torch.bincount(drawn, minlength=VOCAB) / 4000
    assert not counts[expected == 0].any()
    assert (counts - expected).abs().max() < 0.04
    again = ours.generate(ids, None, 1, do_sample=True, num_return_sequences=4000, seed=0, **more)[:, 3]
    assert torch.equal(drawn, again)
    other = ours.generate(ids, None, 1, do_sample=True, num_return_sequences=4000, seed=1, **more)[:, 3]
    assert not torch.equal(drawn, other)


def test_beams_that_are_drawn_go_on_by_their_scores(pair, monkeypatch):
    """If the best are drawn, in whatever order, sampling with beams is beam search."""
    ours = mc.from_pretrained(pair[1])
    ids, mask = prompts("left")
    more = {"num_beams": 4, "num_return_sequences": 3, "eos_token_id": MANY}
    wanted = ours.generate(ids, mask, 12, **more)
    monkeypatch.setattr(search, "drawn", lambda scores, count, rng: scores.topk(count).indices.flip(1))
    assert torch.equal(ours.generate(ids, mask, 12, do_sample=True, **more), wanted)


def test_where_fewer_beams_end_than_are_asked_for_the_prompt_stands_alone(pair):
    ours = mc.from_pretrained(pair[1])
    ids, mask = prompts("left")
    banned = torch.ones(4, VOCAB, dtype=torch.bool)
    banned[:, 8:10] = False  # two texts for each prompt
    more = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": []}
    found = ours.generate(ids, mask, 1, banned=banned, **more)
    assert torch.equal(found[:, :9], ids.repeat_interleave(3, 0)) and (found[2::3, 9] == 5).all()


def test_top_p_keeps_at_least_one():
    s = Settings(tokens=SpecialTokens(), max_new_tokens=1, top_p=1e-6)
    assert (narrowed(torch.tensor([[0.0, 3.0, 1.0, 2.0, 2.9]]), s) > -torch.inf).tolist() == [[0, 1, 0, 0, 0]]


def test_beams_that_are_drawn_have_as_many_tokens_left_as_may_end_and_one(pair, monkeypatch):
    """As transformers: without it a row's beams could all end, or be too few to draw from."""
    scores = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    for setting, warp in (
        ({"top_k": 1}, transformers.TopKLogitsWarper(1, min_tokens_to_keep=3)),
        ({"top_p": 1e-6}, transformers.TopPLogitsWarper(1e-6, min_tokens_to_keep=3)),
    ):
        s = Settings(tokens=SpecialTokens(), max_new_tokens=1, **setting)
        assert torch.equal(narrowed(scores, s, 3), warp(None, scores)), setting
    kept = []
    monkeypatch.setattr(search, "narrowed", lambda scores, s, keep=1: kept.append(keep) or narrowed(scores, s, keep))
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    for ends in ([], [7], MANY):
        ours.generate(ids, None, 1, num_beams=2, do_sample=True, top_k=1, eos_token_id=ends)
    assert kept == [2, 2, len(MANY) + 1]


def test_without_a_seed_torchs_own_decides(pair):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(ours.generate(ids, None, 20, do_sample=True, eos_token_id=[]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_stop_strings_end_a_row(pair):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    free = ours.generate(ids, None, 20, eos_token_id=[])[0, 9:]
    text = Letters().decode(free)
    stop = text[4:6]
    end = text.index(stop) + 2
    for strings in (stop, [stop, "no such text"]):
        found = ours.generate(ids, None, 20, eos_token_id=[], stop_strings=strings, tokenizer=Letters())[0, 9:]
        assert torch.equal(found, free[:end])
    with pytest.raises(ValueError, match="stop_strings: got no tokenizer"):
        ours.generate(ids, None, 20, stop_strings="x")


class Words(Letters):
    """A word for each token, the first without its space, as SentencePiece's decoders have it."""

    def decode(self, tokens, **_):
        return "".join(f" {chr(ord('A') + int(t))}" for t in tokens).removeprefix(" ")


def test_stop_strings_that_begin_with_the_space_before_the_first_new_word(pair):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    more = {"tokenizer": Words(), "eos_token_id": [], "pad_token_id": 11}
    first = ours.generate(ids, None, 1, **more)
    stop = f" {Words().decode(first[0, 9:])}"
    assert torch.equal(ours.generate(ids, None, 20, stop_strings=stop, **more), first)


@pytest.mark.parametrize("stop", ["\u8336\u5317", "\n", "a\U0001f600", "b c"])
def test_stop_strings_in_characters_of_byte_tokens(stop):
    """SentencePiece's tokens of bytes: a run of them is decoded as a whole, or each as U+FFFD."""
    from tokenizers import Tokenizer, decoders, models

    names = [*"abc ", *(f"<0x{byte:02X}>" for byte in range(256)), "<unk>"]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    for text in (
        "\u5317\u4eac\u8336" * 8 + "\u5317",
        "\U0001f600" * 5 + "\u4eac\n",
        "a" + "\U0001f600" * 9,
        "\u4eac" * 9 + "b c",
    ):
        pieces = [[c] if c in names else [f"<0x{byte:02X}>" for byte in c.encode()] for c in "a" + text]
        ids = torch.tensor([tokenizer.convert_tokens_to_ids([piece for part in pieces for piece in part])])
        checks = StopStrings(stop, tokenizer)
        # A running text contains none, so only the first result counts.
        found = next((n for n in range(1, ids.shape[1]) if checks.found(ids[:, : n + 1])[0]), None)
        wanted = next((n for n in range(1, ids.shape[1]) if stop in tokenizer.decode(ids[0, : n + 1])[1:]), None)
        assert found == wanted, text


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_of_the_prompt_end_nothing(pair, beams):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    more = {"num_beams": beams, "eos_token_id": [], "pad_token_id": 11}
    free = ours.generate(ids, None, 6, **more)
    stop = Letters().decode(ids[0, -2:])
    assert stop not in Letters().decode(free[0, 8:])
    assert torch.equal(ours.generate(ids, None, 6, stop_strings=stop, tokenizer=Letters(), **more), free)


def test_stop_strings_end_beams_where_the_longest_ends(pair):
    """As transformers cuts them; the padding that ends texts, too, is no sign of an end."""
    theirs, folder = pair
    ours, ids = mc.from_pretrained(folder), prompts("left")[0][:1]
    text = Letters().decode(ours.generate(ids, None, 20, num_beams=3, eos_token_id=[])[0, 9:])
    more = {"num_beams": 3, "stop_strings": text[3:5], "tokenizer": Letters(), "eos_token_id": [], "pad_token_id": 11}
    found = ours.generate(ids, None, 40, **more)
    ends = [Letters().decode(row).index(text[3:5], 9) + 2 for row in found]
    assert found.shape[1] == max(ends) < 49


def test_settings_of_the_file_that_are_left_are_said_once(pair, caplog):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    _warn_unused.cache_clear()
    ours.generation_config = {"repetition_penalty": 1.05, "num_beams": 1, "min_length": 3, "temperature": 0.6}
    for more in ({}, {}, {"repetition_penalty": 1.05}):
        ours.generate(ids, None, 2, **more)
    found = [record.getMessage() for record in caplog.records]
    assert [text.partition(";")[0] for text in found] == [
        "generation_config.json asks for repetition_penalty=1.05, min_length=3",
        "generation_config.json asks for min_length=3",
    ]


def test_a_length_in_the_file_is_said_unless_the_call_has_one(pair, caplog):
    """Without a limit, 20 tokens are written, where transformers writes as many as the file says."""
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    for file, more, said in (
        ({"max_length": 40}, {}, "asks for max_length=40;"),
        ({"max_new_tokens": 3}, {"eos_token_id": []}, "asks for max_new_tokens=3;"),
        ({"max_new_tokens": 20, "max_length": 20}, {}, ""),  # the default
        ({"max_length": 40}, {"max_new_tokens": 2}, ""),
        ({"max_new_tokens": 3}, {"max_length": ids.shape[1] + 2}, ""),
    ):
        _warn_unused.cache_clear()
        caplog.clear()
        ours.generation_config = file
        ours.generate(ids, **more)
        assert (said in caplog.text) if said else ("asks for" not in caplog.text), file


def test_every_setting_of_the_file_that_changes_a_greedy_text_is_said(pair, caplog):
    """Where transformers' text is another one with it, a warning names it."""
    theirs, folder = pair
    ours, ids = mc.from_pretrained(folder), prompts("left")[0][:1]
    greedy = ours.generate(ids, None, 8)
    first = end = int(greedy[0, 9])
    settings = {
        "bad_words_ids": [[first]], "suppress_tokens": [first], "begin_suppress_tokens": [first], "min_length": 16,
        "min_new_tokens": 8, "sequence_bias": [[[first], -50.0]], "exponential_decay_length_penalty": [1, 9.0],
        "forced_bos_token_id": 9, "forced_eos_token_id": 9, "repetition_penalty": 3.0, "no_repeat_ngram_size": 1,
        "encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 1, "guidance_scale": 3.0, "num_beams": 4,
        "watermarking_config": {"bias": 20.0}, "top_k": 3, "typical_p": 0.4, "renormalize_logits": True,
    }  # fmt: skip
    for name, value in settings.items():
        file = {"eos_token_id": end, name: value}
        wanted = theirs.generate(ids, generation_config=transformers.GenerationConfig(max_new_tokens=8, **file))
        _warn_unused.cache_clear()
        caplog.clear()
        ours.generation_config = file
        found = ours.generate(ids, None, 8)
        said = f"generation_config.json asks for {name}={value!r};" in caplog.text
        assert torch.equal(found, greedy[:, : found.shape[1]]) and (said or torch.equal(found, wanted)), name


@pytest.mark.parametrize(
    ("words", "starts", "banned"),
    [
        ([[3], [7], [60], [4, 60]], True, ((3,),)),  # an end and what the vocabulary lacks come to nothing
        ([[3], [4, 7]], True, ((3,), (4, 7))),
        ([[3]], False, ()),  # of a decoder, as of all its settings
    ],
)
def test_which_of_the_words_that_a_checkpoint_bans_are_kept_out(words, starts, banned):
    assert SpecialTokens.resolve([7], None, {"bad_words_ids": words}, 50, starts).bad_words == banned


def test_texts_that_are_to_be_longer_than_they_may_are_said_once(pair, caplog):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    length = ids.shape[1]
    for lengths, said, written in [
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "min_new_tokens asks for 3 and max_new_tokens allows 2", 2),
        ({"min_length": length + 4, "max_length": length + 2}, "min_length asks for 4 and max_length allows 2", 2),
        ({"min_new_tokens": 2, "max_new_tokens": 2}, None, 2),
        ({"min_new_tokens": 21}, "min_new_tokens asks for 21 and max_new_tokens allows 20", 20),
    ]:
        caplog.clear()
        for _ in range(2):
            new = ours.generate(ids, eos_token_id=MANY, **lengths)[0, length:].tolist()
        assert len(new) == written and not set(new) & set(MANY)
        found = [record.getMessage().partition(":")[0].replace(" new tokens", "") for record in caplog.records]
        assert found == ([] if said is None else [said])


def test_stop_strings_of_the_file_are_said_where_they_are_not_the_callers(pair, caplog):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    ours.generation_config = {"stop_strings": ["xyz"]}
    _warn_unused.cache_clear()
    ours.generate(ids, None, 2, stop_strings="xyz", tokenizer=Letters())
    assert not caplog.records
    ours.generate(ids, None, 2)
    assert "asks for stop_strings=['xyz'];" in caplog.text


@pytest.mark.parametrize("part", ["decoder", None])
def test_settings_that_are_left_may_be_in_an_old_config(part, tmp_path, caplog):
    """As in checkpoints of 2020; transformers follows them where there is no generation_config.json."""
    mc.from_config("tiny/encoder-decoder", "seq2seq-lm").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tasks = {"summarization": {"num_beams": 3, "length_penalty": 2.0}}  # T5's, which nobody asked for
    settings = {"num_beams": 4, "no_repeat_ngram_size": 3, "min_length": 0, "task_specific_params": tasks}
    (config if part is None else config[part]).update(settings)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([[8, 9, 10]])
    for file, said in ((None, ["config.json asks for num_beams=4"]), ("generation_config.json", [])):
        if file is not None:
            (tmp_path / file).write_text('{"eos_token_id": 3}')
        theirs = transformers.EncoderDecoderModel.from_pretrained(tmp_path).generation_config
        assert (theirs.num_beams == 4 and theirs.no_repeat_ngram_size == 3) == (file is None)
        ours = mc.from_pretrained(tmp_path)
        _warn_unused.cache_clear()
        caplog.clear()
        ours.generate(ids, None, 2, no_repeat_ngram_size=3)
        assert [record.getMessage().partition(";")[0] for record in caplog.records] == said


@pytest.mark.parametrize(("name", "task"), [("tiny/encoder-decoder", "seq2seq-lm"), ("tiny/bert", "causal-lm")])
def test_what_a_tokenizer_returns_is_taken_as_it_is(name, task):
    model = mc.from_config(name, task, **({"is_decoder": True} if task == "causal-lm" else {}))
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    ids = torch.randint(8, 60, (2, 7))
    types = torch.arange(14).view(2, 7) % 2
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=types, max_new_tokens=2)
    assert seen[0]["token_type_ids"].tolist() == [types.flatten().tolist()]


@pytest.mark.parametrize("name", ["decoder_input_ids", "decoder_attention_mask", "encoder_outputs"])
def test_what_the_decoder_is_given_is_no_input_of_the_prompts(name):
    """Forward takes it, and each step would have it in the place of the token that was written."""
    model, ids = mc.from_config("tiny/t5", "seq2seq-lm"), torch.tensor([[8, 9, 1]])
    with pytest.raises(ValueError, match=f"{name}: neither an argument of generate nor an input"):
        model.generate(ids, **{name: ids})


def test_a_min_length_that_the_prompt_has_already_asks_for_no_token(pair):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    end = int(ours.generate(ids, None, 1, eos_token_id=[])[0, 9])
    for least, ends_at_once in ((4, True), (9, True), (10, False)):
        found = ours.generate(ids, None, 4, eos_token_id=end, min_length=least)
        assert (found.shape[1] == 10) == ends_at_once, least


def test_a_first_token_that_the_vocabulary_lacks_is_nothing_to_a_decoder(pair):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]
    ours.generation_config = {"bos_token_id": 10**6}
    assert ours.generate(ids, None, 2).shape == (1, 11)


def test_parts_that_were_in_eval_mode_stay_so(pair):
    ours = mc.from_pretrained(pair[1]).train()
    part = next(iter(ours.children())).eval()
    ours.generate(prompts("left")[0], None, 2)
    assert ours.training and not any(module.training for module in part.modules())


@pytest.mark.parametrize(("name", "token"), [("decoder_start_token_id", 7), ("bos_token_id", 9)])
def test_what_a_decoder_begins_with(name, token):
    model = mc.from_config("tiny/t5", "seq2seq-lm")
    model.config.extra.pop("decoder_start_token_id", None)
    model.generation_config = {name: token, "decoder_start_token_id": None, "pad_token_id": 3} | {name: token}
    assert model.generate(torch.tensor([[5, 6]]), None, 1)[0, 0] == token
    model.generation_config = {"decoder_start_token_id": None, "bos_token_id": None, "pad_token_id": 3}
    assert model.generate(torch.tensor([[5, 6]]), None, 1)[0, 0] == 3  # T5's own, where nobody says
    model.generation_config[name] = [token, token]
    with pytest.raises(ValueError, match=f"{name} of the checkpoint: got .*, expected one token"):
        model.generate(torch.tensor([[5, 6]]), None, 1)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_the_texts_of_an_encoder_decoder_are_forced_to(beams, file, tmp_path, caplog):
    """The first and the last token are the checkpoint's, as in transformers, or the caller's; [] for none."""
    model = randomize_(mc.from_config("tiny/t5", "seq2seq-lm", num_layers=3), 5)
    forced = {"forced_bos_token_id": 9, "forced_eos_token_id": 11}
    model.save_pretrained(tmp_path)
    held = model.config.special_tokens() if file != "config.json" else json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**held, **forced}))
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    ours, ids = mc.from_pretrained(tmp_path), torch.tensor([[8, 9, 10, 1], [7, 5, 20, 1]])
    more = {"max_new_tokens": 5, "num_beams": beams, "eos_token_id": 1}
    found = ours.generate(ids, None, **more)
    assert torch.equal(found, theirs.generate(ids, do_sample=False, **more)) and (found[:, 1] == 9).all()
    assert (found[:, -1] == 11).all() and not caplog.records
    with_default = mc.from_pretrained(tmp_path, num_beams=beams)  # the settings that a caller names are not all
    assert torch.equal(with_default.generate(ids, None, 5, eos_token_id=1), found)
    given = ours.generate(ids, None, **more, forced_bos_token_id=12, forced_eos_token_id=[])
    assert (given[:, 1] == 12).all() and not (given[:, -1] == 11).any()
    by_default = mc.from_pretrained(tmp_path, forced_bos_token_id=12)
    assert (by_default.generate(ids, None, **more)[:, 1] == 12).all()
    free = ours.generate(ids, None, **more, forced_bos_token_id=[], forced_eos_token_id=[])
    assert not (free[:, 1] == 9).any()


@pytest.mark.parametrize("value", [[1, 2], 131, "<s>"])
def test_a_forced_token_that_is_none(value):
    model = mc.from_config("tiny/t5", "seq2seq-lm")
    with pytest.raises(ValueError, match="forced_bos_token_id: got"):
        model.generate(torch.tensor([[8, 1]]), None, 2, forced_bos_token_id=value)
    with pytest.raises(ValueError, match="forced_bos_token_id: got"):
        mc.from_config("tiny/t5", "seq2seq-lm", forced_bos_token_id=value)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_grows_with_long_texts(pair, beams, monkeypatch):
    ours = mc.from_pretrained(pair[1])
    ids, mask = prompts("left")
    wanted = ours.generate(ids, mask, 25, num_beams=beams, eos_token_id=[])
    monkeypatch.setattr("modelcenter.generation.state._RESERVE", 3)
    caches = []
    add = KVCache._append
    monkeypatch.setattr(KVCache, "_append", lambda self, *args: caches.append(self) or add(self, *args))
    assert torch.equal(ours.generate(ids, mask, 25, num_beams=beams, eos_token_id=[]), wanted)
    assert max(x.shape[2] for kept in caches[-1]._own.values() for x in kept) == 9 + 25


def test_streaming(pair):
    ours, ids = mc.from_pretrained(pair[1]), prompts("left")[0][:1]

    class Tokenizer(Letters):
        def decode(self, tokens, **_):
            return " ".join(str(int(t)) for t in tokens) + " "

    out, before = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        tokens = ours.generate(ids, None, 6, streamer=transformers.TextStreamer(Tokenizer(), skip_prompt=True))
    finally:
        sys.stdout = before
    assert out.getvalue().split() == [str(t) for t in tokens[0, 9:].tolist()]
    with pytest.raises(ValueError, match="streamer: it shows one growing sequence"):
        ours.generate(ids, None, 6, num_beams=2, streamer=object())


def test_compiled_units_write_as_they_are_written():
    """What a cache holds grows with each token: the compiler would take minutes, and inductor fails with T5's bias."""
    from torch._dynamo.testing import CompileCounterWithBackend

    backend = CompileCounterWithBackend("eager")
    torch._dynamo.register_backend(backend, "generation_test_counter")
    ids, mask = prompts("left")
    policies = (engine.Policy(), engine.Policy(compile="generation_test_counter"))
    plain, compiled = (mc.from_config("tiny/t5", "seq2seq-lm", vocab_size=VOCAB, policy=policy) for policy in policies)
    assert torch.equal(plain.generate(ids, mask, 6), compiled.generate(ids, mask, 6))
    assert backend.frame_count == 0
    compiled(ids, mask, labels=ids)
    assert backend.frame_count > 0


@pytest.mark.parametrize(
    "more, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"max_new_tokens": 56}, "9 tokens and 56 new ones exceed the 64 positions"),
        ({"temperature": 0.0, "do_sample": True}, "temperature: got 0.0"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"eos_token_id": VOCAB}, f"eos_token_id: got {VOCAB}"),
        ({"num_return_sequences": 2}, "num_return_sequences: got 2, expected at most num_beams=1"),
        (
            {"num_return_sequences": 4, "num_beams": 2, "do_sample": True},
            "num_return_sequences: got 4, expected at most num_beams=2; raise num_beams, or .* num_beams=1",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id: got '</s>', expected one or several token ids"),
        ({"temperature": "hot"}, "temperature: got 'hot', expected a number"),
        ({"min_new_tokens": -1}, "min_new_tokens: got -1, expected a whole number of at least 0"),
        ({"min_length": 2.5}, "min_length: got 2.5, expected a whole number of at least 0"),
        ({"stop_strings": 5}, "stop_strings: got 5, expected a text or several"),
        ({"repetition_penalty": "1.2"}, "repetition_penalty: got '1.2', expected a number"),
        ({"seed": 1.5}, "seed: got 1.5, expected a whole number"),
        ({"length_penalty": 1000.0}, r"length_penalty: got 1000.0, expected a number between -55\.1 and 55\.1"),
        ({"length_penalty": math.nan}, "length_penalty: got nan, expected a number between"),
        ({"do_sample": "false"}, "do_sample: got 'false', expected True or False"),
        ({"early_stopping": "no"}, "early_stopping: got 'no', expected True, False or 'never'"),
        ({"max_new_tokens": None, "max_length": 9}, "max_length: got 9, expected more than the 9 tokens"),
        ({"max_new_tokens": None, "max_length": "20"}, "max_length: got '20', expected more than"),
        ({"num_beam": 2}, "num_beam: neither .*; did you mean num_beams?"),
        (
            {"sequence_bias": torch.ones(4, 9)},
            "sequence_bias: neither an argument of generate nor an input of \\w+ per token",
        ),
        ({"position_ids": torch.ones(4, 9)}, "position_ids: neither .*; positions are counted from a prompt's first"),
        ({"token_inputs": {"position_ids": torch.ones(4, 9)}}, "position_ids: neither an argument"),
        ({"input_ids": [[1, 2]]}, "input_ids: got list, expected a tensor"),
        ({"input_ids": {"input_ids": torch.ones(1, 2)}}, r"by name: \*\*batch"),
        ({"attention_mask": torch.zeros(4, 9, dtype=torch.long)}, "row 0 has no token"),
        ({"attention_mask": torch.ones(4, 8, dtype=torch.long)}, "attention_mask: got shape"),
        ({"banned": torch.ones(1, VOCAB) > 0}, rf"banned: got shape \(1, {VOCAB}\) of .*, expected \(4, {VOCAB}"),
        ({"banned": torch.zeros(4, VOCAB)}, "banned: got .* of torch.float32, expected .* of torch.bool"),
        ({"banned": torch.arange(4)[:, None].expand(4, VOCAB) == 2}, "banned: row 2 has no token left"),
    ],
)
def test_arguments_that_cannot_be_followed_are_named(pair, more, message):
    ours = mc.from_pretrained(pair[1])
    ids, mask = prompts("left")
    with pytest.raises(ValueError, match=message):
        ours.generate(**{"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, **more})


def test_a_model_without_a_language_head_writes_no_text(pair):
    with pytest.raises(ValueError, match="cannot generate text"):
        mc.from_pretrained(pair[1], "base").generate(prompts("left")[0])


@pytest.mark.parametrize("name", "gpt2 gptj opt bert roberta llama gpt_neox bloom cpm1 cpmant".split())
def test_models_with_a_table_of_positions_say_so(name):
    """A model is bounded exactly if it refuses one token more than it has positions for."""
    encoder = {"is_decoder": True} if name in ("bert", "roberta") else {}
    model = mc.from_config(f"tiny/{name}", "causal-lm", **encoder)
    longest = model.config.max_tokens or 64
    left = positions_left(model, 5)
    assert left == (longest - 5 if model.bounded else None)
    try:
        model.begin({"input_ids": torch.zeros(1, longest + 1, dtype=torch.long)})
        refused = False
    except ValueError:
        refused = True
    assert refused == model.bounded


def test_generation_config_travels(pair, tmp_path):
    theirs, folder = pair
    ours = mc.from_pretrained(folder)
    assert ours.generation_config["eos_token_id"] == 7
    other = mc.from_pretrained(folder, eos_token_id=8, pad_token_id=3).generation_config
    assert (other["eos_token_id"], other["pad_token_id"]) == (8, 3)  # what the caller says, not what the file says
    ours.generation_config["eos_token_id"] = [7, 8]
    for form in ("hf", "distributed"):
        ours.save_pretrained(tmp_path / form, form)
        assert mc.from_pretrained(tmp_path / form).generation_config["eos_token_id"] == [7, 8]
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").generation_config.eos_token_id == [7, 8]


def test_tokens_that_the_caller_names_when_loading_come_before_those_of_the_file(tmp_path):
    mc.from_config("tiny/t5", "seq2seq-lm").save_pretrained(tmp_path)
    file = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    tokens = {"decoder_start_token_id": 11, "eos_token_id": [5, 6], "pad_token_id": 3}
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, **tokens).generation_config
    ours = mc.from_pretrained(tmp_path, **tokens)
    for name, value in tokens.items():
        assert ours.generation_config[name] == value == getattr(theirs, name)
    assert ours.generate(torch.tensor([[8, 9, 1]]), None, 1)[0, 0] == 11


def test_settings_that_the_caller_names_when_loading_are_what_generate_does(pair, tmp_path, caplog):
    """Unless its caller says otherwise; transformers reads them in the export."""
    theirs, folder = pair
    ids, mask = prompts("left")
    settings = {"num_beams": 3, "length_penalty": 0.5, "max_new_tokens": 6, "no_repeat_ngram_size": 2}
    ours = mc.from_pretrained(folder, **settings)
    assert torch.equal(ours.generate(ids, mask), mc.from_pretrained(folder).generate(ids, mask, **settings))
    _warn_unused.cache_clear()
    plain = {"num_beams": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0}
    assert torch.equal(ours.generate(ids, mask, 4, **plain), mc.from_pretrained(folder).generate(ids, mask, 4))
    assert ours.generate(ids, mask, max_length=11).shape[1] == 11  # a length of the call, however it is said
    assert not caplog.records
    ours.save_pretrained(tmp_path)
    written = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).generation_config
    assert written.eos_token_id == 7 and {name: getattr(written, name) for name in settings} == settings
    assert "num_beams" not in json.loads((tmp_path / "config.json").read_text())
    fresh = mc.from_config("tiny/gpt2", "causal-lm", temperature=0.5, pad_token_id=4)
    assert fresh.generation_config.temperature == 0.5 and fresh.generation_config.pad_token_id == 4


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("causal-lm", {"num_beams": 0}, "num_beams: got 0, expected a whole number of at least 1"),
        ("causal-lm", {"temperature": -1.0}, "temperature: got -1.0"),
        ("causal-lm", {"max_length": "9"}, "max_length: got '9', expected a whole number"),
        ("causal-lm", {"stop_strings": ["a", ""]}, "stop_strings: got .*, none of them empty"),
        ("causal-lm", {"min_length": -4}, "min_length: got -4, expected a whole number of at least 0"),
        ("causal-lm", {"sequence_bias": [[[4], 1.0]]}, "sequence_bias: not an argument of generate here"),
        ("causal-lm", {"bad_words_ids": [[4, 99]]}, "bad_words_ids: got 99, but the vocabulary has the tokens 0 to 60"),
        ("causal-lm", {"min_p": 2}, "min_p: got 2, expected a share of the highest probability"),
        ("causal-lm", {"generation_config": {"num_beams": 4}}, "generation_config.*give its settings one by one"),
        ("causal-lm", {"temperatur": 0.5}, "'temperatur' = 0.5.*Did you mean 'temperature'"),
        ("sequence-classification", {"num_beams": 4}, "num_beams: a model for the task .* cannot generate"),
    ],
)
def test_wrong_settings_when_loading(pair, task, settings, message):
    with pytest.raises(ValueError, match=message):
        mc.from_pretrained(pair[1], task, **settings)


def on_ranks(folder, beams):
    """Ranks with prompts of their own, which end after different numbers of steps."""
    ours = mc.from_pretrained(folder)
    ids, mask = prompts("left")
    rank = engine.rank()
    return ours.generate(
        ids[rank :: engine.world_size()], mask[rank :: engine.world_size()], 6 + 9 * rank, num_beams=beams
    )


def sharded(folder, beams):
    engine.init_distributed(zero_level=3)
    return on_ranks(folder, beams)


@pytest.mark.parametrize("beams", [1, 3])
def test_two_ranks_give_what_one_does(pair, beams):
    ours = mc.from_pretrained(pair[1])
    ids, mask = prompts("left")
    for rank, found in enumerate(engine.testing.run(sharded, 2, pair[1], beams)):
        wanted = ours.generate(ids[rank::2], mask[rank::2], 6 + 9 * rank, num_beams=beams)
        assert torch.equal(found, wanted)
