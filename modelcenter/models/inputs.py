"""The parts of `begin`: packing the tokens of a batch, checking positions, and looking up embeddings."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modelcenter.config import ModelConfig
from modelcenter.layers.cache import KVCache, past_of
from modelcenter.layers.dropout import name_sites
from modelcenter.layers.layout import check_tensor, flat_positions
from modelcenter.layers.packing import Packed

Batch = Mapping[str, Any]
# 1 at tokens that attend to all others of their text, and that all attend to, in models with windows.
GLOBAL_MASK = "global_attention_mask"
_TENSORS = {
    "input_ids", "attention_mask", "token_type_ids", "task_type_ids", GLOBAL_MASK, "position_ids",
    "inputs_embeds", "cu_seqlens", "labels", "start_positions", "end_positions", "decoder_input_ids",
    "decoder_attention_mask", "prompt_lengths",
}  # fmt: skip


def given_inputs(**inputs: Any) -> dict[str, Any]:
    """A batch: the arguments of a forward by name, without those that the caller left out.

    `cache`, the name in transformers from 5.24 on, becomes `past_key_values`.

    Raises:
        ValueError: tokens, masks or labels are not tensors; the cache is given under both names.
    """
    batch = {name: value for name, value in inputs.items() if value is not None}
    if "cache" in batch:
        if "past_key_values" in batch:
            raise ValueError("cache: given beside past_key_values, which is the same; pass one of them")
        batch["past_key_values"] = batch.pop("cache")
    for name, value in batch.items():
        if name in _TENSORS:
            check_tensor(name, value)
    return batch


# {task: inputs that only its head reads}.
HEAD_INPUTS: Mapping[str, tuple[str, ...]] = {
    "base": (),
    "embedding": ("prompt_lengths",),
    "multi-vector": (),
    "sparse-embedding": (),
    "text-encoding": (),
    "masked-lm": ("labels", "logits_to_keep", "soft_targets"),
    "causal-lm": ("labels", "logits_to_keep", "output_log_probs", "soft_targets"),
    "seq2seq-lm": ("labels", "logits_to_keep", "soft_targets"),
    "sequence-classification": ("labels",),
    "token-classification": ("labels",),
    "question-answering": ("start_positions", "end_positions"),
    "multiple-choice": ("labels", "num_choices"),
    "pretraining": ("labels", "logits_to_keep", "next_sentence_label", "sentence_order_label"),  # of BERT, of ALBERT
    "next-sentence-prediction": ("labels",),
    "double-heads": ("labels", "mc_labels", "mc_token_ids", "num_choices"),
}


class GivenCounts(dict[str, Any]):
    """The caller's `loss_counts`. Raises ValueError if they are not a mapping, or lack a term of the loss."""

    def __init__(self, given: Any, task: str):
        if not isinstance(given, Mapping):
            raise ValueError(f"loss_counts: got {given!r}, expected {{term: items}}, as model.loss_counts(batch) is")
        super().__init__(given)
        self.task = task

    def __missing__(self, term: str) -> Any:
        raise ValueError(
            f"loss_counts: got the terms {', '.join(self) or 'none'}, but the loss of task {self.task!r} has the term "
            f"{term}; model.loss_counts(batch) counts all that it has"
        )


class ModelInputs(nn.Module):
    """The part of models.base.Model that reads a batch."""

    # Whether positions in a padded batch count the tokens of a row instead of its columns.
    counts_positions: ClassVar[bool] = False
    # The number of tokens that the model puts before each sequence.
    prefix_tokens: int = 0
    # The module that embeds these tokens in prompt tuning.
    tuned_prompt: nn.Module | None
    # Set by engine.shard where several ranks share the tokens of a batch (engine.parallel.context).
    token_split: Any = None

    config: ModelConfig
    task: str
    tasks: ClassVar[tuple[str, ...]] = ("base",)
    # By task; a task that is not listed takes all inputs of forward.
    head_inputs: ClassVar[Mapping[str, tuple[str, ...]]] = HEAD_INPUTS
    # Whether it accepts global_attention_mask.
    marks_global: ClassVar[bool] = False
    _sites_named = False
    _packed_hooks: Mapping[int, Callable[[Any, Packed], None]] = MappingProxyType({})

    def refuse_inputs_of_other_heads(self, batch: Batch) -> None:
        """Raise ValueError for an input that only another task's head reads: all heads of a family share one forward,
        which would ignore it."""
        own = self.head_inputs.get(self.task)
        if own is None:
            return
        every = (*HEAD_INPUTS.values(), *self.head_inputs.values())
        others = {name for names in every for name in names}.difference(own)
        for name, value in batch.items():
            if name in others and (isinstance(value, Tensor) or value):
                takers = [task for task in self.tasks if name in self.head_inputs.get(task, ())]
                known = f"load it with task={' or '.join(map(repr, takers))}" if takers else "no task of it does"
                raise ValueError(
                    f"{name}: {type(self).__name__} of task {self.task!r} does not take it, {known}; or leave it out"
                )

    def refuse_idle_mask(self, batch: Batch) -> None:
        """Raise ValueError for a mask of global tokens, if this model has none."""
        if GLOBAL_MASK in batch and not self.marks_global:
            raise ValueError(
                f"{GLOBAL_MASK}: in {type(self).__name__} no token has global attention, which only Longformer and LED "
                "have; leave it out"
            )

    def pack(self, batch: Batch, prefix: str = "") -> Packed:
        """Pack the tokens in `{prefix}input_ids` or `{prefix}inputs_embeds`, which are padded or packed.

        In generation they continue the sequences in `past_key_values`; each row has the same number of new tokens.

        Raises:
            ValueError: the inputs do not fit together; the message names the field.
        """
        source, cache = self._source(batch, prefix), past_of(batch)
        if cache is not None and self.token_split is not None:
            raise ValueError("use_cache: not with context or sequence parallelism; load the model with cp_size=1")
        ctx = self._pack_tokens(batch, prefix, source, cache)
        if self.prefix_tokens and not prefix and (cache is None or not cache.lengths):
            ctx = ctx.with_prefix(self.prefix_tokens, getattr(self.config, "first_position", 0))
        if cache is None and not self.prefix_tokens:
            ctx = self.without_unneeded(ctx, batch)
        if self.task == "multi-vector" and ctx.layout.packed and (mask := batch.get("attention_mask")) is not None:
            ctx = ctx.attending_to(mask)
            if ctx.attended is not None and self.token_split is not None:
                raise ValueError(
                    "attention_mask: with context or sequence parallelism all tokens are attended to; queries may be "
                    "expanded by mask tokens that are (expansion_attended)"
                )
        if self.training:
            if not self._sites_named:
                name_sites(self)
                self._sites_named = True
            ctx = ctx.with_draws()
        if self.token_split is not None:
            self.token_split.enter(self.training)
            ctx = ctx.split_over(self.token_split)
        if cache is not None:
            cache.begin(ctx)
        if self.training and not prefix:
            for hook in self._packed_hooks.values():
                hook(self, ctx)
        return ctx

    def register_packed_hook(self, hook: Callable[[Any, Packed], None]) -> RemovableHandle:
        """In training, call hook(model, ctx) after the tokens of a batch (of the encoder, if any) are packed."""
        hooks = vars(self).setdefault("_packed_hooks", OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @staticmethod
    def _source(batch: Batch, prefix: str) -> Tensor:
        """The tokens or embeddings that the caller gave."""
        ids, embeds = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}inputs_embeds")
        given = [x for x in (ids, embeds) if x is not None]
        if len(given) != 1:
            raise ValueError(f"{prefix}input_ids, {prefix}inputs_embeds: pass exactly one of them")
        (source,) = given
        if source.dim() != (2 if ids is not None else 3):
            name, width = (f"{prefix}inputs_embeds", ", width") if ids is None else (f"{prefix}input_ids", "")
            expected = f"(batch, seq{width}) or packed (1, T{width})"
            raise ValueError(f"{name}: got shape {tuple(source.shape)}, expected {expected}")
        return source

    def _pack_tokens(self, batch: Batch, prefix: str, source: Tensor, cache: KVCache | None) -> Packed:
        shape, position_ids = (source.shape[0], source.shape[1]), batch.get("position_ids")
        if cache is not None and cache.lengths:
            ctx = cache.next(*shape, source.device, batch.get(f"{prefix}attention_mask"), prefix)
            if position_ids is not None:
                ctx.positions = flat_positions(position_ids, shape, prefix)
            return ctx
        if (ends := batch.get(f"{prefix}cu_seqlens")) is not None:
            if shape[0] != 1:
                raise ValueError(f"{prefix}cu_seqlens: packed input must be of shape (1, T), got {tuple(source.shape)}")
            return Packed.from_cu_seqlens(ends, batch.get(f"{prefix}max_seqlen"), shape[1], position_ids, prefix)
        # The next tokens take the positions that follow the number of tokens in the cache.
        count = self.counts_positions or cache is not None
        return Packed.from_mask(shape, batch.get(f"{prefix}attention_mask"), source.device, position_ids, count, prefix)

    def without_unneeded(self, ctx: Packed, batch: Batch) -> Packed:
        """`ctx` without tokens on which no output of the batch depends; `pack` calls it if there is no cache."""
        return ctx

    def embedded(self, batch: Batch, ctx: Packed, table: nn.Module, prefix: str = "") -> Tensor:
        """(T, hidden_size): the caller's embeddings, or the embeddings of the caller's tokens.

        Raises:
            ValueError: the caller's embeddings and the table differ in width; a token is outside the table (on a GPU,
                the kernel raises).
        """
        ids = batch.get(f"{prefix}input_ids")
        if ids is None:
            x = ctx.unpad(self.given_embeds(batch, table.embedding_dim, prefix))
        else:
            x = self.look_up(table, ctx.unpad(ids), ids, f"{prefix}input_ids")
        return x if self.tuned_prompt is None or ctx.layout.prefix_tokens is None else self.tuned_prompt(x, ctx)

    @staticmethod
    def given_embeds(batch: Batch, width: Any, prefix: str = "") -> Tensor:
        """The caller's embeddings. Raises ValueError if their width is not `width`."""
        x: Tensor = batch[f"{prefix}inputs_embeds"]
        if x.shape[-1] != width:
            raise ValueError(f"{prefix}inputs_embeds: got width {x.shape[-1]}, expected {width}")
        return x

    def look_up(
        self, table: nn.Module, rows: Tensor, given: Tensor, name: str = "input_ids", size: str = "vocab_size"
    ) -> Tensor:
        """Look up rows of a table.

        Args:
            rows: indices of the rows. given: the caller's input that they come from. name: of that input.
            size: the config field with the length of the table.

        Raises:
            ValueError: as `embedded`; or `given` has no integer dtype.
        """
        if given.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name}: got {given.dtype}, expected torch.int64 or torch.int32; convert by .long()")
        try:
            return table(rows)
        except IndexError as error:
            raise self.outside(given, name, size) from error

    def outside(self, given: Tensor, name: str, size: str) -> ValueError:
        """The error for indices outside the table; arguments as in `look_up`."""
        hint = "; the tokenizer may be another model's" if size == "vocab_size" else ""
        return ValueError(
            f"{name}: got numbers from {int(given.min())} to {int(given.max())}, expected 0 to "
            f"{getattr(self.config, size) - 1} ({size}){hint}"
        )

    def check_positions(
        self, batch: Batch, ctx: Packed, most: int, prefix: str = "", size: str = "max_positions"
    ) -> None:
        """Raise ValueError for a sequence of `{prefix}input_ids` longer than the table of `most` positions. size: the
        config field with the length of the table."""
        past = 0 if ctx.cache is None else len(ctx.cache)
        columns = not (ctx.layout.packed or past or self.counts_positions)
        longest = past + (ctx.shape[1] + ctx.layout.prefix_length if columns else ctx.max_seqlen)
        if batch.get("position_ids") is None and longest > most:
            raise ValueError(
                f"{prefix}input_ids: a sequence has {longest} tokens, the position table of this model has {most} "
                f"({size}); truncate to that"
            )
