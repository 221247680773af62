"""What docs/models.md says of each family: 2 ranks train it as one does, and it writes what transformers writes."""

import contextlib
import importlib
from pathlib import Path

import engine_toys as toys
import pytest
import torch
import transformers
from harness import LATER, ArchitectureTests

import engine
import modelcenter as mc
from modelcenter import registry
from modelcenter.compare import pack_rows, rows_for
from modelcenter.compare.transformers_models import by_written_out_attention
from modelcenter.testing import assert_same, randomize_

TINY = [name for name in registry.preset_names() if name.startswith("tiny/")]
LANGUAGE = ("masked-lm", "causal-lm", "seq2seq-lm")


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2) as pool:
        yield pool


def task_of(name):
    tasks = registry.get(registry.preset(name)["config"]["model_type"]).model_class().tasks
    return next(task for task in LANGUAGE if task in tasks)


def step(name, sizes):
    """Loss of ragged microbatches and the gradients, of a pipeline's stage its own."""
    if sizes:
        engine.init_distributed(**sizes)
    task = task_of(name)
    model = randomize_(mc.from_config(name, task, policy=False))
    if sizes:
        model = engine.shard(model)
    lengths = [(5, 3), (7, 2, 4), (6,)]
    batches = [pack_rows(task, rows_for(task, model.config, lengths=n, seed=i)) for i, n in enumerate(lengths)]
    loss = mc.training.accumulate(model, batches)
    return loss.item(), {key: toys.whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}


def held(path):
    """What a stage holds of the parameters of a checkpoint: {name: (first indices, values)}."""
    engine.init_distributed(pp_size=2)
    model = mc.from_pretrained(path)
    return {name: (offsets, local.detach().clone()) for name, offsets, local in engine.local_slices(model)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tiny/bart" else pytest.mark.full) for name in TINY]
)
def test_each_stage_loads_its_part(two, name, tmp_path):
    """Without a whole model on any rank, whose stages are cut before it has memory."""
    randomize_(mc.from_config(name, task_of(name))).save_pretrained(tmp_path)
    whole = dict(mc.from_pretrained(tmp_path).state_dict())
    parts = two.run(held, tmp_path)
    assert parts[0].keys() | parts[1].keys() == whole.keys() and not parts[0].keys() >= whole.keys()
    for part in parts:
        for key, (offsets, values) in part.items():
            places = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))
            assert torch.equal(values, whole[key][places]), key


SIZES = {"pipeline": {"pp_size": 2}, "tensor": {"tp_size": 2}, "context": {"cp_size": 2}}
# Split layers and tokens of the others are in the parity tests of their architectures: test_ranks_that_share_a_batch.
CASES = [(name, how) for name in TINY for how in SIZES if how == "pipeline" or name == "tiny/cpm2"]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_two_ranks_train_as_one(two, name, how):
    loss, wanted = step(name, {})
    found = two.run(step, name, SIZES[how])
    assert [one for one, _ in found] == pytest.approx([loss] * 2, rel=1e-5)
    gradients = [*found[0][1].items(), *found[1][1].items()]
    assert {key for key, _ in gradients} == set(wanted)
    for key, gradient in gradients:
        assert_same(key, gradient, wanted[key], 5e-5)


@pytest.mark.full
def test_every_family_has_its_parity_tests():
    """With ranks that share a batch, which are not repeated here."""
    for path in Path(__file__).parent.glob("test_*.py"):
        with contextlib.suppress(pytest.skip.Exception):  # transformers lacks the family
            importlib.import_module(f"tests.models.{path.stem}")
    families, classes = {family for family in LATER if family not in transformers.CONFIG_MAPPING}, [ArchitectureTests]
    for cls in classes:
        classes += cls.__subclasses__()
        if cls.__name__.startswith("Test") and callable(cls.test_ranks_that_share_a_batch):
            families.add(cls.hf_config["model_type"])
    assert families >= {registry.preset(name)["config"]["model_type"] for name in TINY}


ABSENT = {"tiny/minicpm", "tiny/cpm1", "tiny/cpm3", "tiny/cpmbee"}  # from transformers
# There an encoder's positions count the padding before a row.
COUNT_PADDING = {"tiny/encoder-decoder", "tiny/bart", "tiny/led", "tiny/mbart", "tiny/marian", "tiny/pegasus"}
WRITERS = [name for name in TINY if task_of(name) != "masked-lm" and name not in ABSENT]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_texts_are_those_of_transformers(name, beams, tmp_path):
    task = task_of(name)
    same = {}
    if task == "seq2seq-lm" and name != "tiny/encoder-decoder":  # as transformers' cache wants
        same = {"num_layers": 3} | ({} if name == "tiny/t5gemma" else {"num_decoder_layers": 3})
    if name == "tiny/umt5" and not hasattr(transformers.UMT5Config(), "scale_decoder_outputs"):
        same["scale_decoder_outputs"] = True  # as transformers before 5.24, whatever the file says
    ours = randomize_(mc.from_config(name, task, **same), 5)
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = getattr(transformers, theirs.architectures[0]).from_pretrained(tmp_path).eval()
    if name in ("tiny/gemma2", "tiny/t5gemma"):
        by_written_out_attention(theirs)
    theirs.generation_config.eos_token_id = None
    rng = torch.Generator().manual_seed(4)
    ids = torch.randint(8, 60, (3, 7), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    if name in COUNT_PADDING:
        mask = mask.flip(1)
    ids = torch.where(mask.bool(), ids, ours.config.extra.get("pad_token_id") or 0)
    more = {"max_new_tokens": 9, "num_beams": beams}
    wanted = theirs.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=3, **more)
    assert torch.equal(ours.generate(ids, mask, eos_token_id=[], pad_token_id=3, **more), wanted)
