"""`invert`: from a text to its prompt in one call."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from dlmi.errors import InputError
from dlmi.invert_text.found import FoundPrompt
from dlmi.invert_text.request import SearchRequest
from dlmi.invert_text.search import Progress
from dlmi.lm import FrozenLM
from dlmi.models import load_lm
from dlmi.placement import DType
from dlmi.token_sets import AllowedTokens
from dlmi.vocabulary import ForbiddenTokens


@overload
def invert(lm: Any, text: str, **options: Any) -> FoundPrompt: ...


@overload
def invert(lm: Any, text: Sequence[str], **options: Any) -> list[FoundPrompt]: ...


def invert(
    lm: FrozenLM | str | tuple[Any, Any],
    text: str | Sequence[str],
    *,
    prompt_length: int | Literal["auto"] = "auto",
    method: str = "EchoSearch",
    seconds: float | None = None,
    steps: int | None = None,
    restarts: int = 1,
    seed: int = 0,
    allowed_tokens: AllowedTokens = "round_trip",
    forbid_target_tokens: ForbiddenTokens = "none",
    template: str | None = None,
    chat: bool = False,
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
        template: Text around the prompt, with `{slot}` where its tokens go.
        chat: Make it the user's message of a chat, as the tokenizer's own chat template has it.
        dtype: Of an LM that is given by its name.
        on_progress: Called after each step and each evaluation, for each text that is not solved.
        options: Further arguments of the method, such as `search_width`.

    Raises:
        InputError: If something of this cannot be.
    """
    request = SearchRequest(
        [text] if isinstance(text, str) else list(text),
        prompt_length,
        method,
        seconds,
        steps,
        restarts,
        seed,
        allowed_tokens,
        forbid_target_tokens,
        options,
        template,
        chat,
    )
    found = request.search(as_frozen_lm(lm, dtype), on_progress).run()
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
