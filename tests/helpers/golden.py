"""Recorded cases of the code before its rebuild, run through the present API.

`tests/golden/rows.jsonl` has a line per target of every case: the arguments that the old classes
were given, and the row that came of it. Commit b7e9a4c made them, in float64 on a tiny GPT-2.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

import dlmi.methods
from dlmi import Inverter, TargetDataModule
from dlmi.methods import Refined, SwapSearch
from dlmi.run.data import LoadOptions
from dlmi.targets.sources import ByRank, File, Questions, Sharing, Texts

GOLDEN = Path(__file__).parents[1] / "golden"

_RUN = ("prompt_length", "steps", "token_budget", "eval_every", "prompt_bos", "fluency", "seed")
_RUN += ("allowed_tokens", "forbid_target_tokens")
_RENAMED = {"init": "first_prompt", "start": "start_from", "starts": "num_starts"}
_RENAMED |= {"refine_width": "width"}

_WORDS = [f"w{i}" for i in range(28)]
_CHAT = (
    "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w3{% endif %}"
)
# Tokens that merge with their neighbours, so that not every prompt survives as text; two of them
# are halves of an é.
_MERGES = ["a b", "c d", "Ġ a", "Ġ A", "Ã ©", "ab cd", "Ġ ab", "b c"]
_PIECES = ["<eos>", "<bos>", *"abcdAĠĊÃ©", *(merge.replace(" ", "") for merge in _MERGES)]


def make_inverter(method: str, settings: dict[str, Any]) -> Inverter:
    """The inverter of a case, from the arguments of the old class."""
    options = dict(settings)
    run = {name: options.pop(name) for name in _RUN if name in options}
    scale = options.pop("norm_gradient_scale", None)
    if options.pop("next_token", "greedy") == "gumbel_softmax":
        options.setdefault("next_token_tau", 1.0)
    if method == "EchoSearch":
        method, run = "SwapSearch", {"steps": 500, **run}
        options["norm_gradient_scale"] = 0.85 if scale is None else scale
        scale = None
    else:
        run["norm_gradient_scale"] = scale
    after = options.pop("refine_after", 1.0)
    width = options.pop("refine_width", 16) if after < 1 else 16
    named = {_RENAMED.get(name, name): value for name, value in options.items()}
    made = getattr(dlmi.methods, method)(**named)
    if after < 1:
        made = Refined(made, SwapSearch(width=width, norm_gradient_scale=scale or 1.0), after)
    return Inverter(made, **run)


def make_data(data: dict[str, Any], lm: Path) -> TargetDataModule:
    """The data module of a case, from the arguments of the old one."""
    options = {
        name: value.replace("<data>", str(GOLDEN / "data")) if isinstance(value, str) else value
        for name, value in data.items()
    }
    kept = ("dtype", "batch_size", "rows_per_pass", "compile", "template", "chat")
    arguments = {name: options[name] for name in kept if name in options}
    if "bos" in options:
        arguments["load"] = LoadOptions(bos=options["bos"])
    if "questions" in options:
        reasons = options.get("reasoning") == "own"
        arguments["targets"] = Questions(
            options["questions"],
            options.get("max_questions"),
            options.get("answer"),
            options.get("reasoning_tokens", 96) if reasons else None,
            **({"trigger": options["trigger"]} if "trigger" in options else {}),
        )
    elif "targets_file" in options:
        arguments["targets"] = File(options["targets_file"])
    elif "texts" in options:
        arguments["targets"] = Texts(options["texts"])
    else:
        names = {"k": "k", "per_k": "per_k", "target_length": "length", "target_seed": "seed"}
        ranks = {new: options[old] for old, new in names.items() if old in options}
        arguments["targets"] = ByRank(**{**ranks, "k": tuple(ranks["k"])})
    if options.get("shared"):
        names = {"examples_per_step": "per_step", "eval_examples": "evaluated"}
        names |= {"held_out_file": "held_out"}
        share = {new: options[old] for old, new in names.items() if old in options}
        arguments["share"] = Sharing(**share)
    return TargetDataModule(lm=str(lm), **arguments)


def run_case(method: str, settings: dict[str, Any], data: TargetDataModule, folder: Path) -> list:
    """The rows of a case, by the ids of their targets."""
    inverter = make_inverter(method, settings)
    trainer = Trainer(
        max_epochs=-1,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(inverter, datamodule=data)
    return sorted(inverter.finished, key=lambda row: row.target_id)


def make_lm(kind: str, folder: Path) -> Path:
    """The folder of a tiny GPT-2: `gpt2`, `gpt2_chat` or `gpt2_bpe`; all have the same weights."""
    path = folder / kind
    if path.exists():
        return path
    common = {"vocab_size": 32, "bos_token_id": 2, "eos_token_id": 1, "initializer_range": 0.6}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**common, n_embd=16, n_layer=2, n_head=2, n_positions=64))
    model.save_pretrained(path)
    tokenizer = _bpe_tokenizer() if kind == "gpt2_bpe" else _word_tokenizer(kind == "gpt2_chat")
    tokenizer.save_pretrained(path)
    return path


def _word_tokenizer(chat: bool) -> FastTokenizer:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<eos>", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = FastTokenizer(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    if chat:
        fast.chat_template = _CHAT
    return fast


def _bpe_tokenizer() -> FastTokenizer:
    merges = [(merge.split()[0], merge.split()[1]) for merge in _MERGES]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(_PIECES)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return FastTokenizer(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
