"""How an LM's weights are kept: on which devices, offloaded or not, in how many bits.

A device map spreads the layers of one model over devices; accelerate's hooks then move what goes
in and out of a layer to where the layer lies. Layers that a map leaves to `cpu` (beside a GPU) or
to `disk` are brought in for each pass. Quantised weights are kept in 8 or 4 bits; embeddings,
norms and all that is computed stay in the LM's dtype.
"""

import hashlib
import importlib.util
import logging
from typing import Any, Literal, cast, get_args

import torch
import transformers
from accelerate.utils import align_module_device
from lightning.pytorch.utilities import rank_zero_warn

from dlmi.errors import InputError

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | str]
Quantization = Literal["int8", "int4"]


def quantization_options(
    name: str, config: Any, quantization: Quantization | None, dtype: torch.dtype
) -> dict[str, Any]:
    """What `from_pretrained` needs to quantise while loading; nothing where there is nothing to do.

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
    options = transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_8bit=quantization == "int8",
        load_in_4bit=quantization == "int4",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": options}


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
    """Raise `InputError` unless the embeddings lie where Z lives; tell what is offloaded."""
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
    weights = list(model.parameters())
    if offloaded := sum(weight.numel() for weight in weights if weight.device.type == "meta"):
        share = offloaded / sum(weight.numel() for weight in weights)
        rank_zero_warn(
            f"{share:.0%} of the LM's weights are offloaded: each pass reads them anew, and one "
            "with a gradient holds them all until it is done."
        )


def fingerprint(model: Any) -> str:
    """A short hash over the head of every weight, wherever it lies."""
    digest = hashlib.sha256()
    # Quantised layers may keep theirs as buffers.
    buffers = model.named_buffers() if kept_bits(model.config) is not None else ()
    for name, weight in (*model.named_parameters(), *buffers):
        path, _, leaf = name.rpartition(".")
        module, device = model.get_submodule(path), None
        if weight.device.type == "meta":
            device = torch.device("cpu")  # offloaded: brought in for the moment
        with align_module_device(module, device):
            head = getattr(module, leaf).detach().flatten()[:256].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + head)
    return digest.hexdigest()[:16]


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return accelerator or torch.device("cpu")
