"""Settings by the names that they had in earlier versions, and what they are called now.

An old name is never read: it is refused, with the new one in the same line.
"""

import dataclasses

# Of the run's own settings only the place has changed: `model.init_args.steps` is `model.steps`.
RUN_SETTINGS = (
    *("prompt_length", "steps", "token_budget", "eval_every", "prompt_bos", "allowed_tokens"),
    *("forbid_target_tokens", "fluency", "norm_gradient_scale", "seed"),
)

# Names that have changed, below `model`: a method's, wherever it stood.
MODEL = {
    "class_path": "model.method",
    "init": "model.method.first_prompt",
    "start": "model.method.start_from",
    "starts": "model.method.num_starts",
    "refine_after": "model.method Refined, with model.method.first and model.method.after",
    "refine_width": "model.method.width (of Refined: model.method.search.width)",
    "next_token": "model.method.next_token_tau (unset: greedy tokens)",
    "allow_non_ascii": "model.allowed_tokens all",
}

CLASSES = {"EchoSearch": "SwapSearch"}

# Below `data`.
DATA = {
    "quantization": "data.load.quantization",
    "lm_device_map": "data.load.device_map",
    "bos": "data.load.bos",
    "trust_remote_code": "data.load.trust_remote_code",
    "k": "data.targets.k",
    "per_k": "data.targets.per_k",
    "target_length": "data.targets.length",
    "rank_sigma": "data.targets.sigma",
    "eos": "data.targets.eos",
    "exclude_special": "data.targets.exclude_special",
    "target_seed": "data.targets.seed",
    "targets_file": "data.targets File, with data.targets.path",
    "texts": "data.targets Texts, with data.targets.texts",
    "shared": "data.share (with data.share.per_step, evaluated or held_out)",
    "examples_per_step": "data.share.per_step",
    "eval_examples": "data.share.evaluated",
    "held_out_file": "data.share.held_out",
    "questions": "data.targets Questions, with data.targets.source",
    "max_questions": "data.targets.limit",
    "answer": "data.targets.answer",
    "reasoning": "data.targets.reasoning_tokens (unset: none)",
    "reasoning_tokens": "data.targets.reasoning_tokens",
    "trigger": "data.targets.trigger",
}

# Of `targets` and `verify`, which have no sections.
COMMANDS = {
    "target_length": "length",
    "rank_sigma": "sigma",
    "target_seed": "seed",
    "targets_file": "file",
    "quantization": "load.quantization",
    "lm_device_map": "load.device_map",
    "bos": "load.bos",
    "trust_remote_code": "load.trust_remote_code",
}


def method_names() -> list[str]:
    """The methods."""
    from dlmi import methods  # only now: it brings torch

    return methods.__all__


def method_settings() -> set[str]:
    """The names of all settings of methods."""
    from dlmi import methods

    classes = [getattr(methods, name) for name in method_names()]
    return {field.name for method in classes for field in dataclasses.fields(method)}


def new_spelling(old: str) -> str | None:
    """What a setting of `fit` is called now; None where it never existed.

    >>> new_spelling("model.init_args.tau0"), new_spelling("data.k"), new_spelling("data.kk")
    ('model.method.tau0', 'data.targets.k', None)
    """
    section, _, name = old.partition(".")
    if section == "data":
        return DATA.get(name)
    if section != "model":
        return None
    name = name.removeprefix("method.").removeprefix("init_args.")
    if name in MODEL:
        return MODEL[name]
    if name in RUN_SETTINGS:
        return f"model.{name}"
    is_methods = name in method_settings() and not old.startswith("model.method.")
    return f"model.method.{name}" if is_methods else None
