"""Fine-tuning of language models: against transformers, cut differently, resumed, and on bad rows."""

import json
import signal

import numpy as np
import pytest
import torch
import toydata
import transformers
from chat_toys import CHATML, SIZES, STILL, make_pairs, make_tokenizer
from toydata import command, read_jsonl, write_jsonl
from toyruns import die_at, in_a_process, read_summary, went_on_after

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.sampling import EpochBatches
from modelcenter.training.config import LMConfig
from modelcenter.training.tasks import TASKS
from modelcenter.training.tasks.lm import add_stops
from scripts.finetune_lm import main

END = {"end": "<|im_end|>"}


def as_chats(pairs):
    """Chats of one or two rounds."""
    rows = []
    for i, row in enumerate(pairs):
        turns = [{"role": "user", "content": row["mr"]}, {"role": "assistant", "content": row["ref"]}]
        other = pairs[i - 1]
        more = [{"role": "user", "content": other["mr"]}, {"role": "assistant", "content": other["ref"]}]
        rows.append({"messages": turns + (more if i % 3 == 0 else [])})
    return rows


def flags(folder, **changes):
    return toydata.flags(folder, **({"model": "tiny/gpt2", "model_config": SIZES | STILL} | changes))


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learnt something, at folder/run."""
    folder = make_folder(tmp_path_factory.mktemp("lm"), train=64)
    sizes = SIZES | STILL | {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64}
    main(command(flags(folder, model_config=sizes, epochs=8, lr=1e-2, log_every=20, eval_every="never")))
    return folder


def make_folder(path, train=27, chats=False):
    form = as_chats if chats else list
    write_jsonl(path / "data" / "train.jsonl", form(make_pairs(train, seed=1)))
    write_jsonl(path / "data" / "dev.jsonl", form(make_pairs(11, seed=2)))
    make_tokenizer(CHATML if chats else None, **(END if chats else {})).save_pretrained(path / "tokenizer")
    return path


def curve(folder, name="run"):
    rows = read_jsonl(folder / name / "metrics.jsonl")
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def losses(folder, name="run"):
    return [row["loss"] for row in curve(folder, name) if "loss" in row]


def hugging_face(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path))


def labelled_by_hand(tokenizer, rows):
    """(ids, labels) of each chat: what stands between the generation prompt and the end of each turn."""
    start, end = tokenizer("<|im_start|>assistant\n")["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = []
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"]
        labels, i = [-100] * len(ids), 0
        while i < len(ids):
            if ids[i : i + len(start)] == start:
                i += len(start)
                stop = ids.index(end, i)
                labels[i : stop + 1] = ids[i : stop + 1]
                i = stop
            i += 1
        found.append((torch.tensor([ids]), torch.tensor([labels])))
    return found


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.full), 0.2])
def test_same_losses_as_a_plain_loop_over_the_transformers_model(tmp_path, smoothing):
    """Rows, marks of answers, order, label smoothing and the mean over tokens, by an independent loop."""
    folder = make_folder(tmp_path, chats=True)
    more = {"label_smoothing": smoothing, "gradient_accumulation_steps": 2, "batch_size": 4}
    values = flags(folder, weight_decay=0.0, warmup=0, lr_scheduler="constant", max_grad_norm=0, seed=7, **more)
    main(command(values))
    tokenizer = make_tokenizer(CHATML, **END)
    sizes = SIZES | STILL | {"vocab_size": len(tokenizer), "pad_token_id": 0}
    modelcenter.from_config("tiny/gpt2", "causal-lm", seed=7, **sizes).save_pretrained(folder / "start")
    model = hugging_face(folder / "start").train()
    data = labelled_by_hand(tokenizer, as_chats(make_pairs(27, seed=1)))
    assert sum(int((labels != -100).sum()) for _, labels in data) > 300
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    lengths = np.array([ids.shape[1] for ids, _ in data])
    expected, norms = [], []
    for rows in EpochBatches(lengths, 8, 7).epoch(0):
        optimizer.zero_grad()
        count = sum(int((data[i][1][:, 1:] != -100).sum()) for i in rows)
        total = torch.zeros(())
        for i in rows:
            logits = model(data[i][0]).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(
                logits, data[i][1][0, 1:], reduction="sum", label_smoothing=smoothing
            )
        (total / count).backward()
        expected.append(total.item() / count)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
    assert losses(folder) == pytest.approx(expected, abs=1e-5)
    assert [row["grad_norm"] for row in curve(folder) if "loss" in row] == pytest.approx(norms, rel=1e-4)
    # Evaluation: by the labels alone, each token counts once.
    model = hugging_face(folder / "run" / "model").eval()
    total, count = 0.0, 0
    for ids, labels in labelled_by_hand(tokenizer, as_chats(make_pairs(11, seed=2))):
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += int((labels[:, 1:] != -100).sum())
    last = curve(folder)[-1]
    assert last["eval_loss"] == pytest.approx(total / count, abs=1e-5)
    assert last["eval_perplexity"] == pytest.approx(np.exp(total / count), rel=1e-5)


def test_ranks_and_microbatches_change_nothing(folder):
    main(command(flags(folder, token_accuracy=True)))
    main(command(flags(folder, output_dir=str(folder / "cut"), batch_size=2, gradient_accumulation_steps=4)))
    assert losses(folder, "cut") == pytest.approx(losses(folder), abs=2e-6)
    values = flags(folder, output_dir=str(folder / "two"), batch_size=4, eval_samples=3, token_accuracy=True)
    on_ranks(lambda: main(command(values)), 2, timeout=90)
    assert losses(folder, "two") == pytest.approx(losses(folder), abs=2e-6)
    last, other = curve(folder)[-1], curve(folder, "two")[-1]
    assert other["eval_loss"] == pytest.approx(last["eval_loss"], abs=2e-6)
    assert other["eval_accuracy"] == last["eval_accuracy"] > 0
    assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"]))
    assert len(read_jsonl(folder / "two" / "samples.jsonl")) == 3


def test_killed_runs_go_on_bit_for_bit(folder, monkeypatch, capfd):
    dropped = {"model_config": SIZES | {"dropout": 0.3}, "epochs": 3, "save_every": 2, "eval_samples": 2}
    dropped["eval_max_new_tokens"] = 4
    main(command(flags(folder, output_dir=str(folder / "whole"), **dropped)))
    with monkeypatch.context() as patch:
        die_at(patch, 7)
        assert in_a_process(main, flags(folder, **dropped)) == -signal.SIGKILL
    main(command(flags(folder, **dropped)))
    assert went_on_after(capfd) in (4, 6)  # step 6 may have been half written
    assert curve(folder) == curve(folder, "whole")
    samples = read_jsonl(folder / "run" / "samples.jsonl")
    assert samples == read_jsonl(folder / "whole" / "samples.jsonl")
    assert [row["step"] for row in samples] == [4, 4, 8, 8, 12, 12]


@pytest.mark.full
def test_a_mixture_of_experts(folder, monkeypatch, capfd):
    """Balanced over the whole batch: on 2 ranks, and when resumed, as in one process; transformers loads it."""
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.3, "attention_dropout": 0.2}
    values = {"model": "tiny/qwen2_moe", "model_config": fields, "save_every": 2, "eval_every": "never", "epochs": 2}
    main(command(flags(folder, output_dir=str(folder / "whole"), **values)))
    two = flags(folder, output_dir=str(folder / "two"), batch_size=4, zero=3, **values)
    on_ranks(lambda: main(command(two)), 2, timeout=90)
    assert losses(folder, "two") == pytest.approx(losses(folder, "whole"), abs=2e-5)
    with monkeypatch.context() as patch:
        die_at(patch, 5)
        assert in_a_process(main, flags(folder, **values)) == -signal.SIGKILL
    main(command(flags(folder, **values)))
    assert went_on_after(capfd) in (2, 4)  # step 4 may have been half written
    assert curve(folder) == curve(folder, "whole")
    ours, theirs = modelcenter.from_pretrained(folder / "two" / "model"), hugging_face(folder / "two" / "model")
    ids = torch.arange(5, 30).view(1, -1)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=0)


def test_predict_is_what_transformers_generates(trained, tmp_path):
    data = write_jsonl(tmp_path / "new.jsonl", [{"mr": row["mr"]} for row in make_pairs(7, seed=4)])
    words = ["predict", str(trained / "run"), str(data), "--max_new_tokens", "12", "--batch_size", "3"]
    cli([*words, "--output", str(tmp_path / "out.jsonl")])
    found = read_jsonl(tmp_path / "out.jsonl")
    tokenizer, model = make_tokenizer(), hugging_face(trained / "run" / "model").eval()
    assert model.config.eos_token_id == tokenizer.eos_token_id  # not GPT-2's
    for row, said in zip(read_jsonl(data), found, strict=True):
        ids = tokenizer(row["mr"] + "\n", return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=0)
        expected = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        assert said == {"prompt": row["mr"] + "\n", "completion": expected}
    assert any(said["completion"].endswith(".") for said in found)  # it learnt to stop
    on_ranks(lambda: cli([*words, "--output", str(tmp_path / "two.jsonl")]), 2)
    assert read_jsonl(tmp_path / "two.jsonl") == found
    cli([*words, "--num_beams", "3", "--num_return_sequences", "2", "--output", str(tmp_path / "b.jsonl")])
    assert [len(row["completions"]) for row in read_jsonl(tmp_path / "b.jsonl")] == [2] * 7


def test_evaluate_is_the_runs_own_evaluation(trained, capsys):
    last = [row for row in curve(trained) if "eval_loss" in row][-1]
    capsys.readouterr()
    cli(["evaluate", str(trained / "run"), str(trained / "data"), "--json"])
    found = json.loads(capsys.readouterr().out)
    expected = {"rows": 11, "loss": last["eval_loss"], "perplexity": last["eval_perplexity"]}
    assert found == pytest.approx(expected, abs=1e-5)
    # A checkpoint by itself does as well.
    cli(["evaluate", str(trained / "run" / "model"), str(trained / "data" / "dev.jsonl"), "--json"])
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected, abs=1e-5)


def test_end_tokens_of_answers_end_generation(tmp_path):
    """The template's end of a turn is not the tokenizer's end token, as in Qwen's base models."""
    folder = make_folder(tmp_path, chats=True)
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(folder / "start")
    sizes = SIZES | {"vocab_size": len(tokenizer)}
    start = modelcenter.from_config("tiny/gpt2", "causal-lm", **sizes)
    start.generation_config = {"eos_token_id": 0}
    start.save_pretrained(folder / "start", tokenizer=tokenizer)
    values = flags(folder, model=str(folder / "start"), max_steps=1)
    for name in ("from_scratch", "model_config", "tokenizer"):
        del values[name]
    main(command(values))
    saved = json.loads((folder / "run" / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_a_generation_config_that_a_run_begins_keeps_the_other_tokens_of_the_config(tmp_path):
    """transformers reads either file, not both: with the end tokens alone it would pad prompts without knowing it."""
    model = modelcenter.from_config("tiny/llama", "causal-lm", bos_token_id=0, eos_token_id=1, pad_token_id=2)
    add_stops(model, [4], replace=False)
    model.save_pretrained(tmp_path)
    read = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (read.bos_token_id, read.eos_token_id, read.pad_token_id) == (0, [1, 4], 2)
    t5 = modelcenter.from_config("tiny/t5", "seq2seq-lm")
    add_stops(t5, [7], replace=False)
    assert t5.generation_config["decoder_start_token_id"] == t5.config.decoder_start_token_id
    model.generation_config = {"eos_token_id": 1, "do_sample": True}  # what the checkpoint brought stays as it is
    add_stops(model, [4], replace=False)
    assert model.generation_config == {"eos_token_id": [1, 4], "do_sample": True}


def test_dry_run_marks_what_is_trained_on(folder, capsys, monkeypatch):
    main(command(flags(folder, dry_run=True)))
    shown = capsys.readouterr().out
    assert "serves" in shown and "\x1b" not in shown
    line = next(line for line in shown.splitlines() if "train.jsonl, line" in line)
    assert line.strip().startswith("name[") and "]\\n⟦" in line and "<|endoftext|>⟧" in line
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(command(flags(folder, dry_run=True)))
    assert "]\\n\x1b[32m" in capsys.readouterr().out


def test_plain_text(folder, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("Aromi serves Chinese food.\nZizzi serves Italian food.\n")
    data = {"train_data": str(tmp_path / "t.txt"), "eval_data": str(tmp_path / "t.txt")}
    main(command(flags(folder, **data, max_steps=2, eval_samples=1, eval_max_new_tokens=3)))
    sample = read_jsonl(folder / "run" / "samples.jsonl")[0]
    assert sample["prompt"].startswith("Aromi") and sample["reference"].endswith("food.")
    capsys.readouterr()
    cli(["predict", str(folder / "run"), str(tmp_path / "t.txt"), "--max_new_tokens", "2"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in said] == ["Aromi serves Chinese food.", "Zizzi serves Italian food."]


def test_a_sample_of_a_chat_that_begins_with_an_answer(folder, tmp_path):
    turns = [{"role": "assistant", "content": "Aromi serves food."}, {"role": "user", "content": "Zizzi?"}]
    data = str(write_jsonl(tmp_path / "first.jsonl", [{"messages": turns}]))
    more = {"template": "plain", "max_steps": 1, "eval_samples": 1, "eval_max_new_tokens": 2, "save_every": "never"}
    main(command(flags(folder, train_data=data, eval_data=data, **more)))
    sample = read_jsonl(folder / "run" / "samples.jsonl")[0]
    assert sample["prompt"] and sample["prompt"] + sample["reference"] == "Aromi serves food."


def test_a_sample_is_as_long_as_its_own_prompt_allows(folder, tmp_path):
    """128 positions: a prompt that takes most of them shortens its own text alone."""
    rows = [*make_pairs(2), {"mr": "Aromi " * 55, "ref": "yes"}]
    data = str(write_jsonl(tmp_path / "some.jsonl", rows))
    values = flags(folder, eval_data=data, max_steps=1, lr=0.0, save_every="never", eval_max_new_tokens=20)
    texts = []
    for name, count in (("two", 2), ("three", 3)):
        main(command(values | {"eval_samples": count, "output_dir": str(folder / name)}))
        texts.append([row["completion"] for row in read_jsonl(folder / name / "samples.jsonl")])
    assert texts[1][:2] == texts[0] and len(texts[1]) == 3


def test_rows_that_are_left_out_are_counted(folder, caplog):
    rows = make_pairs(12)
    rows[3]["ref"] = ""
    rows[5]["mr"] = "Aromi " * 60
    data = write_jsonl(folder / "some.jsonl", rows)
    main(command(flags(folder, train_data=str(data), max_length=60, max_steps=1)))
    assert "some.jsonl: 1 rows have no answer and are left out (first:" in caplog.text and "line 4)" in caplog.text
    assert "1 rows have no answer within 60 tokens and are left out" in caplog.text and "line 6)" in caplog.text
    summary = read_summary(folder)
    assert summary["data"]["train"]["rows"] == 10
    main(command(flags(folder, train_data=str(data), max_length=60, max_steps=1, too_long="drop", dry_run=True)))
    assert "1 rows are longer than 60 tokens and are left out" in caplog.text  # its answer may lie within them


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"response_column": "answer"}, "response_column: .* has no column 'answer'"),
        ({"template": "chat"}, "template: this tokenizer has no chat template"),
        ({"eval_samples": 2, "cp": 2}, "eval_samples: a model split by --cp cannot generate"),
        ({"label_smoothing": 1}, "label_smoothing: got 1.0, expected 0 or more and less than 1"),
        ({"adam_epsilon": 0}, "adam_epsilon: got 0.0, expected a number above 0"),
        (
            {"model": "tiny/bert", "model_config": {"num_layers": 1}},
            "model: tiny/bert is an encoder, .* --model_config is_decoder=true",
        ),
        ({"max_length": 12, "too_long": "error"}, "train.jsonl, line 1: the row has .* tokens, but max_length is 12"),
    ],
)
def test_flags_that_do_not_fit_the_model_or_the_rows_are_named(folder, changes, said):
    with pytest.raises(ValueError, match=said):
        main(command(flags(folder, **changes)))


def test_prompts_that_leave_no_room(trained, tmp_path):
    data = write_jsonl(tmp_path / "long.jsonl", [{"mr": "Aromi"}, {"mr": "Aromi " * 200}])
    with pytest.raises(ValueError, match="line 2: the prompt has .* tokens, expected 1 to 127"):
        cli(["predict", str(trained / "run"), str(data)])


def test_smoothing_is_for_classes(folder):
    from modelcenter.training.setup.model import smooth_labels

    model = modelcenter.from_config("tiny/bert", "sequence-classification", num_labels=1, problem_type="regression")
    says = "label_smoothing: supported for one label among classes, not for .*, regression"
    with pytest.raises(ValueError, match=says):
        smooth_labels(model, 0.1)
    with pytest.raises(ValueError, match="not for question-answering"):
        smooth_labels(modelcenter.from_config("tiny/bert", "question-answering"), 0.1)


def cpm_folder(path):
    """Chinese rows, and a tokenizer as CPM-Ant's that knows their characters."""
    from transformers import CpmAntTokenizer

    rows = []
    for i in range(24):
        city, food = [("北京", "面条"), ("上海", "米饭"), ("广州", "点心")][i % 3]
        rows.append({"instruction": f"去{city}吃什么？\n说一样", "input": "", "output": f"在{city}吃{food}。"})
    words = ["<d>", "</d>", "<s>", "</s>", "<pad>", "<unk>", "</n>", "</_>"]
    words += sorted({c for row in rows for text in row.values() for c in text} - {"\n"}) + ["北京", "上海", "面条"]
    (path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    CpmAntTokenizer(str(path / "vocab.txt")).save_pretrained(path / "tokenizer")
    write_jsonl(path / "data" / "train.jsonl", rows)
    write_jsonl(path / "data" / "dev.jsonl", rows[:5])
    return path


@pytest.mark.full
def test_cpm_ant_in_chinese(tmp_path, capsys):
    """What is asked is seen as a whole, an answer from left to right: as in generation, token by token."""
    pytest.importorskip("rjieba")
    folder = cpm_folder(tmp_path)
    values = flags(folder, model="tiny/cpmant", epochs=20, lr=1e-2, log_every=100, eval_every="never")
    del values["model_config"]
    cli(["finetune", "lm", *command(values | {"eval_samples": 2})])
    capsys.readouterr()
    cli(["predict", str(folder / "run"), str(folder / "data" / "dev.jsonl"), "--max_new_tokens", "12"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    truth = read_jsonl(folder / "data" / "dev.jsonl")
    assert [row["completion"] for row in said] == [row["output"] for row in truth]
    # The loss of a row, from tokens that are given one after another.
    task = TASKS["lm"].load().from_flags(LMConfig(train_data=[str(folder / "data")]))
    model = modelcenter.from_pretrained(str(folder / "run" / "model"))
    tokenizer = modelcenter.AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    task.on_model_built(model)
    rows, _ = task.tokenize(tokenizer, 64)
    ids, at = torch.from_numpy(np.array(rows.tokens.row(0), np.int64))[None], rows.prompt_length(0)
    assert tokenizer.decode(ids[0, :at]) == "去北京吃什么？\n说一样\n"
    with torch.no_grad():
        out, total = model(ids[:, :at], use_cache=True), 0.0
        for token in ids[0, at:]:
            total -= out.logits[0, -1].log_softmax(-1)[token].item()
            out = model(token.view(1, 1), use_cache=True, past_key_values=out.past_key_values)
        loss = model(**rows.batch(np.array([0]))).loss.item()
    assert loss == pytest.approx(total / (ids.shape[1] - at), abs=1e-4)


FAMILIES = "llama cpm1 cpm3 gptj gpt_neox opt bloom qwen2 qwen3 mistral minicpm minicpm3".split()
FAMILIES += "gemma gemma2 gemma3_text modernbert-decoder granite olmo2 phi3 smollm3".split()
FAMILIES += "granitemoe mixtral olmoe qwen2_moe qwen3_moe".split()


@pytest.mark.parametrize("family", ["cpmant", *(pytest.param(f, marks=pytest.mark.full) for f in FAMILIES)])
def test_every_family_learns_answers(folder, family):
    values = flags(folder, model=f"tiny/{family}", epochs=3, lr=1e-2, log_every=100, batch_size=4)
    del values["model_config"]
    main(command(values))
    rows = [row for row in curve(folder) if "eval_loss" in row]
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"] - 0.2
