"""`invert`: from a text to its prompt in one call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from dlmi import methods
from dlmi.errors import InputError
from dlmi.invert_text.found import FoundPrompt
from dlmi.invert_text.search import Progress, TextSearch
from dlmi.inverter import Inverter
from dlmi.lm import FrozenLM
from dlmi.models import load_lm
from dlmi.placement import DType
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens

AUTO_LENGTHS = (4, 8, 16, 32)
DEFAULT_SECONDS = 120.0  # where neither seconds nor steps are given

# What differs from the defaults of a method, which are the published ones, for budgets of minutes:
# cheap steps, and a decode after each of them or after a few.
_FOR_SMALL_BUDGETS: Mapping[str, Mapping[str, Any]] = {
    "GCG": {"search_width": 64, "topk": 64, "eval_every": 1},
    "ADC": {"restarts": 4, "eval_every": 4},
    "DLMI": {"tau0": 1.0, "num_samples": 1, "lr": 0.3, "eval_every": 4},
    "GBDA": {"num_samples": 1, "lr": 0.3, "eval_every": 4},
}


@overload
def invert(lm: Any, text: str, **options: Any) -> FoundPrompt: ...


@overload
def invert(lm: Any, text: Sequence[str], **options: Any) -> list[FoundPrompt]: ...


def invert(
    lm: FrozenLM | str | tuple[Any, Any],
    text: str | Sequence[str],
    *,
    prompt_length: int | Literal["auto"] = "auto",
    method: str = "GCG",
    seconds: float | None = None,
    steps: int | None = None,
    restarts: int = 1,
    seed: int = 0,
    allowed_tokens: AllowedTokens = "round_trip",
    forbid_target_tokens: ForbiddenTokens = "none",
    dtype: DType = "auto",
    on_progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> FoundPrompt | list[FoundPrompt]:
    """Find the prompt after which a language model greedily says a text.

    Nothing is written and nothing is printed. Ctrl-C ends the search and gives the best so far.

    Args:
        lm: A FrozenLM, a name for `load_lm`, or a pair of a causal LM of transformers and its
            tokenizer; the LM is frozen (`eval`, no gradients for its weights) and stays so.
        text: What it is to say, or several texts, which are inverted side by side.
        prompt_length: Tokens of the prompt, or `auto`: 4, then 8, 16 and 32 as long as nothing is
            exact, each with a quarter of the budget.
        method: Name of a class in `dlmi.methods`.
        seconds: Budget of time, for all texts together. Default: 120, unless `steps` is given.
        steps: Budget of steps, for each start of each text.
        restarts: Starts of each text, side by side; the first that is exact ends the others.
        seed: Fixes the noise.
        allowed_tokens: What a prompt may hold. The default keeps prompts that survive being pasted.
        forbid_target_tokens: What it may not hold: `none`, the target's `ids`, or its `words`.
        dtype: Of an LM that is given by its name.
        on_progress: Called after each step and each evaluation, for each text that is not solved.
        options: Further arguments of the method, such as `search_width`.

    Raises:
        InputError: If something of this cannot be.
    """
    frozen_lm = as_frozen_lm(lm, dtype)
    texts = [text] if isinstance(text, str) else list(text)
    options |= {
        "allowed_tokens": allowed_tokens,
        "forbid_target_tokens": forbid_target_tokens,
        "seed": seed,
    }
    search = make_search(
        frozen_lm, texts, prompt_length, method, seconds, steps, restarts, options, on_progress
    )
    found = search.run()
    return found[0] if isinstance(text, str) else found


def as_frozen_lm(lm: Any, dtype: DType = "auto") -> FrozenLM:
    """Whatever stands for an LM as the LM itself."""
    if isinstance(lm, FrozenLM):
        return lm
    if isinstance(lm, str):
        return load_lm(lm, dtype)
    if isinstance(lm, tuple) and len(lm) == 2:
        model, tokenizer = lm
        return FrozenLM(model, tokenizer, name=getattr(model, "name_or_path", "") or "unnamed")
    raise InputError(
        "Expected `lm` to be a FrozenLM, a name, or a pair (model, tokenizer), but got "
        f"{type(lm).__name__}."
    )


def make_search(
    lm: FrozenLM,
    texts: Sequence[str],
    prompt_length: int | Literal["auto"],
    method: str,
    seconds: float | None,
    steps: int | None,
    restarts: int,
    options: Mapping[str, Any],
    on_progress: Callable[[Progress], None] | None,
) -> TextSearch:
    """The search that `invert` runs; its arguments are those of `invert`, checked here."""
    _check(texts, prompt_length, seconds, steps, restarts)
    method_class = _method_class(method)
    settings = {**_small_settings(method, lm), **options}
    known = inspect.signature(method_class.__init__).parameters
    if unknown := [name for name in settings if name not in known]:
        raise InputError(f"Expected options of {method}, but it has no `{unknown[0]}`.")

    def make_inverter(length: int, step_limit: int) -> Inverter:
        return method_class(prompt_length=length, steps=step_limit, **settings)

    if seconds is None and steps is None:
        seconds = DEFAULT_SECONDS
    lengths = [prompt_length] if prompt_length != "auto" else _auto_lengths(lm, texts)
    return TextSearch(lm, texts, make_inverter, lengths, seconds, steps, restarts, on_progress)


def _method_class(name: str) -> type[Inverter]:
    if name not in methods.__all__:
        names = ", ".join(methods.__all__)
        raise InputError(f"Expected `method` to be one of {names}, but got {name!r}.")
    found: type[Inverter] = getattr(methods, name)
    return found


def _small_settings(method: str, lm: FrozenLM) -> dict[str, Any]:
    settings = dict(_FOR_SMALL_BUDGETS.get(method, {"eval_every": 4}))
    if "topk" in settings:  # a small vocabulary has fewer
        settings["topk"] = min(settings["topk"], max(1, len(lm.prompt_token_ids) // 2))
    return settings


def _auto_lengths(lm: FrozenLM, texts: Sequence[str]) -> list[int]:
    """Those that fit into the LM's positions; the shortest is tried, or refused, in any case."""
    longest = max(len(lm.encode(text)) for text in texts)
    limit = lm.max_positions
    fitting = [n for n in AUTO_LENGTHS if limit is None or n + longest + 1 <= limit]
    return fitting or [AUTO_LENGTHS[0]]


def _check(
    texts: Sequence[str],
    prompt_length: int | Literal["auto"],
    seconds: float | None,
    steps: int | None,
    restarts: int,
) -> None:
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError("Expected `text` to be a text or a list of at least one text.")
    numbers = {"prompt_length": prompt_length, "steps": steps, "restarts": restarts}
    for name, value in numbers.items():
        if value not in (None, "auto") and (not isinstance(value, int) or value < 1):
            raise InputError(f"Expected `{name}` to be at least 1, but got {value!r}.")
    if seconds is not None and not seconds > 0:
        raise InputError(f"Expected `seconds` to be positive, but got {seconds}.")
