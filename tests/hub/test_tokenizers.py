"""Tokenizers that come as a SentencePiece model alone, against the pieces of that model."""

import transformers
from sentencepiece_toys import write_unigrams

import modelcenter as mc
from modelcenter.hub.files.json_files import write_json


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
