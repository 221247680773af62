"""What the stages of a pipeline send: each finds what it waits for, and a step that fails, or cannot be, says so."""

import itertools
import weakref
from types import SimpleNamespace

import engine_toys as toys
import parallel_bert as bert
import pytest
import torch
from engine_toys import union
from parallel_bert import FOUR_LAYERS, INTERLEAVED, PP

import engine
import modelcenter as mc
from engine.parallel.pipeline import p2p, schedule
from engine.testing import run


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_stage_finds_what_it_waits_for(size, chunks):
    """Played through: each action has what it needs, and what goes one way comes in the order it was sent."""
    microbatches, most = 4 * size, p2p.max_in_flight(size, chunks)
    left = [schedule.stage_actions(rank, size, chunks, microbatches) for rank in range(size)]
    assert all(len(set(actions)) == len(actions) == 2 * chunks * microbatches for actions in left)
    last, done, sent = size * chunks - 1, set(), {}
    by = [[] for _ in left]  # what each has sent
    while any(left):
        before = len(done)
        for rank, actions in enumerate(left):
            while actions:
                forward, chunk, number = actions[0]
                stage = chunk * size + rank
                source = stage - 1 if forward else stage + 1
                if 0 <= source <= last:
                    if (forward, source, number) not in done:
                        break
                    kind = source % size, rank, forward
                    assert sent[kind].pop(0) == (source, number)
                assert forward or (True, stage, number) in done
                target = stage + 1 if forward else stage - 1
                if 0 <= target <= last:
                    if len(by[rank]) >= most:  # it waits until that has been received
                        assert by[rank][-most] in done
                    by[rank].append((forward, target, number))
                sent.setdefault((rank, target % size, forward), []).extend([(stage, number)] * (0 <= target <= last))
                actions.pop(0)
                done.add((forward, stage, number))
        assert len(done) > before
    in_flight = 0
    for forward, _, _ in schedule.stage_actions(0, size, 1, 4 * size):
        in_flight += 1 if forward else -1
        assert in_flight <= size  # 1F1B holds no more activations than there are stages


def test_what_was_sent_is_not_held_for_the_whole_step(monkeypatch):
    """gloo says of what is sent that it is complete when somebody has waited for it."""
    waited = []

    class Work:
        def __init__(self, number):
            self.number = number

        def is_completed(self):
            return self.number in waited

        def wait(self):
            waited.append(self.number)

    numbers = itertools.count()
    monkeypatch.setattr(torch.distributed, "isend", lambda x, **_: Work(next(numbers)))
    monkeypatch.setattr(p2p, "_groups", lambda *_: ["backward", "forward"])
    between = p2p.Neighbours({"pp": SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 2)})
    sent = []
    for _ in range(30):
        one, two = torch.ones(3), torch.ones(2)
        sent += [weakref.ref(one), weakref.ref(two)]
        between.send(one, torch.ones(0), two, forward=True)
        del one, two
    assert sum(one() is not None for one in sent) == 2 * p2p.max_in_flight(2, 1) == 8
    between.flush()
    assert not any(one() is not None for one in sent) and waited == list(range(60))


def after_an_exception(bad):
    """Gradients of a step that comes after one whose microbatch `bad` raised on every stage; refused after the first
    one."""
    engine.init_distributed(**PP)
    model = engine.shard(bert.build("masked-lm", **FOUR_LAYERS))
    batches = [bert.batch("masked-lm", i, model.config) for i in (0, 2)]

    def forward(batch, totals):
        if batch is batches[bad]:
            raise KeyError("stopped")
        return model(**batch, loss_counts=totals).loss

    with pytest.raises(KeyError, match="stopped"):
        engine.accumulate(model, batches, forward, model.loss_counts)
    model.zero_grad()
    again = engine.shard(bert.build("masked-lm", **FOUR_LAYERS))  # which hands over in the same channels
    if bad:
        for other in (model, again):
            with pytest.raises(RuntimeError, match="an exception ended an earlier step of this pipeline"):
                mc.training.accumulate(other, batches)
        return {}
    mc.training.accumulate(model, batches)
    return {n: toys.whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.full
def test_a_pipeline_does_not_go_on_with_what_another_step_had_sent():
    assert run(after_an_exception, 2, 1) == [{}, {}]


@pytest.mark.full
def test_a_pipeline_goes_on_where_nothing_had_been_sent():
    whole = bert.build("masked-lm", **FOUR_LAYERS)
    mc.training.accumulate(whole, [bert.batch("masked-lm", i, whole.config) for i in (0, 2)])
    found = union(run(after_an_exception, 2, 0))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=2e-5)


def refused(what):
    try:
        if what == "ranks":
            engine.init_distributed(pp_size=3)
        elif what == "chunks":
            engine.init_distributed(pp_chunks=2)
        elif what == "twice":
            engine.init_distributed(pp_size=2, pipe_size=1)
        elif what == "interleaved":
            engine.init_distributed(**INTERLEAVED)
        else:
            engine.init_distributed(**PP)
        if what == "plain":
            engine.shard(toys.build())
        model = bert.build("masked-lm", num_layers=1 if what == "units" else 2)
        if what == "lists":
            model.decoder = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        if what == "gate":
            model.gate = torch.nn.Parameter(torch.ones(1))
        if what == "begin":
            begin = model.begin

            def biased(batch):
                x, ctx = begin(batch)
                ctx.cached = {"bias": x.sum()}
                return x, ctx

            model.begin = biased
        if what == "unsplit":
            mc.training.accumulate(model, [bert.batch(model.task, 0, model.config)])
        engine.shard(model)
        batches = [bert.batch(model.task, i, model.config) for i in (0, 2)]
        if what == "call":
            model(**batches[0])
        batches[0]["input_ids"] = batches[0]["input_ids"] + (engine.rank() if what == "other batches" else 0)
        mc.training.accumulate(model, batches[: 1 + (what == "other number" and engine.rank())])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ranks", "pp_size is 3 but there are 2 ranks"),
        ("chunks", "pp_chunks is 2 but pp_size is 1"),
        ("twice", "pp_size is 2 and pipe_size is 1"),
        ("plain", "Toy cannot be split into stages"),
        ("units", "Bert has 1 units, fewer than the 2 parts"),
        ("lists", "Bert cannot be split into stages: its units are not one list"),
        (
            "begin",
            "its begin computes more than the first hidden states from its parameters (embed, position, token_type",
        ),
        ("gate", "Bert cannot be split into stages: gate is in no unit, and in no module that stage_homes names"),
        ("interleaved", "Bert has 2 units, fewer than the 4 parts"),
        ("unsplit", "this Bert is not split into stages: call engine.shard"),
        ("call", "no rank can call it alone: use engine.accumulate"),
        ("other batches", "its pipeline (pp_size=2) were given different microbatches"),
        ("other number", "compute one batch together (pp_size, tp_size, cp_size) but were given different"),
    ],
)
def test_errors_name_what_is_wrong(two, what, message):
    for found in two.run(refused, what):
        assert found is not None and message in found
