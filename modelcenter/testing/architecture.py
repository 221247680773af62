"""The tests that every architecture passes."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.ops import norm
from modelcenter import compare
from modelcenter.compare import pack_rows, pad_rows
from modelcenter.layers import dropout
from modelcenter.layers.dropout import AttentionDropout
from modelcenter.layers.heads import VocabularyHead
from modelcenter.models.base import VOCABULARY_TASKS
from modelcenter.testing.largest_tensor import LargestTensor
from modelcenter.testing.mutations import MUTATIONS
from modelcenter.testing.parity import assert_same, run_backward
from modelcenter.testing.ranks import accumulate_rows, two_ranks
from modelcenter.testing.reference import CHOICES, ReferenceModels

# (ZeRO level, number of microbatches of each rank) of the runs on two ranks.
LEVELS = {"level 3": ((3, 4),), "levels 0 to 2": ((2, 1), (1, 2), (0, 8))}


class ArchitectureTests(ReferenceModels):
    """The tests that every architecture passes. A subclass sets `hf_config`, and `tasks` to leave some out.

    Attributes:
        hf_config: fields of a tiny Hugging Face config, `model_type` among them.
        tasks: None: all that the architecture has.
        tolerance: on losses, outputs and gradients in fp32.
        row_lengths: tokens of the rows; a multiple of three rows.
        no_dropout: the config's dropouts, set to 0 for parity.
        num_labels: of classification heads.
        has_positions: transformers' model takes position_ids.
        mutations: name -> function that spoils a model of ours; parity must notice each, beside those of MUTATIONS.
        read_in_part: tasks of encoders and decoders whose heads do not use every token's final state.
    """

    mutations: ClassVar[dict[str, Callable[[Any], None]]] = {}
    read_in_part: ClassVar[frozenset[str]] = frozenset(
        (*VOCABULARY_TASKS, "sequence-classification", "multiple-choice", "next-sentence-prediction")
    ) - {"double-heads"}

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

    def test_matches_transformers(self, task: str, side: str, tmp_path: Path) -> None:
        """Outputs, loss and every gradient, on padded rows."""
        theirs = self.reference(task, tmp_path)
        self.check_parity(theirs, self.ours(tmp_path, None), side)

    def test_base_matches_transformers(self, tmp_path: Path) -> None:
        theirs = self.reference("base", tmp_path)
        ours = self.ours(tmp_path, None)
        batch = pad_rows("base", self.rows("base", ours.config))
        result = compare.compare_models(ours, theirs, batch, tolerance=self.tolerance)
        assert result.equal and "last_hidden_state" in result.values, str(result)
        if "embedding" in ours.tasks:
            self.check_embeddings(theirs, tmp_path, batch)

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
            by_token = alone.dim() == 3 or task == "pretraining"
            mine = out.logits[:, step : step + alone.shape[1]] if by_token else out.logits[i : i + 1]
            assert_same(f"row {i}", mine, alone, self.tolerance)
            step += alone.shape[1]

    def test_training_leaves_vocabulary_logits_out(self, task: str, tmp_path: Path) -> None:
        """In training a vocabulary-sized head returns the loss alone, and the last unit computes only the states that
        are read. Gradients are those of a run that returns logits and computes every state."""
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
        big = task != "double-heads" and any(isinstance(module, VocabularyHead) for module in model.modules())
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
        for module in (dropout, norm):
            monkeypatch.setattr(module, "dropout_add", lambda x, residual, p, **_: residual + scaled(x, p))
        monkeypatch.setattr(AttentionDropout, "drop", lambda drop, weights, key, numbers: scaled(weights, drop.p))
        dropouts = {name: 0.1 * i for i, name in enumerate(self.no_dropout, 1)}
        theirs = copy.deepcopy(self.reference(task, tmp_path, **dropouts))
        for module in theirs.modules():  # transformers 5.17 does not pass it on to a part that has a copy of the config
            if hasattr(module, "set_attn_implementation"):
                module.set_attn_implementation("eager")
                module.set_experts_implementation("eager")  # the others multiply no float64
        ours = self.ours(tmp_path, None).double().train()  # of fp32 a compiled operator may drop attention weights
        batch = pad_rows(task, self.rows(task, ours.config, [9] * len(self.row_lengths)), choices=CHOICES)
        assert_same("loss", ours(**batch).loss, self.loss_of(theirs.double().train(), batch), self.tolerance)

    def test_empty_batch(self, task: str, tmp_path: Path) -> None:
        """A batch of no rows has loss 0 and zero gradients for every parameter."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None).train()
        out, grads = run_backward(model, model.empty_batch())
        assert out.loss.item() == 0.0
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained), "a parameter takes no part"
        assert not any(grad.any() for grad in grads.values())

    def test_gradients_do_not_depend_on_the_cut(self, task: str, tmp_path: Path) -> None:
        """One batch, 4 and 8 microbatches: the same loss and gradients, with rows of unequal length."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config, (7, 3, 11, 5, 2, 8, 4, 9, 6, 3, 10, 2) * 2)
        expected = run_backward(model, pack_rows(task, rows))
        for cut in (1, 4, 8):
            self._check_run(f"in {cut} microbatches", accumulate_rows(str(tmp_path), task, rows, cut, 0), expected)

    def test_two_ranks_equal_one(self, task: str, levels: Sequence[tuple[int, int]], tmp_path: Path) -> None:
        """At each ZeRO level on 2 ranks, with unequal shares of the rows in up to 8 microbatches: as in one process."""
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config, (7, 3, 11, 5, 2, 8, 4, 9, 6) * 2)
        expected = run_backward(model, pack_rows(task, rows))
        for level, cut in levels:
            for run in two_ranks().run(accumulate_rows, str(tmp_path), task, rows, cut, level):
                self._check_run(f"at level {level}", run, expected)

    def test_ranks_that_share_a_batch(self, sharing: str, tmp_path: Path) -> None:
        """2 ranks that split the layers, their activations too, or the tokens: as in one process."""
        task = self.main_task()
        self.reference(task, tmp_path)
        model = self.ours(tmp_path, None)
        rows = self.rows(task, model.config, (7, 3, 11, 5, 2, 8, 4))
        expected = run_backward(model, pack_rows(task, rows))
        for run in two_ranks().run(accumulate_rows, str(tmp_path), task, rows, 2, 3, sharing):
            self._check_run(f"with {sharing} parallelism", run, expected)

    def _check_run(
        self, where: str, run: tuple[Tensor, dict[str, Tensor]], expected: tuple[Any, dict[str, Tensor]]
    ) -> None:
        """Assert that (loss, gradients) of a run are those of (output, gradients) in one process."""
        (loss, grads), (out, expected_grads) = run, expected
        assert_same(f"loss {where}", loss, out.loss, self.tolerance)
        for name, grad in expected_grads.items():
            assert_same(f"{name} {where}", grads[name], grad, self.tolerance)

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
        with LargestTensor() as largest:
            run_backward(model.train(), pad_rows(task, rows, "right", CHOICES))
        assert products and max(products) <= tokens, (max(products), tokens)
        assert largest.elements < tokens**2, (largest.elements, largest.operator)

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
        expected = self.ours(tmp_path, None)(**batch).loss
        model = self.ours(tmp_path, None, dtype="bfloat16")
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        out, grads = run_backward(model.train(), batch)
        assert_same("loss", out.loss.float(), expected, 0.05)
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
