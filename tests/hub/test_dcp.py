"""Distributed checkpoints as files: what torch writes is read in part, what is written here torch reads."""

import io
import itertools
import random
import tracemalloc
import warnings
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from engine.checkpoint.dcp import _Reader
from modelcenter.convert.pieces import full_box
from modelcenter.hub.conversion.plan import Job, Plan, Segment
from modelcenter.hub.files import dcp as dcp_files
from modelcenter.hub.files.dcp import DCPSource, DCPTensorInfo, write_metadata
from modelcenter.hub.files.safetensors import SafetensorsWriter, file_head
from modelcenter.hub.files.torch_archive import archive_frame, locate_tensor

TENSORS = {
    "half": torch.randn(3, 4).bfloat16(),
    "count": torch.tensor(3),
    "flag": torch.tensor(True),
    "scale": torch.tensor(2.5),
    "mask": torch.tensor([True, False, True]),
    "small": torch.arange(5, dtype=torch.int32).to(torch.uint16),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "turned": torch.randn(3, 5).t(),
    "none": torch.empty(0, 3),
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
    "deep": torch.randn(2, 3, 4, dtype=torch.float64),
}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.new_empty(tensor.numel()).copy_(tensor.flatten()).view(torch.uint8).numpy())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


@pytest.fixture
def theirs(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(TENSORS, storage_writer=dcp.FileSystemWriter(tmp_path / "model"), no_dist=True)
    return tmp_path


@pytest.mark.parametrize("name", TENSORS)
def test_what_torch_writes(name, theirs):
    tensor = TENSORS[name]
    with DCPSource(theirs) as source:
        assert same(source.read(name), tensor)
        rng = random.Random(0)
        for _ in range(10):
            box = tuple(tuple(sorted((rng.randint(0, n), rng.randint(0, n)))) for n in tensor.shape)
            assert same(source.read(name, box), tensor[tuple(slice(*b) for b in box)].clone())


@pytest.mark.parametrize("parts", [1, 2])
def test_what_torch_reads(parts, tmp_path):
    """0-d, integer, bool, empty and 8-bit tensors; whole or in two parts."""
    (tmp_path / "model").mkdir()
    infos = {}
    with open(tmp_path / "model" / "__0_0.distcp", "wb") as file:
        for name, tensor in TENSORS.items():
            rows = len(tensor) if tensor.dim() and tensor.numel() else 0
            cuts = [(0, rows // 2), (rows // 2, rows)] if parts == 2 and rows > 1 else [(0, rows)]
            places = []
            for low, high in cuts:
                box = ((low, high), *full_box(tensor.shape[1:])) if rows else full_box(tensor.shape)
                part = tensor[low:high] if rows else tensor
                before, after = archive_frame(part.dtype, tuple(part.shape), zlib.crc32(raw(part)))
                places.append((box, "__0_0.distcp", file.tell(), len(before) + part.nbytes + len(after)))
                assert file.write(before) % 64 == 0
                file.write(raw(part) + after)
                whole_file = before + raw(part) + after
                assert zipfile.ZipFile(io.BytesIO(whole_file)).testzip() is None
                assert same(torch.load(io.BytesIO(whole_file), weights_only=True), part)
            infos[name] = DCPTensorInfo(tuple(tensor.shape), tensor.dtype, tuple(places))
    write_metadata(tmp_path / "model", infos)
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, storage_reader=_Reader(tmp_path / "model"), no_dist=True)
    with DCPSource(tmp_path) as source:
        for name, tensor in TENSORS.items():
            assert same(found[name], tensor) and same(source.read(name), tensor), name


def test_parts_that_share_elements():
    """As all pairs of them say."""
    rng = random.Random(0)
    for _ in range(300):
        boxes = [tuple(tuple(sorted(rng.choices(range(7), k=2))) for _ in range(rng.choice((1, 2)))) for _ in range(2)]
        boxes = [box for box in boxes if len(box) == len(boxes[0])] * rng.choice((1, 1, 1, 2))
        pairs = itertools.combinations(boxes, 2)
        assert dcp_files._are_disjoint(boxes) is all(dcp_files._overlap(a, b) is None for a, b in pairs), boxes


@pytest.mark.parametrize("rows, columns", [(600, 1), (1, 600), (30, 20)])
def test_parts_of_many_ranks(rows, columns, monkeypatch):
    """Whether they share elements is found without a look at every pair."""
    boxes = [((3 * i, 3 * i + 3), (5 * j, 5 * j + 5)) for i in range(rows) for j in range(columns)]
    looked, overlap = [], dcp_files._overlap
    monkeypatch.setattr(dcp_files, "_overlap", lambda a, b: looked.append(1) or overlap(a, b))
    assert dcp_files._are_disjoint(boxes) and len(looked) < 25 * len(boxes)
    assert not dcp_files._are_disjoint([*boxes, ((3 * rows - 1, 3 * rows), (0, 1))])


def test_a_damaged_number_in_a_description_takes_no_memory(theirs):
    """Pickle's reader in C makes an array of twice the number by which something is remembered: up to 64 GB."""
    path, blob, many = theirs / "damaged", io.BytesIO(), 20_000_000
    description = b"\x80\x02)r" + many.to_bytes(4, "little") + b"."  # an empty tuple, remembered under that number
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", description)
    path.write_bytes(blob.getvalue())
    tracemalloc.start()
    try:
        with open(path, "rb") as file, pytest.raises(ValueError, match="the tensor at byte 0 is damaged"):
            locate_tensor(path, file, 0, len(blob.getvalue()))
        assert tracemalloc.get_traced_memory()[1] < many
    finally:
        tracemalloc.stop()


def test_more_than_four_gigabytes(tmp_path):
    """The archive around a large tensor has the long form of its numbers. (The file is sparse.)"""
    count, path = 2**30 + 5, tmp_path / "large"
    before, after = archive_frame(torch.float32, (count,))
    with open(path, "wb") as file:
        file.write(before)
        file.seek(len(before) + 4 * (count - 1))
        file.write(torch.tensor([7.0]).numpy().tobytes() + after)
        length = file.tell()
    with open(path, "rb") as file:
        info = locate_tensor(path, file, 0, length)
    assert (info.offset, info.shape, info.dtype) == (len(before), (count,), torch.float32)
    found = torch.load(path, weights_only=True, mmap=True)
    assert found.shape == (count,) and found[-1] == 7.0


def test_safetensors_of_every_kind(tmp_path):
    """0-d, integer and bool tensors, by the writer of one file and at places known before."""
    entries = [(name, t.dtype, tuple(t.shape)) for name, t in TENSORS.items()]
    with SafetensorsWriter(tmp_path / "a.safetensors", entries) as writer:
        for tensor in TENSORS.values():
            writer.write(tensor)
    head, places = file_head(entries)
    jobs = [
        Job(n, n, d, s, "b.safetensors", (Segment(full_box(s), at),), False)
        for (n, d, s), at in zip(entries, places, strict=False)
    ]
    Plan(0, {"b.safetensors": places[-1]}, {"b.safetensors": head}, jobs).prepare(tmp_path)
    with open(tmp_path / "b.safetensors", "r+b") as file:
        for job in reversed(jobs):
            file.seek(job.segments[0].start)
            file.write(raw(TENSORS[job.name]))
    assert len(head) % 8 == 0
    for name in ("a", "b"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == TENSORS.keys() and all(same(found[n], t) for n, t in TENSORS.items())
