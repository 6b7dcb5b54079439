"""What a search found: a prompt, and what the LM really says to it."""

import html
from dataclasses import dataclass, field
from typing import Any

from dlmi.display import visible
from dlmi.evaluation import say
from dlmi.lm import FrozenLM
from dlmi.metrics import lcs_members, lcs_ratio
from dlmi.results import Inversion


@dataclass(frozen=True)
class FoundPrompt:
    """The best prompt for a text, decoded anew from its ids and from its text as one pastes it.

    Attributes:
        text: What the LM was to say.
        prompt_text: The best prompt.
        prompt_ids: The same as token ids.
        output_text: What the LM says to `prompt_ids`, greedily, over the length of the target.
        output_ids: The same as token ids.
        output_tokens: The text of each of them alone.
        lcs: Honest LCS ratio of that output and the text.
        exact: Whether that output is the text, token for token.
        pasted_output_text: What the LM says to `prompt_text` when it is tokenised again.
        pasted_output_ids: The same as token ids.
        pasted_lcs: Honest LCS ratio of that.
        pasted_exact: Whether that is the text, token for token.
        seconds: Wall time from the start of the search until this text was done with.
        interrupted: Whether Ctrl-C cut the search short.
        row: The whole result row, as `fit` writes it.
    """

    text: str
    prompt_text: str
    prompt_ids: tuple[int, ...]
    output_text: str
    output_ids: tuple[int, ...]
    output_tokens: tuple[str, ...]
    lcs: float
    exact: bool
    pasted_output_text: str
    pasted_output_ids: tuple[int, ...]
    pasted_lcs: float
    pasted_exact: bool
    seconds: float
    interrupted: bool
    row: Inversion = field(repr=False)

    @classmethod
    def of_row(
        cls, lm: FrozenLM, row: Inversion, seconds: float, interrupted: bool
    ) -> "FoundPrompt":
        """Decode a row's prompt again, alone, and keep what came of it rather than what it says."""
        length, prompt_bos = len(row.target_ids), bool(row.settings["prompt_bos"])
        output_ids = say(lm, row.full_ids or row.prompt_ids, length, prompt_bos)
        pasted_ids = say(lm, lm.encode(row.full_text or row.prompt_text), length, prompt_bos)
        return cls(
            text=row.target_text,
            prompt_text=row.prompt_text,
            prompt_ids=row.prompt_ids,
            output_text=lm.decode(output_ids),
            output_ids=output_ids,
            output_tokens=tuple(lm.decode([token_id]) for token_id in output_ids),
            lcs=lcs_ratio(row.target_ids, output_ids),
            exact=output_ids == row.target_ids,
            pasted_output_text=lm.decode(pasted_ids),
            pasted_output_ids=pasted_ids,
            pasted_lcs=lcs_ratio(row.target_ids, pasted_ids),
            pasted_exact=pasted_ids == row.target_ids,
            seconds=seconds,
            interrupted=interrupted,
            row=row,
        )

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    def to_json(self) -> dict[str, Any]:
        """Plain values for other programs; the row's trace and settings stay out."""
        names = (
            *("text", "prompt_text", "prompt_ids", "prompt_length", "output_text", "output_ids"),
            *("lcs", "exact", "pasted_output_text", "pasted_output_ids"),
            *("pasted_lcs", "pasted_exact", "seconds", "interrupted"),
        )
        row_names: tuple[str, ...]
        row_names = ("target_ids", "method", "steps", "seed", "model", "dtype", "device")
        if self.row.frame is not None:
            row_names = ("full_text", "full_ids", *row_names)
        return {
            **{name: getattr(self, name) for name in names},
            **{name: getattr(self.row, name) for name in row_names},
        }

    def _repr_html_(self) -> str:
        """A small table for notebooks; tokens outside the LCS are struck out in red."""
        members = lcs_members(self.row.target_ids, self.output_ids)
        output = "".join(
            _shown(token) if is_member else f'<del style="color:#b00020">{_shown(token)}</del>'
            for token, is_member in zip(self.output_tokens, members, strict=True)
        )
        is_same = self.pasted_output_ids == self.output_ids
        pasted = "the same" if is_same else _code(_shown(self.pasted_output_text))
        lines = {
            "text": _code(_shown(self.text)),
            "prompt": _code(_shown(self.prompt_text)),
            "the LM says": _code(output),
            "pasted as text": pasted,
            "LCS": f"{self.lcs:.2f}{', exact' if self.exact else ''}",
            "found by": f"{_shown(self.row.method)}, N={self.prompt_length}, {self.seconds:.1f} s",
        }
        cells = (
            f'<tr><th style="text-align:left">{name}</th>'
            f'<td style="text-align:left">{value}</td></tr>'
            for name, value in lines.items()
        )
        return f"<table>{''.join(cells)}</table>"


def _shown(text: str) -> str:
    return html.escape(visible(text))


def _code(escaped: str) -> str:
    return f'<code style="white-space:pre-wrap">{escaped}</code>'
