"""CPM-Bee's rows: figures that OpenBMB/CPM-Bee's own code gave for these objects and this vocabulary."""

import numpy as np
import pytest

from modelcenter.data.structured import FIELDS, Answer, StructuredEncoder, extension_table, structured_batch, target_ids
from modelcenter.hub.tokenization_cpm import CPMBeeTokenizer

WORDS = "<pad> <unk> <mask> <sep> </n> </_> <s> </s> <root> <ans> <option> a b ab < input 好".split()
DATA = {"input": "ab<mask_0>é é<mask_1>", "<ans>": {"<mask_0>": "a << b", "<mask_1>": "好é"}}
SAMPLE = {"input": "b<mask_1>", "<ans>": {"<mask_1>": "a"}}
# fmt: off
IDS = [6, 8, 7, 6, 15, 7, 6, 13, 2, 1, 5, 1, 2, 7, 6, 9, 7, 6, 2, 7, 6, 11, 5, 14, 5, 12, 6, 2, 7, 6, 16, 1]
SEGMENTS = [0] * 3 + [1] * 3 + [2] * 8 + [3] * 3 + [4] * 3 + [5] * 6 + [6] * 3 + [7] * 3
LABELS = [-100] * 21 + [11, 5, 14, 5, 12, 7, -100, -100, -100, 16, 1]  # 7: the end, which the next key's <s> hides
RELATIONS = [
    0, 2, 3, 2, 3, 4, 3, 4, 9, 0, 2, 10, 11, 12, 11, 12, 17, 9, 0, 18, 19, 20, 19, 20, 9, 10, 11, 0, 2, 3, 2, 3,
    17, 18, 19, 9, 0, 2, 10, 11, 25, 26, 27, 17, 9, 0, 18, 19, 17, 18, 19, 9, 10, 11, 0, 2, 25, 26, 27, 17, 18, 19,
    9, 0,
]
OF_SAMPLE = [
    0, 2, 3, 2, 3, 4, 9, 0, 2, 10, 11, 12, 17, 9, 0, 18, 19, 20, 9, 10, 11, 0, 2, 3, 17, 18, 19, 9, 0, 2, 25, 26, 27,
    17, 9, 0,
]
# fmt: on


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bee") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return StructuredEncoder(CPMBeeTokenizer(str(path)))


def fields(row):
    return {name: row.values[:, i].tolist() for i, name in enumerate(FIELDS)}


def test_a_row(encoder):
    row = encoder.encode(DATA)
    found = fields(row)
    assert found["input_ids"] == [*IDS, 7]  # the end of the last answer is there to be predicted
    assert {i for i, number in enumerate(found["input_id_sub"]) if number} == {12, 27}  # <mask_1>, twice
    assert found["segment"] == [*SEGMENTS, 7] and set(found["num_segments"]) == {8}
    assert found["context"] == [int(segment not in (5, 7)) for segment in found["segment"]]
    assert not any(found["sample_ids"]) and not any(found["segment_rel_offset"])
    assert row.relations.tolist() == RELATIONS and extension_table([row]) == ((2, 1),)
    assert target_ids(row, extension_table([row]), len(WORDS)).tolist() == [*LABELS, 7]
    assert row.answers == (Answer(("<mask_0>",), 5), Answer(("<mask_1>",), 7))
    assert row.texts == {(2, 0): "<mask_0>", (1, 0): "é", (2, 1): "<mask_1>"}
    assert encoder.decode([(16, 0), (14, 0), (5, 0), (2, 1), (1, 0), (2, 0), (7, 0), (11, 0)], row.texts) == (
        "好<< <mask_1>é<mask_0>"
    )
    asked = encoder.encode(DATA, answered=False)  # the same without its answers
    told = np.array(found["context"]) == 1
    assert np.array_equal(asked.values, row.values[told]) and np.array_equal(asked.relations, row.relations)


def test_samples_stand_behind(encoder):
    """A name that stood in the row has its number in a sample, too."""
    row = encoder.encode(DATA, [SAMPLE])
    found = fields(row)
    assert found["input_ids"][:32] == IDS and not any(found["sample_ids"][:32])
    assert found["input_ids"][32:] == [6, 8, 7, 6, 15, 7, 6, 12, 2, 7, 6, 9, 7, 6, 2, 7, 6, 11]
    assert [i for i, number in enumerate(found["input_id_sub"]) if number] == [12, 27, 40, 46]
    assert set(found["sample_ids"][32:]) == {1} == set(found["context"][32:])
    assert set(found["segment_rel_offset"][32:]) == {64} and set(found["num_segments"][32:]) == {6}
    assert row.relations.tolist() == RELATIONS + OF_SAMPLE
    assert target_ids(row, extension_table([row]), len(WORDS)).tolist() == [*LABELS, 7, *[-100] * 17]
    assert len(row.answers) == 2


def test_rows_of_a_batch(encoder):
    rows = [encoder.encode(one) for one in (DATA, SAMPLE, {"<ans>": "<option_3><option_1>"})]
    batch = structured_batch(rows, len(WORDS))
    assert batch["cu_seqlens"].tolist() == [0, 33, 52, 62] and batch["max_seqlen"] == 33
    assert batch["segment_rel"].shape == (1, 64 + 36 + 9)
    assert batch["segment_rel_offset"][0, [0, 33, 52]].tolist() == [0, 64, 100]
    assert batch["ext_table_ids"].tolist() == [2, 10] and batch["ext_table_sub"].tolist() == [1, 1]
    assert batch["labels"][0, -3:].tolist() == [10, len(WORDS) + 1, 7]  # <option_3> came first
    empty = structured_batch([], len(WORDS), [(2, 1)])
    assert empty["labels"].shape == (1, 0) and empty["cu_seqlens"].tolist() == [0]


def test_what_is_deep_counts_to_seven(encoder):
    data = "a"
    for _ in range(9):
        data = {"b": data}
    row = encoder.encode({"a": data, "<ans>": "b"})
    table = row.relations.reshape(14, 14)  # the root, a, nine of b and their text, <ans> and its text
    assert table[0].tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 2, 3]
    assert table[11].tolist() == [57, 57, 57, 57, 57, 49, 41, 33, 25, 17, 9, 0, 58, 59]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"input": "a"}, "expected an object with the key '<ans>'"),
        ("a", "got 'a', expected an object"),
        ({"input": 3, "<ans>": ""}, "'input': got 3, expected a text, or an object of texts"),
        ({"input": {"a": ["b"]}, "<ans>": ""}, r"'input.a': got \['b'\]"),
        ({"input": "a < b", "<ans>": ""}, "'<' in 'a < b' is not a token of CPM-Bee; write '<' in a text as '<<'"),
        ({"input": "<b>", "<ans>": ""}, "'<b>' in '<b>' is not a token"),
        ({"input": "a", "<ans>": {}}, "'<ans>': got {}, expected a text"),
    ],
)
def test_objects_that_the_model_cannot_read_are_named(encoder, data, said):
    with pytest.raises(ValueError, match=said):
        encoder.encode(data)


def test_another_tokenizer():
    with pytest.raises(ValueError, match="tokenizer: dict cannot encode CPM-Bee's structured input"):
        StructuredEncoder({})
