"""BERT, ERNIE, RoBERTa with its namesakes and ELECTRA as decoders (`is_decoder`), and BERT's and ERNIE's next
sentence, against transformers."""

import pytest
import torch
import transformers
from harness import ArchitectureTests, randomize_

import modelcenter as mc

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "hidden_act": "silu",
    "max_position_embeddings": 37,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-2,
}


def see_the_future(model):
    for unit in model.units:
        unit.attn.causal = False


class Writer(ArchitectureTests):
    tasks = ("base", "causal-lm")
    mutations = {"attention to later tokens": see_the_future}

    def rows(self, task, config, lengths=None, seed=0):
        rows = super().rows(task, config, lengths, seed)
        for row in rows:  # a padding token takes no position of RoBERTa
            row.input_ids[:] = [token if token != config.pad_token_id else 7 for token in row.input_ids]
        return rows

    def generating(self, batch):
        return {name: value for name, value in batch.items() if name != "token_type_ids"}  # a new token has type 0

    def position_ids(self, shift, n):
        return torch.arange(n) + self.first if self.first else super().position_ids(shift, n)


class BertWriter(Writer):
    hf_config = {**SIZES, "model_type": "bert", "is_decoder": True}
    first = 0


class RobertaWriter(Writer):
    hf_config = {**SIZES, "model_type": "roberta", "pad_token_id": 2, "is_decoder": True}
    first = 3


class ElectraWriter(Writer):
    hf_config = {**SIZES, "model_type": "electra", "embedding_size": 20, "is_decoder": True}
    no_dropout = {**Writer.no_dropout, "summary_last_dropout": 0.0}
    first = 0


class Few:
    """Of tests that the same heads pass elsewhere, the full set has these."""

    test_base_matches_transformers = test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = None
    test_ranks_that_share_a_batch = test_dropout = test_bfloat16 = test_distributed_checkpoint = None
    test_training_leaves_vocabulary_logits_out = test_parity_notices = test_packed_equals_separate = None


class TestBertWriter(Few, BertWriter):
    pass


class TestRobertaWriter(Few, RobertaWriter):
    test_export_is_exact = test_empty_batch = None  # type: ignore[assignment]


class TestElectraWriter(Few, ElectraWriter):
    test_export_is_exact = test_empty_batch = None  # type: ignore[assignment]


class TestNextSentence(Few, BertWriter):
    hf_config = {**SIZES, "model_type": "bert"}
    tasks = ("next-sentence-prediction",)
    mutations = {}
    test_cached_equals_whole = None  # type: ignore[assignment]


@pytest.mark.full
class TestBertWriterWhole(BertWriter):
    pass


@pytest.mark.full
class TestErnieWriterWhole(BertWriter):
    hf_config = BertWriter.hf_config | {"model_type": "ernie", "use_task_id": True}


@pytest.mark.full
class TestRobertaWriterWhole(RobertaWriter):
    pass


@pytest.mark.full
class TestXLMRobertaWriterWhole(RobertaWriter):
    hf_config = RobertaWriter.hf_config | {"model_type": "xlm-roberta"}


@pytest.mark.full
class TestCamembertWriterWhole(RobertaWriter):
    hf_config = RobertaWriter.hf_config | {"model_type": "camembert"}


@pytest.mark.full
class TestData2VecTextWriterWhole(RobertaWriter):
    hf_config = RobertaWriter.hf_config | {"model_type": "data2vec-text"}


@pytest.mark.full
class TestElectraWriterWhole(ElectraWriter):
    pass


@pytest.mark.full
class TestNextSentenceWhole(BertWriter):
    hf_config = TestNextSentence.hf_config
    tasks = TestNextSentence.tasks
    test_parity_notices = None  # type: ignore[assignment]


@pytest.mark.full
class TestNextSentenceOfErnie(TestNextSentenceWhole):
    hf_config = TestNextSentence.hf_config | {"model_type": "ernie", "use_task_id": True}


@pytest.mark.parametrize(
    "family",
    [
        "BertLMHeadModel",
        *(f"{x}ForCausalLM" for x in ("Roberta", "XLMRoberta", "Camembert", "Electra")),
    ],
)
def test_text_is_what_transformers_forward_makes(family, tmp_path):
    """Greedy, with a row padded on the left: token by token of transformers' forward over each row alone, whole.

    Not its `generate`, which numbers RoBERTa's tokens from 0, over the rows of the table that belong to padding.
    """
    cls = getattr(transformers, family)
    theirs = randomize_(cls(cls.config_class(**SIZES, is_decoder=True)), 3)
    theirs.tie_weights()
    theirs.eval().save_pretrained(tmp_path)
    ours = mc.from_pretrained(tmp_path)
    ids = torch.randint(8, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    ids = torch.where(mask.bool(), ids, ours.config.pad_token_id)
    found = ours.generate(ids, mask, 8, eos_token_id=[], pad_token_id=3, no_repeat_ngram_size=1)
    for row, kept, out in zip(ids, mask.bool(), found, strict=True):
        text = row[kept][None]
        for _ in range(8):
            scores = theirs(text).logits[:, -1].scatter(1, text, -torch.inf)  # no token twice
            text = torch.cat([text, scores.argmax(-1, keepdim=True)], 1)
        assert torch.equal(out[len(row) - int(kept.sum()) :], text[0])


def test_an_encoder_that_sees_ahead_writes_nothing(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    for family, name in (("Bert", "BertLMHeadModel"), ("Roberta", "RobertaForCausalLM")):
        config = getattr(transformers, f"{family}Config")(**sizes, intermediate_size=40)
        getattr(transformers, name)(config).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="is_decoder is False, expected True for causal-lm"):
            mc.from_pretrained(tmp_path)(torch.ones(1, 3, dtype=torch.long))
        assert mc.from_pretrained(tmp_path, is_decoder=True).task == "causal-lm"
    model = mc.from_pretrained(tmp_path, "masked-lm")
    for name in ("use_cache", "output_log_probs", "logits_to_keep"):
        with pytest.raises(ValueError, match=f"{name}: this model is an encoder"):
            model(torch.ones(1, 3, dtype=torch.long), **{name: 1})
    model = mc.from_pretrained(tmp_path, is_decoder=True)
    with pytest.raises(ValueError, match="logits_to_keep: got 2"):
        model(torch.ones(1, 3, dtype=torch.long), logits_to_keep=2)
    usable = model.config.max_positions - model.config.pad_token_id - 1
    with pytest.raises(ValueError, match=f"exceed the {usable} positions"):
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=usable - 2)
