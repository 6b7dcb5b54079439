"""How an LM's weights are kept: on which devices, offloaded or not, in how many bits.

A device map spreads the layers of one model over devices; accelerate's hooks then move what goes
in and out of a layer to where the layer lies. Layers that a map leaves to `cpu` (beside a GPU) or
to `disk` are brought in for each pass. Quantised weights are kept in 8 or 4 bits; embeddings,
norms and all that is computed stay in the LM's dtype.
"""

import hashlib
import importlib.util
import itertools
import logging
from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

import torch
import transformers
from accelerate.utils import align_module_device
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from dlmi.errors import InputError

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | str]
Quantization = Literal["int8", "int4"]


def quantization_options(
    name: str, config: Any, quantization: Quantization | None, dtype: torch.dtype
) -> dict[str, Any]:
    """What `from_pretrained` needs to quantise while loading; nothing where there is nothing to do.

    Args:
        name: Of the model, for messages.
        config: The model's config.
        quantization: What is asked for.
        dtype: What is computed in.

    Raises:
        InputError: If the checkpoint is quantised otherwise, or the package is missing.
    """
    stored = kept_bits(config)
    if quantization is None or quantization == stored:
        return {}
    if stored is not None:
        raise InputError(
            "Expected `data.load.quantization` to be unset for a quantised checkpoint, but "
            f"{name!r} comes in {stored} and {quantization} is asked for. Leave it out."
        )
    if dtype == torch.float64:
        raise InputError(
            "Expected `data.dtype` to be float32, bfloat16 or float16 with "
            f"`data.load.quantization` {quantization}, but got float64."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"Expected the package bitsandbytes for `data.load.quantization` {quantization}, but "
            "it is not installed. `pip install bitsandbytes`, or leave the option out."
        )
    # It says at every product that int8 rounds its input to float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    bits: dict[str, Any] = {"load_in_8bit": True}
    if quantization == "int4":
        bits = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": dtype,
        }
    return {"quantization_config": transformers.BitsAndBytesConfig(**bits)}  # type: ignore[no-untyped-call]


def kept_bits(config: Any) -> str | None:
    """How a config says that weights are quantised: `int8`, `int4`, `gptq`, ...; None if not."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    options = stored if isinstance(stored, dict) else stored.to_dict()
    if options.get("load_in_8bit"):
        return "int8"
    if options.get("load_in_4bit"):
        return "int4"
    method = options.get("quant_method", "quantised")
    return str(getattr(method, "value", method))


def dtype_name(dtype: torch.dtype, config: Any) -> str:
    """What rows say: the dtype that the LM computes in, and how its weights are kept if otherwise.

    >>> dtype_name(torch.float16, transformers.LlamaConfig(quantization_config={"load_in_8bit": 1}))
    'float16+int8'
    """
    bits = kept_bits(config)
    return str(dtype).removeprefix("torch.") + (f"+{bits}" if bits else "")


def split_dtype_name(name: str) -> tuple[DType, Quantization | None]:
    """The settings behind a row's `dtype`; a checkpoint's own quantisation needs none.

    >>> split_dtype_name("float16+int8"), split_dtype_name("bfloat16+gptq")
    (('float16', 'int8'), ('bfloat16', None))
    """
    dtype, _, bits = name.partition("+")
    if dtype not in get_args(DType):
        raise InputError(f"Expected the rows' `dtype` to be one of an LM, but got {name!r}.")
    known = cast(Quantization, bits) if bits in get_args(Quantization) else None
    return cast(DType, dtype), known


def check_device_map(device_map: DeviceMap) -> None:
    """Raise `InputError` where a mapping names a device that is not there."""
    for device in device_map.values() if isinstance(device_map, dict) else ():
        if device == "disk":
            continue
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                "Expected `data.load.device_map` to name devices of this machine, `cpu` or `disk`, "
                f"but got {device!r}."
            ) from error


def check_placed(model: Any, device: torch.device) -> None:
    """Raise `InputError` unless the embeddings lie where prompts are made; tell what is offloaded.

    Args:
        model: As it was loaded.
        device: Where Z lives.
    """
    where: torch.device = model.get_input_embeddings().weight.device
    if where.type == "meta":
        raise InputError(
            "Expected `data.load.device_map` to keep the embeddings on a device, but they are "
            "offloaded. Every prompt is made from them: map them to a device."
        )
    if where.type != device.type or device.index not in (None, where.index):
        raise InputError(
            f"Expected `data.load.device_map` to put the embeddings where the prompts are made, on "
            f"{device}, but they lie on {where}. Set `trainer.accelerator` and `trainer.devices`, "
            "or the map, accordingly."
        )
    sizes = {True: 0, False: 0}
    for weight in model.parameters():
        sizes[weight.device.type == "meta"] += weight.numel()
    if sizes[True]:
        rank_zero_warn(
            f"{sizes[True] / sum(sizes.values()):.0%} of the LM's weights are offloaded: each pass "
            "reads them anew, and one with a gradient holds them all until it is done."
        )


def fingerprint(model: Any) -> str:
    """A short hash over the head of every weight, wherever it lies."""
    digest = hashlib.sha256()
    for name, weight in _weights(model):
        head = weight.detach().flatten()[:256].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + head)
    return digest.hexdigest()[:16]


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, once; what is offloaded is brought in for the moment."""
    # Quantised layers may keep theirs as buffers.
    keeps_buffers = kept_bits(model.config) is not None
    for name, weight in itertools.chain(
        model.named_parameters(), model.named_buffers() if keeps_buffers else ()
    ):
        path, _, leaf = name.rpartition(".")
        if weight.device.type == "meta":
            module = model.get_submodule(path)
            with align_module_device(module, torch.device("cpu")):
                yield name, getattr(module, leaf)
        else:
            yield name, weight


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return accelerator or torch.device("cpu")
