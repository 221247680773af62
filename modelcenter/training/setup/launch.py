"""The start of a run: claim its output folder, meet the other ranks, and agree with them on flags and storage."""

import platform
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import engine
from engine.checkpoint import wait_checkpoint
from engine.collectives import from_rank_0, together
from modelcenter.command_line.launcher import launched_rank
from modelcenter.hub.remote.push import check_push
from modelcenter.training.config import TrainConfig
from modelcenter.training.output.folder import prepare_output, remove_if_empty
from modelcenter.training.output.lock import lock_folder
from modelcenter.training.output.trackers import selected_trackers
from modelcenter.training.setup.rank_checks import check_flags
from modelcenter.training.setup.resolve import set_matmul_precision


@contextmanager
def claim_output(cfg: TrainConfig) -> Iterator[None]:
    """Check on rank 0, before the ranks meet, that the run can write its output, that the folder holds no finished run
    (see output.folder.prepare_output), and that the run may push.

    Inside, other runs are kept out of the folder. Afterwards, a new folder that is still empty is removed.
    """
    selected_trackers(cfg.trackers)
    if cfg.output_dir is None or cfg.dry_run or launched_rank() != 0:
        yield
        return
    if cfg.push_to_hub is not None:
        check_push(cfg.push_to_hub)
    path = Path(cfg.output_dir)
    with remove_if_empty(path):
        prepare_output(path, cfg.overwrite_output_dir)
        with lock_folder(path):
            yield


def start_ranks(cfg: TrainConfig) -> None:
    """Meet the other ranks, if a launcher started some.

    Raises:
        ValueError: ranks were given different flags, or do not share the output folder.
    """
    engine.init_distributed(
        seed=cfg.seed,
        zero_level=cfg.zero,
        dp_replicate=cfg.dp_replicate,
        tp_size=cfg.tp,
        cp_size=cfg.cp,
        pp_size=cfg.pp,
        pp_chunks=2 if cfg.pp > 1 and cfg.pp_schedule == "interleaved" else 1,
    )
    check_flags(cfg)
    if cfg.output_dir is not None and not cfg.dry_run:
        check_shared(Path(cfg.output_dir).absolute())
    set_matmul_precision(cfg.matmul_precision)
    engine.memory.keep_freed_memory()  # each step allocates the buffers that the last one freed
    # FSDP2 warns in every step about units that return views. Only changing these in place would go wrong, which no
    # block does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # An earlier run in this process may still be writing to the folder that this one reads and clears. A failure there
    # has been reported already.
    with suppress(Exception):
        wait_checkpoint()


def check_shared(path: Path, patience: float = 10.0) -> None:
    """Check that all ranks see the folder that rank 0 writes to. Collective.

    Args:
        patience: seconds that a network file system gets to show a new file.

    Raises:
        ValueError: a rank does not see what rank 0 writes.
    """
    if engine.world_size() == 1:
        return
    name = f".shared-{uuid.uuid4().hex[:8]}"
    with together(f"writing to {path}"):
        if engine.rank() == 0:
            (path / name).touch()
    name = from_rank_0(name)
    try:
        with together(f"looking into {path}"):
            deadline = time.monotonic() + patience
            while not (path / name).exists():
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"output_dir: rank {engine.rank()} on {platform.node()} does not see what rank 0 wrote to "
                        f"{path}; give a folder on storage that all nodes share"
                    )
                time.sleep(0.1)
    finally:
        if engine.rank() == 0:
            (path / name).unlink(missing_ok=True)
