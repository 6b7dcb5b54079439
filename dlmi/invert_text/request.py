"""What someone asks for: texts, prompt length, method, budget; checked before an LM is loaded."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlmi import methods
from dlmi.errors import InputError
from dlmi.invert_text.search import Progress, TextSearch
from dlmi.inverter import Inverter
from dlmi.lm import FrozenLM
from dlmi.templates import find_template
from dlmi.token_sets import AllowedTokens, check_allowed_tokens
from dlmi.vocabulary import ForbiddenTokens

AUTO_LENGTHS = (4, 8, 16, 32)
_DEFAULT_SECONDS = 120.0

# Where a method's defaults, which are the published ones, are too slow for minutes: cheap steps,
# and a decode after a few of them. GCG that keeps its prompt unless a candidate is better gets
# stuck when it sees few of them, so it takes the best even if that is worse.
_FOR_SMALL_BUDGETS: Mapping[str, Mapping[str, Any]] = {
    "EchoSearch": {},
    "GCG": {"search_width": 64, "topk": 64, "buffer_size": 0, "eval_every": 4},
    "ADC": {
        "restarts": 1,
        "momentum": 0.97,
        "ema_rate": 0.05,
        "norm_gradient_scale": 0.85,
        "eval_every": 8,
    },
    "DLMI": {"tau0": 1.0, "num_samples": 1, "lr": 0.3, "eval_every": 4},
    "GBDA": {"num_samples": 1, "lr": 0.3, "eval_every": 4},
}


@dataclass(frozen=True)
class SearchRequest:
    """A search that is wanted.

    Attributes:
        texts: What the LM is to say.
        prompt_length: Tokens of a prompt, or `auto`: 4, then 8, 16 and 32 as long as nothing is
            exact, each with a quarter of the budget.
        method: Name of a class in `dlmi.methods`.
        seconds: Budget of time, for all texts together; 120 where there are no steps either.
        steps: Budget of steps, for each start of each text.
        restarts: Starts of each text, side by side.
        seed: Fixes the noise.
        allowed_tokens: What a prompt may hold.
        forbid_target_tokens: What it may not hold.
        options: Further arguments of the method.
        template: Text around the prompt, with `{slot}` where its tokens go.
        chat: Make it the user's message of a chat, as the tokenizer's own chat template has it.

    Raises:
        InputError: If something of this cannot be.
    """

    texts: Sequence[str]
    prompt_length: int | Literal["auto"] = "auto"
    method: str = "EchoSearch"
    seconds: float | None = None
    steps: int | None = None
    restarts: int = 1
    seed: int = 0
    allowed_tokens: AllowedTokens = "round_trip"
    forbid_target_tokens: ForbiddenTokens = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        """Refuse what no LM could make possible."""
        if not self.texts or not all(isinstance(text, str) for text in self.texts):
            raise InputError("Expected `text` to be a text, or a list of at least one text.")
        for name in ("prompt_length", "steps", "restarts"):
            value = getattr(self, name)
            if value not in (None, "auto") and (not isinstance(value, int) or value < 1):
                raise InputError(f"Expected `{name}` to be at least 1, but got {value!r}.")
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"Expected `seconds` to be positive, but got {self.seconds}.")
        if self.method not in methods.__all__:
            names = ", ".join(methods.__all__)
            raise InputError(f"Expected `method` to be one of {names}, but got {self.method!r}.")
        known = inspect.signature(self.method_class).parameters
        own = set(known) - {"prompt_length", "steps", *self._common_settings()}
        for name in self.options:
            if name not in own:
                raise InputError(
                    f"Expected `options` to be options of {self.method} ({', '.join(sorted(own))}),"
                    f" but got {name!r}."
                )
        check_allowed_tokens(self.allowed_tokens)
        template = find_template(self.template, self.chat)
        if template is not None and template.fields:
            raise InputError(
                "Expected `template` to hold `{slot}` and fixed text, but "
                f"{{{template.fields[0]}}} is a field. `fit` fills fields, from a targets file."
            )

    @property
    def method_class(self) -> type[Inverter]:
        """The class that is named."""
        found: type[Inverter] = getattr(methods, self.method)
        return found

    def search(
        self, lm: FrozenLM, on_progress: Callable[[Progress], None] | None = None
    ) -> TextSearch:
        """The search on an LM, ready to run."""
        settings = {**self._small_settings(lm), **self._common_settings(), **self.options}

        def make_inverter(length: int, steps: int) -> Inverter:
            return self.method_class(prompt_length=length, steps=steps, **settings)

        has_budget = self.seconds is not None or self.steps is not None
        return TextSearch(
            lm,
            self.texts,
            make_inverter,
            self._lengths(lm),
            self.seconds if has_budget else _DEFAULT_SECONDS,
            self.steps,
            self.restarts,
            on_progress,
            find_template(self.template, self.chat),
        )

    def _common_settings(self) -> dict[str, Any]:
        names = ("seed", "allowed_tokens", "forbid_target_tokens")
        return {name: getattr(self, name) for name in names}

    def _small_settings(self, lm: FrozenLM) -> dict[str, Any]:
        settings = dict(_FOR_SMALL_BUDGETS.get(self.method, {"eval_every": 4}))
        if "topk" in settings:  # a small vocabulary has fewer
            settings["topk"] = min(settings["topk"], max(1, len(lm.prompt_token_ids) // 2))
        return settings

    def _lengths(self, lm: FrozenLM) -> Sequence[int]:
        """`auto` takes those that fit into the LM's positions; the shortest in any case."""
        if self.prompt_length != "auto":
            return [self.prompt_length]
        longest = max(len(lm.encode(text)) for text in self.texts)
        limit = lm.max_positions
        fitting = [n for n in AUTO_LENGTHS if limit is None or n + longest < limit]
        return fitting or AUTO_LENGTHS[:1]
