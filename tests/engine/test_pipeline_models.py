"""Pipelines of encoder-decoders and of the CPM, whose blocks share more than hidden states; and what a split model
writes and shows: generation and hidden states."""

import itertools
import types
from unittest import mock

import engine_toys as toys
import pytest
import torch
from engine_toys import union

import engine
import modelcenter as mc
from engine.names import model_tensors
from engine.notes import stages_of
from modelcenter import registry
from modelcenter.compare import pack_rows, pad_rows, rows_for
from modelcenter.testing import randomize_

PP, INTERLEAVED = {"pp_size": 2}, {"pp_size": 2, "pp_chunks": 2}
FOUR = {"pp_size": 4}
# Of both sides together 5 units: with two parts the first one ends among the decoder's, with four there are seams.
SIDES = {"num_layers": 2, "num_decoder_layers": 3}
LENGTHS = ((7, 3, 11, 5), (4, 2, 6), (2,), (1, 9))
LAST = {"num_layers": 4}
# Sides of two widths, of which a stage hands on both.
WIDTHS = {
    "decoder": registry.preset("tiny/t5gemma")["config"]["decoder"] | {"hidden_size": 36, "intermediate_size": 60}
}


def built(name, task, sizes, fields):
    if sizes:
        engine.init_distributed(**sizes)
    model = randomize_(mc.from_config(name, task, policy=False, **fields))
    return engine.shard(model) if sizes else model


def batches(model):
    """Packed and padded ones of other sizes, in a number that is odd."""
    found = []
    for i, lengths in enumerate(LENGTHS[:3]):
        rows = rows_for(model.task, model.config, lengths=lengths, seed=i)
        packed = i % 2 == 0
        found.append(pack_rows(model.task, rows) if packed else pad_rows(model.task, rows, "left"))
    if model.config.model_type == "cpmbee":
        for batch in found:
            batch["input_id_sub"] = batch["input_ids"] % 3
    return found


def trained(name, task, sizes, fields, frozen=()):
    """Of two global batches: losses, gradients (of the second added to those of the first), norm."""
    model = built(name, task, {}, {**fields, "dropout": 0.0}).train()
    for parameter in (p for n, p in model.named_parameters() if n.startswith(frozen)):
        parameter.requires_grad_(False)
    if sizes:
        engine.init_distributed(**sizes)
        engine.shard(model)
    own = batches(model)
    losses = [mc.training.accumulate(model, part).item() for part in (own, own[1:])]
    norm = engine.optim.clip_grad_norm_(model.parameters(), 1e9).item()
    return losses, norm, {n: toys.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def foreign_on_one_stage(path):
    model = built("tiny/bert", "masked-lm", PP, {})
    optimizer = engine.optim.AdamOptimizer(model.parameters())
    if engine.rank() == 1:
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2, 3)))
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 3\) that is not in the model"):
        engine.save_checkpoint(path, model, optimizer)
    if engine.rank() == 1:
        optimizer.param_groups[0]["params"].pop()
    engine.save_checkpoint(path, model, optimizer)
    if engine.rank() == 0:
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2, 3)))
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 3\) that is not in the model"):
        engine.load_checkpoint(path, model, optimizer)


def test_a_stage_with_another_optimizer_keeps_no_other_waiting(two, tmp_path):
    two.run(foreign_on_one_stage, tmp_path / "c")


def same(results, expected):
    for losses, norm, _ in results:
        assert losses == pytest.approx(expected[0], rel=1e-5) and norm == pytest.approx(expected[1], rel=1e-4)
    found = union([grads for *_, grads in results])
    assert found.keys() == expected[2].keys()
    for name, grad in expected[2].items():
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=2e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


GLOBALS = {**SIDES, "global_first_token": True}
BARTS = ("tiny/bart", "tiny/mbart", "tiny/m2m_100", "tiny/marian", "tiny/pegasus")
CASES = [
    ("tiny/t5", "seq2seq-lm", PP, SIDES),
    ("tiny/umt5", "seq2seq-lm", INTERLEAVED, SIDES),
    ("tiny/t5", "token-classification", PP, LAST),
    ("tiny/cpmant", "causal-lm", INTERLEAVED, LAST),
    ("tiny/cpmbee", "causal-lm", PP, LAST),
]
MORE = [
    (name, task, sizes, fields if fields else SIDES if "t5" in name or name in ("tiny/cpm2", *BARTS) else LAST)
    for name, task, fields in [
        ("tiny/t5", "sequence-classification", None),
        ("tiny/mt5", "question-answering", None),
        ("tiny/mt5", "seq2seq-lm", None),
        ("tiny/t5", "seq2seq-lm", None),
        ("tiny/cpm2", "seq2seq-lm", None),
        *((name, "seq2seq-lm", None) for name in BARTS),
        ("tiny/led", "seq2seq-lm", GLOBALS),
        ("tiny/t5gemma", "seq2seq-lm", WIDTHS),
        ("tiny/t5gemma", "sequence-classification", WIDTHS),
        *((f"tiny/{cpm}", "causal-lm", None) for cpm in ("cpm1", "cpm3", "cpmant", "cpmbee")),
    ]
    for sizes in (PP, INTERLEAVED)
]


@pytest.mark.parametrize(
    ("name", "task", "sizes", "fields"), CASES + [pytest.param(*case, marks=pytest.mark.full) for case in MORE]
)
def test_two_stages_train_as_one_process(two, name, task, sizes, fields):
    same(two.run(trained, name, task, sizes, fields), trained(name, task, {}, fields))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "task", "sizes", "fields"),
    [
        ("tiny/t5", "seq2seq-lm", FOUR, {"num_layers": 3, "num_decoder_layers": 4}),
        ("tiny/t5", "seq2seq-lm", {**FOUR, "pp_chunks": 2}, {"num_layers": 4, "num_decoder_layers": 5}),
        ("tiny/umt5", "seq2seq-lm", {**PP, "tp_size": 2}, SIDES),
        ("tiny/t5gemma", "seq2seq-lm", {**PP, "tp_size": 2}, WIDTHS),
        ("tiny/t5gemma", "seq2seq-lm", {**INTERLEAVED, "cp_size": 2}, WIDTHS),
        ("tiny/bart", "seq2seq-lm", {**PP, "tp_size": 2}, SIDES),
        ("tiny/t5", "seq2seq-lm", {**INTERLEAVED, "cp_size": 2}, SIDES),
        ("tiny/cpmant", "causal-lm", FOUR, {"num_layers": 5}),
        ("tiny/cpm3", "causal-lm", {**PP, "tp_size": 2}, LAST),
        ("tiny/cpmbee", "causal-lm", {**INTERLEAVED, "cp_size": 2}, LAST),
    ],
)
def test_four_ranks_train_as_one_process(four, name, task, sizes, fields):
    same(four.run(trained, name, task, sizes, fields), trained(name, task, {}, fields))


@pytest.mark.parametrize("level", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_stage_whose_first_part_is_frozen(two, level):
    """No backward reaches it; the second part trains a norm outside the units."""
    fields = {"num_layers": 6, "num_decoder_layers": 2}
    frozen = ("embed.", "encoder.position", "encoder.layers.0.", "encoder.layers.1.", "decoder.position")
    expected = trained("tiny/t5", "seq2seq-lm", {}, fields, frozen)
    assert "encoder.final_norm.weight" in expected[2]
    same(two.run(trained, "tiny/t5", "seq2seq-lm", {**INTERLEAVED, "zero_level": level}, fields, frozen), expected)


def held(sizes, fields):
    model = built("tiny/t5", "seq2seq-lm", sizes, fields)
    return {name for name, _ in model_tensors(model) if "layers" not in name}, stages_of(model).copies


def test_a_stage_has_what_its_units_read(four):
    (first, *_), (second, _), (third, copied), (last, copies) = four.run(
        held, FOUR, {"num_layers": 3, "num_decoder_layers": 4}
    )
    assert first == {"embed.weight", "encoder.position.weight"}
    assert second == {"encoder.position.weight", "encoder.final_norm.weight", "decoder.position.weight"}
    assert third == {"decoder.position.weight"} == copied
    assert last == {"decoder.position.weight", "embed.weight", "decoder.final_norm.weight"}
    assert copies == {"decoder.position.weight", "embed.weight"}


def shared_by_layers(name):
    """How many copies of the bias and the rotations the layers of this stage are given in one forward, and dtypes."""
    engine.init_distributed(**PP)
    model = randomize_(mc.from_config(name, "causal-lm", policy=False, **LAST)).train()
    engine.shard(model, policy=engine.Policy(precision="bf16"))
    seen = []

    def note(_, given):
        seen.extend(x for x in (given[1].bias, *(given[1].rotary or ())) if x is not None)

    for unit in model.units:
        unit.register_forward_pre_hook(note)
    mc.training.accumulate(model, batches(model)[:1])
    return len({x.data_ptr() for x in seen}), {x.dtype for x in seen}


@pytest.mark.parametrize(("name", "shared"), [("tiny/bloom", 1), pytest.param("tiny/llama", 2, marks=pytest.mark.full)])
def test_what_layers_share_is_not_cast_by_each(two, name, shared):
    """Also on a stage that has no hidden states when it makes this: each layer would keep a copy for backward."""
    assert two.run(shared_by_layers, name) == [(shared, {torch.bfloat16})] * 2


def exported(sizes, path, kind):
    model = built("tiny/t5", "seq2seq-lm", sizes, SIDES)
    if kind == "distributed":
        engine.checkpoint.save_model(path, model)
    else:
        model.save_pretrained(path)


def test_exports_are_those_of_one_process(two, tmp_path):
    exported({}, tmp_path / "one", "hf")
    two.run(exported, INTERLEAVED, tmp_path / "two", "hf")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    two.run(exported, PP, tmp_path / "three", "distributed")
    one, back = built("tiny/t5", "seq2seq-lm", {}, SIDES), mc.from_config("tiny/t5", "seq2seq-lm", **SIDES)
    engine.checkpoint.load_model(tmp_path / "three", back)
    for name, tensor in one.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


# -- what a split model writes and shows -------------------------------------------------------------------------------


def written(name, sizes, how, several):
    """Texts of a model; `several`: data ranks have rows of their own and end after other numbers of steps."""
    task, fields = ("seq2seq-lm", SIDES) if "t5" in name or name in BARTS else ("causal-lm", LAST)
    model = built(name, task, sizes, fields).eval()
    ids = torch.randint(8, 60, (3, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    if how.get("part"):  # of each prompt is context
        how = {"context": (torch.arange(7) < 5).long().expand(3, 7)}
    if how.get("more_words"):  # of which some are in the prompts, and nothing but these are written
        extended = {"ext_table_ids": torch.tensor([3, 40, 41, 42]), "ext_table_sub": torch.tensor([1, 2, 3, 4])}
        ids[:, -2:] = torch.tensor([131, 134])
        how = {**how, "other_inputs": extended, "banned": (torch.arange(135) < 131).expand(3, 135)}
        del how["more_words"]
    how = {"max_new_tokens": 6, "pad_token_id": 3, "eos_token_id": [9], **how}
    rank = engine.data_rank() if sizes else 0
    if several:
        return [
            model.generate(ids[part], mask[part], **{**how, "max_new_tokens": 4 + 3 * r})
            for r, part in enumerate((slice(2), slice(2, 3)))
            if not sizes or r == rank
        ]
    torch.manual_seed(engine.rank() if sizes else 0)  # stages may draw other numbers
    return [model.generate(ids, mask, **how)]


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    [
        ("tiny/gpt2", PP, {}),
        ("tiny/gpt2", INTERLEAVED, {"do_sample": True, "seed": 3, "top_k": 20}),
        ("tiny/t5", INTERLEAVED, {"num_beams": 3}),
        ("tiny/cpmant", INTERLEAVED, {"part": True}),
        ("tiny/cpmbee", PP, {"more_words": True, "num_beams": 3}),
    ]
    + [
        pytest.param(name, sizes, how, marks=pytest.mark.full)
        for name in ("tiny/llama", "tiny/t5", "tiny/umt5", *BARTS, "tiny/cpm1", "tiny/cpm3", "tiny/cpmbee")
        for sizes in (PP, INTERLEAVED)
        for how in ({}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}, {"num_beams": 3})
    ],
)
def test_texts_of_a_split_model(two, name, sizes, how):
    expected = written(name, {}, how, False)[0]
    for found in two.run(written, name, sizes, how, False):
        assert torch.equal(found[0], expected)


def test_banned_tokens_are_not_written(two):
    model = built("tiny/gpt2", "causal-lm", {}, LAST)
    greedy = written("tiny/gpt2", {}, {}, False)[0]
    banned = torch.zeros(len(greedy), model.config.vocab_size, dtype=torch.bool).scatter_(1, greedy[:, 7:], True)
    expected = written("tiny/gpt2", {}, {"banned": banned}, False)[0]
    assert not torch.equal(expected, greedy)
    for found in two.run(written, "tiny/gpt2", PP, {"banned": banned}, False):
        assert torch.equal(found[0], expected)


def test_stages_agree_on_what_they_draw(two):
    first, second = two.run(written, "tiny/gpt2", PP, {"do_sample": True}, False)
    assert torch.equal(first[0], second[0])


def test_pipelines_with_rows_of_their_own(four):
    expected = written("tiny/t5", {}, {"eos_token_id": []}, True)
    for rank, found in enumerate(four.run(written, "tiny/t5", PP, {"eos_token_id": []}, True)):
        assert torch.equal(found[0], expected[rank % 2])


def timed():
    """The tokens of a stage, with a clock that goes on in the last one only."""
    model, clock = built("tiny/gpt2", "causal-lm", PP, LAST).eval(), itertools.count()
    time = types.SimpleNamespace(monotonic=lambda: next(clock) * engine.rank())
    with (
        mock.patch("modelcenter.generation.state.time", time),
        mock.patch("modelcenter.generation.generate.time", time),
    ):
        return model.generate(torch.full((1, 4), 9), max_new_tokens=9, max_time=3.5, eos_token_id=[])


def test_stages_end_texts_at_the_same_time(two):
    first, second = two.run(timed)
    assert torch.equal(first, second) and first.shape == (1, 4 + 4)


def in_slots(name, sizes, beams):
    """Texts of unequal lengths, two rows at a time."""
    task, fields = ("seq2seq-lm", SIDES) if "t5" in name else ("causal-lm", LAST)
    model = built(name, task, sizes, fields).eval()
    ids = torch.randint(8, 60, (5, 7), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(7) >= torch.tensor([3, 0, 2, 6, 1])[:, None]).long()
    how = {"pad_token_id": 3, "eos_token_id": [9, 20, 31], "num_beams": beams}
    return model.generate(ids, mask, [9, 2, 7, 5, 3], batch_size=2, **how)


@pytest.mark.parametrize("name", ["tiny/gpt2", "tiny/t5"])
@pytest.mark.parametrize("beams", [1, 3])
def test_rows_take_the_places_of_ended_ones_on_all_stages(two, name, beams):
    expected = in_slots(name, {}, beams)
    for found in two.run(in_slots, name, PP, beams):
        assert torch.equal(found, expected)


def asked_for_more(name):
    model = built("tiny/gpt2", "causal-lm", PP, LAST).eval()
    more = {"max_new_tokens": 3, "batch_size": 2, "limits": [9, 2, 1]}[name]
    more = [*more, 3 + engine.rank()] if name == "limits" else more + engine.rank()
    given = {"max_new_tokens": 3} | {"max_new_tokens" if name == "limits" else name: more}
    try:
        model.generate(torch.full((4, 4), 9), **given)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ["max_new_tokens", "batch_size", "limits"])
def test_other_settings_on_a_stage_are_an_error(two, name):
    assert all("different rows or settings" in message for message in two.run(asked_for_more, name))


def shown(name, task, sizes, fields):
    """The hidden states of two batches, and the gradients of a loss that reads all of them."""
    model = built(name, task, sizes, fields).eval()
    seen = []

    def forward(batch, totals):
        out = model(**batch, loss_counts=totals, output_hidden_states=True)
        states = [x for name in out if name.endswith("hidden_states") for x in out[name]]
        seen.append([out.last_hidden_state.detach(), *(x.detach() for x in states)])
        return sum(x.square().mean() * (i + 1) for i, x in enumerate(states))

    loss = engine.accumulate(model, batches(model)[:2], forward, lambda batch: {"loss": 1}, model.empty_batch)
    grads = {n: toys.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return [loss.item()], 0.0, grads, seen


@pytest.mark.parametrize(
    ("name", "task", "sizes", "fields"),
    [
        ("tiny/bert", "masked-lm", PP, LAST),
        ("tiny/t5", "seq2seq-lm", PP, SIDES),
        pytest.param("tiny/t5", "seq2seq-lm", INTERLEAVED, SIDES, marks=pytest.mark.full),
        pytest.param("tiny/cpm3", "causal-lm", INTERLEAVED, LAST, marks=pytest.mark.full),
    ],
)
def test_hidden_states_reach_the_last_stage(two, name, task, sizes, fields):
    *expected, wanted = shown(name, task, {}, fields)
    first, last = two.run(shown, name, task, sizes, fields)
    assert not first[3]
    for found, states in zip(last[3], wanted, strict=True):
        torch.testing.assert_close(found, states, rtol=1e-5, atol=1e-5)
    same([first[:3], last[:3]], expected)
