"""Parity tests for an architecture, ours or a user's own: subclass `ArchitectureTests` in a test file.

    class TestBert(ArchitectureTests):
        hf_config = {"model_type": "bert", "vocab_size": 131, ...}

Every test compares with an independent truth: transformers' model of the same class with every parameter randomised
(its own initialisation leaves biases 0 and norms 1, which hides mistakes). Use sizes that are all different, and an
exaggerated norm eps, so that a swapped dimension or a dropped field shows. Run with pytest.
"""

import atexit
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from modelcenter import compare, registry
from modelcenter.compare import (
    Row,
    difference,
    hub_gradients,
    pack_rows,
    pad_rows,
    parameters_by_file_name,
    rows_for,
)
from modelcenter.layers import dropout
from modelcenter.layers.packed_attention import Drop
from modelcenter.models.base import VOCABULARY_TASKS

CHOICES = 3
# ZeRO level and number of microbatches of a rank.
LEVELS = {"level 3": ((3, 4),), "levels 0 to 2": ((2, 1), (1, 2), (0, 8))}


def randomize_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter, biases and norms too, a value that matters."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=rng)
            if p.dim() > 1:
                p.copy_(noise / math.sqrt(p.shape[-1]) * 1.5)
            else:
                p.copy_(0.3 * noise + ("norm" in name.lower() and name.endswith("weight")))
    return model


def assert_same(what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Raise AssertionError with the size of the difference beyond `tolerance` (see compare.difference)."""
    gap = difference(ours.detach(), theirs.detach())
    assert gap <= tolerance, f"{what}: difference {gap:.2e} > {tolerance:.0e}"


def run_backward(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """(output, gradients under hub names) of one batch."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    return out, hub_gradients(model)


class ArchitectureTests:
    """The tests that every architecture passes. A subclass sets `hf_config`, and `tasks` to leave some out.

    Attributes:
        hf_config: fields of a tiny Hugging Face config, `model_type` among them; dropouts are set to 0 for parity.
        tasks: None: all that the architecture has.
        tolerance: on losses, outputs and gradients in fp32.
        mutations: name -> function that spoils a model of ours; parity must notice each.
        row_lengths: tokens of the rows; a multiple of three rows.
        read_in_part: tasks of encoders and decoders whose heads do not use every token's final state.
    """

    hf_config: ClassVar[dict[str, Any]]
    tasks: ClassVar[tuple[str, ...] | None] = None
    tolerance: ClassVar[float] = 1e-5
    row_lengths: ClassVar[tuple[int, ...]] = (7, 3, 11, 5, 2, 8)
    mutations: ClassVar[dict[str, Callable[[Any], None]]] = {}
    read_in_part: ClassVar[frozenset[str]] = frozenset(
        (*VOCABULARY_TASKS, "sequence-classification", "multiple-choice", "next-sentence-prediction")
    ) - {"double-heads"}
    no_dropout: ClassVar[dict[str, Any]] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    num_labels: ClassVar[int] = 5
    has_positions: ClassVar[bool] = True  # transformers' model takes position_ids

    # -- what pytest sees ---------------------------------------------------------------------------------------------

    @classmethod
    def supervised_tasks(cls) -> tuple[str, ...]:
        model = registry.get(cls.hf_config["model_type"]).model_class()
        return tuple(task for task in (cls.tasks or model.tasks) if task not in ("base", "text-encoding"))

    @classmethod
    def main_task(cls) -> str:
        """The task of tests that take one: a language model's, if it has one."""
        tasks = cls.supervised_tasks()
        return next((task for task in ("masked-lm", "causal-lm", "seq2seq-lm") if task in tasks), tasks[0])

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "task" in metafunc.fixturenames:
            metafunc.parametrize("task", self.supervised_tasks())
        if "side" in metafunc.fixturenames:
            metafunc.parametrize("side", ("none", "right", "left"))
        if "sharing" in metafunc.fixturenames:
            metafunc.parametrize("sharing", ("tensor", "sequence", "context"))
        if "levels" in metafunc.fixturenames:
            metafunc.parametrize("levels", LEVELS.values(), ids=LEVELS)
        if "mutation" in metafunc.fixturenames:
            metafunc.parametrize("mutation", sorted({**MUTATIONS, **self.mutations}))

    # -- parts --------------------------------------------------------------------------------------------------------

    def reference(self, task: str, folder: Path, **fields: Any) -> Any:
        """A randomised transformers model of the task, in eval mode, saved in `folder`."""
        cls = compare.hub_class(self.hf_config["model_type"], task)
        labels = 2 if task == "question-answering" else self.num_labels
        values = {**self.hf_config, **self.no_dropout, "num_labels": labels, **fields}
        values.pop("model_type")
        theirs = cls(cls.config_class(**values))
        randomize_(theirs)
        theirs.tie_weights()
        theirs.eval().save_pretrained(folder)
        return theirs

    def ours(self, folder: Path, task: str | None, **kwargs: Any) -> Any:
        from modelcenter.auto import from_pretrained

        return from_pretrained(str(folder), task, **kwargs)

    def rows(self, task: str, config: Any, lengths: Sequence[int] | None = None, seed: int = 0) -> list[Row]:
        return rows_for(task, config, lengths=lengths or self.row_lengths, choices=CHOICES, seed=seed)

    def truth(
        self, theirs: nn.Module, ours: nn.Module, task: str, rows: list[Row], side: str
    ) -> tuple[list[Any], float, dict]:
        """transformers on each example alone, without padding, at the positions the padded batch gives it.

        Returns (output per example, mean loss, gradients of the mean loss). This truth is free of padding: in
        transformers a padded batch pools the wrong token when padding is on the left, and lets padding into the softmax
        of question answering.
        """
        longest = max(len(row.input_ids) for row in rows)
        step = CHOICES if task == "multiple-choice" else 1
        groups = [rows[i : i + step] for i in range(0, len(rows), step)]
        theirs.zero_grad()
        outs, total, items = [], 0.0, 0
        for group in groups:
            if (
                task == "multiple-choice"
            ):  # the choices of an example differ in length: one row each, put together below
                outs.append(torch.cat([self._alone(theirs, task, [row], longest, side).logits for row in group], 1))
                loss, n = torch.nn.functional.cross_entropy(outs[-1], torch.tensor([group[0].labels])), 1
            else:
                out = self._alone(theirs, task, group, longest, side)
                outs.append(out)
                loss, n = out.loss, _items(task, group[0])
            if task == "pretraining":
                loss, n = _both_terms(out, group[0], rows), 1
            (loss * n).backward()
            total, items = total + loss.item() * n, items + n
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad / items
            for name, p in parameters_by_file_name(theirs, ours).items()
        }
        return outs, total / items, grads

    def position_ids(self, shift: int, n: int) -> Tensor:
        """(n,) what transformers gives to n tokens after `shift` of padding."""
        return torch.arange(shift, shift + n)

    def _alone(self, theirs: nn.Module, task: str, group: list[Row], longest: int, side: str) -> Any:
        batch = pad_rows(task, group, choices=len(group))
        n = len(group[0].input_ids)
        shift = longest - n if side == "left" else 0
        if self.has_positions:
            positions = self.position_ids(shift, n)
            batch["position_ids"] = positions.view(1, *([1] * (task == "multiple-choice")), n)
        if task == "multiple-choice":
            batch.pop("labels", None)
            batch["position_ids"] = batch["position_ids"].flatten(0, 1)
        return theirs(**batch)

    # -- tests --------------------------------------------------------------------------------------------------------

    def test_matches_transformers(self, task: str, side: str, tmp_path: Path) -> None:
        """Outputs, loss and every gradient, on padded rows."""
        theirs = self.reference(task, tmp_path)
        self.check_parity(theirs, self.ours(tmp_path, None), side)

    def check_parity(self, theirs: nn.Module, ours: Any, side: str) -> None:
        task = ours.task
        lengths = [9] * len(self.row_lengths) if side == "none" else None
        rows = self.rows(task, ours.config, lengths)
        batch = pad_rows(task, rows, "right" if side == "none" else side, CHOICES)
        if side == "none" or (side == "right" and task != "question-answering"):
            result = compare.compare_models(ours, theirs, batch, tolerance=self.tolerance)
            assert result.equal, str(result)
            assert "gradients" in result.values and "loss" in result.values
            with torch.no_grad():
                keys = [
                    {name for name, x in model(**batch).items() if isinstance(x, Tensor)} for model in (ours, theirs)
                ]
            missing = keys[1] - keys[0] - {"prediction_logits"}  # ours are "logits" in every task
            assert not missing, f"outputs that transformers has: {missing}"
            return
        outs, loss, grads = self.truth(theirs, ours, task, rows, side)
        out, mine = run_backward(ours, batch)
        assert_same("loss", out.loss, torch.tensor(loss), self.tolerance)
        assert set(mine) == set(grads), set(mine) ^ set(grads)
        for name, grad in grads.items():
            assert_same(name, mine[name], grad, self.tolerance)
        logits = out.logits
        for i, one in enumerate(outs):
            wanted = one if task == "multiple-choice" else one.get("logits", one.get("prediction_logits"))
            if task == "question-answering":
                wanted = torch.stack([one.start_logits, one.end_logits], -1)
            if wanted.dim() == 3:
                columns = compare.output_mask(ours, batch)[i]
                assert_same(f"logits of row {i}", logits[i][columns], wanted[0], self.tolerance)
            else:
                assert_same(f"logits of row {i}", logits[i], wanted[0], self.tolerance)

    def test_base_matches_transformers(self, tmp_path: Path) -> None:
        theirs = self.reference("base", tmp_path)
        ours = self.ours(tmp_path, None)
        batch = pad_rows("base", self.rows("base", ours.config))
        result = compare.compare_models(ours, theirs, batch, tolerance=self.tolerance)
        assert result.equal and "last_hidden_state" in result.values, str(result)

    def test_packed_equals_separate(self, task: str, tmp_path: Path) -> None:
        """A packed batch gives what its rows give alone: nothing crosses a boundary."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config)
        out, packed = run_backward(model, pack_rows(task, rows))
        padded_out, padded = run_backward(model, pad_rows(task, rows, "right", CHOICES))
        assert_same("loss", out.loss, padded_out.loss, self.tolerance)
        for name in packed:
            assert_same(name, packed[name], padded[name], self.tolerance)
        if task == "multiple-choice":
            return
        step = 0
        for i, row in enumerate(rows):
            alone = model(**pack_rows(task, [row])).logits
            mine = out.logits[i : i + 1] if alone.dim() == 2 else out.logits[:, step : step + alone.shape[1]]
            assert_same(f"row {i}", mine, alone, self.tolerance)
            step += alone.shape[1]

    def test_training_leaves_vocabulary_logits_out(self, task: str, tmp_path: Path) -> None:
        """In training a vocabulary-sized head returns the loss alone, and the last unit works out no states but those
        that are read of it; with the same gradients as with all of both."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        batch = pack_rows(task, self.rows(task, model.config))
        if task in VOCABULARY_TASKS and not model.is_encoder_decoder:
            batch["labels"][:, ::2] = compare.IGNORE
        rows: list[int] = []
        if (mlp := getattr(model.units[-1], "mlp", None)) is not None:
            mlp.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
        _, grads = run_backward(model, {**batch, "output_logits": True, "output_hidden_states": True})
        out, trained = run_backward(model.train(), batch)
        assert not rows or (rows[1] < rows[0]) == (task in self.read_in_part and not model.is_encoder_decoder)
        big = task in ("masked-lm", "causal-lm", "seq2seq-lm", "pretraining")
        assert ("logits" in out) is not big
        for name in grads:
            assert_same(name, trained[name], grads[name], self.tolerance)

    def test_dropout(self, task: str, tmp_path: Path) -> None:
        """Active in training, drawn anew each time, reproducible by seed; eval is deterministic."""
        self.reference(task, tmp_path, **{name: 0.3 for name in self.no_dropout})
        model = self.ours(tmp_path, None)
        batch = pack_rows(task, self.rows(task, model.config))
        assert torch.equal(model(**batch).loss, model(**batch).loss)
        model.train()
        losses = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            losses.append(model(**batch).loss.item())
        assert losses[0] == losses[1] != losses[2]

    def test_dropout_is_where_transformers_has_it(self, task: str, tmp_path: Path, monkeypatch: Any) -> None:
        """With a factor of 1 + p in each place of both: the same loss."""

        def scaled(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            return x * (1 + p) if training else x

        monkeypatch.setattr(torch.nn.functional, "dropout", scaled)
        monkeypatch.setattr(dropout, "dropout", scaled)
        monkeypatch.setattr(dropout, "dropout_add", lambda x, residual, p: residual + scaled(x, p))
        monkeypatch.setattr(Drop, "drop", lambda drop, weights, key, numbers: scaled(weights, drop.p))
        theirs = self.reference(task, tmp_path, **{name: 0.1 * i for i, name in enumerate(self.no_dropout, 1)})
        if hasattr(theirs, "set_attn_implementation"):
            theirs.set_attn_implementation("eager")
        ours = self.ours(tmp_path, None).double().train()  # of fp32 a compiled operator may drop attention weights
        batch = pad_rows(task, self.rows(task, ours.config, [9] * len(self.row_lengths)), choices=CHOICES)
        assert_same("loss", ours(**batch).loss, self.loss_of(theirs.double().train(), batch), self.tolerance)

    def loss_of(self, theirs: nn.Module, batch: dict[str, Any]) -> Tensor:
        """transformers' loss of rows of one length."""
        return theirs(**batch).loss

    def test_empty_batch(self, task: str, tmp_path: Path) -> None:
        """A batch of no rows has loss 0 and zero gradients for every parameter."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None).train()
        out, grads = run_backward(model, model.empty_batch())
        assert out.loss.item() == 0.0
        assert all(p.grad is not None for p in model.parameters()), "a parameter takes no part"
        assert not any(grad.any() for grad in grads.values())

    def test_gradients_do_not_depend_on_the_cut(self, task: str, tmp_path: Path) -> None:
        """One batch, 4 and 8 microbatches: the same loss and gradients, with rows of unequal length."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config, (7, 3, 11, 5, 2, 8, 4, 9, 6, 3, 10, 2) * 2)
        whole, expected = run_backward(model, pack_rows(task, rows))
        for cut in (1, 4, 8):
            loss, grads = _accumulated(str(tmp_path), task, rows, cut, 0)
            assert_same(f"loss in {cut}", loss, whole.loss, self.tolerance)
            for name in expected:
                assert_same(f"{name} in {cut}", grads[name], expected[name], self.tolerance)

    def test_two_ranks_equal_one(self, task: str, levels: Sequence[tuple[int, int]], tmp_path: Path) -> None:
        """At each ZeRO level on 2 ranks, with unequal shares of the rows in up to 8 microbatches: as in one process."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config, (7, 3, 11, 5, 2, 8, 4, 9, 6) * 2)
        whole, expected = run_backward(model, pack_rows(task, rows))
        for level, cut in levels:
            for loss, grads in two_ranks().run(_accumulated, str(tmp_path), task, rows, cut, level):
                assert_same(f"loss at level {level}", loss, whole.loss, self.tolerance)
                for name in expected:
                    assert_same(f"{name} at level {level}", grads[name], expected[name], self.tolerance)

    def test_ranks_that_share_a_batch(self, sharing: str, tmp_path: Path) -> None:
        """2 ranks that split the layers, their activations too, or the tokens: as in one process."""
        task = self.main_task()
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config, (7, 3, 11, 5, 2, 8, 4))
        whole, expected = run_backward(model, pack_rows(task, rows))
        for loss, grads in two_ranks().run(_accumulated, str(tmp_path), task, rows, 2, 3, sharing):
            assert_same("loss", loss, whole.loss, self.tolerance)
            for name in expected:
                assert_same(name, grads[name], expected[name], self.tolerance)

    def test_padding_costs_nothing(self, tmp_path: Path) -> None:
        """One long row among many short ones: no product has a row for padding, and nothing is as large as the square
        of the tokens, as a mask or a bias of all pairs would be."""
        task = self.main_task()
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config, (31, *(2,) * 500))
        sides = [sum(len(row.input_ids) for row in rows)]
        if model.is_encoder_decoder:
            sides.append(sum(len(row.labels) for row in rows))
        tokens = max(sides)
        tokens += model.prefix_tokens * len(rows)
        products = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, x: products.append(x[0].numel() // x[0].shape[-1]))
        with _Largest() as seen:
            run_backward(model.train(), pad_rows(task, rows, "right", CHOICES))
        assert products and max(products) <= tokens, (max(products), tokens)
        assert seen.elements < tokens**2, (seen.elements, seen.where)

    def generating(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with what it takes for each token to see only what is before it."""
        return batch

    def test_cached_equals_whole(self, tmp_path: Path) -> None:
        """Rows of several lengths padded on the left, then their next tokens, some at once: the logits of whole rows.

        Of models that generate by "causal-lm".
        """
        if "causal-lm" not in self.supervised_tasks():
            return
        self.reference("causal-lm", tmp_path)
        model = self.ours(tmp_path, None)
        steps = (2, 1, 1, 3)
        new = sum(steps)
        rows = self.rows("causal-lm", model.config, [n + new for n in self.row_lengths])
        packed = self.generating(pack_rows("causal-lm", rows))
        with torch.no_grad():
            logits = model(**packed, output_logits=True).logits[0]
            whole = torch.stack([logits[end - new - 1 : end] for end in packed["cu_seqlens"][1:].tolist()])
            before = [
                replace(
                    row,
                    input_ids=row.input_ids[:-new],
                    token_type_ids=row.token_type_ids[:-new],
                    labels=row.labels[:-new],
                )
                for row in rows
            ]
            batch = self.generating(pad_rows("causal-lm", before, "left"))
            del batch["labels"]
            out = model(**batch, use_cache=True, logits_to_keep=1)
            found = [out.logits]
            after = torch.tensor([row.input_ids[-new:] for row in rows])
            for ids in after.split(steps, 1):
                out = model(**self.generating({"input_ids": ids}), past_key_values=out.past_key_values)
                found.append(out.logits)
        assert len(out.past_key_values) == max(self.row_lengths) + new + model.prefix_tokens
        assert_same("logits", torch.cat(found, 1), whole, self.tolerance)

    def test_bfloat16(self, task: str, tmp_path: Path) -> None:
        self.reference(task, tmp_path)
        batch = pack_rows(task, self.rows(task, self.ours(tmp_path, None).config))
        wanted = self.ours(tmp_path, None)(**batch).loss
        model = self.ours(tmp_path, None, dtype="bfloat16")
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        out, grads = run_backward(model.train(), batch)
        assert_same("loss", out.loss.float(), wanted, 0.05)
        assert all(torch.isfinite(grad).all() for grad in grads.values())

    def test_export_is_exact(self, task: str, tmp_path: Path) -> None:
        """transformers -> ours -> transformers: the same names, dtypes and bits; it loads there."""
        from safetensors.torch import load_file

        theirs = self.reference(task, tmp_path / "hf")
        model = self.ours(tmp_path / "hf", None)
        model.save_pretrained(tmp_path / "again")
        before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
        assert set(before) == set(after), set(before) ^ set(after)
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
        how = {"attn_implementation": theirs.config._attn_implementation}
        exported = type(theirs).from_pretrained(tmp_path / "again", **how).eval()
        batch = pad_rows(task, self.rows(task, model.config), "right", CHOICES)
        # Equal weights at other addresses may round differently in a kernel.
        assert_same("loss of the export", exported(**batch).loss, theirs(**batch).loss, 1e-6)

    def test_distributed_checkpoint(self, task: str, tmp_path: Path) -> None:
        """Saving and loading in the distributed format keeps every bit."""
        self.reference(task, tmp_path / "hf")
        model = self.ours(tmp_path / "hf", None)
        model.save_pretrained(tmp_path / "dcp", format="distributed")
        again = self.ours(tmp_path / "dcp", None)
        assert again.task == task and again.config == model.config
        for (name, p), (other, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
            assert name == other and torch.equal(p, q), name

    def test_parity_notices(self, mutation: str, tmp_path: Path) -> None:
        """The tests are tested: each mutation of our model must break parity."""
        theirs = self.reference(self.main_task(), tmp_path)
        ours = self.ours(tmp_path, None)
        {**MUTATIONS, **self.mutations}[mutation](ours)
        try:
            self.check_parity(theirs, ours, "right")
        except AssertionError:
            return
        raise AssertionError(f"parity did not notice: {mutation}")


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.where = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not func.is_view and tensor.numel() > self.elements:
                self.elements, self.where = tensor.numel(), str(func)
        return out


@functools.cache
def two_ranks() -> engine.testing.Pool:
    """Two gloo ranks, forked once for all tests of a process."""
    pool = engine.testing.Pool(2)
    atexit.register(pool.close)
    return pool


def _both_terms(out: Any, row: Row, rows: Sequence[Row]) -> Tensor:
    """The part of one row, times their number, in the sum of two means: over words, and over rows."""
    words, follows = (torch.tensor(labels) for labels in row.labels)
    total = sum(label != compare.IGNORE for one in rows for label in one.labels[0])
    first = torch.nn.functional.cross_entropy(out.prediction_logits[0], words, reduction="sum")
    second = torch.nn.functional.cross_entropy(out.seq_relationship_logits, follows[None])
    return first * len(rows) / total + second


def _items(task: str, row: Row) -> int:
    """Supervised items of one row."""
    if task in ("masked-lm", "token-classification", "seq2seq-lm"):
        return sum(label != compare.IGNORE for label in row.labels)
    if task == "causal-lm":
        return sum(label != compare.IGNORE for label in row.labels[1:])
    return 1


def _accumulated(
    folder: str, task: str, rows: list[Row], cut: int, level: int, shared: str = ""
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, whole gradients) of rows dealt to the ranks and cut into microbatches; the last rank may have fewer.

    shared: what two ranks split of one batch: "tensor", "sequence" (both: layers), "context" or nothing.
    """
    from modelcenter.auto import from_pretrained
    from modelcenter.training import accumulate

    policy: Any = False
    if engine.is_initialized():
        sizes = {"tensor": {"tp_size": 2}, "sequence": {"tp_size": 2}, "context": {"cp_size": 2}}
        engine.init_distributed(**sizes.get(shared, {}))
        policy = engine.Policy(zero_level=level, sequence_parallel=shared == "sequence")
    model = from_pretrained(folder, None, policy=policy)
    if shared in ("tensor", "sequence"):
        held = sum(part.numel() for _, _, part in engine.local_slices(model))
        assert held < 0.8 * model.num_parameters(), "tp_plan splits few of the layers"
    step = CHOICES if task == "multiple-choice" else 1
    examples = [rows[i : i + step] for i in range(0, len(rows), step)][engine.data_rank() :: engine.data_size()]
    size = -(-len(examples) // cut)
    parts = [examples[i : i + size] for i in range(0, len(examples), size)]
    loss = accumulate(model, [pack_rows(task, [row for example in part for row in example]) for part in parts])
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    return loss, {name: grad.clone() for name, grad in hub_gradients(model, grads).items()}


# Mistakes that a port makes. Names of modules are the same in every architecture.


def _swap_k_and_v(model: Any) -> None:
    attn = model.units[1].attn
    attn.k, attn.v = attn.v, attn.k


def _transpose(model: Any) -> None:
    with torch.no_grad():
        weight = model.units[0].attn.q.weight
        weight.copy_(weight.t().clone().reshape(weight.shape))


def _drop_eps(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-12


def _zero_bias(model: Any) -> None:
    """Of the last attention, or where that has none the unit's last vector: a bias or the weight of a norm."""
    unit = model.units[-1]
    bias = unit.attn.out.bias
    with torch.no_grad():
        (bias if bias is not None else [p for p in unit.parameters() if p.dim() == 1][-1]).zero_()


def _wrong_activation(model: Any) -> None:
    model.units[0].mlp.activation = torch.tanh


def _swap_layers(model: Any) -> None:
    units = model.units
    units[0], units[1] = units[1], units[0]


def _cross_boundaries(model: Any) -> None:
    """Attention as if the batch were one sequence."""
    begin = model.begin

    def merged(batch: Any) -> Any:
        x, ctx = begin(batch)
        n = ctx.num_tokens
        ctx.lengths, ctx.cu_seqlens, ctx.max_seqlen = [n], torch.tensor([0, n]), n
        return x, ctx

    model.begin = merged


MUTATIONS: dict[str, Callable[[Any], None]] = {
    "k and v swapped": _swap_k_and_v,
    "a transposed weight": _transpose,
    "a dropped eps": _drop_eps,
    "a zeroed bias": _zero_bias,
    "another activation": _wrong_activation,
    "layers swapped": _swap_layers,
    "attention across rows": _cross_boundaries,
}
