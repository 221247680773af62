"""CPM-1, CPM-3 and CPM-Bee against the code that their exports bring for transformers, which is written out plainly."""

import math

import pytest
import torch
from cpm_rows import cross_boundaries, packed, padded, transpose
from harness import ArchitectureTests, assert_same, randomize_
from transformers import CpmAntConfig, CpmAntForCausalLM

import modelcenter as mc
from modelcenter import compare
from modelcenter.layers.segments import Segments
from modelcenter.registry import preset
from modelcenter.testing import two_ranks

KINDS = ("cpm1", "cpm3", "cpmbee")


def fields_of(kind, **fields):
    return {**preset(f"tiny/{kind}")["config"], "dropout_p": 0.0, **fields}


def reference(kind, folder, **fields):
    """A randomised language model of the code for transformers, saved."""
    values = fields_of(kind, **fields)
    for name in ("model_type", "architectures"):
        values.pop(name)
    cls = compare.hub_class(kind, "causal-lm")
    theirs = randomize_(cls(cls.config_class(**values))).eval()
    theirs.save_pretrained(folder)
    return theirs


class CPMTests(ArchitectureTests):
    no_dropout = {"dropout_p": 0.0}
    has_positions = False
    mutations = {"attention across rows": cross_boundaries, "a transposed weight": transpose}


def _scores_scaled(model):
    for unit in model.units:
        unit.attn.scale = None if unit.attn.scale else 1.0


def _another_prompt(model):
    with torch.no_grad():
        model.prompt.weight.copy_(model.prompt.weight.flip(0))


def _unscaled(model):
    for unit in model.units:
        unit.of_mlp = 1.0


def _plain_residual(model):
    for unit in model.units:
        unit.shrink = 1.0


def _see_all(model):
    begin = model.begin

    def changed(batch):
        return begin({**batch, "context": torch.ones_like(batch["input_ids"])})

    model.begin = changed


class TestCPM1(CPMTests):
    hf_config = fields_of("cpm1")
    tolerance = 4e-5  # scores are not scaled, so that their rounding weighs more (2e-5 on torch 2.11)
    mutations = CPMTests.mutations | {"scaled scores": _scores_scaled, "sight of what follows": _see_all}


class TestCPM3(CPMTests):
    hf_config = fields_of("cpm3")
    mutations = CPMTests.mutations | {"another prompt": _another_prompt, "a scale left out": _unscaled}


class TestCPMBee(CPMTests):
    hf_config = fields_of("cpmbee")
    mutations = CPMTests.mutations | {"a plain residual": _plain_residual, "sight of what follows": _see_all}


# -- segments ----------------------------------------------------------------------------------------------------------

LENGTHS = (7, 3, 11, 5)
MARKS = {
    "cpm1": {"context": 2, "span": 2},
    "cpm3": {"context": 2, "span": 2, "segment": 3},
    "cpmbee": {
        "context": 2, "span": 2, "segment": 3, "sample_ids": 3, "input_id_sub": 4, "segment_rel_offset": 2,
    },
}  # fmt: skip
RELATIONS = 2 * 9  # of two samples of three segments each, in every row


def marked(kind, seed=0, lengths=LENGTHS):
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for n in lengths:
        row = {"input_ids": torch.randint(1, 131, (n,), generator=rng)}
        row |= {name: torch.randint(0, high, (n,), generator=rng) for name, high in MARKS[kind].items()}
        if kind == "cpmbee":
            row["num_segments"] = torch.full((n,), 3)
            row["segment_rel_offset"] *= 9
        rows.append(row)
    return rows


def batched(kind, rows, how):
    """The batch, with what belongs to rows and not to tokens. A packed batch has one table of relations."""
    batch = packed(rows) if how == "packed" else padded(rows, "right" if how == "length" else how)
    if how == "length":
        batch["length"] = batch.pop("attention_mask").sum(1)
    if kind == "cpmbee":
        table = relations(len(rows))
        batch |= {"ext_table_ids": torch.tensor([3, 9, 100]), "ext_table_sub": torch.tensor([1, 2, 7])}
        if how == "packed":
            shift = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row["input_ids"]) for row in rows]))
            batch["segment_rel_offset"] = batch["segment_rel_offset"] + RELATIONS * shift
            table = table.view(1, -1)
        else:  # as CPM-Live has it at padding
            batch["num_segments"] = batch["num_segments"].clamp(min=1)
        batch["segment_rel"] = table
    return batch


def relations(rows):
    return torch.randint(0, 10, (rows, RELATIONS), generator=torch.Generator().manual_seed(8))


def truth(kind, theirs, rows):
    """Logits of each row alone, in float64."""
    wanted = []
    for number, row in enumerate(rows):
        batch = {name: value[None] for name, value in row.items()}
        if kind == "cpmbee":
            batch["segment_rel"] = relations(len(rows))[number : number + 1]
            batch |= {"ext_table_ids": torch.tensor([3, 9, 100]), "ext_table_sub": torch.tensor([1, 2, 7])}
        wanted.append(theirs(**batch).logits[0])
    return torch.cat(wanted)


@pytest.mark.parametrize("how", ["packed", "left", "right", "length"])
@pytest.mark.parametrize("kind", KINDS)
def test_contexts_spans_and_segments_are_those_of_the_reference(kind, how, tmp_path):
    """Who sees whom, what is added between segments, and the vocabulary that goes on: logits and every gradient."""
    theirs, rows = reference(kind, tmp_path), marked(kind)
    ours = mc.from_pretrained(tmp_path)
    logits = ours(**batched(kind, rows, how)).logits
    if how != "packed":
        logits = logits[padded(rows, "left" if how == "left" else "right")["attention_mask"].bool()]
    theirs = theirs.double()
    wanted = truth(kind, theirs, rows)
    assert_same("logits", logits.view(wanted.shape), wanted.float(), 1e-5)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (logits.view(wanted.shape) * weights).mean().backward()
    (wanted * weights.double()).mean().backward()
    grads = compare.hub_gradients(ours)
    for name, p in theirs.named_parameters():
        key = name if name in grads else name.partition(".")[2]
        assert_same(name, grads[key], p.grad.float(), 2e-5)
        assert p.grad.any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_marks_in_a_cache(kind, tmp_path):
    """New tokens that are not of the context, after a text of all kinds: as in one forward."""
    reference(kind, tmp_path)
    ours, rows, new = mc.from_pretrained(tmp_path), marked(kind), marked(kind, 1, (5,) * len(LENGTHS))
    for row in new:
        row["context"].zero_()
    both = [{name: torch.cat((a[name], b[name])) for name in a} for a, b in zip(rows, new, strict=True)]
    with torch.no_grad():
        batch = batched(kind, both, "packed")
        whole = ours(**batch).logits[0]
        whole = torch.stack([whole[end - 5 : end] for end in batch["cu_seqlens"][1:].tolist()])
        fixed = {k: v for k, v in batched(kind, rows, "left").items() if k.startswith(("ext_", "segment_rel"))}
        fixed.pop("segment_rel_offset", None)
        out, found = ours(**batched(kind, rows, "left"), use_cache=True), []
        for a, b in ((0, 2), (2, 3), (3, 5)):
            step = {name: torch.stack([row[name][a:b] for row in new]) for name in new[0]}
            out = ours(**step, **fixed, past_key_values=out.past_key_values)
            found.append(out.logits)
    assert_same("logits", torch.cat(found, 1), whole, 1e-5)


def test_segments_that_come_late(tmp_path):
    """A cache filled without segments, and one whose segments are not given again: as if all were given at once."""
    reference("cpm1", tmp_path)
    ours = mc.from_pretrained(tmp_path)
    ids = torch.arange(1, 9)[None]
    late, early = torch.tensor([[0] * 5 + [1] * 3]), torch.tensor([[1] * 5 + [0] * 3])
    with torch.no_grad():
        out = ours(ids[:, :5], use_cache=True)
        found = ours(ids[:, 5:], context=late[:, 5:], past_key_values=out.past_key_values).logits
        assert_same("late", found, ours(ids, context=late).logits[:, 5:], 1e-5)
        span = torch.tensor([[0, 1, 0, 1, 0, 0, 0, 0]])
        out = ours(ids[:, :5], context=early[:, :5], span=span[:, :5], use_cache=True)
        found = ours(ids[:, 5:], past_key_values=out.past_key_values).logits
        assert_same("early", found, ours(ids, context=early, span=span).logits[:, 5:], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_outgrows_its_bias(kind, tmp_path):
    """The bias is made for places by the dozen; a text that goes on needs those of all its tokens."""
    reference(kind, tmp_path, position_bias_num_buckets=200, position_bias_max_distance=400)
    ours = mc.from_pretrained(tmp_path)
    ids = torch.randint(1, 131, (1, 70), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        out = ours(ids[:, :60], use_cache=True)
        found = ours(ids[:, 60:], past_key_values=out.past_key_values).logits
        assert_same("logits", found, ours(ids).logits[:, 60:], 2e-5)


def shared(folder, kind, sizes):
    import engine

    if engine.is_initialized():
        engine.init_distributed(**sizes)
    model = mc.from_pretrained(folder, policy=None if engine.is_initialized() else False)
    batch = batched(kind, marked(kind), "packed")
    batch["labels"] = batch["input_ids"].clone()
    if kind == "cpmbee":
        batch["labels"][:, 2] = 133  # the last of the vocabulary that goes on
    out = model(**batch)
    engine.accumulate(
        model, [batch], lambda b, totals: model(**b, loss_counts=totals).loss, model.loss_counts, model.empty_batch
    )
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return out.logits.detach(), compare.hub_gradients(model, {n: g.clone() for n, g in grads.items()})


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"cp_size": 2}], ids=["zero", "tensor", "context"])
@pytest.mark.parametrize("kind", KINDS)
def test_marks_on_two_ranks(kind, sizes, tmp_path):
    reference(kind, tmp_path)
    logits, grads = shared(str(tmp_path), kind, sizes)
    for mine, own in two_ranks().run(shared, str(tmp_path), kind, sizes):
        assert_same("logits", mine, logits, 1e-5)
        for name, grad in grads.items():
            assert_same(name, own[name], grad, 1e-5)


# -- other implementations ---------------------------------------------------------------------------------------------


def test_cpm3_is_a_cpm_ant_without_segments(tmp_path):
    """transformers' CpmAnt whose weights have the factors, whose context is all there is, and whose segments add 0."""
    fields = fields_of("cpm3")
    theirs = reference("cpm3", tmp_path)
    ours = mc.from_pretrained(tmp_path)
    values = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
    ant = CpmAntForCausalLM(CpmAntConfig(**values))
    held, width = dict(theirs.named_parameters()), math.sqrt(fields["hidden_size"])
    words, prompts = held["cpm3.input_embedding.weight"] / width, held["cpm3.prompt_embedding.weight"] / width
    with torch.no_grad():
        for name, p in ant.named_parameters():
            own = held.get(name.replace("cpmant.", "cpm3."))
            if name.endswith("input_embedding.weight"):
                # CpmAnt puts prompt 2 before a text, we put prompt 0
                p.copy_(torch.cat((words, prompts[10:15], prompts[5:10], prompts[:5], prompts[15:])))
            elif name == "lm_head.weight":
                p.copy_(words)
            elif name.endswith("segment_embedding.weight"):
                p.zero_()
            else:
                p.copy_(own / math.sqrt(p.shape[1]) if p.dim() == 2 and "position_bias" not in name else own)
    ids = torch.randint(1, 131, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mine = ours(ids, context=torch.ones_like(ids), segment=torch.full_like(ids, 2)).logits
        assert_same("logits", mine, ant.eval()(ids).logits, 1e-5)


def waves_(parameters):
    """The recipe of the numbers below: parameter k, in the order of names, is sin(0.7 j + k) / sqrt(inputs) at its
    element j, and 1 + 0.3 sin(0.7 j + k) in norms."""
    with torch.no_grad():
        for k, (_, p) in enumerate(sorted(parameters.items())):
            wave = torch.sin(0.7 * torch.arange(p.numel(), dtype=torch.float64) + k).view(p.shape)
            p.copy_(wave / math.sqrt(p.shape[1]) * 3 if p.dim() == 2 else 1 + 0.3 * wave)


# Logits 10, 60 and 110 of the last token, by ModelCenter's cpm1.py and cpm3.py (commit 1449045) and CPM-Live's
# bee_torch.py (commit 8ad7aa6), run in float64 on the input of `wavy`, with their parameters set by `waves_`.
THEIRS = {
    "cpm1": [-1.536063, -0.17799, 1.796027],
    "cpm3": [0.1272025, -0.6520761, 0.8251893],
    "cpmbee": [0.1065167, -0.2481944, 0.2559844],
}


def wavy(kind, n=12):
    """A row of n tokens, with segments of all kinds."""
    at = torch.arange(n)
    row = {"input_ids": at * 37 % 130 + 1, "context": (at % 3 == 0).long(), "span": (at % 5 == 4).long()}
    if kind != "cpm1":
        row["segment"] = at % 3
    if kind == "cpmbee":
        row |= {"input_id_sub": at % 4, "sample_ids": at // 6, "segment_rel_offset": 9 * (at // 8)}
        row["num_segments"] = torch.full((n,), 3)
    batch = {name: value[None] for name, value in row.items()}
    if kind == "cpmbee":
        batch["segment_rel"] = (torch.arange(18) * 4 % 10)[None]
    return batch


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_the_original_code(kind, tmp_path):
    theirs = reference(kind, tmp_path)
    waves_({name.removeprefix(f"{kind}."): p for name, p in theirs.named_parameters()})
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = mc.from_pretrained(tmp_path)(**wavy(kind)).logits[0, -1]
    assert_same("logits", logits[[10, 60, 110]], torch.tensor(THEIRS[kind]), 2e-5)


# -- the rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_forwards(kind):
    """Greedy tokens over the cache are those of whole forwards."""
    model = randomize_(mc.from_config(f"tiny/{kind}", "causal-lm"), 3)
    ids = torch.randint(1, 131, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    found = model.generate(ids, mask, max_new_tokens=8)
    tokens = ids
    with torch.no_grad():
        for _ in range(8):
            whole = torch.nn.functional.pad(mask, (0, tokens.shape[1] - ids.shape[1]), value=1)
            tokens = torch.cat((tokens, model(tokens, whole).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, tokens)
    assert model.generate(ids, mask, max_new_tokens=4, num_beams=3).shape == (3, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_the_caller(kind, tmp_path):
    """As ModelCenter takes them: what the embedding gives, scaled."""
    reference(kind, tmp_path)
    ours = mc.from_pretrained(tmp_path)
    ids = torch.randint(1, 131, (2, 6))
    x = ours.embed(ids) * (1.0 if kind == "cpm1" else ours.config.hidden_size**-0.5)
    with torch.no_grad():
        assert torch.equal(ours(inputs_embeds=x).logits, ours(ids).logits)


@pytest.mark.parametrize(("length_scale", "attn_scale", "tied"), [(True, True, True), (True, False, False)])
def test_cpm1_with_scales(length_scale, attn_scale, tied, tmp_path):
    fields = {"length_scale": length_scale, "attn_scale": attn_scale, "tie_word_embeddings": tied}
    theirs = reference("cpm1", tmp_path, **fields)
    ours = mc.from_pretrained(tmp_path)
    assert (ours.head.weight is None) is tied
    ids = torch.randint(1, 131, (2, 6))
    with torch.no_grad():
        assert_same("logits", ours(ids).logits, theirs(ids).logits, 1e-5)


ONE = torch.ones(1, 4, dtype=torch.long)


def table(ids, sub=None):
    """Tokens that extend CPM-Bee's vocabulary."""
    return {"ext_table_ids": torch.tensor(ids)} | ({} if sub is None else {"ext_table_sub": torch.tensor(sub)})


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("cpm1", {"segment": ONE}, "segment: cpm1 has no segments"),
        ("cpm1", {"span": torch.ones(1, 5).long()}, "got context .1, 4., span .1, 5. beside input of shape .1, 4."),
        ("cpm3", {"segment": 3 * ONE}, "segment: got 3, expected 0 to 2"),
        ("cpmbee", {"segment": ONE}, "segment: pass segment_rel"),
        ("cpmbee", {"num_segments": ONE}, "num_segments: pass segment_rel"),
        ("cpmbee", {"segment": ONE, "segment_rel": ONE}, "segment: expected 0 to num_segments - 1"),
        ("cpmbee", {"segment_rel": torch.zeros(2, 3).long()}, "segment_rel: got shape .2, 3., expected .* the 1 rows"),
        ("cpmbee", {"segment_rel": 71 * ONE}, "segment_rel: got 71 to 71, expected 0 .* to 70"),
        ("cpmbee", table([[1]], [[1]]), "ext_table_ids, ext_table_sub: pass both, of one shape .n,."),
        ("cpmbee", table([1]), "ext_table_ids, ext_table_sub: pass both"),
        ("cpmbee", table([1, 131], [1, 1]), "ext_table_ids: got 131, expected 0 to 130 .vocab_size."),
        ("cpmbee", table([1, -1], [1, 1]), "ext_table_ids: got -1, expected 0 to 130"),
        ("cpmbee", table([1.0], [1]), "ext_table_ids: got torch.float32, expected whole numbers"),
        ("cpmbee", {"input_ids": 132 * ONE, **table([3], [1])}, "input_ids: got 132, expected 0 to 131 .vocab_size"),
        ("cpmbee", {"input_id_sub": torch.ones(1, 3).long()}, "input_id_sub: got shape .1, 3., expected .1, 4."),
        ("cpmbee", {"sample_ids": [[1]]}, "sample_ids: got list, expected a tensor"),
        ("cpm1", {"length": torch.tensor([5])}, "length: got 5, expected 0 to 4 .tokens of a row."),
        ("cpm3", {"length": torch.tensor([-1])}, "length: got -1, expected 0 to 4"),
        ("cpmant", {"length": torch.tensor([2.5])}, "length: got torch.float32, expected whole numbers"),
        ("cpmant", {"length": [4]}, "length: got list, expected a tensor"),
        ("cpmant", {"context": 0.5 * ONE}, "context: got torch.float32, expected whole numbers"),
        ("cpm1", {"context": 2 * ONE}, "context: got 2, expected 0 to 1"),
        ("cpmbee", {"context": -ONE}, "context: got -1, expected 0 to 1"),
        ("cpm3", {"span": [[0, 0, 0, 0]]}, "span: got list, expected a tensor"),
        *(
            (kind, {"input_ids": None, "inputs_embeds": torch.zeros(1, 4, 47)}, "inputs_embeds: got width 47, expected")
            for kind in ("cpm1", "cpm3", "cpmant", "cpmbee")
        ),
    ],
)
def test_inputs_that_do_not_fit(kind, given, words):
    with pytest.raises(ValueError, match=words):
        mc.from_config(f"tiny/{kind}", "causal-lm")(**{"input_ids": ONE, **given})


def test_configs_that_do_not_fit():
    with pytest.raises(ValueError, match="cpm3 config: prompt is 4, expected 0 to 3"):
        mc.from_config("tiny/cpm3", prompt=4)
    with pytest.raises(ValueError, match="cpmbee config: tie_embeddings is False, expected true"):
        mc.from_config("tiny/cpmbee", tie_embeddings=False)
    with pytest.raises(ValueError, match="cpm1 config: num_buckets is 7"):
        mc.from_config("tiny/cpm1", num_buckets=7)
    with pytest.raises(ValueError, match="missing field 'hidden_size'"):
        mc.from_config("cpm1-large")


def test_marks_keep_their_kind():
    segments = Segments.of(torch.tensor([[1, 0]]), torch.zeros(1, 2), torch.zeros(1, 2))
    assert segments.hidden(segments).tolist() == [[[[False, True], [False, False]]]]
