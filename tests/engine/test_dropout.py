"""Dropout from a counter-based generator: bits, statistics, gradients, and one mask however a batch is cut."""

import numpy as np
import pytest
import torch
from engine_toys import whole
from fused_cases import KEY, MASK_DTYPES, MASK_SHAPES, masked, on_each_isa, run_on
from parallel_bert import noted_masks
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import engine
import modelcenter as mc
from engine.ops import dropout, dropout_add, dropout_key, dropout_masks, dropout_rows
from engine.ops.philox import random_bits
from modelcenter.compare import pack_rows, rows_for
from modelcenter.testing import randomize_


def philox(key, counter):
    """Philox4x32-10 in Python's whole numbers, as the paper's table has it."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ low, y & 0xFFFFFFFF, (x >> 32) ^ d ^ high, x & 0xFFFFFFFF
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d


def test_the_generator_is_the_published_one():
    """The authors' known answers, and the order of words and halves in a block."""
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    token, site, key = (5 << 32) + 9, 77, (3 << 32) + 11
    bits = random_bits(torch.tensor([token]), 120, 200, key, site)[0].tolist()
    for at in (0, 7, 8, 9, 25, 40, 136, 199):
        block, inside = divmod(120 + at, 128)
        words = philox((11, 3), (block * 16 + inside % 16, site, 9, 5))
        assert bits[at] == words[inside // 32] >> (16 * (inside // 16 % 2)) & 0xFFFF


def test_keys_of_steps_are_those_of_the_published_mixer():
    """Steele's SplitMix64 from 0: a later version draws the masks of an earlier one."""
    step = 0x9E3779B97F4A7C15
    numbers = [dropout_masks._splitmix(i * step % 2**64) for i in range(3)]
    assert numbers == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    with dropout_key(0, 5):
        key = dropout_masks._key.get()
    assert key % 2**64 == dropout_masks._splitmix(numbers[0] + 5) and -(2**63) <= key < 2**63


def every():
    out = []
    for dtype in MASK_DTYPES:
        for shape in MASK_SHAPES:
            x, residual, tokens, first = masked(dtype, shape)
            for add in (None, residual):
                for numbers in (None, tokens):
                    out.append(dropout_masks._run(x, add, numbers, 20_000, KEY, 7, first))
    return out


def test_compiled_and_reference_agree_bit_for_bit(compiled, monkeypatch):
    for a, b in zip(run_on(monkeypatch, True, every), run_on(monkeypatch, False, every), strict=True):
        assert torch.equal(a, b)


@pytest.mark.full
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(compiled, tmp_path):
    code = (
        "import sys, torch, test_dropout as t\ntorch.set_num_threads(int(sys.argv[2]))\n"
        "torch.save(t.every(), sys.argv[1])"
    )
    found = on_each_isa(code, tmp_path)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [*MASK_DTYPES, torch.float64], ids=str)
def test_values_and_gradients(either, dtype):
    """Against a mask that was read off, in float64: rounded once."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 100).to(dtype).requires_grad_()
    residual = torch.randn(3, 5, 100).to(dtype).requires_grad_()
    tokens = torch.randint(0, 2**50, (3, 5))
    numbers = {"key": 4, "site": 9, "tokens": tokens}
    keep = dropout(torch.ones(3, 5, 100), 0.3, **numbers).double() != 0
    scale = 65536 / (65536 - round(0.3 * 65536))
    y = dropout_add(x, residual, 0.3, **numbers)
    wanted = residual.double() + torch.where(keep, x.double() * scale, 0.0)
    torch.testing.assert_close(y.double(), wanted, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)
    grad = torch.randn_like(y)
    gx, gr = torch.autograd.grad(y, (x, residual), grad)
    assert torch.equal(gr, grad) and torch.equal(gx == 0, ~keep | (grad == 0))  # randn has 16-bit zeros on torch 2.11
    wanted = torch.where(keep, grad.double() * scale, 0.0)
    torch.testing.assert_close(gx.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_all_may_be_dropped(either):
    x, residual = torch.randn(3, 40, requires_grad=True), torch.randn(3, 40)
    out = dropout_add(x, residual, 1.0, key=4, site=9)
    assert torch.equal(out, residual) and not dropout(x, 1.0).any()
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_a_residual_of_another_shape_or_dtype_is_added_to_what_is_left(either):
    x = torch.randn(3, 40).bfloat16()
    left = dropout(x, 0.3, key=4)
    for residual in (torch.randn(3, 40), torch.randn(40).bfloat16(), torch.randn(2, 3, 40).bfloat16()):
        assert torch.equal(dropout_add(x, residual, 0.3, key=4), residual + left)


def test_the_reference_takes_rows_and_columns_in_parts(monkeypatch):
    x, residual, tokens, first = masked(torch.float32, (3, 384, 640))
    found = []
    for size in (1 << 18, 2 * 384, 100):
        monkeypatch.setattr(dropout_masks, "_CHUNK", size)
        out = torch.empty_like(x)
        dropout_masks._reference(out, x, residual, tokens, first, KEY, 7, 20_000)
        found.append(out)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_reference_has_few_kernels_on_a_gpu():
    """Where no compiler was there to build the operator; on a CPU it works on what fits the caches."""

    class Kernels(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += not func.is_view
            return func(*args, **kwargs or {})

    x, tokens = torch.empty(4096, 1024, device="meta"), torch.empty(4096, dtype=torch.int64, device="meta")
    with Kernels() as seen:
        dropout_masks._run(x, None, tokens, 20_000, KEY, 7, 0)
    assert seen.count < 200


def test_second_derivatives(either):
    """Of a penalty on the gradient, against the mask times its scale, which is all that dropout is."""
    x, residual = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = dropout_masks._run(torch.ones(4, 8), None, None, 20_000, 1, 7, 0).double()
    for dtype in (torch.float64, torch.float32):
        found = []
        for out in (dropout_add(x.to(dtype), residual.to(dtype), 20_000 / 65536, key=1, site=7), residual + x * mask):
            slope = torch.autograd.grad(out.double().pow(3).sum(), x, create_graph=True)[0]
            found.append(torch.autograd.grad(slope.square().sum(), (x, residual)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_no_mask_is_kept_for_backward():
    x = torch.randn(64, 256, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        dropout(x, 0.5, key=1, tokens=torch.arange(64)).sum().backward()
    assert x.grad is not None and sizes == [64]  # the tokens


def drops(p=0.25, rows=400, channels=512, **numbers):
    numbers = {"key": 1, "site": 2, "tokens": torch.arange(rows), **numbers}
    return (dropout(torch.ones(rows, channels), p, **numbers) == 0).double()


def test_masks_have_the_right_mean_and_are_independent():
    """Of channels, tokens, sites, steps and seeds: means, variances and correlations within 5 sigma of chance."""
    n, p = 400 * 512, 0.25
    one = drops()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(one.mean() - p) < 5 * sigma / n**0.5
    for dim in (0, 1):  # sums over a dimension are binomial
        size = one.shape[dim]
        spread = one.sum(dim).var() / (size * p * (1 - p))
        assert abs(spread - 1) < 5 * (2 / one.shape[1 - dim]) ** 0.5

    def correlation(a, b):
        return ((a - p) * (b - p)).mean() / (p * (1 - p))

    with dropout_key(3, 4):
        first = dropout_masks._key.get()
    with dropout_key(3, 5):
        second = dropout_masks._key.get()
    with dropout_key(4, 4):
        third = dropout_masks._key.get()
    assert len({first, second, third}) == 3 and dropout_masks._key.get() is None
    others = [drops(site=3), drops(key=2), drops(tokens=torch.arange(400) + (1 << 32)), drops(key=1 << 32)]
    others += [drops(key=key) for key in (first, second, third)]
    pairs = [(one, other) for other in others] + [(others[-1], others[-2]), (others[-3], others[-2])]
    pairs += [(one[:, a:], one[:, : 512 - a]) for a in (1, 16, 32, 128)] + [(one[1:], one[:-1])]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 5 / a.numel() ** 0.5


def test_parts_of_tokens_and_of_channels_have_the_masks_of_the_whole(either):
    tokens = torch.randint(0, 2**40, (60,))
    all_of_it = drops(rows=60, channels=300, tokens=tokens)
    rows = torch.randperm(60)[:17]
    assert torch.equal(all_of_it[rows], drops(rows=17, channels=300, tokens=tokens[rows]))
    for begin, end in ((0, 150), (150, 300), (129, 131)):
        part = drops(rows=60, channels=end - begin, tokens=tokens, first_channel=begin)
        assert torch.equal(all_of_it[:, begin:end], part)


def test_bad_input_says_what_is_wrong():
    x = torch.ones(4, 6)
    with pytest.raises(ValueError, match="p is 1.5, expected a probability"):
        dropout(x, 1.5)
    with pytest.raises(ValueError, match=r"tokens has 3 numbers for an x of shape \(4, 6\)"):
        dropout(x, 0.5, tokens=torch.arange(3))
    with (
        pytest.raises(ValueError, match="got 2 rows for a batch of 3 sequences"),
        dropout_key(1, 1),
        dropout_rows(torch.arange(2)),
    ):
        dropout_masks.draws_of(torch.tensor([0, 2, 3, 5]), 5)
    with dropout_key(1, 1), dropout_rows(torch.arange(2)):
        draws = dropout_masks.draws_of(torch.tensor([0, 2, 3, 5, 6]), 6)  # two choices for each row
    assert (draws.sequences >> 32).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="dropout of 5 tokens, but the batch has 6"):
        draws.of(5)


# -- in models ---------------------------------------------------------------------------------------------------------

MODELS = {
    "bert": ("tiny/bert", "sequence-classification", {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.4}),
    "gpt2": ("tiny/gpt2", "causal-lm", {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.4}),
    "t5": ("tiny/t5", "seq2seq-lm", {"dropout_rate": 0.3}),
}
LENGTHS = (5, 3, 7, 2, 4, 6, 2, 9)
ONE_BATCH = [[[0, 1, 2, 3, 4, 5, 6, 7]]]
CUTS = [[[0, 7], [2]], [[1, 3, 5], [6, 4]]]  # ranks -> microbatches -> rows
FOURTHS = [[[0]], [[1, 3], [5]], [[4, 6]], [[2], [7]]]


def gradients(model, cut, sizes=None, policy=None, step=4):
    """Loss and gradients of one step on these rows, cut so."""
    name, task, fields = MODELS[model]
    if sizes is not None:
        engine.init_distributed(**sizes, seed=sum(map(len, cut)))
    built = randomize_(mc.from_config(name, task, num_layers=2, policy=False, **fields)).train()
    if sizes is not None:
        built = engine.shard(built, policy=engine.Policy(**policy or {}))
    rows = rows_for(task, built.config, lengths=LENGTHS)
    own = cut[engine.data_rank()] if sizes is not None and engine.data_size() > 1 else [b for part in cut for b in part]
    batches = [{**pack_rows(task, [rows[i] for i in part]), "row_ids": torch.tensor(part) + 1000} for part in own]
    with dropout_key(11, step):
        loss = mc.training.accumulate(built, batches)
    return loss.item(), {n: whole(p.grad) for n, p in built.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=2e-5)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_microbatches_do_not_show(model):
    expected = gradients(model, ONE_BATCH)
    for cut in (CUTS, FOURTHS):
        assert_same(gradients(model, cut), expected)
    assert gradients(model, ONE_BATCH, step=5)[0] != expected[0]


@pytest.mark.parametrize("model", ["t5", *(pytest.param(m, marks=pytest.mark.full) for m in MODELS if m != "t5")])
def test_two_ranks_have_the_masks_of_one(two, model):
    expected = gradients(model, ONE_BATCH)
    ways = [({"zero_level": 3}, {}), ({"tp_size": 2}, {"sequence_parallel": True}), ({"cp_size": 2}, {})]
    if model != "t5":
        ways.append(({"pp_size": 2}, {"recompute": "full"}))
    for sizes, policy in ways:
        for found in two.run(gradients, model, CUTS, sizes, policy):
            assert len(found[1]) > 10 and ("pp_size" in sizes or found[1].keys() == expected[1].keys())
            assert_same(found, expected)


def test_sequences_that_are_cut_have_the_masks_of_whole_ones(monkeypatch):
    """Three heads on two ranks: keys are gathered, and a rank has a part of the queries of some sequences."""
    name, task, fields = MODELS["t5"]
    monkeypatch.setitem(MODELS, "3 heads", (name, task, fields | {"num_heads": 3}))
    with engine.testing.Pool(2) as ranks:  # forked now, with the third model
        expected = gradients("3 heads", ONE_BATCH)
        for found in ranks.run(gradients, "3 heads", CUTS, {"cp_size": 2}):
            assert_same(found, expected)


def test_four_ranks_have_the_masks_of_one(four):
    expected = gradients("bert", ONE_BATCH)
    for found in four.run(gradients, "bert", FOURTHS, {"zero_level": 2}, {"recompute": "full"}):
        assert_same(found, expected)


def test_a_place_in_the_batch_in_place_of_the_row_is_noticed(monkeypatch):
    expected = gradients("bert", ONE_BATCH)
    monkeypatch.setattr(
        "modelcenter.training.accumulation.dropout_rows",
        lambda rows: dropout_rows(None if rows is None else torch.arange(rows.numel())),
    )
    with pytest.raises(AssertionError):
        assert_same(gradients("bert", CUTS), expected)


def test_places_in_a_model_draw_apart():
    from modelcenter.layers.attention import CrossAttention, SelfAttention
    from modelcenter.layers.dropout import Dropout, name_sites

    for name, task, _ in MODELS.values():
        model = mc.from_config(name, task, policy=False)
        name_sites(model)
        kinds = Dropout | SelfAttention | CrossAttention
        sites = [module.site for module in model.modules() if isinstance(module, kinds)]
        assert None not in sites and len(sites) > 6 and len(set(sites)) == len(sites)


def test_layers_and_heads_drop_different_weights():
    name, task, fields = MODELS["bert"]
    model = randomize_(mc.from_config(name, task, num_layers=3, policy=False, **fields)).train()
    batch = pack_rows(task, rows_for(task, model.config, lengths=(9, 9)))
    with noted_masks() as drawn, dropout_key(1, 1), dropout_rows(torch.arange(2)):
        model(**batch)
    layers = [mask.view(2, -1, 9, 9) for mask in drawn if mask.dim() == 3]  # sequences, heads, queries, keys
    assert len(layers) == 3 and layers[0].shape[1] > 1
    heads = [head for layer in layers for sequence in layer for head in sequence]
    assert not any(torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])


def test_without_a_key_each_forward_draws_anew_and_a_seed_repeats():
    model = randomize_(mc.from_config("tiny/bert", "masked-lm", policy=False, hidden_dropout_prob=0.3)).train()
    batch = pack_rows("masked-lm", rows_for("masked-lm", model.config, lengths=LENGTHS))
    torch.manual_seed(5)
    first, second = (model(**batch).loss.item() for _ in range(2))
    torch.manual_seed(5)
    assert model(**batch).loss.item() == first != second
    with dropout_rows(torch.arange(len(LENGTHS))):  # rows alone are not enough
        assert model(**batch).loss.item() == second


def test_compiled_units_draw_a_new_mask_at_each_step():
    name, task, fields = MODELS["bert"]
    model = randomize_(mc.from_config(name, task, num_layers=1, policy=False, **fields)).train()
    batch = pack_rows(task, rows_for(task, model.config, lengths=LENGTHS))

    def losses():
        found = []
        for step in range(3):
            with dropout_key(1, step), dropout_rows(torch.arange(len(LENGTHS))):
                found.append(model(**batch).loss.item())
        return found

    plain = losses()
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("eager")
    torch._dynamo.register_backend(backend, "dropout_test_counter")
    engine.recompute.wrap_units_(model.units, "none", "dropout_test_counter")
    np.testing.assert_allclose(losses(), plain, rtol=1e-5)
    assert backend.frame_count
    assert len(set(plain)) == 3


def test_what_a_unit_returns_is_no_view():
    """Of one, FSDP warns that it must not be changed in place."""
    x = torch.randn(5, 8, requires_grad=True)
    assert not dropout(x, 0.5)._is_view() and not dropout_add(x, x.detach(), 0.5)._is_view()


def test_a_transform_of_torch_func_is_refused_not_passed_over():
    """The derivative would be that of a constant."""
    for take in (torch.func.grad, torch.func.jacrev, lambda f: torch.func.vmap(f)):
        with pytest.raises(RuntimeError, match="setup_context"):
            take(lambda x: dropout(x, 0.5, key=3).sum())(torch.ones(3, 4))
    x = torch.ones(3, 4, requires_grad=True)
    torch.autograd.grad(dropout(x, 0.5, key=3).sum(), x)
