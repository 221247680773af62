"""evaluate and predict on pretrained models, against transformers and on two ranks."""

import json

import pytest
import torch
from text_toys import KINDS, TOKENIZERS, pretrain, write_texts
from toydata import write_jsonl
from toyruns import read_summary

from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.training.tasks.pretraining.span_corruption import fill_spans


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of each kind, and of pairs."""
    folder = write_texts(tmp_path_factory.mktemp("trained"))
    for kind in KINDS:
        pretrain(folder, kind, kind, max_steps=3)
    pretrain(folder, "mlm", "pairs", max_steps=3, next_sentence=True)
    pretrain(folder, "mlm", "order", max_steps=3, sentence_order=True, model="tiny/albert")
    return folder


@pytest.mark.parametrize("name", [*KINDS, "pairs", "order"])
def test_evaluate_is_the_runs_own_evaluation_on_any_number_of_ranks(trained, name):
    last = read_summary(trained, name)["last"]
    expected = {key.removeprefix("eval_"): v for key, v in last.items() if key.startswith("eval_")}
    del expected["seconds"]
    words = ["evaluate", str(trained / name), str(trained / "data"), "--output", str(trained / "scores.json")]
    for ranks in (1, 2):
        if ranks == 1:
            cli(words)
        else:
            on_ranks(lambda: cli([*words, "--batch_size", "2"]), 2)
        found = json.loads((trained / "scores.json").read_text())
        del found["rows"]
        assert found == pytest.approx(expected, rel=1e-5)
    assert {"loss", "perplexity"} <= set(expected)
    assert ("next_sentence_accuracy" in expected) == (name == "pairs")
    assert ("sentence_order_accuracy" in expected) == (name == "order")


def predict(trained, name, rows, *more, ranks=1) -> list[dict]:
    data = write_jsonl(trained / "asked.jsonl", [{"text": text} for text in rows])
    words = ["predict", str(trained / name), str(data), "--output", str(trained / "said.jsonl"), *more]
    if ranks == 1:
        cli(words)
    else:
        on_ranks(lambda: cli(words), ranks)
    return [json.loads(line) for line in (trained / "said.jsonl").read_text().splitlines()]


def test_masks_are_filled(trained):
    from transformers import AutoModelForMaskedLM

    rows = ["the [MASK] was fine and a plot", "it [MASK] [MASK] .", "a film with [MASK]"]
    found = predict(trained, "mlm", rows, "--top_k", "3", "--batch_size", "2")
    tokenizer = TOKENIZERS["tiny/bert"]()
    model = AutoModelForMaskedLM.from_pretrained(trained / "mlm" / "model").eval()
    for row, said in zip(rows, found, strict=True):
        ids = tokenizer(row, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            best = model(ids).logits[0][ids[0] == 4].softmax(-1).topk(3)
        tokens = [[one["token"] for one in mask] for mask in said["masks"]]
        assert tokens == [[tokenizer.decode([i]).strip() for i in part] for part in best.indices.tolist()]
        scores = [one["score"] for mask in said["masks"] for one in mask]
        assert scores == pytest.approx(best.values.flatten().tolist(), abs=2e-6)
        ids[ids == 4] = best.indices[:, 0]
        assert said["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
    other = predict(trained, "mlm", rows, "--top_k", "3", "--batch_size", "1", ranks=2)
    for one, same in zip(other, found, strict=True):
        assert one["text"] == same["text"]
    with pytest.raises(ValueError, match=r"asked.jsonl, line 2: the row has no \[MASK\] to fill"):
        predict(trained, "mlm", ["a [MASK]", "a film"])
    assert len(predict(trained, "pairs", rows)[1]["masks"]) == 2


def test_texts_go_on(trained):
    from transformers import AutoModelForCausalLM

    rows = ["the film was", "it", "a very fine plot ."]
    found = predict(trained, "lm", rows, "--max_new_tokens", "5")
    tokenizer = TOKENIZERS["tiny/gpt2"]()
    model = AutoModelForCausalLM.from_pretrained(trained / "lm" / "model").eval()
    assert (model.config.bos_token_id, model.config.eos_token_id) != (50256, 50256)  # the tokenizer's, not the preset's
    for row, said in zip(rows, found, strict=True):
        ids = tokenizer(row, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert said == {"text": tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)}
    assert predict(trained, "lm", rows, "--max_new_tokens", "5", "--batch_size", "1", ranks=2) == found


def test_sentinels_are_filled(trained):
    rows = ["the <extra_id_0> was <extra_id_1> .", "<extra_id_0> film"]
    found = predict(trained, "span-corruption", rows, "--max_new_tokens", "8")
    assert [list(row["spans"]) for row in found] == [["<extra_id_0>", "<extra_id_1>"], ["<extra_id_0>"]]
    other = predict(trained, "span-corruption", rows, "--max_new_tokens", "8", "--batch_size", "1", ranks=2)
    assert other == found
    beams = ["--max_new_tokens", "8", "--num_beams", "3"]
    several = predict(trained, "span-corruption", rows, *beams, "--num_return_sequences", "2")
    assert [list(row) for row in several] == [["predictions"]] * 2
    assert [len(row["predictions"]) for row in several] == [2, 2]
    assert [row["predictions"][0] for row in several] == predict(trained, "span-corruption", rows, *beams)
    with pytest.raises(ValueError, match="line 1: the row has no sentinel to fill; put <extra_id_0> where"):
        predict(trained, "span-corruption", ["a film"])
    tokenizer = TOKENIZERS["tiny/t5"]()
    marks = tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"])
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(20)])
    film, plot, fine = tokenizer.convert_tokens_to_ids(["film", "plot", "fine"])
    answer = [marks[0], film, plot, marks[1], marks[2], fine, marks[0], plot, 1, fine]
    said = fill_spans(tokenizer, sentinels, [marks[0], fine, marks[2], marks[1], 1], answer)
    assert said["spans"] == {"<extra_id_0>": "film plot", "<extra_id_2>": "fine", "<extra_id_1>": ""}
    assert said["text"] == "film plot fine fine"
