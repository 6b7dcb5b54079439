"""Prompt engineering: questions with answers, and how many an LM gets right after a prompt."""

from dlmi.prompt_engineering.answers import find_answer, normalise
from dlmi.prompt_engineering.baselines import random_prompts, score_each
from dlmi.prompt_engineering.examples import Example, load_examples, read_examples
from dlmi.prompt_engineering.scoring import Accuracy, Answered, Decoding, score_prompt
from dlmi.prompt_engineering.template import QuestionTemplate

__all__ = [
    "Accuracy",
    "Answered",
    "Decoding",
    "Example",
    "QuestionTemplate",
    "find_answer",
    "load_examples",
    "normalise",
    "random_prompts",
    "read_examples",
    "score_each",
    "score_prompt",
]
