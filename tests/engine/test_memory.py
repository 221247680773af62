"""What the C allocator and torch are told about memory: each in a process of its own, as it holds until the end."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.ops import onednn_linear

ROOT = str(Path(__file__).parents[2])
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this switch")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such pages")


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@glibc
def test_freed_blocks_are_kept_unless_they_are_huge():
    run("""if True:
        import ctypes, engine
        assert engine.memory.keep_freed_memory()
        libc, size = ctypes.CDLL(None), ctypes.c_size_t
        libc.malloc.restype = ctypes.c_void_p
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096 / 2**20
        def left_by(megabytes):  # of a block that was written to and freed
            before = resident()
            block = ctypes.c_void_p(libc.malloc(size(megabytes << 20)))
            libc.memset(block, 1, size(megabytes << 20))
            assert resident() > before + 0.9 * megabytes
            libc.free(block)
            return resident() - before
        huge, large = left_by(48), left_by(24)
        assert huge < 4 and large > 20, (huge, large)
    """)


@linux
def test_torch_is_prepared_before_it_is_imported():
    """By the scripts, too; afterwards nothing is set, as nothing would change."""
    run("""if True:
        import os, sys, engine
        for name in engine.memory._SWITCHES:
            os.environ.pop(name, None)
        from modelcenter.training.script import run_task
        prepare = engine.memory.prepare_torch
        def asked():
            assert "torch" not in sys.modules
            raise InterruptedError
        engine.memory.prepare_torch = asked
        try:
            run_task("classification", ["--model", "m", "--train_data", "d", "--output_dir", "o"])
            raise AssertionError("not asked")
        except InterruptedError:
            pass
        sys.modules["torch"] = sys
        assert not prepare() and not set(engine.memory._SWITCHES) & set(os.environ)
        del sys.modules["torch"]
        os.environ["LRU_CACHE_CAPACITY"] = "7"
        assert prepare() and os.environ["LRU_CACHE_CAPACITY"] == "7"
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    """)


@linux
@pytest.mark.full
@pytest.mark.skipif(not onednn_linear()[0], reason="products of this CPU are not oneDNN's")
def test_products_of_new_shapes_do_not_pile_up():
    """torch's libraries read the switches, and products of ever other shapes keep the resident size where it is."""
    run("""if True:
        import engine
        assert engine.memory.prepare_torch() and engine.memory.keep_freed_memory()
        import torch
        from engine.ops.gemm import _onednn
        torch.set_num_threads(1)
        g, weight, x = torch.ones(240, 512), torch.ones(512, 128), torch.ones(240, 128)
        def resident(shapes):  # after products of so many shapes, as a layer has them, that were not there before
            for rows in shapes:
                _onednn(x[:rows], weight), _onednn(g[:rows], weight.t()), _onednn(g[:rows].t(), x[:rows].t())
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096 / 2**20
        early, late = resident(range(240, 190, -1)), resident(range(190, 40, -1))
        assert late < early + 30, (early, late)
    """)


def test_only_the_start_of_a_program_is_left_uncollected():
    run("""if True:
        import gc, sys, weakref, engine
        class Ring:
            def __init__(self):
                self.other = self
        def is_collected_after(block):
            with block:
                ring, enabled = weakref.ref(Ring()), gc.isenabled()
            assert gc.isenabled()
            gc.collect()
            return enabled, ring() is None
        assert is_collected_after(engine.memory.left_uncollected()) == (False, False)
        try:
            with engine.memory.left_uncollected():
                raise InterruptedError
        except InterruptedError:
            assert gc.isenabled()
        sys.modules["torch"] = sys
        assert is_collected_after(engine.memory.left_uncollected()) == (True, True)
    """)


def test_a_run_is_collected_again_once_it_trains(tmp_path):
    """What it has prepared is left alone, as in its own process; flags that are wrong leave nothing behind."""
    run(f"""if True:
        import gc, sys, types, engine
        from modelcenter.training import script
        seen = []
        def prepare(cfg, info):
            seen.append(gc.isenabled())
            raise ValueError("no data")
        # To import the module would import torch, which the run is to do.
        stand_in = types.SimpleNamespace(prepare_run=prepare, PreparedRun=object)
        sys.modules["modelcenter.training.setup.prepare"] = stand_in
        try:
            script.run_task("classification", ["--model", "m", "--train_data", "d", "--output_dir", {str(tmp_path)!r}])
        except ValueError as error:
            assert str(error) == "no data", error
        assert seen == [False] and gc.isenabled() and gc.get_freeze_count() > 100_000
    """)
