"""The same initial bits on every mesh, and models built on meta."""

import engine_toys as toys
import pytest
import torch
from torch import nn

import engine
from engine.init import init_parameters_


def initialised(level, dp_replicate, on_meta, tied):
    engine.init_distributed(zero_level=level, dp_replicate=dp_replicate)
    if on_meta:
        with torch.device("meta"):
            model = toys.Toy(tied=tied)
        engine.shard(model)
        engine.materialize(model, seed=11, init=True)
    else:
        model = engine.shard(toys.Toy(tied=tied))
        init_parameters_(model, 11)
    values = {n: toys.whole(p) for n, p in model.named_parameters()}
    tie = (model.head.weight is model.embed.weight) == tied
    out = model(toys.microbatch(0)[0])
    out.sum().backward()
    return values, model.rope, out.detach(), tie


def one_process(tied):
    model = toys.Toy(tied=tied)
    init_parameters_(model, 11)
    return model


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("on_meta", "tied"), [(False, False), (True, True), *(pytest.param(x, not x, marks=FULL) for x in (False, True))]
)
@pytest.mark.parametrize(("level", "copies", "ranks"), [(3, 1, 2), (0, 1, 2), (3, 1, 4), (2, 2, 4)])
def test_bitwise_on_every_mesh(two, four, level, copies, ranks, on_meta, tied):
    expected = one_process(tied)
    pool = {2: two, 4: four}[ranks]
    for values, rope, out, tie_kept in pool.run(initialised, level, copies, on_meta, tied):
        assert values.keys() == dict(expected.named_parameters()).keys() and tie_kept
        for name, parameter in expected.named_parameters():
            assert torch.equal(values[name], parameter), name
        assert torch.equal(rope, expected.rope)
        torch.testing.assert_close(out, expected(toys.microbatch(0)[0]).detach())


def test_draws_follow_the_rule_the_seed_and_the_name():
    a, b, c = one_process(False), one_process(False), toys.Toy()
    init_parameters_(c, 12)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, c.embed.weight)
    assert not torch.equal(a.layers[0].up.weight, a.layers[1].up.weight)
    assert torch.equal(a.scale, torch.ones(1)) and 0.3 < a.embed.weight.std() < 0.7  # init_spec
    assert torch.equal(a.layers[0].norm.weight, torch.ones(toys.WIDTH))  # reset_parameters
    assert a.layers[0].up.weight.abs().max() <= toys.WIDTH**-0.5


def test_names_select():
    model = toys.build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    init_parameters_(model, 11, ["head.weight", "layers.1.up.bias"])
    expected = one_process(False)
    for name, parameter in model.named_parameters():
        source = dict(expected.named_parameters()) if name in ("head.weight", "layers.1.up.bias") else before
        assert torch.equal(parameter, source[name]), name


def test_the_outer_spec_speaks_for_the_modules_below():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 200, bias=False)
            self.bound = nn.Parameter(torch.empty(500))

        def init_spec(self):
            return {"inner.weight": ("zeros",), "bound": ("uniform", 0.25)}

    model = Outer()
    init_parameters_(model, 0)
    assert not model.inner.weight.any() and 0.2 < model.bound.abs().max() <= 0.25


def test_the_random_state_of_the_caller_is_left_alone():
    model = toys.Toy()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    init_parameters_(model, 3)
    assert torch.equal(torch.rand(1), expected)


class Odd(nn.Module):
    def __init__(self, rule=None):
        super().__init__()
        self.own = nn.Parameter(torch.empty(2))
        if rule:
            self.init_spec = lambda: {"own": rule}


def test_a_rule_that_is_missing_or_unknown_is_an_error():
    with pytest.raises(ValueError, match=r"parameter own has no rule .*give Odd an init_spec\(\)"):
        init_parameters_(Odd(), 0)
    with pytest.raises(ValueError, match=r"gives \('magic', 1\) for parameter own, expected one of: normal with 1"):
        init_parameters_(Odd(("magic", 1)), 0)
    with pytest.raises(ValueError, match="expected one of"):
        init_parameters_(Odd(("normal",)), 0)
    with pytest.raises(ValueError, match="not parameters of Toy: nothing"):
        init_parameters_(toys.Toy(), 0, ["nothing"])
    with pytest.raises(ValueError, match="call engine.materialize"):
        init_parameters_(toys.Toy().to("meta"), 0)
    with pytest.raises(ValueError, match="seed is -1"):
        init_parameters_(toys.Toy(), -1)


def test_materialize_keeps_what_is_there_and_wants_buffers_back():
    model = toys.build()
    head = model.head.weight
    model.layers.to("meta")
    engine.materialize(model, init=True)
    assert model.head.weight is head and not any(p.is_meta for p in model.parameters())
    with torch.device("meta"):
        tied = toys.Toy(tied=True)
    engine.materialize(tied, init=True)
    assert tied.head.weight is tied.embed.weight and not tied.head.weight.is_meta

    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    with torch.device("meta"):
        lost = nn.Sequential(Lost())
    with pytest.raises(ValueError, match=r"buffer 0.table was built on meta .*give Lost a reset_buffers"):
        engine.materialize(lost)


@pytest.mark.parametrize("start", [0, 1], ids=["whole", "in part"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64], ids=str)
def test_buffers_of_each_dtype_have_their_values_back(dtype, start):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(3).to(dtype), persistent=False)

        def reset_buffers(self):
            self.table[start:] = torch.arange(start, 3)

    with torch.device("meta"):
        model = Table()
    if start and dtype != torch.bool:  # of which each value may be meant
        with pytest.raises(ValueError, match="^buffer table was built on meta"):
            engine.materialize(model)
    else:
        engine.materialize(model)
        assert torch.equal(model.table[start:], torch.arange(start, 3).to(dtype))


def test_a_transformers_model_from_meta():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=13, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=10, initializer_range=0.5,
    )  # fmt: skip
    with torch.device("meta"):
        model = BertModel(config)
    engine.materialize(model, seed=1, init=True)
    assert torch.equal(model.embeddings.position_ids, torch.arange(10)[None])
    assert not model.embeddings.token_type_ids.any()
    assert 0.3 < model.pooler.dense.weight.std() < 0.7 and not model.pooler.dense.bias.any()
    assert torch.equal(model.embeddings.LayerNorm.weight, torch.ones(8))
    other = BertModel(config)
    init_parameters_(other, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_drawing_leaves_the_generators_of_gpus_alone(monkeypatch):
    """They are seeded for each rank's data: the same dropout on all ranks would be no error, and wrong."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    model, before = nn.Linear(2, 2), torch.get_rng_state()
    init_parameters_(model, 0)
    engine.init.draw_(torch.empty(2, 2), "weight", 0, nn.init.normal_)
    assert not seeded and torch.equal(torch.get_rng_state(), before)
