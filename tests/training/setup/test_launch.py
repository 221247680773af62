"""All ranks see the folder of the run."""

import pytest

import engine
from engine.testing import run as on_ranks
from modelcenter.training.setup.launch import check_shared


def _look(root, private):
    engine.init_distributed()
    own = root / f"node-{engine.rank()}" if private else root
    own.mkdir(exist_ok=True)
    check_shared(own, patience=0.3)
    engine.synchronize()
    return sorted(p.name for p in own.iterdir())


def test_a_folder_that_ranks_do_not_share_is_an_error(tmp_path):
    assert on_ranks(_look, 2, tmp_path, False) == [[], []]
    with pytest.raises(RuntimeError, match=r"output_dir: rank 1 on .* does not see what rank 0 wrote .* all nodes"):
        on_ranks(_look, 2, tmp_path, True)
    assert not list((tmp_path / "node-0").iterdir())
