"""What `begin` is made of: a batch becomes packed tokens, positions that are checked, and embeddings."""

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
_TENSORS = {
    "input_ids", "attention_mask", "token_type_ids", "task_type_ids", "position_ids", "inputs_embeds", "cu_seqlens",
    "labels", "start_positions", "end_positions", "decoder_input_ids", "decoder_attention_mask", "prompt_lengths",
}  # fmt: skip


def given_inputs(**inputs: Any) -> dict[str, Any]:
    """The arguments of a forward by name, without those that the caller left out: a batch.

    `cache`, as transformers calls it from 5.24 on, is `past_key_values`.

    Raises:
        ValueError: tokens, masks or labels that are no tensor; both names of the cache.
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


# {task: what its head reads, and those of other tasks have no use for}.
HEAD_INPUTS: Mapping[str, tuple[str, ...]] = {
    "base": (),
    "embedding": ("prompt_lengths",),
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
    """`loss_counts` as the caller gave them. Raises ValueError: they are no mapping, or lack a term of the loss."""

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
    """Base of models.base.Model: how a batch enters a model."""

    # Positions of a padded batch number the tokens of a row, not its columns.
    counts_positions: ClassVar[bool] = False
    # Tokens that the model puts before each sequence.
    prefix_tokens: int = 0
    # Of prompt tuning, what stands at these tokens.
    tuned_prompt: nn.Module | None
    # Set by engine.shard where several ranks share the tokens of a batch (engine.parallel.context).
    token_split: Any = None

    config: ModelConfig
    task: str
    tasks: ClassVar[tuple[str, ...]] = ("base",)
    # Of each task; a task that is not named here takes all that forward takes.
    head_inputs: ClassVar[Mapping[str, tuple[str, ...]]] = HEAD_INPUTS
    _sites_named = False
    _packed_hooks: Mapping[int, Callable[[Any, Packed], None]] = MappingProxyType({})

    def refuse_inputs_of_other_heads(self, batch: Batch) -> None:
        """Raise ValueError for an input that the head of another task reads: all heads of a family have one forward,
        which would pass it over."""
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

    def pack(self, batch: Batch, prefix: str = "") -> Packed:
        """The tokens in `{prefix}input_ids` or `{prefix}inputs_embeds`, padded or packed.

        In generation they continue what `past_key_values` holds: then every row has the same number of new tokens.

        Raises:
            ValueError: inputs that do not fit together, naming the field.
        """
        source, cache = self._source(batch, prefix), past_of(batch)
        if cache is not None and self.token_split is not None:
            raise ValueError("use_cache: not with context or sequence parallelism; load the model with cp_size=1")
        ctx = self._pack_tokens(batch, prefix, source, cache)
        if self.prefix_tokens and not prefix and (cache is None or not cache.lengths):
            ctx = ctx.with_prefix(self.prefix_tokens, getattr(self.config, "first_position", 0))
        if cache is None and not self.prefix_tokens:
            ctx = self.without_unneeded(ctx, batch)
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
        """Call hook(model, ctx) in training when the tokens of a batch are packed (an encoder's, if there is one)."""
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
        # What a cache holds is continued at the number of its tokens.
        count = self.counts_positions or cache is not None
        return Packed.from_mask(shape, batch.get(f"{prefix}attention_mask"), source.device, position_ids, count, prefix)

    def without_unneeded(self, ctx: Packed, batch: Batch) -> Packed:
        """The same without tokens that no output of the batch depends on; `pack` asks, where there is no cache."""
        return ctx

    def embedded(self, batch: Batch, ctx: Packed, table: nn.Module, prefix: str = "") -> Tensor:
        """(T, hidden_size): the caller's embeddings, or those of its tokens.

        Raises:
            ValueError: embeddings of another width than the table's; a token outside the table (on a GPU the kernel
                raises).
        """
        ids = batch.get(f"{prefix}input_ids")
        if ids is None:
            x = ctx.unpad(self.given_embeds(batch, table.embedding_dim, prefix))
        else:
            x = self.look_up(table, ctx.unpad(ids), ids, f"{prefix}input_ids")
        return x if self.tuned_prompt is None or ctx.layout.prefix_tokens is None else self.tuned_prompt(x, ctx)

    @staticmethod
    def given_embeds(batch: Batch, width: Any, prefix: str = "") -> Tensor:
        """The caller's embeddings. Raises ValueError: they are not `width` wide."""
        x: Tensor = batch[f"{prefix}inputs_embeds"]
        if x.shape[-1] != width:
            raise ValueError(f"{prefix}inputs_embeds: got width {x.shape[-1]}, expected {width}")
        return x

    def look_up(
        self, table: nn.Module, rows: Tensor, given: Tensor, name: str = "input_ids", size: str = "vocab_size"
    ) -> Tensor:
        """Rows of a table, of the numbers that the caller gave as `name`; size: the config's field of its length.

        Raises:
            ValueError: as `embedded`, or `given` are no whole numbers.
        """
        if given.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name}: got {given.dtype}, expected torch.int64 or torch.int32; convert by .long()")
        try:
            return table(rows)
        except IndexError as error:
            raise self.outside(given, name, size) from error

    def outside(self, given: Tensor, name: str, size: str) -> ValueError:
        """The error for numbers of which some are not in the table; arguments as of `look_up`."""
        hint = "; the tokenizer may be another model's" if size == "vocab_size" else ""
        return ValueError(
            f"{name}: got numbers from {int(given.min())} to {int(given.max())}, expected 0 to "
            f"{getattr(self.config, size) - 1} ({size}){hint}"
        )

    def check_positions(self, batch: Batch, ctx: Packed, most: int, prefix: str = "") -> None:
        """Raise ValueError for a sequence of `{prefix}input_ids` longer than the table of `most` positions."""
        past = 0 if ctx.cache is None else len(ctx.cache)
        columns = not (ctx.layout.packed or past or self.counts_positions)
        longest = past + (ctx.shape[1] + ctx.layout.prefix_length if columns else ctx.max_seqlen)
        if batch.get("position_ids") is None and longest > most:
            raise ValueError(
                f"{prefix}input_ids: a sequence has {longest} tokens, the position table of this model has {most} "
                "(max_positions); truncate to that"
            )
