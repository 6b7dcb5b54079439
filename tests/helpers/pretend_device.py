"""A pretend second device: tensors whose device is `pretend:0` and whose memory is the CPU's.

Below autograd every op is run by the CPU's kernel on an alias of the same memory, after a check
that no tensor or generator of another device has come along, as a GPU would refuse it. `install`
changes torch for good, so it belongs into a process of its own.
"""

import collections
import ctypes
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_aten = torch.ops.aten
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_EXTENSION_DEVICE = 12  # DLPack's name for such a device
_MIXING = {"copy_", "_copy_from", "_to_copy", "_copy_from_and_resize"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Ops that take a 0-dim tensor of the CPU for a number, beside those that are tagged pointwise.
_WITH_SCALARS = {
    *("masked_fill", "masked_fill_", "where", "index_fill", "index_fill_", "fill", "fill_"),
    *("_foreach_div", "_foreach_div_", "_foreach_mul", "_foreach_mul_", "_foreach_add"),
    "_foreach_add_",
}


# Ops whose result, or its size, has to be known on the host before it can go on.
_WAITING = {
    *("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
}

# How often the host has waited for the device (`to_host`), and has sent it something (`to_device`).
transfers: collections.Counter[str] = collections.Counter()


class DeviceMismatch(RuntimeError):
    """Tensors or a generator of two devices in one op."""


# ---- memory under two names


def _to_pretend(cpu):
    """A pretend tensor over the memory of a CPU tensor: DLPack says which device it is on."""
    storage = cpu.untyped_storage()
    count = storage.nbytes() // cpu.element_size()
    flat = torch.empty(0, dtype=cpu.dtype).set_(storage, 0, (count,), (1,))
    capsule = torch.utils.dlpack.to_dlpack(flat)
    ctypes.c_int32.from_address(_pointer_of(capsule, b"dltensor") + 8).value = _EXTENSION_DEVICE
    return _aten.as_strided.default.redispatch(
        _CPU_KEY,
        torch._C._from_dlpack(capsule),
        list(cpu.shape),
        list(cpu.stride()),
        cpu.storage_offset(),
    )


def _to_cpu(pretend):
    """A CPU tensor over the memory of a pretend tensor."""
    storage = pretend.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(pretend.shape, pretend.stride(), dtype=pretend.dtype)
    flat = _bytes_of(storage)
    flat._keeps = pretend  # the memory lives as long as its alias
    return torch.empty(0, dtype=pretend.dtype).set_(
        flat.untyped_storage(), pretend.storage_offset(), pretend.shape, pretend.stride()
    )


def _bytes_of(storage):
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _adopt(pretend, cpu):
    """Give a pretend tensor the memory that a kernel has given its alias, as for a resize."""
    fresh = _to_pretend(cpu)
    _aten.set_.source_Storage_storage_offset.redispatch(
        _CPU_KEY,
        pretend,
        fresh.untyped_storage(),
        fresh.storage_offset(),
        list(fresh.shape),
        list(fresh.stride()),
    )


# ---- ops


class _Op:
    """What must be known of an op, from its schema."""

    def __init__(self, op):
        returns, arguments = op._schema.returns, op._schema.arguments
        self.name = op._schema.name.split("::")[1]
        self.is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        self.takes_scalars = torch.Tag.pointwise in op.tags or self.name in _WITH_SCALARS
        self.names = [a.name for a in arguments]
        self.written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        self.tensors = {a.name for a in arguments if str(a.type) == "Tensor"}


_known_ops: dict[Any, _Op] = {}


def _is_pretend(x):
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def _check_devices(op, known, args, kwargs):
    """Refuse what a GPU refuses."""
    foreign = []
    for value in (*args, *kwargs.values()):
        for x in value if isinstance(value, list | tuple) else [value]:
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                foreign.append(x)
            elif isinstance(x, torch._C.Generator) and x._cdata not in _generators:
                raise DeviceMismatch(f"Expected a generator of device {NAME}, but got cpu ({op})")
    if not foreign or known.name in _MIXING:
        return
    if known.name in _INDEXING:  # indices may be on the CPU
        values = args[2] if len(args) > 2 else None
        if _is_pretend(args[0]) and (values is None or _is_pretend(values) or values.dim() == 0):
            return
    elif known.takes_scalars and all(x.dim() == 0 for x in foreign):
        return
    raise DeviceMismatch(f"Expected all tensors to be on one device, but got {NAME} and cpu ({op})")


def _count(known, args, kwargs):
    """Count what a GPU would wait for, and what would be copied to it."""
    if known.name in ("_copy_from", "_to_copy"):
        to = args[1].device if known.name == "_copy_from" else kwargs.get("device")
        is_there = to is not None and torch.device(to).type == NAME
        if _is_pretend(args[0]) and to is not None and not is_there:
            transfers["to_host"] += 1
        elif is_there and not _is_pretend(args[0]):
            transfers["to_device"] += 1
    elif known.name in _WAITING:
        transfers["to_host"] += kwargs.get("output_size") is None
    elif known.name in _INDEXING:
        indices = [x for x in args[1] if isinstance(x, torch.Tensor)]
        transfers["to_host"] += sum(x.dtype == torch.bool for x in indices)
        transfers["to_device"] += sum(x.device.type == "cpu" for x in indices)


def _as_tensor(number, others):
    """A number that stood for a 0-dim tensor."""
    floats = [x.dtype for x in others if isinstance(x, torch.Tensor) and x.is_floating_point()]
    is_float = isinstance(number, float)
    return torch.tensor(number, dtype=floats[0] if is_float and floats else None)


def _run(op, *args, **kwargs):
    """Any op, by the CPU's kernel."""
    if op not in _known_ops:
        _known_ops[op] = _Op(op)
    known = _known_ops[op]
    if known.is_view or known.name == "set_":
        return op.redispatch(_CPU_KEY, *args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        _check_devices(op, known, args, kwargs)
        _count(known, args, kwargs)
        if known.name == "_fused_sdp_choice":
            return 0  # attention op by op
        if known.name == "_copy_from":
            source, target = (_to_cpu(x) if _is_pretend(x) else x for x in args[:2])
            target.copy_(source)
            return args[1]
        if known.name == "resize_":
            cpu = _to_cpu(args[0]).clone()
            cpu.resize_(*args[1:], **kwargs)
            _adopt(args[0], cpu)
            return args[0]
        return _run_on_aliases(op, known, args, kwargs)


def _run_on_aliases(op, known, args, kwargs):
    aliases, written = {}, []

    def down(name, x):
        if _is_pretend(x):
            cpu = _to_cpu(x)
            aliases[id(cpu)] = x, cpu  # kept: an id must not be reused
            if name in known.written:
                written.append((x, cpu, cpu.data_ptr(), cpu.shape))
            return cpu
        if isinstance(x, torch.device):
            return torch.device("cpu") if x.type == NAME else x
        if isinstance(x, list | tuple):
            return [down(name, y) for y in x]
        if isinstance(x, bool | int | float) and name in known.tensors:
            return _as_tensor(x, args)
        return x

    device = kwargs.get("device")
    is_going_home = known.name == "_to_copy" and device and torch.device(device).type == "cpu"
    result = op(
        *[down(name, x) for name, x in zip(known.names, args, strict=False)],
        **{name: down(name, x) for name, x in kwargs.items()},
    )
    for pretend, cpu, pointer, shape in written:
        if cpu.data_ptr() != pointer or cpu.shape != shape:
            _adopt(pretend, cpu)

    def up(x):
        if isinstance(x, torch.Tensor):
            return aliases[id(x)][0] if id(x) in aliases else x if is_going_home else _to_pretend(x)
        return type(x)(map(up, x)) if isinstance(x, list | tuple) else x

    return up(result)


# ---- generators, storages, and what torch and Lightning ask of a device

_generators: dict[int, torch._C.Generator] = {}


class _PretendGenerator(torch._C.Generator):
    """A CPU generator that says it is on the pretend device."""

    def __new__(cls, device=None):
        made = super().__new__(cls, "cpu")
        _generators[made._cdata] = made  # kept for good: an address must not be reused
        return made

    @property
    def device(self):
        return torch.device(NAME, 0)


class _AnyGenerator(type):
    def __instancecheck__(cls, x):
        return isinstance(x, torch._C.Generator)


class _Generator(metaclass=_AnyGenerator):
    """In place of `torch.Generator`."""

    def __new__(cls, device="cpu"):
        is_pretend = torch.device(device).type == NAME
        return _PretendGenerator() if is_pretend else torch._C.Generator(device)


class _Backend:
    """`torch.pretend`."""

    def __getattr__(self, name):
        answers = {"is_available": True, "is_initialized": True, "device_count": 1}
        answers |= {"current_device": 0, "_is_in_bad_fork": False}
        nothing = ("set_device", "manual_seed", "manual_seed_all", "synchronize", "empty_cache")
        if name not in answers and name not in nothing:
            raise AttributeError(name)
        return lambda *_: answers.get(name)

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class PretendAccelerator(Accelerator):
    """Lightning's view of the device."""

    def setup_device(self, device):
        assert device.type == NAME

    def teardown(self):
        pass

    def get_device_stats(self, device):
        return {}

    @staticmethod
    def parse_devices(devices):
        return [0]

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return NAME


def trainer_options():
    """What makes a Trainer use the device."""
    strategy = SingleDeviceStrategy(device=torch.device(NAME, 0), accelerator=None)
    return {"accelerator": PretendAccelerator(), "devices": 1, "strategy": strategy}


_library: list[torch.library.Library] = []


def install():
    """Add the device to torch, once and for good."""
    if _library:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    torch.Generator = _Generator
    _library.append(torch.library.Library("_", "IMPL"))
    _library[0].fallback(_run, "PrivateUse1")
    _library[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    clone_elsewhere = torch.UntypedStorage.clone

    def clone(self):  # there is no allocator of storages, which `copy.deepcopy` would need
        if self.device.type != NAME:
            return clone_elsewhere(self)
        copied = _bytes_of(self).clone() if self.nbytes() else torch.empty(0, dtype=torch.uint8)
        return _to_pretend(copied).untyped_storage()

    torch.UntypedStorage.clone = clone
