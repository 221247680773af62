"""CPM-Ant against transformers' CpmAntModel and its head."""

import json

import pytest
import torch
from cpm_rows import cross_boundaries, packed, padded, transpose
from harness import ArchitectureTests, assert_same, randomize_
from torch import nn
from transformers import CpmAntConfig, CpmAntForCausalLM

import engine
import modelcenter as mc
from modelcenter import compare
from modelcenter.compare import pad_rows
from modelcenter.testing import two_ranks


def _bias_of_places_alone(model):
    begin = model.begin

    def changed(batch):
        x, ctx = begin(batch)
        ctx.segment_bias = torch.zeros_like(ctx.segment_bias)
        return x, ctx

    model.begin = changed


def _another_prompt(model):
    with torch.no_grad():
        model.embed.weight[131:].copy_(model.embed.weight[131:].flip(0))


def _see_what_is_before(model):
    begin = model.begin

    def changed(batch):
        return begin({**batch, "context": torch.zeros_like(batch["input_ids"])})

    model.begin = changed


class _Shifting(nn.Module):
    """transformers' model with labels shifted, which it forgets, and without the arguments that it does not take."""

    def __init__(self, theirs):
        super().__init__()
        self.model = theirs

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters(*args, **kwargs)

    def forward(self, input_ids, labels=None, output_hidden_states=False, **ignored):
        if labels is not None:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
        return self.model(input_ids, labels=labels, output_hidden_states=output_hidden_states)


class TestCPMAnt(ArchitectureTests):
    hf_config = {
        "model_type": "cpmant",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "dim_head": 10,
        "dim_ff": 80,
        "position_bias_num_buckets": 14,
        "position_bias_max_distance": 20,
        "eps": 1e-2,
        "prompt_types": 4,
        "prompt_length": 5,
        "segment_types": 3,
    }
    no_dropout = {"dropout_p": 0.0}
    mutations = {
        "no bias between segments": _bias_of_places_alone,
        "another prompt": _another_prompt,
        "a causal text": _see_what_is_before,
        "attention across rows": cross_boundaries,
        "a transposed weight": transpose,
    }

    def check_parity(self, theirs, ours, side):
        """transformers takes padding on the left alone, by token 0 and without a mask; one row at a time has none."""
        super().check_parity(_Shifting(theirs), ours, "left" if side == "right" else side)

    def loss_of(self, theirs, batch):
        return _Shifting(theirs)(**batch).loss

    def test_base_matches_transformers(self, tmp_path):
        theirs = _Shifting(self.reference("base", tmp_path))
        ours = self.ours(tmp_path, None)
        batch = pad_rows("base", self.rows("base", ours.config), "left")
        result = compare.compare_models(ours, theirs, batch, tolerance=self.tolerance)
        assert result.equal and "last_hidden_state" in result.values, str(result)

    def generating(self, batch):
        return {**batch, "context": torch.zeros_like(batch["input_ids"])}


# -- context, span and segment, which transformers fixes ---------------------------------------------------------------


def reference(folder, **fields):
    values = {**TestCPMAnt.hf_config, **TestCPMAnt.no_dropout, **fields}
    values.pop("model_type")
    theirs = randomize_(CpmAntForCausalLM(CpmAntConfig(**values))).eval()
    theirs.save_pretrained(folder)
    return theirs


LENGTHS = (7, 3, 11, 5)


def marked(seed=0, lengths=LENGTHS):
    """Rows of (input_ids, context, span, segment)."""
    rng = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randint(low, high, (n,), generator=rng)
            for name, low, high in (("input_ids", 1, 131), ("context", 0, 2), ("span", 0, 2), ("segment", 0, 3))
        }
        for n in lengths
    ]


def truth(theirs, row):
    """Logits of one row by transformers' own layers, mask and bias, given what its forward has no arguments for."""
    m, count = theirs.cpmant, theirs.config.prompt_length
    prompt = torch.arange(count) + m.vocab_size + 2 * count
    own = {"input_ids": prompt, "context": torch.ones(count), "span": torch.zeros(count), "segment": torch.zeros(count)}
    ids, context, span, segment = (torch.cat((own[name].long(), row[name]))[None] for name in own)
    places, length = torch.arange(ids.shape[1])[None], torch.tensor([len(row["input_ids"])])
    mask = m._prepare_attention_mask(ids, span, context.bool(), length)
    x = m.input_embedding(ids) + m.segment_embedding(segment)
    return theirs.lm_head(m.encoder(x, mask, m.position_bias(places, places, segment, segment))[0][0, count:])


@pytest.mark.parametrize("how", ["packed", "left", "right", "length"])
def test_contexts_spans_and_segments_are_those_of_transformers(how, tmp_path):
    """Who sees whom, and the bias between segments: logits and every gradient."""
    theirs, rows = reference(tmp_path), marked()
    ours = mc.from_pretrained(tmp_path)
    batch = packed(rows) if how == "packed" else padded(rows, "right" if how == "length" else how)
    if how == "length":
        batch["length"] = batch.pop("attention_mask").sum(1)
    logits = ours(**batch).logits
    if how != "packed":
        logits = logits[padded(rows, "left" if how == "left" else "right")["attention_mask"].bool()]
    wanted = torch.cat([truth(theirs, row) for row in rows])
    assert_same("logits", logits.view(wanted.shape), wanted, 1e-5)
    weights = torch.randn_like(wanted)
    (logits.view(wanted.shape) * weights).mean().backward()
    (wanted * weights).mean().backward()
    grads = compare.hub_gradients(ours)
    for name, p in theirs.named_parameters():
        assert_same(name, grads[name], p.grad, 1e-5)
        assert p.grad.any(), name


def test_marks_in_a_cache(tmp_path):
    """New tokens that are not of the context, in spans and segments of their own, after a text of all kinds."""
    reference(tmp_path)
    ours, rows, new = mc.from_pretrained(tmp_path), marked(), marked(1, (5,) * len(LENGTHS))
    for row in new:
        row["context"].zero_()
    both = [{name: torch.cat((a[name], b[name])) for name in a} for a, b in zip(rows, new, strict=True)]
    batch = packed(both)
    with torch.no_grad():
        whole = ours(**batch).logits[0]
        whole = torch.stack([whole[end - 5 : end] for end in batch["cu_seqlens"][1:].tolist()])
        out, found = ours(**padded(rows, "left"), use_cache=True), []
        for a, b in ((0, 2), (2, 3), (3, 5)):
            step = {name: torch.stack([row[name][a:b] for row in new]) for name in new[0]}
            out = ours(**step, past_key_values=out.past_key_values)
            found.append(out.logits)
    assert_same("logits", torch.cat(found, 1), whole, 1e-5)


def shared(folder, sizes):
    """Logits and gradients of marked rows, by ranks that share them or by one."""
    if engine.is_initialized():
        engine.init_distributed(**sizes)
    model = mc.from_pretrained(folder, policy=None if engine.is_initialized() else False)
    rows = marked()
    batch = packed(rows) | {"labels": packed(rows)["input_ids"]}
    out = model(**batch)
    engine.accumulate(
        model, [batch], lambda b, totals: model(**b, loss_counts=totals).loss, model.loss_counts, model.empty_batch
    )
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return out.logits.detach(), compare.hub_gradients(model, {n: g.clone() for n, g in grads.items()})


@pytest.mark.parametrize(("heads", "sizes"), [(6, {"tp_size": 2}), (6, {"cp_size": 2}), (5, {"cp_size": 2})])
def test_marks_on_ranks_that_share_a_batch(heads, sizes, tmp_path):
    reference(tmp_path, num_attention_heads=heads)
    logits, grads = shared(str(tmp_path), {})
    for mine, own in two_ranks().run(shared, str(tmp_path), sizes):
        assert_same("logits", mine, logits, 1e-5)
        for name, grad in grads.items():
            assert_same(name, own[name], grad, 1e-5)


def test_embeddings_of_the_caller(tmp_path):
    reference(tmp_path)
    ours, rows = mc.from_pretrained(tmp_path), padded(marked(), "left")
    with torch.no_grad():
        wanted = ours(**rows).logits
        ids = rows.pop("input_ids")
        assert torch.equal(ours(**rows, inputs_embeds=ours.embed(ids)).logits, wanted)


def test_the_published_spelling_of_the_class(tmp_path):
    reference(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["CPMAntForCausalLM"]}))
    assert mc.from_pretrained(tmp_path).task == "causal-lm"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"length": torch.tensor([2, 3])}, "length: got shape .2,., expected one number for each row"),
        ({"length": torch.tensor([2]), "attention_mask": torch.ones(1, 4)}, "length: pass it or attention_mask"),
        ({"segment": torch.tensor([[0, 1, 2, 32]])}, "segment: got 32, expected 0 to 2 .segment_types."),
        ({"context": torch.ones(1, 5).long()}, "got context .1, 5., span .1, 4., segment .1, 4. beside input of"),
        ({"logits_to_keep": 2}, "logits_to_keep: got 2"),
    ],
)
def test_inputs_that_do_not_fit(given, words, tmp_path):
    model = mc.from_config({**TestCPMAnt.hf_config}, "causal-lm")
    with pytest.raises(ValueError, match=words):
        model(torch.ones(1, 4, dtype=torch.long), **given)
