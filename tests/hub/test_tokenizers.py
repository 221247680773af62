"""Tokenizers that come as a SentencePiece model alone, against the pieces of that model."""

import pytest
import transformers
from sentencepiece_toys import write_unigrams
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

import modelcenter as mc
from modelcenter.hub.conversion import convert
from modelcenter.hub.files.json_files import write_json
from modelcenter.hub.files.names import TOKENIZER_FILES
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.remote.snapshot import needed_files
from modelcenter.registry import ARCHITECTURES


def test_camembert(tmp_path):
    """Its pieces count on from fairseq's special tokens, and the mask is the last."""
    pieces = write_unigrams(tmp_path / "sentencepiece.bpe.model")
    write_json(tmp_path / "config.json", {"model_type": "camembert"})
    made = mc.AutoTokenizer.from_pretrained(tmp_path)
    text = "the soup has fish in it"
    begin, end, last = 5, 6, pieces.get_piece_size() + 4
    assert made(text)["input_ids"] == [begin, *(i + 4 for i in pieces.encode(text)), end]
    assert made("Œ", add_special_tokens=False)["input_ids"][-1] == made.unk_token_id == 3
    assert made("soup", "fish")["input_ids"].count(end) == 3 and "token_type_ids" not in made(text)
    assert (made.pad_token_id, made.mask_token_id, len(made)) == (1, last, last + 1)
    assert last in made("the <mask> has")["input_ids"]
    made.save_pretrained(tmp_path / "again")
    write_json(tmp_path / "again" / "config.json", {"model_type": "camembert"})
    for load in (mc.AutoTokenizer, transformers.AutoTokenizer):
        assert load.from_pretrained(tmp_path / "again")(text)["input_ids"] == made(text)["input_ids"]


def test_deberta(tmp_path):
    """What is published of v2 and v3 is a SentencePiece model that no other family's is called as; a model keeps it."""
    base, saved, converted = tmp_path / "base", tmp_path / "saved", tmp_path / "converted"
    mc.from_config("tiny/deberta-v2", "masked-lm").save_pretrained(base)
    special = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
    numbers = {f"{name}_id": i for i, name in enumerate(special)}
    pieces = write_unigrams(
        base / "spm.model", **numbers, **{f"{name}_piece": piece for name, piece in special.items()}
    )
    write_json(base / "tokenizer_config.json", {"do_lower_case": False, "vocab_type": "spm"})
    mc.from_pretrained(base).save_pretrained(saved)
    convert(base, converted, "distributed", workers=1)
    text = "the soup has fish in it Œ"
    for path in (base, saved, converted):
        made = mc.AutoTokenizer.from_pretrained(path)
        assert made(text)["input_ids"] == [1, *pieces.encode(text), 2] and len(made) == pieces.get_piece_size() + 1
        assert (made.pad_token_id, made.unk_token_id, made.mask_token_id) == (0, 3, pieces.get_piece_size())
    (base / "tokenizer_config.json").unlink()
    assert len(mc.AutoTokenizer.from_pretrained(base)) == len(made)
    held = [path.name for path in saved.iterdir()]
    assert {"spm.model", "tokenizer_config.json"} <= set(needed_files("me/deberta", held, HubOptions()))


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_all_files_of_a_tokenizer_are_known(kind):
    """Those that the class of transformers reads: others stay behind where a model is saved or downloaded."""
    name = TOKENIZER_MAPPING_NAMES.get(kind)
    files = {} if name is None else tokenizer_class_from_name(name).vocab_files_names
    assert {*files.values()} <= {*TOKENIZER_FILES}


NAMES = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask_2>"}


@pytest.mark.parametrize(
    ("file", "names"),
    [
        (None, {}),
        ("special_tokens_map.json", {**NAMES, "additional_special_tokens": ["<mask_1>", "<unk_2>"]}),
        ("special_tokens_map.json", {**NAMES, "mask_token": {"content": "<mask_2>", "lstrip": False}}),
        ("tokenizer_config.json", {**NAMES, "mask_token_sent": "<mask_1>", "offset": 103}),
    ],
)
def test_pegasus(file, names, tmp_path):
    """Its pieces count on from 103, whatever tokens files name; transformers 5 alone is one short, or exchanges the
    masks."""
    pieces = write_unigrams(tmp_path / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write_json(tmp_path / "config.json", {"model_type": "pegasus"})
    if file is not None:
        write_json(tmp_path / file, names)
    made, text = mc.AutoTokenizer.from_pretrained(tmp_path), "the soup has  fish\nin it Œ"
    ids = [*(i + 103 for i in pieces.encode(text)), 1]
    made.save_pretrained(tmp_path / "again")
    write_json(tmp_path / "again" / "config.json", {"model_type": "pegasus"})
    for load in (None, mc.AutoTokenizer, transformers.AutoTokenizer):
        own = made if load is None else load.from_pretrained(tmp_path / "again")
        assert own(text)["input_ids"] == ids and own.unk_token_id == 105 in ids
        assert own.convert_tokens_to_ids(["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk_102>"]) == [
            *range(5),
            104,
        ]
        assert own.init_kwargs["mask_token_sent"] == "<mask_1>"
        assert own.mask_token == "<mask_2>" and len(own) == pieces.get_piece_size() + 103
        assert own("the<mask_1>")["input_ids"][-2:] == [2, 1] and {2, 3, 4, 104} <= set(own.all_special_ids)
        assert own.decode(ids, skip_special_tokens=True).strip() == "the soup has fish in it"
    given = mc.AutoTokenizer.from_pretrained(tmp_path, mask_token="<mask_1>")
    assert given.mask_token == "<mask_1>"


def test_pegasus_without_a_mask_of_sentences(tmp_path):
    """What another tokenizer of this class says is left as transformers reads it."""
    write_unigrams(tmp_path / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write_json(tmp_path / "config.json", {"model_type": "pegasus"})
    write_json(tmp_path / "tokenizer_config.json", {**NAMES, "mask_token_sent": None, "offset": 3})
    made, theirs = (kind.from_pretrained(tmp_path) for kind in (mc.AutoTokenizer, transformers.AutoTokenizer))
    assert made("the soup")["input_ids"] == theirs("the soup")["input_ids"] and made.mask_token == "<mask_2>"
