"""Fixtures of more than one file of tests."""

import errno
import mmap

import pytest


@pytest.fixture
def only_private_maps(monkeypatch):
    """A file system that maps files privately alone, as FUSE's with direct_io."""
    real = mmap.mmap

    def private(handle, size, access, **options):
        if access != mmap.ACCESS_COPY:
            raise OSError(errno.ENODEV, "No such device")
        return real(handle, size, access=access, **options)

    monkeypatch.setattr(mmap, "mmap", private)
