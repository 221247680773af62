"""AdamW with states in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.ops import fused
from engine.optim.adam import AdamOptimizer
from engine.optim.batch import Batch
from engine.optim.states import check_gradients, placed_gradient, undone_on_error
from engine.tensors import local_tensor, with_local

_ALIGN = 64  # bytes


def _check_contiguous(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if not local_tensor(parameter).is_contiguous():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} and strides {tuple(parameter.stride())} is not "
                "contiguous: assign parameter.data = parameter.data.contiguous() first"
            )


@dataclass
class _Piece:
    """A range of elements of one parameter's shard; the whole shard if it is small."""

    group: dict[str, Any]
    shard: torch.Tensor  # flat, on the parameter's device
    gradient: torch.Tensor
    master: torch.Tensor  # flat, on the host
    moments: tuple[torch.Tensor, torch.Tensor]
    step: torch.Tensor  # a copy of the parameter's step count, which the operator increments
    count: torch.Tensor | None  # the step count itself, if this is the parameter's last piece


class _Slot:
    """Host memory for the gradients and the 16-bit parameters of one bucket, and the events of their copies."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._room = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.pieces: list[_Piece] = []
        self.gradients: list[torch.Tensor] = []
        self.arrived: torch.cuda.Event | None = None
        self.left: torch.cuda.Event | None = None

    def begin(self, pieces: list[_Piece]) -> None:
        needed = sum(-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for p in pieces for t in (p.gradient, p.shard))
        if self.left is not None:
            self.left.synchronize()  # before the memory is written again
        if needed > self._room.numel():
            self._room = torch.empty(needed, dtype=torch.uint8, pin_memory=self._pinned)
        self._used, self.pieces = 0, pieces

    def take(self, like: torch.Tensor) -> torch.Tensor:
        size = like.numel() * like.element_size()
        part = self._room[self._used : self._used + size].view(like.dtype)
        self._used += -(-size // _ALIGN) * _ALIGN
        return part


class AdamOffloadOptimizer(AdamOptimizer):
    """``AdamOptimizer`` with moments and fp32 masters in host memory, where the step is computed too.

    The device only keeps parameters and gradients: for bf16, 4 bytes per parameter instead of 16. Gradients are copied
    to the host, and parameters back, in buckets of bounded size, on a separate stream: while one bucket is stepped, the
    gradients of the next arrive and the parameters of the previous one leave. On a CPU the same code runs in ordinary
    memory. Parameters have the same bits as with ``AdamOptimizer`` (without compiled operators, where torch's kernel is
    used, the same within rounding), except that under "bf16-sr" they have masters here. The states of an
    ``AdamOptimizer`` can be loaded. Under torchrun, set ``OMP_NUM_THREADS`` to give the step its threads.

    fp32 parameters, too, have a ``master``, from which the step computes: a value written only into a parameter is lost
    in the next step, see ``AdamOptimizer``.

    Args:
        params, lr, betas, eps, weight_decay, hold_steps: as in ``AdamOptimizer``.
        record_delta: record how far each step moves the parameters, for ``get_avg_delta`` and ``get_var_delta``, as in
            BMTrain.
        bucket: the number of elements copied at a time; besides the states, about 8 bytes of host memory for each.

    Raises:
        ValueError: a value is out of its range, or a parameter is on meta or not contiguous.
    """

    states_on_host = True
    _settings = (*AdamOptimizer._settings, "_bucket", "record_delta")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        bucket: int = 1 << 24,
    ) -> None:
        if not isinstance(bucket, int) or bucket < 1:
            raise ValueError(f"bucket is {bucket!r}, expected a whole number of at least 1")
        self._bucket = bucket
        self.record_delta = record_delta
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps)

    def _reset_caches(self) -> None:
        super()._reset_caches()
        self._deltas = torch.zeros(3, dtype=torch.float64)  # their number, their sum, the sum of their squares
        self._slots: dict[tuple[torch.device, int], _Slot] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @undone_on_error
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``AdamOptimizer``."""
        super().add_param_group(param_group)
        _check_contiguous(self.param_groups[-1])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """One step. Waits until the gradients are on the host. Arguments as in ``AdamOptimizer``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._deltas.zero_()
        if found_inf is not None and found_inf.item() != 0:
            return loss
        check_gradients(self.param_groups)
        for group in self.param_groups:
            _check_contiguous(group)  # again, as their memory may have changed: the step works on flat views
        scale = None if grad_scale is None else grad_scale.to("cpu").reciprocal()
        try:
            self._step_in_buckets(scale)
        finally:
            for device, stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)
            for slot in self._slots.values():
                slot.pieces = []  # so that zero_grad frees their gradients
        return loss

    def _step_in_buckets(self, scale: torch.Tensor | None) -> None:
        waiting: _Slot | None = None
        for turn, bucket in enumerate(self._buckets()):
            slot = self._slot(bucket[0].shard.device, turn)
            self._fetch(slot, bucket)
            if waiting is not None:
                self._step_on_host(waiting, scale)
            waiting = slot
        if waiting is not None:
            self._step_on_host(waiting, scale)

    def get_avg_delta(self) -> float:
        """The mean change of a parameter element in the last step, over this rank's shards; 0 if not recorded."""
        count, total, _ = self._deltas.tolist()
        return total / count if count else 0.0

    def get_var_delta(self) -> float:
        """The variance of these changes."""
        count, _, squares = self._deltas.tolist()
        return squares / count - self.get_avg_delta() ** 2 if count else 0.0

    def _slot(self, device: torch.device, turn: int) -> _Slot:
        if (slot := self._slots.get((device, turn % 2))) is None:
            slot = self._slots[device, turn % 2] = _Slot(pinned=device.type == "cuda")
        return slot

    def _buckets(self) -> Iterator[list[_Piece]]:
        """Pieces on one device, at most ``bucket`` elements in all, one list at a time."""
        bucket: list[_Piece] = []
        room = self._bucket
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter] or self._init_state(parameter)
                kept = [state[name] for name in ("master", *self.moments)]
                flat = [local_tensor(t).reshape(-1) for t in (parameter, placed_gradient(parameter), *kept)]
                if not flat[0].numel():  # it has no piece that would count the step
                    state["step"].add_(1.0)
                if bucket and bucket[0].shard.device != flat[0].device:
                    yield bucket
                    bucket, room = [], self._bucket
                begin = 0
                while begin < flat[0].numel():
                    end = min(flat[0].numel(), begin + room)
                    shard, gradient, master, m, v = (t[begin:end] for t in flat)
                    count = state["step"] if end == flat[0].numel() else None
                    bucket.append(_Piece(group, shard, gradient, master, (m, v), state["step"].clone(), count))
                    room -= end - begin
                    begin = end
                    if not room:
                        yield bucket
                        bucket, room = [], self._bucket
        if bucket:
            yield bucket

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _fetch(self, slot: _Slot, pieces: list[_Piece]) -> None:
        """Start copying the gradients to the host."""
        slot.begin(pieces)
        slot.gradients = [slot.take(piece.gradient) for piece in pieces]
        stream = self._stream(pieces[0].shard.device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for target, piece in zip(slot.gradients, pieces, strict=True):
                target.copy_(piece.gradient, non_blocking=True)
        if stream is not None:
            slot.arrived = stream.record_event()

    def _step_on_host(self, slot: _Slot, scale: torch.Tensor | None) -> None:
        """Step the pieces of a slot, and start copying their parameters back."""
        if slot.arrived is not None:
            slot.arrived.synchronize()
        batches: dict[tuple[Any, ...], tuple[dict[str, Any], Batch]] = {}
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece, gradient in zip(slot.pieces, slot.gradients, strict=True):
            mode = "plain" if piece.shard.dtype == torch.float32 else "master"
            held = self._is_held(piece.step)
            key = (id(piece.group), piece.shard.dtype, gradient.dtype, held)
            _, batch = batches.setdefault(key, (piece.group, Batch(mode, True, held)))
            source = piece.master if mode == "plain" else slot.take(piece.shard)
            batch.p.append(source)
            batch.g.append(gradient)
            batch.m.append(piece.moments[0])
            batch.v.append(piece.moments[1])
            if mode == "master":
                batch.aux.append(piece.master)
            batch.steps.append(piece.step)
            back.append((piece.shard, source))
        for group, batch in batches.values():
            values = batch.p if batch.mode == "plain" else batch.aux
            before = [value.clone() for value in values] if self.record_delta else []
            self.update({**group, "lr": 0.0} if batch.held else group, batch, scale, None)
            for old, value in zip(before, values[: len(before)], strict=True):
                delta = value.double() - old.double()
                self._deltas += torch.stack([delta.new_tensor(delta.numel()), delta.sum(), delta.square().sum()])
        for piece in slot.pieces:
            if piece.count is not None:
                piece.count.add_(1.0)
        stream = self._stream(slot.pieces[0].shard.device)
        with torch.cuda.stream(stream):
            for target, source in back:
                target.copy_(source, non_blocking=True)
        if stream is not None:
            slot.left = stream.record_event()

    def _init_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        self._check_dtype(parameter)
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in self.moments:
            state[name] = self._on_host(parameter, torch.zeros_like(local_tensor(parameter.detach()), device="cpu"))
        state["master"] = self._on_host(parameter, local_tensor(parameter.detach()), self._travels(parameter))
        return state

    @staticmethod
    def _travels(parameter: torch.Tensor) -> bool:
        """Whether the master itself is copied to a GPU. Other masters need not be pinned, which would take up to twice
        the memory: torch rounds pinned blocks up to the next power of two."""
        return parameter.is_cuda and parameter.dtype == torch.float32

    def _on_host(self, parameter: torch.Tensor, value: torch.Tensor, pinned: bool = False) -> torch.Tensor:
        """An fp32 copy of ``value`` on the host, placed as the parameter is."""
        host = torch.empty(value.shape, dtype=torch.float32, pin_memory=pinned)
        return with_local(parameter, host.copy_(value))

    def state_device(self, parameter: torch.Tensor) -> torch.device:
        """The CPU, whatever the parameter's device."""
        return torch.device("cpu")

    def _loaded(self, name: str, value: torch.Tensor, parameter: torch.Tensor, own: bool) -> torch.Tensor:
        kept = super()._loaded(name, value, parameter, own)
        local = local_tensor(kept)
        if not own and name != "step" and local_tensor(value).device == local.device:
            return with_local(kept, local.clone())
        return kept

    @torch.no_grad()
    def _convert_master(self, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Give a loaded state, which may be an ``AdamOptimizer``'s, a master on the host."""
        master = shard = local_tensor(parameter.detach())
        if "remainder" in state:
            low, master = local_tensor(state.pop("remainder")), torch.empty(shard.shape, dtype=torch.float32)
            fused.merge_master_([shard.to("cpu", torch.bfloat16)], [low], [master])
            shard.copy_(master)
        elif "master" in state:
            master = local_tensor(state["master"])
            if parameter.dtype == torch.float32:
                shard.copy_(master)
        pinned = self._travels(parameter)
        ready = master is not shard and (master.is_pinned() or not pinned)
        state["master"] = with_local(parameter, master) if ready else self._on_host(parameter, master, pinned)
