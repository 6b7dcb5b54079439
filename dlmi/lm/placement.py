"""How an LM's weights are stored: on which devices, offloaded or not, in how many bits.

A device map spreads the layers of one model over devices; accelerate's hooks move the inputs and
outputs of a layer to its device. Layers that a map leaves on `cpu` (next to a GPU) or on `disk` are
loaded for each pass. Quantised weights are stored in 8 or 4 bits; embeddings, norms and all
computed values stay in the LM's dtype.
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
    """Options of `from_pretrained` that quantise the weights while loading; none if not needed."""
    stored = quantized_bits(config)
    if quantization is None or quantization == stored:
        return {}
    if stored is not None:
        raise InputError(
            "Expected `data.load.quantization` to be unset for a quantised checkpoint, but "
            f"{name!r} comes in {stored} and {quantization} is asked for. Leave it out."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"Expected the package bitsandbytes for `data.load.quantization` {quantization}, but "
            "it is not installed. `pip install bitsandbytes`, or leave the option out."
        )
    # It warns at every product that int8 rounds its input to float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    options = transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_8bit=quantization == "int8",
        load_in_4bit=quantization == "int4",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": options}


def quantized_bits(config: Any) -> str | None:
    """The quantisation that a config declares: `int8`, `int4`, `gptq`, ...; None for none."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    options = stored if isinstance(stored, dict) else stored.to_dict()
    for name, bits in (("load_in_8bit", "int8"), ("load_in_4bit", "int4")):
        if options.get(name):
            return bits
    method = options.get("quant_method", "quantised")
    return str(getattr(method, "value", method))


def split_dtype_name(name: str) -> tuple[DType, Quantization | None]:
    """The settings behind a row's `dtype`; a checkpoint's own quantisation needs none.

    >>> split_dtype_name("float16+int8"), split_dtype_name("bfloat16+gptq")
    (('float16', 'int8'), ('bfloat16', None))
    """
    dtype, _, bits = name.partition("+")
    if dtype not in get_args(DType):
        raise InputError(f"Expected the rows' `dtype` to be that of an LM, but got {name!r}.")
    known = cast(Quantization, bits) if bits in get_args(Quantization) else None
    return cast(DType, dtype), known


def check_placed(model: Any, device: torch.device) -> None:
    """Raise `InputError` unless the embeddings are on `device`; warn about offloaded weights."""
    where: torch.device = model.get_input_embeddings().weight.device
    if where.type != device.type or device.index not in (None, where.index):
        place = "are offloaded" if where.type == "meta" else f"lie on {where}"
        raise InputError(
            "Expected `data.load.device_map` to keep the embeddings where the prompts are made, on "
            f"{device}, but they {place}. Change the map, or `trainer.accelerator` and "
            "`trainer.devices`."
        )
    weights = list(model.parameters())
    if offloaded := sum(weight.numel() for weight in weights if weight.device.type == "meta"):
        share = offloaded / sum(weight.numel() for weight in weights)
        rank_zero_warn(
            f"{share:.0%} of the LM's weights are offloaded: each pass loads them again, and one "
            "with a gradient holds all of them until it is done."
        )


def fingerprint(model: Any) -> str:
    """A short hash over the first values of every weight, offloaded or not."""
    digest = hashlib.sha256()
    # Quantised layers may store their weights as buffers.
    buffers = model.named_buffers() if quantized_bits(model.config) is not None else ()
    for name, weight in (*model.named_parameters(), *buffers):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        device = torch.device("cpu") if weight.device.type == "meta" else None  # load if offloaded
        with align_module_device(module, device):
            head = getattr(module, leaf).detach().flatten()[:256].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + head)
    return digest.hexdigest()[:16]


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")
