"""Rerankers that are language models: the difference of two logits as the score of a head with one label, the templates
of published models, their files in sentence-transformers, and training, against transformers' causal models."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chat_toys import make_tokenizer
from ranked_toys import groups_of, make_ranked
from safetensors.torch import load_file
from toydata import command, read_jsonl, write_jsonl

import modelcenter as mc
from engine.testing import run as on_ranks
from modelcenter.adapters import load_lora
from modelcenter.cli import run as cli
from modelcenter.data.sampling import EpochBatches
from modelcenter.data.tokenization.pair_templates import PUBLISHED, PairTemplate
from modelcenter.data.tokenization.tokenize import tokenize
from modelcenter.hub.files.pair_template_files import with_instruction, writes_pairs
from modelcenter.hub.info import model_info
from modelcenter.hub.score_tokens import token_numbers
from modelcenter.training.tasks.pair_reading import tokenize_pairs
from modelcenter.training.trained import TrainedModel
from scripts.finetune_reranking import main

SIZES = {
    "hidden_size": 16, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24,
    "max_positions": 512, "initializer_range": 0.4,
}  # fmt: skip
# Short, as the toy tokenizer has a token for nearly each letter.
SHORT = (
    "{{- bos_token -}}"
    "{%- for m in messages if m.role == 'system' %}{{ m.content }}|{% endfor -%}"
    "Q {{ (messages | selectattr('role', 'eq', 'query') | first).content }}\n"
    "D {{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|im_end|>\nanswer:"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def tokenizer_with(template=None):
    tokenizer = make_tokenizer(template, bos_token="<|im_start|>")
    tokenizer.add_tokens(["yes", "no", "Yes"])
    return tokenizer


def save_lm(folder, template=None, family="qwen3", dtype=None, **changes):
    """A language model with a tokenizer whose vocabulary has the words. changes: of its sizes; None: it has none."""
    tokenizer = tokenizer_with(template)
    sizes = SIZES | {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 0} | changes
    sizes = {name: value for name, value in sizes.items() if value is not None}
    model = mc.from_config(f"tiny/{family}", "causal-lm", seed=3, **sizes)
    model.save_pretrained(folder, tokenizer=tokenizer, dtype=dtype)
    return folder


def last_logits(model, rows):
    """(rows, vocabulary) of transformers' causal model, at the last token of each row."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor(np.asarray(row)[None])).logits[0, -1] for row in rows])


def differences(folder, rows, words=("yes", "no")):
    """(rows,) the published score: the logit of the first word less that of the second."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    numbers = tokenizer_with().convert_tokens_to_ids([*words])
    logits = last_logits(model, rows)[:, numbers]
    return logits[:, 0] - logits[:, 1] if len(words) > 1 else logits[:, 0]


GROUPED = {"num_kv_heads": None, "head_dim": None}  # which older families have not
OTHER_SIZES = {"gpt2": GROUPED, "gpt_neox": GROUPED, "minicpm": {"dim_model_base": 4, "head_dim": 4}}
OTHER_SIZES["gptj"] = GROUPED | {"rotary_dim": 4}
OTHER_SIZES["modernbert-decoder"] = GROUPED
ROWS = [[1, 9, 30, 7, 5], [4, 8, 2], [12, 3, 3, 44, 60, 61, 17]]


def scores(model, rows=ROWS):
    """(rows,) of a classifier of ours, padded."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        return model(ids, mask).logits[:, 0]


@pytest.mark.parametrize("words", [("yes", "no"), ("Yes",)], ids=len)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "family",
    ["qwen3", *(pytest.param(f, marks=pytest.mark.full) for f in ("qwen2", "llama", "gemma", "gpt2", "gpt_neox"))],
)
def test_the_score_is_the_difference_of_logits(tmp_path, family, tied, words):
    folder = save_lm(tmp_path / "lm", family=family, tie_embeddings=tied, **OTHER_SIZES.get(family, {}))
    model = mc.from_pretrained(folder, "sequence-classification", score_tokens=words)
    assert (model.config.num_labels, tuple(model.head.weight.shape)) == (1, (1, 16))
    expected = differences(folder, ROWS, words)
    assert expected.std() > 0.1
    torch.testing.assert_close(scores(model), expected, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "ours")
    from transformers import AutoModelForSequenceClassification

    theirs = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "ours")).eval()
    with torch.no_grad():
        found = torch.stack([theirs(torch.tensor([row])).logits[0, 0] for row in ROWS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    by_number = [tokenizer_with().convert_tokens_to_ids(word) for word in words]
    again = mc.from_pretrained(folder, "sequence-classification", score_tokens=by_number, num_labels=1)
    assert torch.equal(again.head.weight, model.head.weight)


def test_the_difference_is_not_rounded_to_the_16_bits_of_the_file(tmp_path):
    folder = save_lm(tmp_path / "lm", dtype="bfloat16", tie_embeddings=False)
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]
    yes, no = tokenizer_with().convert_tokens_to_ids(["yes", "no"])
    difference = rows[yes].float() - rows[no].float()
    assert not torch.equal(difference, difference.bfloat16().float())
    options = {"score_tokens": ("yes", "no")}
    whole = mc.from_pretrained(folder, "sequence-classification", dtype="float32", **options)
    assert torch.equal(whole.head.weight[0], difference)
    model = mc.from_pretrained(folder, "sequence-classification", **options)
    assert model.dtype == torch.bfloat16 and torch.equal(model.head.weight[0], difference.bfloat16())
    assert model.load_report.file_dtypes == ["bfloat16"] and not model.load_report.initialised


def test_a_scale_of_logits_is_part_of_the_head(tmp_path):
    folder = save_lm(tmp_path / "lm", family="minicpm", **OTHER_SIZES["minicpm"])
    plain = mc.from_pretrained(folder, "causal-lm")
    assert plain.head.scale == 0.25
    model = mc.from_pretrained(folder, "sequence-classification", score_tokens=("yes", "no"))
    with torch.no_grad():
        logits = torch.stack([plain(torch.tensor([row])).logits[0, -1] for row in ROWS])
    yes, no = tokenizer_with().convert_tokens_to_ids(["yes", "no"])
    torch.testing.assert_close(scores(model), logits[:, yes] - logits[:, no], atol=1e-5, rtol=1e-5)


def test_words_are_tokens(tmp_path):
    """A word that is written so in the vocabulary is that token, as in sentence-transformers; else its one token."""
    tokenizer = tokenizer_with()
    tokenizer.save_pretrained(tmp_path)
    vocabulary = tokenizer.get_vocab()
    assert len(tokenizer("Ġfood", add_special_tokens=False)["input_ids"]) > 1
    assert token_numbers(["Ġfood"], tmp_path) == token_numbers([" food"], tmp_path) == (vocabulary["Ġfood"],)
    assert token_numbers([7, "no"], tmp_path) == (7, vocabulary["no"])
    for words in ("yes", ["a", "b", "c"], [], [3, 3]):
        with pytest.raises(ValueError, match="expected the word for yes, and optionally another for no"):
            token_numbers(words, tmp_path)


def test_a_head_in_the_files_stays(tmp_path):
    folder = save_lm(tmp_path / "lm")
    model = mc.from_pretrained(folder, "sequence-classification", num_labels=1, seed=8)
    model.save_pretrained(tmp_path / "drawn")
    again = mc.from_pretrained(tmp_path / "drawn", "sequence-classification", score_tokens=(391, 392))
    assert torch.equal(again.head.weight, model.head.weight)


# -- templates -------------------------------------------------------------------------------------------------------

QUERY, TEXT = "what is by the river?", "Zizzi serves food" + " in the city centre" * 6
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def qwen3_tokens(tokenizer, instruction, query, text, max_length):
    """As the card of Qwen/Qwen3-Reranker-0.6B makes them."""
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (PREFIX, body, SUFFIX)]
    return [*parts[0], *parts[1][: max_length - len(parts[0]) - len(parts[2])], *parts[2]]


def bge_tokens(tokenizer, prompt, query, text, max_length):
    """As the card of BAAI/bge-reranker-v2-gemma makes them, where max_length leaves out the end."""
    end = tokenizer(f"\n{prompt}", add_special_tokens=False)["input_ids"]
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (f"A: {query}", f"\nB: {text}")]
    return [tokenizer.bos_token_id, *parts[0], *parts[1]][: max_length - len(end)] + end


PUBLISHED_TOKENS = {
    "qwen3": (qwen3_tokens, "Given a web search query, retrieve relevant passages that answer the query"),
    "bge-gemma": (
        bge_tokens,
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
        "prediction of either 'Yes' or 'No'.",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_are_the_published_ones(name):
    make, instruction = PUBLISHED_TOKENS[name]
    tokenizer = tokenizer_with(PUBLISHED[name].text)
    whole = len(make(tokenizer, instruction, QUERY, TEXT, 10**6))
    for length in (1000, whole, whole - 1, PairTemplate(tokenizer).shortest + 9):
        found = tokenize_pairs(tokenizer, [QUERY, "a"], [TEXT, ""], length)
        assert found.row(0).tolist() == make(tokenizer, instruction, QUERY, TEXT, length), length
        assert found.row(1).tolist() == make(tokenizer, instruction, "a", "", length)
        assert found.truncated == (length < whole)
    own = 'Judge "the" river\\\nand {{ it }} 🙂'
    for template in (tokenizer.chat_template, with_instruction(tokenizer.chat_template, "another")):
        tokenizer.chat_template = with_instruction(template, own)
        assert tokenizer.chat_template.count("'system', 'content'") == 1  # the other one is gone
        found = tokenize_pairs(tokenizer, [QUERY], [TEXT], 1000).row(0).tolist()
        assert found == make(tokenizer, own, QUERY, TEXT, 1000)


def test_which_templates_are_for_pairs():
    from chat_toys import CHATML

    others = (CHATML, None, {"default": SHORT}, "query document", SHORT.replace("'document'", "'text'"))
    assert writes_pairs(SHORT) and not any(map(writes_pairs, others))
    tokenizer = tokenizer_with(CHATML)  # it writes any role, but is not made for pairs
    plain = tokenize_pairs(tokenizer, ["a b"], ["c"], 64).row(0).tolist()
    assert plain == tokenizer("a b", "c")["input_ids"]
    parts = SHORT.replace(".content }}", ".content[0].text }}")  # as of models that read images
    rows = [tokenize_pairs(tokenizer_with(text), ["a b"], ["c"], 64).row(0).tolist() for text in (SHORT, parts)]
    assert rows[0] == rows[1]


def test_the_tokenizer_adds_nothing_to_a_template(folder):
    """Whatever it adds to other texts, and to these ones if they are tokenised in another way."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(SHORT)
    expected = tokenize_pairs(tokenizer, ["a b"], ["c"], 64).row(0).tolist()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("no $A", special_tokens=[("no", 392)])
    rendered = PairTemplate(tokenizer).render("a b", "c")
    with_more = tokenize(tokenizer, [rendered], max_length=64).row(0).tolist()
    assert with_more == [392, *expected]
    assert tokenize_pairs(tokenizer, ["a b"], ["c"], 64).row(0).tolist() == expected


def test_mistakes_in_templates(tmp_path):
    deaf = SHORT.replace("D {{ (messages | selectattr('role', 'eq', 'document') | first).content }}", "'document'")
    with pytest.raises(ValueError, match="does not write the content of the messages of the roles 'query' and 'docu"):
        PairTemplate(tokenizer_with(deaf))
    with pytest.raises(ValueError, match="ends with '<.endoftext.>', the padding token, but"):
        PairTemplate(tokenizer_with(SHORT + "<|endoftext|>"))
    with pytest.raises(ValueError, match="pair_template: cannot be applied to a pair"):
        PairTemplate(tokenizer_with(SHORT + "{{ raise_exception('no') }}"))
    with pytest.raises(ValueError, match="max_length: got 10, but the template itself has 1. tokens"):
        tokenize_pairs(tokenizer_with(SHORT), ["a"], ["b"], 10)


# -- files of sentence-transformers ----------------------------------------------------------------------------------


def as_of_theirs(folder, tokens, prompt=None, template=SHORT):
    """A language model's directory with what sentence-transformers 6.0.1 writes beside a LogitScore."""
    save_lm(folder, template)
    score = ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore")
    steps = [("", "base.modules.transformer.Transformer"), score]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(steps)
    ]
    name = None if prompt is None else "web"
    settings = {
        "activation_fn": "torch.nn.modules.linear.Identity",
        "default_prompt_name": name,
        "model_type": "CrossEncoder",
        "prompts": {} if prompt is None else {"web": prompt},
    }
    (folder / "1_LogitScore").mkdir()
    for file, value in {
        "modules.json": listed,
        "config_sentence_transformers.json": settings,
        "1_LogitScore/config.json": tokens | {"module_input_name": "causal_logits"},
    }.items():
        (folder / file).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("prompt", [None, "find rivers"])
def test_their_files_say_all(tmp_path, prompt):
    yes, no = tokenizer_with().convert_tokens_to_ids(["yes", "no"])
    folder = as_of_theirs(tmp_path / "st", {"true_token_id": yes, "false_token_id": no}, prompt)
    assert TrainedModel(str(folder)).task_info().config == "RerankingConfig"
    about = model_info(str(folder))
    assert (about["task"], about["activation"]) == ("sequence-classification", "identity")
    rows = [{"query": "a river", "docs": ["food", "the city centre"], "labels": [1, 0]}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    cli(["predict", str(folder), str(data), "--output", str(tmp_path / "out.jsonl")])
    (found,) = read_jsonl(tmp_path / "out.jsonl")
    before = "" if prompt is None else f"{prompt}|"
    texts = [f"<|im_start|>{before}Q a river\nD {text}<|im_end|>\nanswer:" for text in ("food", "the city centre")]
    ids = [tokenizer_with()(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert found["scores"] == pytest.approx(differences(folder, ids).tolist(), abs=1e-5)  # by the identity
    mc.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours" / "modules.json").exists()
    cli(["predict", str(tmp_path / "ours"), str(data), "--output", str(tmp_path / "again.jsonl")])
    assert read_jsonl(tmp_path / "again.jsonl")[0]["scores"] == pytest.approx(found["scores"], abs=1e-6)
    assert mc.from_pretrained(folder, "causal-lm").task == "causal-lm"
    assert mc.from_pretrained(folder, "sequence-classification", num_labels=3).head.weight.shape == (3, 16)


def test_their_files_with_one_word(tmp_path):
    yes = tokenizer_with().convert_tokens_to_ids("Yes")
    folder = as_of_theirs(tmp_path / "st", {"true_token_id": yes, "false_token_id": None})
    torch.testing.assert_close(
        scores(mc.from_pretrained(folder)), differences(folder, ROWS, ["Yes"]), atol=1e-5, rtol=1e-5
    )


def test_mistakes_in_their_files(tmp_path):
    named = as_of_theirs(tmp_path / "st", {"true_token_id": "yes"})
    with pytest.raises(ValueError, match=r"true_token_id and false_token_id are \['yes', None\], expected token ids"):
        mc.from_pretrained(named)
    (named / "1_LogitScore" / "config.json").write_text('{"false_token_id": 5}')
    with pytest.raises(ValueError, match=r"true_token_id and false_token_id are \[None, 5\], expected token ids"):
        mc.from_pretrained(named)
    (named / "1_LogitScore" / "config.json").unlink()
    with pytest.raises(ValueError, match="lists the step 1_LogitScore, but 1_LogitScore/config.json is missing"):
        mc.from_pretrained(named)
    prompt = as_of_theirs(tmp_path / "prompt", {"true_token_id": 5}, "find", template=None)
    with pytest.raises(ValueError, match="queries begin with the prompt 'find'"):
        mc.from_pretrained(prompt)
    far = as_of_theirs(tmp_path / "far", {"true_token_id": 5000})
    with pytest.raises(ValueError, match="got token 5000, but 'lm_head.weight' of .* has 394 rows"):
        mc.from_pretrained(far)


# -- training --------------------------------------------------------------------------------------------------------


def write_data(folder):
    """data/ with train.jsonl and dev.jsonl, short.jinja, and lm/; the rows to train on."""
    rows = make_ranked(16, 1, "negatives")
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "dev.jsonl", make_ranked(7, 2, "negatives"))
    (folder / "short.jinja").write_text(SHORT)
    save_lm(folder / "lm")
    return rows


def flags(folder, **changes):
    return {
        "model": str(folder / "lm"),
        "pair_template": str(folder / "short.jinja"),
        "score_tokens": ["yes", "no"],
        "instruction": "food",
        "train_data": str(folder / "data"),
        "output_dir": str(folder / "run"),
        "batch_size": 8,
        "epochs": 1,
        "lr": 1e-2,
        "log_every": 1,
        "max_length": 128,
        **changes,
    }


def encoded(query, text):
    rendered = f"<|im_start|>food|Q {query}\nD {text}<|im_end|>\nanswer:"
    return tokenizer_with()(rendered, add_special_tokens=False)["input_ids"]


def test_training_is_that_of_the_language_model(folder):
    """Losses from the logits of transformers' causal model, and what is exported, against transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    rows = write_data(folder)
    constant = {"lr_scheduler": "constant", "warmup": 0, "weight_decay": 0, "max_grad_norm": 0.5}
    main(command(flags(folder, **constant)))
    ours = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in row]
    model = AutoModelForCausalLM.from_pretrained(str(folder / "lm")).train()
    yes, no = tokenizer_with().convert_tokens_to_ids(["yes", "no"])
    batches = [b.tolist() for b in EpochBatches(np.ones(len(rows), int), 8, 42).epoch(0)]
    groups, last = groups_of(rows), None
    for row, batch in zip(ours[:1], batches, strict=False):  # then the head has moved in its own way
        losses = []
        for query, texts, _ in (groups[i] for i in batch):
            logits = [model(torch.tensor([encoded(query, text)])).logits[0, -1] for text in texts]
            losses.append(F.cross_entropy(torch.stack([x[yes] - x[no] for x in logits]), torch.tensor(0)))
        last = torch.stack(losses).mean().item()
        assert row["loss"] == pytest.approx(last, rel=1e-4)
    exported = folder / "run" / "model"
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    tokenizer = AutoTokenizer.from_pretrained(str(exported))
    theirs = AutoModelForSequenceClassification.from_pretrained(str(exported)).eval()
    held = make_ranked(7, 2, "negatives")
    expected = []
    for row in held:
        texts = [row["positive"], *row["negatives"]]
        turns = [[{"role": "query", "content": row["query"]}, {"role": "document", "content": t}] for t in texts]
        ids = [tokenizer.apply_chat_template(pair, return_dict=True)["input_ids"] for pair in turns]
        assert ids == [encoded(row["query"], text) for text in texts]
        with torch.no_grad():
            outputs = torch.stack([theirs(torch.tensor([i])).logits[0, 0] for i in ids])
        expected.append(outputs.sigmoid().tolist())
    for name in (folder / "run", exported):
        cli(["predict", str(name), str(folder / "data"), "--output", str(folder / "out.jsonl")])
        for found, scores_of_row in zip(read_jsonl(folder / "out.jsonl"), expected, strict=True):
            assert found["scores"] == pytest.approx(scores_of_row, abs=1e-5)


def predicted(folder, model, *words):
    cli(["predict", str(model), str(folder / "data"), "--output", str(folder / "out.jsonl"), *words])
    return [row["scores"] for row in read_jsonl(folder / "out.jsonl")]


@pytest.mark.full
def test_a_language_model_is_used_without_training(folder):
    write_data(folder)
    named = ["--task", "reranking", "--pair_template", str(folder / "short.jinja"), "--instruction", "food"]
    found = predicted(folder, folder / "lm", *named, "--score_tokens", "yes", "no")
    held = make_ranked(7, 2, "negatives")
    ids = [[encoded(row["query"], text) for text in (row["positive"], *row["negatives"])] for row in held]
    for scores_of_row, rows in zip(found, ids, strict=True):
        assert scores_of_row == pytest.approx(differences(folder / "lm", rows).sigmoid().tolist(), abs=1e-5)
    for words in ([], named):  # no head, and nothing to make it of
        with pytest.raises(ValueError, match="a model for causal-lm, expected one that was trained for sequence-class"):
            predicted(folder, folder / "lm", "--task", "reranking", *words[2:])
    published = ["--task", "reranking", "--pair_template", "qwen3", "--max_length", "400"]
    by_name = predicted(folder, folder / "lm", *published)  # with its words
    assert by_name == predicted(folder, folder / "lm", *published, "--score_tokens", "yes", "no")
    main(command(flags(folder, lr=0, max_steps=1)))
    assert [*map(pytest.approx, found)] == predicted(folder, folder / "run")
    other = predicted(folder, folder / "run", "--instruction", "rivers")
    assert other != found and [*map(pytest.approx, found)] == predicted(folder, folder / "run", "--instruction", "food")


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "modernbert-decoder"])
def test_a_published_template_without_its_words(folder, family):
    """Also of a family whose logits are no products with one matrix."""
    write_data(folder)
    save_lm(folder / "lm", family=family, **OTHER_SIZES.get(family, {}))
    one = {"pair_template": "qwen3", "max_steps": 1, "max_length": 500, "lr": 0}
    main(command(flags(folder, **one, score_tokens=["new-head"])))
    assert writes_pairs(mc.AutoTokenizer.from_pretrained(folder / "run" / "model").chat_template)
    found = predicted(folder, folder / "run")
    words = flags(folder, **one, output_dir=str(folder / "words"))
    del words["score_tokens"]
    if family == "qwen3":
        main(command(words))
        assert predicted(folder, folder / "words") != found
    else:
        with pytest.raises(ValueError, match="with a published pair_template, which names words, give --score_tokens"):
            main(command(words))


@pytest.mark.full
def test_a_template_for_chats_is_not_saved_with_a_reranker(folder):
    """sentence-transformers would read pairs by it."""
    from chat_toys import CHATML

    write_data(folder)
    save_lm(folder / "lm", CHATML)
    plain = {name: value for name, value in flags(folder).items() if name not in ("pair_template", "instruction")}
    main(command(plain | {"max_steps": 1}))
    assert tokenizer_with(CHATML).chat_template and mc.AutoTokenizer.from_pretrained(folder / "lm").chat_template
    assert mc.AutoTokenizer.from_pretrained(folder / "run" / "model").chat_template is None


@pytest.mark.full
def test_runs_cut_and_stopped_are_the_same(folder):
    """On two ranks, and resumed after its first steps."""
    write_data(folder)
    main(command(flags(folder, epochs=2, save_every=2, keep=4)))
    words = command(flags(folder, epochs=2, batch_size=4, output_dir=str(folder / "two")))
    on_ranks(lambda: main(words), 2, timeout=90)
    stopped = str(folder / "run" / "checkpoints" / "step-00000002")
    main(command(flags(folder, epochs=2, output_dir=str(folder / "again"), resume=stopped)))
    one, two, resumed = (read_jsonl(folder / name / "metrics.jsonl") for name in ("run", "two", "again"))
    assert len(one) == len(two) > 4 and resumed[-1]["step"] == one[-1]["step"]
    for a, b in zip(one, two, strict=True):
        for name in {"loss", "grad_norm", "eval_loss", "eval_ndcg@10"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=2e-3)
    tail = [(row["step"], row.get("loss"), row.get("eval_loss")) for row in resumed if row["step"] > 2]
    assert tail and tail == [(row["step"], row.get("loss"), row.get("eval_loss")) for row in one if row["step"] > 2]


@pytest.mark.full
def test_low_rank_updates_keep_the_head(folder):
    """The adapter has the trained head, so peft needs nothing of the words."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    write_data(folder)
    main(command(flags(folder, lora_rank=2)))
    expected = predicted(folder, folder / "run")
    base = AutoModelForSequenceClassification.from_pretrained(str(folder / "lm"), num_labels=1)
    theirs = PeftModel.from_pretrained(base, str(folder / "run" / "adapter")).eval()
    row = make_ranked(7, 2, "negatives")[0]
    with torch.no_grad():
        found = theirs(torch.tensor([encoded(row["query"], row["positive"])])).logits.sigmoid().item()
    assert found == pytest.approx(expected[0][0], abs=1e-5)
    lora = load_lora(folder / "run" / "adapter")
    ours = mc.from_pretrained(folder / "lm", "sequence-classification", num_labels=1, adapter=lora)
    assert ours.head.weight.shape == (1, 16)


@pytest.mark.full
def test_negatives_are_scored_by_it(folder):
    write_data(folder)
    main(command(flags(folder)))
    finder = {"model": str(folder / "lm"), "train_data": str(folder / "data"), "output_dir": str(folder / "finder")}
    cli(["finetune", "embedding", *command({**finder, "batch_size": 8, "max_steps": 1, "max_length": 64})])
    made = folder / "mined.jsonl"
    cli(["mine", str(folder / "finder"), str(folder / "data"), "--output", str(made), "--num_negatives", "2",
         "--reranker", str(folder / "run"), "--output_scores"])  # fmt: skip
    rows = read_jsonl(made)
    write_jsonl(folder / "data" / "dev.jsonl", [{n: r[n] for n in ("query", "positive", "negatives")} for r in rows])
    for row, found in zip(rows, predicted(folder, folder / "run", "--split", "validation"), strict=True):
        assert row["scores"] == pytest.approx(found, abs=1e-5)


def test_mistakes(folder):
    write_data(folder)
    cases = {
        "score_tokens: 'maybe so' is": {"score_tokens": ["maybe so", "no"]},
        "expected the word for yes, and optionally another": {"score_tokens": ["yes", "yes"]},
        "pair_template: got 'qwen', expected qwen3, bge-gemma or a Jinja file": {"pair_template": "qwen"},
        "does not render messages of the roles": {"pair_template": str(folder / "plain.jinja")},
        "instruction: this model reads pairs without a template": {"pair_template": None},
        "score_tokens: got yes no, which changes nothing with random weights|score_tokens: ": {
            "from_scratch": True, "model": "tiny/qwen3", "tokenizer": str(folder / "lm"),
        },
    }  # fmt: skip
    (folder / "plain.jinja").write_text("{{ messages[0].content }}")
    for message, changes in cases.items():
        values = {name: value for name, value in flags(folder, **changes).items() if value is not None}
        with pytest.raises(ValueError, match=message):
            main(command(values))
    others = {"gemma2": "a cap on them", "gptj": "a bias", "modernbert-decoder": "a layer before it"}
    for family, message in others.items():
        lm = save_lm(folder / family, family=family, **OTHER_SIZES.get(family, {}))
        with pytest.raises(ValueError, match=message):
            mc.from_pretrained(lm, "sequence-classification", score_tokens=("yes", "no"))
    with pytest.raises(ValueError, match="they build the head of the task sequence-classification"):
        mc.from_pretrained(folder / "lm", "causal-lm", score_tokens=(1, 2))
    model = mc.from_pretrained(folder / "lm")
    model.save_pretrained(folder / "dcp", format="distributed")
    with pytest.raises(ValueError, match="is a distributed checkpoint, whose head cannot be built from words"):
        mc.from_pretrained(folder / "dcp", "sequence-classification", score_tokens=(1, 2))
