"""Token files: what is written is read, complete or absent; Megatron's pairs, written here byte by byte."""

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from token_toys import write_tokens

from modelcenter.data.token_files import TokenWriter, is_tokens, open_tokens, with_end

DOCUMENTS = [[5, 6, 7], [], [65000], [8, 9] * 50]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_round_trip(tmp_path, vocab_size, dtype):
    file = write_tokens(tmp_path / "a", DOCUMENTS, vocab_size=vocab_size, eos=3, about={"source": "x"})
    assert [file.document(i).tolist() for i in range(len(file))] == DOCUMENTS
    assert file.tokens.dtype.str == dtype and isinstance(file.tokens, np.memmap)
    assert (file.eos, file.about["source"], file.about["tokens"]) == (3, "x", 104)
    file.check()
    # The format as it is documented, read without the reader.
    raw = np.frombuffer((tmp_path / "a" / "tokens.bin").read_bytes(), dtype)
    offsets = np.frombuffer((tmp_path / "a" / "offsets.bin").read_bytes(), "<i8")
    assert offsets.tolist() == [0, 3, 3, 4, 104] and raw[:4].tolist() == [5, 6, 7, 65000]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_many_documents_at_once_are_those_one_by_one(tmp_path):
    one = write_tokens(tmp_path / "a", DOCUMENTS)
    with TokenWriter(tmp_path / "b", 65536) as writer:
        writer.add(np.array(sum(DOCUMENTS, [])), np.array([len(d) for d in DOCUMENTS]))
    assert open_tokens(tmp_path / "b").fingerprint() == one.fingerprint()
    assert write_tokens(tmp_path / "c", DOCUMENTS[:-1]).fingerprint() != one.fingerprint()


def test_a_file_system_that_shares_no_memory(tmp_path, only_private_maps):
    file = write_tokens(tmp_path / "a", DOCUMENTS)
    assert [file.document(i).tolist() for i in range(len(file))] == DOCUMENTS and not file.tokens.flags.writeable


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), TokenWriter(tmp_path / "a", 10) as writer:
        writer.add(np.array([1, 2]), np.array([2]))
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    for wrong in (10, -1):
        with pytest.raises(ValueError, match=f"token {wrong} is not in a vocabulary of 10 tokens"):
            write_tokens(tmp_path / "a", [[1, wrong]], 10)
    assert not list(tmp_path.iterdir())
    write_tokens(tmp_path / "a", DOCUMENTS)
    with pytest.raises(ValueError, match="exists already"):
        write_tokens(tmp_path / "a", DOCUMENTS)


def test_what_a_killed_process_left_is_removed(tmp_path):
    with TokenWriter(tmp_path / "a[b]", 9):
        (mine,) = tmp_path.iterdir()
    here, other = mine.name[-16:-8], "0" * 8
    left = [tmp_path / f".a[b]-{of}{i:08}" for i, of in enumerate((here, other, other))]
    for folder in left:
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"abc")
    os.utime(left[2] / "tokens.bin", (0, 0))  # written to long ago
    shutil.rmtree(tmp_path / "a[b]")
    with TokenWriter(tmp_path / "a[b]", 9) as writer:
        # Another machine may still be writing the second, as its locks may not show on this one.
        assert [folder.exists() for folder in left] == [False, True, False]
        shutil.rmtree(left[1])
        writer.add(np.array([5]), np.array([1]))
        with pytest.raises(ValueError, match="another process is writing it"), TokenWriter(tmp_path / "a[b]", 9):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["a[b]"]


def test_a_folder_that_is_there_meanwhile(tmp_path):
    with pytest.raises(ValueError, match="a: exists already; remove it"), TokenWriter(tmp_path / "a", 9):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "mine").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file that is always full")
@pytest.mark.parametrize("count", [3, 100_000])  # found out at the end, or as soon as the buffer is full
def test_a_full_disk_is_said_with_the_folder(tmp_path, count):
    with pytest.raises(OSError, match="No space left on device: '.*/words'"), TokenWriter(tmp_path / "words", 10) as to:
        to._files["tokens.bin"].close()
        to._files["tokens.bin"] = open("/dev/full", "wb")  # noqa: SIM115
        to.add(np.zeros(count, np.int64), np.array([count]))
    assert not list(tmp_path.iterdir())


def test_damage_is_named(tmp_path):
    file = write_tokens(tmp_path / "a", DOCUMENTS)
    tokens = tmp_path / "a" / "tokens.bin"
    raw = tokens.read_bytes()
    tokens.write_bytes(raw[:-2] + b"\1\0")
    with pytest.raises(ValueError, match="tokens.bin: got SHA-256 .* the file has changed"):
        open_tokens(tmp_path / "a").check()
    tokens.write_bytes(raw[:-2])
    with pytest.raises(ValueError, match="tokens.bin: 206 bytes, expected 208 bytes .*truncated"):
        open_tokens(tmp_path / "a")
    about = tmp_path / "a" / "about.json"
    about.write_text(json.dumps({**file.about, "version": 9}))
    with pytest.raises(ValueError, match="version 9, expected 'modelcenter-tokens' version 1"):
        open_tokens(tmp_path / "a")
    about.write_text("{")
    with pytest.raises(ValueError, match="about.json: damaged"):
        open_tokens(tmp_path / "a")
    with pytest.raises(ValueError, match="neither a folder of tokens .* nor Megatron's pair"):
        open_tokens(tmp_path / "nothing")


def megatron(stem, code, sequences, bounds, pointers=None, tail=b""):
    """The pair as its format says, without the code under test."""
    kind = {8: "H", 4: "i"}[code]
    size = struct.calcsize("<" + kind)
    starts = [sum(map(len, sequences[:i])) * size for i in range(len(sequences))]
    stem.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(s)}{kind}", *s) for s in sequences))
    stem.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
        + struct.pack(f"<{len(sequences)}i", *map(len, sequences))
        + struct.pack(f"<{len(sequences)}q", *(pointers or starts)) + struct.pack(f"<{len(bounds)}q", *bounds) + tail
    )  # fmt: skip
    return stem


@pytest.mark.parametrize("code", [8, 4], ids=["uint16", "int32"])
@pytest.mark.parametrize("spelling", ["{}", "{}.bin", "{}.idx"])
def test_megatron_pair(tmp_path, code, spelling):
    stem = megatron(tmp_path / "my_text_document", code, [[1, 2], [3], [60000 if code == 8 else 70000, 5]], [0, 2, 3])
    file = open_tokens(spelling.format(stem))
    assert [file.document(i).tolist() for i in range(2)] == [[1, 2, 3], [60000 if code == 8 else 70000, 5]]
    assert file.eos is None and len(file) == 2 and is_tokens(spelling.format(stem))
    before = file.fingerprint()
    file.check()
    megatron(stem, code, [[1, 2], [3], [5, 5, 5]], [0, 2, 3], tail=b"\0\0\0")
    assert open_tokens(stem).fingerprint() != before


def test_megatron_damage_is_named(tmp_path):
    def refuses(says):
        with pytest.raises(ValueError, match=says):
            open_tokens(tmp_path / "a")
        assert is_tokens(tmp_path / "a")

    megatron(tmp_path / "a", 4, [[1, 2], [3]], [0, 1, 2], pointers=[4, 0])
    refuses("are not contiguous")
    megatron(tmp_path / "a", 4, [[1, 2], [3]], [0, 1])
    refuses("do not run from 0 to 2, the number of sequences")
    stem = megatron(tmp_path / "a", 4, [[1, 2], [3]], [0, 1, 2])
    index, data = stem.with_suffix(".idx"), stem.with_suffix(".bin")
    whole, tokens = index.read_bytes(), data.read_bytes()
    data.write_bytes(tokens[:-1])
    refuses("a.bin: 11 bytes, expected 12")
    index.write_bytes(whole[:-1])
    refuses("but its header gives")
    index.write_bytes(whole[:17] + b"\7" + whole[18:])
    refuses("type code 7")
    index.write_bytes(b"TNTIDX" + whole[6:])
    refuses("does not start like Megatron's")
    data.unlink()
    with pytest.raises(ValueError, match=r"a.bin is missing, so the size"):
        open_tokens(tmp_path / "a.idx")
    assert is_tokens(tmp_path / "a.idx") and not is_tokens(tmp_path / "b.idx")


def test_documents_that_end_in_a_token_which_the_file_does_not_name(tmp_path):
    bounds = list(range(6))
    documents = [[5, 6, 9], [7, 9], [], [9], [8, 9]]
    file = open_tokens(megatron(tmp_path / "a", 8, documents, bounds))
    assert with_end(file, 9).eos == 9 and with_end(file, 9).fingerprint() != file.fingerprint()
    assert with_end(file, None) is file and with_end(file, 4) is file
    file = open_tokens(megatron(tmp_path / "b", 8, [[5, 6], [7, 9], [8], [9, 8], [9]], bounds))
    assert with_end(file, 9) is file  # two of five
    own = write_tokens(tmp_path / "own", [[5, 9], [6, 9]], eos=3)
    assert with_end(own, 9) is own


def test_a_part_of_a_folder_is_not_the_folder(tmp_path):
    folder = write_tokens(tmp_path / "own", DOCUMENTS).path
    assert is_tokens(folder / "tokens.bin")
    with pytest.raises(ValueError, match="tokens.bin: this file is part of a folder of tokens; give the folder, .*own"):
        open_tokens(folder / "tokens.bin")
