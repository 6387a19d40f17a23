"""The model card of a trained model: a README.md with metadata that the Hugging Face Hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from trigon import __version__
from trigon.config.options import format_value
from trigon.tools.push.facts import RunFacts, Validation

CURVES = "curves.png"
"""Name of the figure in the folder."""

# The options of the first table: (label, option).
_MAIN: Sequence[tuple[str, str]] = (
    ("algorithm", "algorithm.adv_estimator"),
    ("prompts per step", "data.rollout_batch_size"),
    ("completions per prompt", "worker.rollout.n"),
    ("prompts per update", "worker.actor.global_batch_size"),
    ("learning rate", "worker.actor.optim.lr"),
    ("sampling temperature", "worker.rollout.temperature"),
    ("maximum length of prompts, completions (tokens)", "data.max_prompt_length"),
    ("seed", "data.seed"),
)
_LORA_RANK = "worker.actor.model.lora.rank"


def model_card(facts: RunFacts, repo_id: str, *, license_id: str | None, has_curves: bool) -> str:
    """Return the text of README.md.

    Args:
        repo_id: where it will be pushed, NAMESPACE/NAME.
        license_id: as the hub names licences, such as apache-2.0; None: the card has none.
        has_curves: whether the folder has CURVES.
    """
    name = repo_id.rpartition("/")[2]
    sections = [
        f"# {name}",
        _introduction(facts),
        _evaluation(facts.validations),
        _training(facts),
        f"## Learning curves\n\n![Learning curves]({CURVES})" if has_curves else "",
        _usage(facts, repo_id),
        _options(facts),
        f"Trained and exported with Trigon {facts.exported.get('trigon_version', __version__)}.",
    ]
    body = "\n\n".join(section for section in sections if section)
    return f"---\n{metadata(facts, name, license_id)}---\n\n{body}\n"


def metadata(facts: RunFacts, name: str, license_id: str | None) -> str:
    """Return the metadata as YAML, with the accuracies of validations on data of the hub."""
    task = "image-text-to-text" if facts.has_vision else "text-generation"
    sources = facts.val_names
    results = [
        EvalResult(
            task_type=task,
            dataset_type=_dataset_type(validation, sources),
            dataset_name=validation.dataset or ", ".join(sources),
            metric_type="accuracy",
            metric_name=f"accuracy after step {validation.step}",
            metric_value=round(validation.after, 6),
        )
        for validation in facts.validations
        if validation.metric == "accuracy" and sources
    ]
    estimator = str(facts.value("algorithm.adv_estimator"))
    data = ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        license=license_id,
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag=task,
        tags=["trigon", "reinforcement-learning", estimator.replace("_", "-"), *(["lora"] if _rank(facts) else [])],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return f"{data.to_yaml()}\n"


def _dataset_type(validation: Validation, sources: Sequence[str]) -> str:
    """Return an identifier of the dataset; of a local file lower-case letters and hyphens."""
    source = validation.dataset or sources[0]
    return source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else re.sub(r"[^a-z0-9]+", "-", source.lower())


def _rank(facts: RunFacts) -> int:
    return int(facts.value(_LORA_RANK))


def _introduction(facts: RunFacts) -> str:
    base = (
        f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
        if facts.base_model
        else f"the local model `{facts.base_name}`"
    )
    datasets = [
        f"[{each}](https://huggingface.co/datasets/{each})" if each in facts.datasets else f"`{each}`"
        for each in facts.dataset_names
    ]
    kind = "A LoRA adapter for" if facts.is_adapter else "A model trained from"
    return (
        f"{kind} {base}, by reinforcement learning with Trigon: "
        f"{facts.step:,} steps of {facts.value('algorithm.adv_estimator')} on {', '.join(datasets)}, with the reward "
        f"function `{facts.reward}`."
    )


def _evaluation(validations: Sequence[Validation]) -> str:
    if not validations:
        return ""
    several = any(each.dataset for each in validations)
    header = ["data", "metric"] if several else ["metric"]
    step = validations[0].step
    rows = [[*header, "before training", f"after step {step:,}", "prompts"], ["---"] * (len(header) + 3)]
    for each in validations:
        numbers = ["" if number is None else f"{number:.3f}" for number in (each.before, each.after)]
        prompts = "unknown" if each.num_prompts is None else f"{each.num_prompts:,}"
        rows.append([*([each.dataset or "all"] if several else []), each.metric, *numbers, prompts])
    return "## Evaluation\n\n" + _table(rows)


def _training(facts: RunFacts) -> str:
    rows = [
        ["", ""],
        ["---", "---"],
        ["base model", facts.base_name],
        ["training data", ", ".join(facts.dataset_names)],
    ]
    rows += [["reward function", f"`{facts.reward}`"], ["steps", f"{facts.step:,}"]]
    for label, name in _MAIN:
        value = format_value(facts.value(name))
        if name == "data.max_prompt_length":
            value = f"{value}, {format_value(facts.value('data.max_response_length'))}"
        rows.append([label, value])
    rows.append(["KL term", _kl(facts)])
    rows.append(["trained weights", f"LoRA of rank {_rank(facts)}" if _rank(facts) else "all that are not frozen"])
    rows.append(["published weights", f"{'adapter' if facts.is_adapter else 'model'} in {facts.exported['dtype']}"])
    return "## Training\n\n" + _table(rows)


def _kl(facts: RunFacts) -> str:
    if facts.value("algorithm.disable_kl"):
        return "none"
    place = "loss" if facts.value("algorithm.use_kl_loss") else "reward"
    return f"in the {place}, coefficient {format_value(facts.value('algorithm.kl_coef'))}"


def _usage(facts: RunFacts, repo_id: str) -> str:
    kind = "AutoModelForImageTextToText" if facts.has_vision else "AutoModelForCausalLM"
    processor = "AutoProcessor" if facts.has_vision else "AutoTokenizer"
    base = facts.base_model or facts.base_name
    if facts.is_adapter:
        code = (
            f"from peft import PeftModel\nfrom transformers import {kind}, {processor}\n\n"
            f'model = {kind}.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(model, "{repo_id}")\n'
            f'processor = {processor}.from_pretrained("{base}")'
        )
        return f"## Use\n\n```python\n{code}\n```"
    code = (
        f"from transformers import {kind}, {processor}\n\n"
        f'model = {kind}.from_pretrained("{repo_id}")\nprocessor = {processor}.from_pretrained("{repo_id}")'
    )
    return f"## Use\n\n```python\n{code}\n```\n\nOr serve it: `vllm serve {repo_id}`."


def _options(facts: RunFacts) -> str:
    text = yaml.safe_dump(_nested(facts.changed), sort_keys=False, allow_unicode=True, width=100)
    return (
        "## Options\n\nAll options that are not Trigon's defaults; secrets are hidden, and folders left out.\n\n"
        f"```yaml\n{text.replace('```', '` ` `')}```"
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by dotted names as sections."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, key = name.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    return tree


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
