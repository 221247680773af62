"""What is an answer: against marks written by hand, transformers' own masks, and templates that make it hard."""

import json

import numpy as np
import pytest
from chat_toys import CHATML, MARKED, make_tokenizer

from modelcenter.data.schemas.conversations import TOOLS
from modelcenter.data.tokenization import answer_labels
from modelcenter.data.tokenization.answer_labels import IGNORED, label_conversations
from modelcenter.data.tokenization.chat_templates import ChatTemplate

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Aromi?"},
    {"role": "assistant", "content": "Chinese food."},
    {"role": "user", "content": "Zizzi?"},
    {"role": "assistant", "content": "Italian food."},
]
PAIR = [{"role": "user", "content": "Aromi?"}, {"role": "assistant", "content": "Chinese food."}]
# As Qwen3's: earlier answers are written without what the last one has before it.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def labelled(template, rows, max_length=200, **options):
    return label_conversations(template, rows, lambda i: f"d.jsonl, line {i + 1}", max_length=max_length, **options)


def answers(found, tokenizer, row=0) -> list[str]:
    """The texts that are trained on."""
    a, b = found.tokens.offsets[row : row + 2]
    ids, trained = found.tokens.ids[a:b], found.labels[a:b] != IGNORED
    np.testing.assert_array_equal(found.labels[a:b][trained], ids[trained])
    cuts = np.flatnonzero(np.diff(trained.astype(int))) + 1
    return [tokenizer.decode(p) for p, t in zip(np.split(ids, cuts), np.split(trained, cuts), strict=True) if t.all()]


def test_answers_of_a_chat_with_their_stop_token():
    tokenizer = make_tokenizer(CHATML, end="<|im_end|>")
    template = ChatTemplate(tokenizer)
    assert template.name == "chat"
    found = labelled(template, [CHAT, PAIR])
    assert answers(found, tokenizer) == ["Chinese food.<|im_end|>", "Italian food.<|im_end|>"]
    assert answers(found, tokenizer, 1) == ["Chinese food.<|im_end|>"]
    assert found.stops == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    assert found.tokens.row(0).tolist() == whole
    assert answers(labelled(template, [CHAT], train_on="last"), tokenizer) == ["Italian food.<|im_end|>"]
    skipped = [*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:]]
    assert answers(labelled(template, [skipped]), tokenizer) == ["Italian food.<|im_end|>"]


def test_the_order_of_fields_is_part_of_what_was_tokenised(tmp_path, monkeypatch):
    """A template writes arguments as they come; nor may the cache give one order's tokens for another's."""
    tokenizer = make_tokenizer(CHATML.replace("m.content", "(m.args | tojson if m.args else m.content)"))
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path))
    pair = [{"role": "user", "content": "Aromi?"}, {"role": "assistant", "content": ""}]
    for args in ({"a": 1, "b": 2}, {"b": 2, "a": 1}):
        found = labelled(ChatTemplate(tokenizer), [[*pair[:1], pair[1] | {"args": args}, *CHAT[3:]]])
        assert json.dumps(args) in tokenizer.decode(found.tokens.row(0))


def test_tools_are_written_as_transformers_writes_them():
    text = "{% if tools %}Call: {{ tools | tojson }}\n{% endif %}" + CHATML
    tool = {"type": "function", "function": {"name": "open", "parameters": {}}}
    tokenizer = make_tokenizer(text, end="<|im_end|>")
    opened = [{"role": "assistant", "content": "Hello."}, *PAIR]  # it begins with an answer
    for turns in (CHAT, opened):
        row = [turns[0] | {TOOLS: [tool]}, *turns[1:]]
        whole = tokenizer.apply_chat_template(turns, tools=[tool], tokenize=True)["input_ids"]
        found = labelled(ChatTemplate(tokenizer), [row])
        assert found.tokens.row(0).tolist() == whole and "Call:" in tokenizer.decode(whole)
        said = [f"{turn['content']}<|im_end|>" for turn in turns if turn["role"] == "assistant"]
        assert answers(found, tokenizer) == said
        asked = tokenizer.apply_chat_template(turns[:-1], tools=[tool], tokenize=True, add_generation_prompt=True)
        assert ChatTemplate(tokenizer).prompt(row).tolist() == asked["input_ids"]
    assert ChatTemplate(tokenizer).uses_tools and not ChatTemplate(make_tokenizer(CHATML)).uses_tools
    # Of several templates transformers takes the one for tools.
    several = make_tokenizer({"default": CHATML, "tool_use": text}, end="<|im_end|>")
    whole = several.apply_chat_template(CHAT, tools=[tool], tokenize=False)
    assert (
        ChatTemplate(several).render([CHAT[0] | {TOOLS: [tool]}, *CHAT[1:]])
        == whole
        != ChatTemplate(several).render(CHAT)
    )


def test_prompt_is_what_generation_is_given():
    tokenizer = make_tokenizer(CHATML, end="<|im_end|>")
    expected = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True, tokenize=True)["input_ids"]
    assert (
        ChatTemplate(tokenizer).prompt(CHAT).tolist() == expected == ChatTemplate(tokenizer).prompt(CHAT[:-1]).tolist()
    )


def test_generation_marks_agree_or_are_refused():
    tokenizer = make_tokenizer(MARKED, end="<|im_end|>")
    template = ChatTemplate(tokenizer)
    assert template.has_generation_marks and not ChatTemplate(make_tokenizer(CHATML)).has_generation_marks
    out = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    found = labelled(template, [CHAT])
    np.testing.assert_array_equal(found.labels != IGNORED, np.array(out["assistant_masks"], bool))
    skipped = [*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:]]  # which the template marks all the same
    assert answers(labelled(template, [skipped]), tokenizer) == ["Italian food.<|im_end|>"]
    tokenizer.chat_template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    with pytest.raises(ValueError, match=r"line 1: template chat: its generation block leaves out '<\|im_end\|>'"):
        labelled(ChatTemplate(tokenizer), [CHAT])


def test_templates_that_write_earlier_answers_in_another_way():
    tokenizer = make_tokenizer(THINKS, end="<|im_end|>")
    found = labelled(ChatTemplate(tokenizer), [CHAT])
    assert answers(found, tokenizer) == ["Chinese food.<|im_end|>", "<think>\nItalian food.<|im_end|>"]
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    with pytest.raises(
        ValueError, match="line 1: template chat: the conversation up to its turn 3 .*answers cannot be found"
    ):
        labelled(ChatTemplate(tokenizer), [CHAT])


def test_an_end_behind_later_turns_is_not_that_of_an_answer():
    """The end token stands at the end of the conversation alone: what lies before it is not all an answer."""
    ended = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    ended += "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
    tokenizer = make_tokenizer(ended)
    for rows in ([CHAT], [[*PAIR, CHAT[3]]]):
        with pytest.raises(ValueError, match=r"template chat: turn \d is rendered differently .* give --train_on last"):
            labelled(ChatTemplate(tokenizer), rows)
    assert answers(labelled(ChatTemplate(tokenizer), [CHAT], train_on="last"), tokenizer) == [
        "Italian food.\n<|endoftext|>"
    ]


@pytest.mark.parametrize("space", ["", "\n"])
def test_templates_that_end_the_conversation_too(space):
    """As Phi's: behind the token that ends the last answer there is the one that ends the conversation."""
    ended = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>" + space + "{% endfor %}"
    ended += "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    tokenizer = make_tokenizer(ended)
    template, earlier = ChatTemplate(tokenizer), "Chinese food.<|im_end|>"
    found = labelled(template, [CHAT, [*PAIR, CHAT[3]], [*PAIR, PAIR[1] | {"content": "No."}, CHAT[3]]])
    assert answers(found, tokenizer) == [earlier, f"Italian food.<|im_end|>{space}<|endoftext|>"]
    assert answers(found, tokenizer, 1) == [earlier] and answers(found, tokenizer, 2) == [earlier, "No.<|im_end|>"]
    assert found.stops == sorted(map(tokenizer.convert_tokens_to_ids, ("<|im_end|>", "<|endoftext|>")))
    # An answer that is written otherwise once turns follow ends in the same token, if the whole has that there.
    tokenizer.chat_template = THINKS + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    with pytest.raises(ValueError, match="template chat: turn 3 is rendered differently"):
        labelled(ChatTemplate(tokenizer), [CHAT])
    # Where the content alone ends in such a token, no token ends the answer.
    tokenizer.chat_template = ended.replace("<|im_end|>", "")
    tokenizer.add_tokens(["END"])
    with pytest.raises(ValueError, match="turn 3 is rendered differently|no special token ends the answer"):
        labelled(ChatTemplate(tokenizer), [[*PAIR[:1], PAIR[1] | {"content": "So END"}, *CHAT[3:]]])


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_a_chat_that_begins_with_an_answer(text):
    """What stands before the first answer is no part of it either; transformers' marks, where there are, agree."""
    tokenizer = make_tokenizer(text, end="<|im_end|>")
    found = labelled(ChatTemplate(tokenizer), [[PAIR[1], *CHAT[3:]]])
    assert answers(found, tokenizer) == ["Chinese food.<|im_end|>", "Italian food.<|im_end|>"]
    assert tokenizer.decode(found.tokens.row(0)).startswith("<|im_start|>assistant\nChinese")
    assert answers(labelled(ChatTemplate(tokenizer, "plain"), [PAIR[1:]]), tokenizer) == ["Chinese food.<|im_end|>"]


@pytest.mark.parametrize("choice", ["chat", "plain"])
def test_a_turn_that_says_nothing_is_no_answer(choice):
    tokenizer = make_tokenizer(CHATML, end="<|im_end|>")
    silent, end = {"role": "assistant", "content": " "}, "<|im_end|>" if choice == "chat" else tokenizer.eos_token
    found = labelled(ChatTemplate(tokenizer, choice), [[PAIR[0], silent], [PAIR[0], silent, *CHAT[3:]]])
    assert found.unanswered.tolist() == [0] and answers(found, tokenizer) == [f"Italian food.{end}"]
    calls = {"role": "assistant", "content": "", "tool_calls": [{"name": "search"}]}
    assert answers(labelled(ChatTemplate(tokenizer, choice), [[PAIR[0], calls]]), tokenizer) == [end]


def test_an_answer_that_nothing_ends_is_refused():
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", ""))
    with pytest.raises(
        ValueError, match="no special token ends the answer 'Chinese food.', so a model would not learn"
    ):
        labelled(ChatTemplate(tokenizer), [PAIR])


def test_plain_layouts():
    tokenizer = make_tokenizer()
    found = labelled(ChatTemplate(tokenizer), [PAIR, CHAT])
    assert ChatTemplate(tokenizer).name == "plain"
    assert tokenizer.decode(found.tokens.row(0)) == "Aromi?\nChinese food.<|endoftext|>"
    assert answers(found, tokenizer) == ["Chinese food.<|endoftext|>"]
    assert answers(found, tokenizer, 1) == ["Chinese food.<|endoftext|>", "Italian food.<|endoftext|>"]
    found = labelled(ChatTemplate(tokenizer, "none"), [PAIR])
    assert tokenizer.decode(found.tokens.row(0)) == "Aromi?Chinese food.<|endoftext|>"
    assert found.stops == [tokenizer.eos_token_id]


def test_a_file_becomes_the_tokenizers_template(tmp_path):
    tokenizer = make_tokenizer()
    (tmp_path / "t.jinja").write_text(CHATML)
    assert ChatTemplate(tokenizer, str(tmp_path / "t.jinja")).text == tokenizer.chat_template == CHATML
    with pytest.raises(ValueError, match="template: got 'plian', expected auto, chat, plain.*Did you mean 'plain'"):
        ChatTemplate(tokenizer, "plian")
    with pytest.raises(ValueError, match="template: this tokenizer has no chat template"):
        ChatTemplate(make_tokenizer(), "chat")
    none = make_tokenizer()
    none.eos_token = None
    with pytest.raises(ValueError, match="tokenizer: it has no end token"):
        ChatTemplate(none)
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ValueError, match="line 1: template chat: cannot be applied to this conversation: no system"):
        labelled(ChatTemplate(tokenizer), [CHAT])


def test_where_tokens_would_reach_over_the_boundary():
    """The prompt keeps the tokens that it has by itself, as the model will see it."""
    tokenizer = make_tokenizer()
    (one,) = tokenizer("Giraffe")["input_ids"]
    found = labelled(ChatTemplate(tokenizer, "none"), [[PAIR[0] | {"content": "Gir"}, PAIR[1] | {"content": "affe"}]])
    prompt = ChatTemplate(tokenizer, "none").prompt([PAIR[0] | {"content": "Gir"}]).tolist()
    assert one not in found.tokens.row(0) and found.tokens.row(0)[: len(prompt)].tolist() == prompt
    assert answers(found, tokenizer) == ["affe<|endoftext|>"]


def test_plain_text_is_trained_on_as_a_whole():
    tokenizer = make_tokenizer()
    found = labelled(ChatTemplate(tokenizer), ["Aromi serves food.", "Zizzi<|endoftext|>", " "])
    assert found.rows.tolist() == [0, 1] and found.unanswered.tolist() == [2]
    np.testing.assert_array_equal(found.labels, found.tokens.ids)
    texts = [tokenizer.decode(found.tokens.row(i)) for i in (0, 1)]
    assert texts == ["Aromi serves food.<|endoftext|>", "Zizzi<|endoftext|>"]


def test_tokens_at_the_start():
    """A plain layout begins as the tokenizer's texts do; a template writes that itself."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos_token="<|im_start|>")
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    found = labelled(ChatTemplate(tokenizer), [PAIR])
    assert found.tokens.row(0)[0] == start and found.labels[0] == IGNORED and (found.tokens.ids == start).sum() == 1
    assert ChatTemplate(tokenizer).prompt(PAIR)[0] == start == ChatTemplate(tokenizer).text_prompt("a")[0]
    assert answers(found, tokenizer) == ["Chinese food.<|endoftext|>"]
    tokenizer.chat_template = CHATML
    assert (labelled(ChatTemplate(tokenizer), [PAIR]).tokens.ids == start).sum() == 2


def test_rows_that_are_too_long():
    tokenizer = make_tokenizer()
    template, long = ChatTemplate(tokenizer), [PAIR[0] | {"content": "Aromi? " * 9}, PAIR[1]]
    size = len(template.prompt(PAIR))
    rows = [PAIR, long, PAIR]
    found = labelled(template, rows, size + 2)
    assert found.rows.tolist() == [0, 2] and found.unfitting.tolist() == [1] and found.tokens.truncated == 2
    assert found.tokens.lengths.tolist() == [size + 2] * 2
    found = labelled(template, rows, 30, too_long="drop")
    assert found.rows.tolist() == [0, 2] and found.tokens.truncated == 0
    with pytest.raises(
        ValueError, match="line 2: the row has .* tokens, but max_length is 30; give --too_long cut or drop"
    ):
        labelled(template, rows, 30, too_long="error")
    with pytest.raises(ValueError, match="line 1: neither this row nor any other has some of its answer in 10 tokens"):
        labelled(template, [long, long], 10)
    with pytest.raises(ValueError, match="line 1: neither this row nor any other has at most 30 tokens"):
        labelled(template, [long, long], 30, too_long="drop")


def test_rows_are_tokenised_in_groups(tmp_path, monkeypatch):
    template = ChatTemplate(make_tokenizer())
    rows = [PAIR, CHAT, PAIR[:1], CHAT, [PAIR[0] | {"content": "Aromi? " * 9}, PAIR[1]]]
    whole = labelled(template, rows, 25)
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path))
    monkeypatch.setattr(answer_labels, "_CHUNK", 2)
    parts = labelled(template, rows, 25)
    for name, value in vars(whole).items():
        if name != "tokens":
            np.testing.assert_array_equal(getattr(parts, name), value, name)
    assert np.array_equal(parts.tokens.ids, whole.tokens.ids) and whole.rows.tolist() == [0, 1, 3]


def test_the_first_token_of_a_row_is_no_answer():
    """Nothing predicts it."""
    template = ChatTemplate(make_tokenizer())
    with pytest.raises(ValueError, match="line 1: neither this row nor any other has some of its answer in 1 tokens"):
        labelled(template, ["Aromi", "Aromi serves food."], 1)


def test_rows_without_an_answer():
    template = ChatTemplate(make_tokenizer())
    found = labelled(template, [PAIR[:1], PAIR])
    assert found.unanswered.tolist() == [0] and found.rows.tolist() == [1]
    with pytest.raises(ValueError, match="line 1: neither this row nor any other has an answer to train on"):
        labelled(template, [PAIR[:1], CHAT[:2]])


def test_slow_tokenizers_do_as_well():
    """Nothing but calls of the tokenizer is needed."""

    class Slow:
        def __init__(self, inner):
            self.inner, self.is_fast = inner, False
            self.init_kwargs = {}

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    fast = make_tokenizer(MARKED, end="<|im_end|>")
    found, other = labelled(ChatTemplate(Slow(fast)), [CHAT]), labelled(ChatTemplate(fast), [CHAT])
    np.testing.assert_array_equal(found.labels, other.labels)


def test_kept_in_the_cache_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path))
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer)
    first = labelled(template, [PAIR, CHAT])
    monkeypatch.setattr(template, "render_answers", None)  # not called again
    again = labelled(template, [PAIR, CHAT])
    np.testing.assert_array_equal(first.labels, again.labels)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # made anew
        labelled(template, [PAIR, CHAT], train_on="last")


@pytest.mark.parametrize("rows", [[PAIR], ["Aromi serves food."]])
def test_a_tokenizer_that_names_another_end_has_an_entry_of_its_own(tmp_path, monkeypatch, rows):
    """Its file says nothing of it: it is the same for Qwen's base models and their chats."""
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path))
    for end in ("<|endoftext|>", "<|im_end|>"):
        tokenizer = make_tokenizer(end=end, additional_special_tokens=["<|im_end|>"])
        found = labelled(ChatTemplate(tokenizer), rows)
        assert found.stops == [tokenizer.eos_token_id] and found.tokens.ids[-1] == tokenizer.eos_token_id


def test_turns_are_tokenised_once_or_twice_however_many_they_are():
    tokenizer = make_tokenizer(CHATML, end="<|im_end|>")
    template, chat = ChatTemplate(tokenizer), PAIR * 30
    rendered = template.render_answers(chat)
    given, ids_of = [], template._encode
    template._encode = lambda texts: given.extend(texts) or ids_of(texts)
    ((ids, places),) = template.tokenize([rendered])
    assert sum(map(len, given)) < 5 * len(rendered.text)
    assert ids == tokenizer(rendered.text)["input_ids"]
    whole = [tuple(len(tokenizer(rendered.text[:at])["input_ids"]) for at in pair) for pair in rendered.answers]
    assert places == whole


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_where_the_first_answer_begins_in_a_prompt(train_on):
    """In a prompt, the earlier answers of which are known, it is where it is in a row that is trained on."""
    template = ChatTemplate(make_tokenizer(bos_token="<|im_start|>"), "plain")
    silent, skipped = CHAT[2] | {"content": " "}, CHAT[2] | {"weight": 0}
    rows = [CHAT, PAIR, CHAT[2:], [*CHAT[:2], skipped, *CHAT[3:]], [*CHAT[:2], silent, *CHAT[3:], *PAIR]]
    found = labelled(template, rows, train_on=train_on)
    for i, row in enumerate(rows):
        labels = found.labels[found.tokens.offsets[i] : found.tokens.offsets[i + 1]]
        assert template.context_length(row, train_on) == np.argmax(labels != IGNORED)


def test_a_question_behind_an_answer_has_the_tokens_of_its_prompt():
    """A tokenizer that puts a space before a text puts none behind a special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["</s>", "\u2581", *"abcd", "bc"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(letters)}, [("b", "c")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    template = ChatTemplate(tokenizer, "none")
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}] * 2
    found = labelled(template, [turns])
    words = tokenizer.convert_ids_to_tokens(found.tokens.row(0).tolist())
    end = words.index("</s>") + 1
    prompt = tokenizer.convert_ids_to_tokens(template.prompt(turns[:3]).tolist())
    assert words[:end] == ["\u2581", "a", "b", "\u2581", "c", "d", "</s>"]  # apart: "bc" is a token
    assert prompt[prompt.index("</s>") + 1 :] == words[end : end + 2] == ["a", "b"]
    assert answers(found, tokenizer) == ["\u2581 c d </s>"] * 2


def test_an_added_word_ends_an_answer_where_the_template_puts_it_alone():
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", ""))
    tokenizer.add_tokens(["<bye>"])
    said = [PAIR[0], PAIR[1] | {"content": "Chinese food.<bye>"}]
    with pytest.raises(ValueError, match="no special token ends the answer 'Chinese food.<bye>'"):
        labelled(ChatTemplate(tokenizer), [said])
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<bye>")
    for row in (PAIR, said):
        assert labelled(ChatTemplate(tokenizer), [row]).stops == [tokenizer.convert_tokens_to_ids("<bye>")]


def test_rows_that_are_left_out_end_no_generation():
    text = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if 'x' in m.content else eos_token }}{% endfor %}"
    tokenizer = make_tokenizer(text)
    rows = [PAIR, [PAIR[0], PAIR[1] | {"content": "x " * 60}]]
    found = labelled(ChatTemplate(tokenizer), rows, 60, too_long="drop")
    assert found.unfitting.tolist() == [1] and found.stops == [tokenizer.eos_token_id]
    cut = labelled(ChatTemplate(tokenizer), rows, 60)
    assert cut.cut.tolist() == [False, True] and len(cut.stops) == 2
