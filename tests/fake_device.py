"""A device that this machine does not have: real values, on tensors that say they are elsewhere.

What a GPU would refuse, a host tensor among device tensors, raises; what would stall its queue,
because the host needs a value or copies one there, is counted by the line that asked for it.

Usage: python tests/fake_device.py OUT: every method there and here, as JSON. A process of its
own, as torch knows the device from then on.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from methods import METHODS, Method
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from lightning_models.generation import SamplingConfig, generate

ROOT = Path(__file__).resolve().parents[1]
MODELS = str(ROOT / "lightning_models")
NAME = "fakedevice"
aten = torch.ops.aten

WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.masked_select,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.bincount,
}
"""Operators whose result, or its size, the host must know."""
BY_MASK = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Backend:
    """What torch asks of a device's module."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))


_registered = (_Guard(), _Hooks())  # torch keeps no reference
torch._C._acc.register_python_privateuseone_device_guard(_registered[0])
torch._C._acc.register_python_privateuseone_hook(_registered[1])
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _Backend)
DEVICE = torch.device(NAME, 0)


class OnDevice(torch.Tensor):
    """A tensor there; ``held`` is its value here."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnDevice":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        tensor.held = held
        return tensor

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def __repr__(self) -> str:
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, None)


class OnFakeDevice(TorchDispatchMode):
    """Makes tensors on the device, and counts by line where the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> "OnFakeDevice":
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(device=) is not seen
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, self)


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Arguments or results of an operator with other tensors; pytrees would take half the time."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([_map(change, each) for each in value])
    return value


def _run(func, args, kwargs, mode):
    flat: list[torch.Tensor] = []

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        flat.append(tensor)
        return tensor.held if isinstance(tensor, OnDevice) else tensor

    held = _map(hold, tuple(args))
    named = {key: _map(hold, value) for key, value in kwargs.items()}
    there = [leaf for leaf in flat if isinstance(leaf, OnDevice)]
    asked = kwargs.get("device")
    target = torch.device(asked).type if asked is not None else None
    packet = func.overloadpacket
    moves = packet in (aten._to_copy, aten.copy_, aten._copy_from)
    if there and not moves:
        hosts = [leaf for leaf in flat if not isinstance(leaf, OnDevice) and leaf.dim() > 0]
        if hosts:
            raise RuntimeError(f"{func} has tensors of both devices: {_line()}")
    leaves_host = target == "cpu" and packet is aten._to_copy
    if mode is not None and _arrives(packet, args, kwargs, target):
        mode.waits[f"{packet.__name__} to the device at {_line()}"] += 1
    if there and mode is not None:
        masks = packet in BY_MASK and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        fetched = leaves_host or (packet is aten.copy_ and not isinstance(args[0], OnDevice))
        unknown = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in WAITS or masks or fetched or unknown:
            mode.waits[f"{packet.__name__} at {_line()}"] += 1
    out = func(*held, **(named if asked is None else {**named, "device": "cpu"}))
    stays = target == NAME if target is not None else bool(there)
    if packet is aten.copy_:
        stays = isinstance(args[0], OnDevice)
    if packet in (aten.equal, aten._local_scalar_dense) or not stays:
        return out
    wrapped = _map(OnDevice, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


def _arrives(packet: Any, args: Any, kwargs: dict[str, Any], target: str | None) -> bool:
    """Whether values of the host are copied to the device, and the host waits for that."""
    source = args[1 if packet is aten.copy_ else 0] if args else None
    if not isinstance(source, torch.Tensor) or source.numel() == 0:
        return False  # nothing is copied
    if packet is aten._to_copy:
        blocks = not kwargs.get("non_blocking")
        return blocks and target == NAME and not isinstance(source, OnDevice)
    if packet is aten.copy_:
        blocks = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        return blocks and isinstance(args[0], OnDevice) and not isinstance(source, OnDevice)
    return False


def _line() -> str:
    """The innermost line of the project that runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(MODELS):
        frame = frame.f_back
    if frame is None:
        return "?"
    path, name = Path(frame.f_code.co_filename).relative_to(ROOT), frame.f_code.co_name
    return f"{path}:{frame.f_lineno} ({name})"


def move(model: torch.nn.Module) -> None:
    """Moves parameters and buffers of a model, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = OnDevice(parameter.data)
                module._parameters[name] = torch.nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
        if hasattr(module, "_device"):
            module._device = DEVICE


def compare(method: Method) -> dict[str, Any]:
    """Trains, scores and generates on both devices; returns waits by line, and how results differ.

    Raises:
        RuntimeError: if tensors of both devices meet.
    """
    here, there = method.build(), method.build()
    move(there)
    found: dict[str, Any] = {}
    with OnFakeDevice() as mode:
        batch = there.transfer_batch_to_device(method.batch(), DEVICE, 0)
        mode.waits.clear()
        loss = there._training_objective(batch)
        loss.backward()
        found["training"] = dict(mode.waits)
        there.eval()
        with torch.no_grad():
            batch = there.transfer_batch_to_device(method.batch(), DEVICE, 0)
            mode.waits.clear()
            scores = there.score(batch).log_prob
            found["scoring"] = dict(mode.waits)
            texts = generate(there, method.format.prompts, device=DEVICE, **GREEDY)
    expected = here._training_objective(method.batch())
    expected.backward()
    here.eval()
    gradients = zip(here.network.parameters(), there.network.parameters(), strict=True)
    found["differences"] = {
        "loss": _difference(loss, expected),
        "gradients": max(_difference(b.grad, a.grad) for a, b in gradients if a.grad is not None),
        "scores": _difference(scores, here.score(method.batch()).log_prob),
        "texts": float(texts != generate(here, method.format.prompts, **GREEDY)),
    }
    return found


GREEDY = {"max_new_tokens": 3, "sampling": SamplingConfig(temperature=0.0)}


def _difference(there: torch.Tensor, here: torch.Tensor) -> float:
    return (there.detach().held - here.detach()).abs().max().item()


def main(out: str) -> None:
    """Writes what each method does there, or the error that it ends with."""
    torch.set_num_threads(1)
    results = {}
    for method in METHODS:
        try:
            results[method.name] = compare(method)
        except Exception as error:
            results[method.name] = {"error": f"{type(error).__name__}: {error}"}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
