"""Replaced token detection: a generator and a discriminator that are pretrained together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import engine
from engine.loss import DRAW_BITS
from modelcenter.data.pretraining.masking import IGNORED, Masking, Words
from modelcenter.data.pretraining.objectives import Objective, Replaced, labelled_batch
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.models.base import Model
from modelcenter.models.replaced_tokens import ReplacedTokenPair
from modelcenter.training.config import ReplacedTokensConfig
from modelcenter.training.evaluation import evaluate
from modelcenter.training.metrics import ReplacedTokens, Score, sum_over_ranks
from modelcenter.training.replaced_tokens import joined_nets, nets_of_run, save_nets, write_generator_config
from modelcenter.training.tasks.examples import Batches, rank_batches
from modelcenter.training.tasks.pretraining.base import Pretraining
from modelcenter.training.tasks.pretraining.prompts import encode_prompts

# {family: share of the selected tokens that become the mask token}, as in ELECTRA's and DeBERTa's published code.
MASKED_SHARE = {"electra": 0.85, "deberta-v2": 1.0}


@dataclass(eq=False, kw_only=True, repr=False)
class ReplacedTokenPretraining(Pretraining):
    """Replaced token detection. Flags: ReplacedTokensConfig.

    In training and evaluation the model is a ReplacedTokenPair; predictions are the discriminator's.
    """

    name: ClassVar[str] = "replaced-tokens"
    wraps_model: ClassVar[bool] = True
    evaluated_logits: ClassVar[bool | str] = "labelled"
    cfg: ReplacedTokensConfig
    pair: ReplacedTokenPair | None = None  # the trained model

    @property
    def head(self) -> str:
        return "pretraining"

    def wrap(self, model: Model, load: Callable[..., Model]) -> Model:
        cfg = self.cfg
        if cfg.share_embeddings == "auto":
            cfg.share_embeddings = "tied" if model.config.model_type == "electra" else "disentangled"
        if cfg.masked_share is None:
            cfg.masked_share = MASKED_SHARE[model.config.model_type]
        self.pair = joined_nets(cfg, model, load)
        return self.pair

    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        words: Words = "none"
        if self.cfg.whole_word:
            words = "words" if self.cfg.word_segmenter == "none" else self.cfg.word_segmenter
        share = MASKED_SHARE["electra"] if self.cfg.masked_share is None else self.cfg.masked_share
        masking = Masking(tokenizer, self.cfg.mask_fraction, words, masked=share, replaced=0.0)
        return Replaced(masking, SpecialTokens.of(tokenizer), max_length, seed, DRAW_BITS)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return ReplacedTokens()

    def update_metrics(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        labels = batch["labels"]
        metrics.update(out.logits, out["replaced"], out["generator_logits"], labels[labels != IGNORED])

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        batches = Batches(examples, rank_batches(examples, batch_size), self.evaluated_logits)
        return evaluate(model, batches, self.metrics(model.device), self.update_metrics)

    # -- what is written ---------------------------------------------------------------------------------------------

    def save_model(self, model: Model, target: Path, tokenizer: Any, card: dict[str, Any]) -> None:
        assert isinstance(model, ReplacedTokenPair)
        save_nets(model, target, tokenizer, card)

    def write_extra(self, folder: Path) -> None:
        assert self.pair is not None
        write_generator_config(self.pair, folder)

    # -- inference with a trained model ------------------------------------------------------------------------------

    def trained_model(self, source: str, load: Callable[..., Model], policy: Any) -> Model:
        return nets_of_run(self.cfg, source, load, policy) if self.eval_parts else load()

    def prompt_examples(self, tokenizer: Any, max_length: int, table: Any, column: str) -> "Texts":
        rows = encode_prompts(tokenizer, table, column, max_length, special=True)
        special = SpecialTokens.of(tokenizer)
        return Texts([np.array(ids, np.int64) for ids in rows], len(special.before), len(special.after))

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """The tokens of each row, each with the probability that it replaced another."""
        rows = rank_batches(examples, cfg.batch_size)
        scores = TokenScores(examples, rows)
        evaluate(model, Batches(examples, rows), scores, lambda metrics, out, batch: metrics.update(out.logits))
        return scores.predictions(tokenizer) if engine.rank() == 0 else iter(())


class Texts:
    """Texts whose tokens are judged. before, after: the numbers of special tokens around each text."""

    def __init__(self, ids: list[np.ndarray], before: int, after: int):
        self.ids, self.before, self.after = ids, before, after

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids], np.int64)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        ids = [self.ids[row] for row in rows]
        return labelled_batch(ids, [np.zeros(len(row), np.int64) for row in ids])  # the labels are not read


class TokenScores:
    """The probability, at each token of all rows, that it replaced another: metrics that are updated batch by batch, in
    the order of `rows`."""

    main = ""

    def __init__(self, examples: Texts, rows: list[np.ndarray]):
        self.examples, self.rows, self.batches_seen = examples, rows, 0
        self.starts = np.concatenate(([0], np.cumsum(examples.lengths)))
        self.probabilities = torch.zeros(int(self.starts[-1]))

    def update(self, logits: Tensor) -> None:
        """logits (1, tokens), of the next batch."""
        rows = self.rows[self.batches_seen]
        places = np.concatenate([np.arange(self.starts[row], self.starts[row + 1]) for row in rows])
        self.probabilities[places] = logits[0].float().sigmoid().cpu()
        self.batches_seen += 1

    def result(self) -> dict[str, float | None]:
        """Combine the ranks: each token is zero on all ranks but one, so the sums are exact."""
        self.probabilities = sum_over_ranks(self.probabilities)
        return {}

    def predictions(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """One line per row; call it after `result`."""
        for row, ids in enumerate(self.examples.ids):
            part = slice(self.examples.before, len(ids) - self.examples.after)
            scores = self.probabilities[self.starts[row] : self.starts[row + 1]].tolist()
            pairs = zip(ids[part].tolist(), scores[part], strict=True)
            yield {
                "text": tokenizer.decode(ids.tolist(), skip_special_tokens=True),
                "tokens": [{"token": tokenizer.decode([i]).strip(), "replaced": round(p, 6)} for i, p in pairs],
            }
