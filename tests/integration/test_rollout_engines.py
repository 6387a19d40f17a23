"""The rollout protocol, tested on vLLM and transformers, with and without images."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from support.builders import make_builder
from support.images import png
from support.oracle import load_hugging_face, padded_logprobs
from support.rollout import drawn, make_transformers_engine, make_vllm_engine, unreadable_weights
from trigon.errors import EngineError, ParityError
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import completion_positions, prompt_positions
from trigon.rollout.parity import ParityCheck
from trigon.rollout.protocol import Interruption, Until
from trigon.types import (
    GroupSpan,
    LocalWeights,
    PackedGroups,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    WeightsHandle,
)

# Several full blocks of vLLM's KV cache, on any device: only full blocks are reused, and so can be
# stale.
LONG = "How many sides does the polygon in the drawing have? " * 16
MAX_MODEL_LEN = 512
MAX_IMAGES = 3

SAMPLING = SamplingParams(n=4, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24, ignore_eos=False, seed=5)
FULL_LENGTH = replace(SAMPLING, ignore_eos=True)

SCENES = [
    pytest.param(("vllm", "qwen2_5_vl", False), id="vllm-qwen2_5_vl-untied", marks=pytest.mark.vllm),
    pytest.param(("vllm", "qwen3_vl", True), id="vllm-qwen3_vl-tied", marks=[pytest.mark.vllm, pytest.mark.extended]),
    pytest.param(("vllm", "qwen2", True), id="vllm-qwen2-tied", marks=[pytest.mark.vllm, pytest.mark.long]),
    pytest.param(
        ("transformers", "qwen2_5_vl", False), id="transformers-qwen2_5_vl-untied", marks=pytest.mark.extended
    ),
    pytest.param(("transformers", "qwen3_vl", True), id="transformers-qwen3_vl-tied", marks=pytest.mark.long),
    pytest.param(("transformers", "qwen2", False), id="transformers-qwen2-untied", marks=pytest.mark.long),
]


@dataclass
class Scene:
    """An engine, the policy whose weights it loads, and prompts for both."""

    engine: Any
    policy: Policy
    processors: Any
    prompts: list
    version: int = 0
    oracle: Any = None

    def change_weights(self, scale=0.02):
        """Change every weight a little, as an update does, and count the version up."""
        generator = torch.Generator().manual_seed(self.version)
        self.version += 1
        with torch.no_grad():
            for weight in self.policy.model.parameters():
                weight.add_(scale * torch.randn(weight.shape, generator=generator))

    def awake(self):
        return self.engine.awake(LocalWeights(self.policy.named_weights), version=self.version)

    def generate(self, sampling=SAMPLING, prompts=None, **others):
        with self.awake():
            return self.engine.generate(self.prompts if prompts is None else prompts, sampling, **others)

    @torch.no_grad()
    def trainer_logprobs(self, prompt, completions, temperature):
        """Return the packed policy's log-probabilities of all completions' tokens, concatenated."""
        family, hf_config = self.processors.family, self.processors.hf_config
        ids = torch.tensor(prompt.token_ids)
        grid = None if prompt.vision is None else prompt.vision.grid_thw
        positions = prompt_positions(ids, grid, family, hf_config)
        lengths = [len(completion.token_ids) for completion in completions]
        ends = torch.tensor([len(ids), *lengths]).cumsum(0).tolist()
        self.policy.temperature = temperature
        packed = PackedGroups(
            token_ids=torch.cat([ids, *(torch.tensor(completion.token_ids) for completion in completions)]),
            position_ids=torch.cat([positions, *(completion_positions(positions, length) for length in lengths)], 1),
            spans=(GroupSpan((0, len(ids)), tuple(pairwise(ends))),),
            visions=() if prompt.vision is None else (prompt.vision,),
        )
        return self.policy(packed).logprobs

    def max_difference(self, sampling=SAMPLING):
        """Return the largest |log-probability difference| between engine and trainer."""
        completions = self.generate(sampling)
        return max(
            float((self.trainer_logprobs(prompt, row, sampling.temperature) - sampled(row)).abs().max())
            for prompt, row in zip(self.prompts, completions, strict=True)
        )

    def logprobs(self, groups):
        """Return the policy's log-probabilities as a train engine does."""
        return [
            self.trainer_logprobs(group.prompt, completions, 1.0).split([len(each.token_ids) for each in completions])
            for group in groups
            if (completions := [rollout.completion for rollout in group.rollouts])
        ]

    def hugging_face_model(self):
        """Return transformers' own model, with its own attention, with the policy's weights."""
        if self.oracle is None:
            self.oracle = load_hugging_face(Path(self.processors.tokenizer.name_or_path), torch.float32)
        self.oracle.load_state_dict(self.policy.model.state_dict())
        return self.oracle


def sampled(completions):
    return torch.tensor([logprob for completion in completions for logprob in completion.sampling_logprobs])


def make_prompts(processors):
    """Return short and long prompts with and without images; two differ only in the pixels."""
    builder = make_builder(processors, max_prompt_length=MAX_MODEL_LEN)
    rows = [("Find x.", []), (LONG, []), (LONG + "Count the shapes.", [])]
    if processors.family.has_vision:
        rows += [
            ("<image>Find x.", [png(84, 84, 0)]),
            (LONG + "<image>", [png(112, 84, 1)]),
            (LONG + "<image>", [png(112, 84, 2)]),
            ("<image>" + LONG + "<image> or <image>?", [png(84, 84, 3), png(56, 140, 4), png(84, 84, 0)]),
        ]
    return [
        builder.build({"problem": text, "answer": "", "images": images}, f"train:{number}")
        for number, (text, images) in enumerate(rows)
    ]


@pytest.fixture(scope="module", params=SCENES)
def scene(request, tiny_model):
    name, model_type, tied = request.param
    folder = str(tiny_model(model_type, tie_word_embeddings=tied))
    # One token in twenty is a stop token, so that some completions stop and some are cut.
    processors = replace(load_processors(folder), stop_token_ids=tuple(range(0, 1000, 20)))
    policy = Policy(
        load_model(folder, dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    engine = open_engine(name, folder, processors)
    yield Scene(engine, policy, processors, drawn(make_prompts(processors), 1))
    engine.close()


def open_engine(name, folder, processors):
    if name == "transformers":
        return make_transformers_engine(folder, processors, max_model_len=MAX_MODEL_LEN)
    return make_vllm_engine(
        folder, processors, max_model_len=MAX_MODEL_LEN, enable_chunked_prefill=True, limit_images=MAX_IMAGES
    )


def test_sampling_logprobs_equal_the_trainers_before_and_after_weight_changes_at_any_temperature(scene):
    for temperature in (1.0, 0.7, 1.0):
        assert scene.max_difference(replace(SAMPLING, temperature=temperature)) <= 1e-4
        scene.change_weights()


@pytest.mark.faults
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}], ids=["of the step", "sampled for it"])
def test_the_parity_check_excuses_one_token_but_not_stale_weights(scene, truncation):
    sampling, tolerance = replace(SAMPLING, **truncation), 1e-3
    parity = ParityCheck(tolerance)
    with scene.awake():
        rows = scene.engine.generate(scene.prompts, sampling)
        groups = [
            RolloutGroup(prompt, tuple(Rollout(completion, Score(0.0, {}, "ok", "")) for completion in row))
            for prompt, row in zip(scene.prompts, rows, strict=True)
        ]
        [probe] = parity.probe(groups, scene.engine, sampling, prompt=scene.prompts[0], version=scene.version)
    metrics = parity.check([probe], scene, warn=pytest.fail)
    assert metrics["parity/logprobs_diff_max"].value < 1e-4

    rollout, *others = probe.first.rollouts
    num_tokens = sum(len(each.completion.token_ids) for each in probe.first.rollouts)
    own, *rest = rollout.completion.sampling_logprobs
    wrong = replace(rollout.completion, sampling_logprobs=(own - 1.5 * tolerance * num_tokens, *rest))
    first = replace(probe.first, rollouts=(replace(rollout, completion=wrong), *others))
    warnings = []
    metrics = parity.check([replace(probe, first=first)], scene, warn=warnings.append)
    assert metrics["parity/first_diff_mean"].value == pytest.approx(1.5 * tolerance, rel=0.1)
    assert metrics["parity/logprobs_diff_mean"].value < tolerance
    assert len(warnings) == 1

    scene.change_weights()
    with pytest.raises(ParityError, match="with further ones"):
        parity.check([probe], scene, warn=pytest.fail)
    for prompt, row in zip(scene.prompts, rows, strict=True):  # each prompt alone would show it
        if not truncation:
            assert float((scene.trainer_logprobs(prompt, row, 1.0) - sampled(row)).abs().max()) > 0.01


def test_the_same_call_gives_the_same_bits_and_a_sample_depends_on_no_other(scene):
    with scene.awake():
        together = scene.engine.generate(scene.prompts, SAMPLING)
        assert scene.engine.generate(scene.prompts, SAMPLING) == together
        assert scene.engine.generate([], SAMPLING) == []
    assert scene.generate() == together
    alone = scene.generate(replace(SAMPLING, n=2), prompts=scene.prompts[2:3])
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in together[2][:2]]
    reordered = scene.generate(prompts=scene.prompts[::-1])[::-1]
    assert [[c.token_ids for c in row] for row in reordered] == [[c.token_ids for c in row] for row in together]


def test_completions_end_at_a_stop_token_or_at_the_limit(scene):
    completions = [completion for row in scene.generate() for completion in row]
    for completion in completions:
        *body, last = (token in scene.processors.stop_token_ids for token in completion.token_ids)
        assert not any(body)
        assert completion.finish_reason == ("stop" if last else "length")
        assert last or len(completion.token_ids) == SAMPLING.max_tokens
        assert len(completion.sampling_logprobs) == len(completion.token_ids)
        assert completion.policy_version == scene.version
        decoded = scene.processors.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.text == decoded
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    # Without stop tokens, in two steps: all have the full length, and all are different.
    both = [scene.generate(FULL_LENGTH, drawn(scene.prompts, step)) for step in (1, 2)]
    full = [completion for rows in both for row in rows for completion in row]
    assert {(completion.finish_reason, len(completion.token_ids)) for completion in full} == {
        ("length", SAMPLING.max_tokens)
    }
    assert len({completion.token_ids for completion in full}) == len(full)


def test_greedy_decoding_takes_the_most_probable_token_and_the_baseline_of_a_prompt_is_greedy(scene):
    greedy = replace(FULL_LENGTH, n=1, temperature=0.0)
    for prompt, [completion] in zip(scene.prompts, scene.generate(greedy), strict=True):
        assert completion.sampling_logprobs == (0.0,) * SAMPLING.max_tokens
        logprobs, _ = distributions(scene, prompt, completion, replace(FULL_LENGTH, temperature=1.0))
        assert logprobs.argmax(1).tolist() == list(completion.token_ids)
    sampling = replace(SAMPLING, top_p=0.9, top_k=50)
    rows = scene.generate(replace(sampling, with_baseline=True))
    assert [row[-1:] for row in rows] == scene.generate(replace(SAMPLING, n=1, temperature=0.0))
    assert [[each.token_ids for each in row[:-1]] for row in rows] == [
        [each.token_ids for each in row] for row in scene.generate(sampling)
    ]


TRUNCATIONS = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.8, "temperature": 1.3}]

EDGE = 1e-4
"""Largest difference of cumulative probabilities by rounding, if log-probs differ by up to 1e-4."""


@pytest.mark.extended
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_logprobs_are_of_the_truncated_distribution(scene, truncation):
    sampling = replace(FULL_LENGTH, n=2, **truncation)
    num_compared, num_tokens = 0, 0
    for prompt, row in zip(scene.prompts, scene.generate(sampling), strict=True):
        for completion in row:
            logprobs, on_edge = distributions(scene, prompt, completion, sampling)
            expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            # Skip positions within EDGE of top_p: there rounding, which depends on the CPU, decides
            # whether one more token is in the nucleus, which changes all log-probabilities.
            compared = ~on_edge
            actual = torch.tensor(completion.sampling_logprobs)
            assert torch.allclose(expected[compared], actual[compared], atol=1e-4)
            num_compared += int(compared.sum())
            num_tokens += len(compared)
    if sampling.top_p == 1:
        assert num_compared == num_tokens
    assert num_compared > 0.6 * num_tokens


@torch.no_grad()
def distributions(scene, prompt, completion, sampling):
    """Return the distribution that each of a completion's R tokens was sampled from.

    Returns: log-probabilities, float32 [R, V], and whether a cumulative probability is within EDGE
    of top_p, so that rounding decides about a token of the nucleus, bool [R].
    """
    model = scene.hugging_face_model()
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    images = {}
    if prompt.vision is not None:
        images = {
            "pixel_values": prompt.vision.pixel_values,
            "image_grid_thw": prompt.vision.grid_thw,
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    logits = model(input_ids=ids, use_cache=False, **images).logits[0, len(prompt.token_ids) - 1 : -1]
    logits[:, list(scene.processors.banned_token_ids)] = -torch.inf
    rows, on_edge = [], []
    for row in logits / sampling.temperature:
        order = row.argsort(descending=True).tolist()
        kept = order[: sampling.top_k] if sampling.top_k > 0 else order
        probabilities = row[kept].softmax(0).tolist()
        cumulative = list(accumulate(probabilities))
        count = sum(before < sampling.top_p for before in [0.0, *cumulative[:-1]])
        truncated = torch.full_like(row, -torch.inf)
        truncated[kept[:count]] = row[kept[:count]]
        rows.append(truncated.log_softmax(0))
        on_edge.append(sampling.top_p < 1 and any(abs(mass - sampling.top_p) <= EDGE for mass in cumulative))
    return torch.stack(rows), torch.tensor(on_edge)


def test_media_tokens_are_never_sampled_even_if_most_probable(scene):
    banned = list(scene.processors.banned_token_ids)
    if not banned:
        pytest.skip("a text model has no media tokens")
    head = scene.policy.model.get_output_embeddings().weight
    kept = head.detach().clone()
    with torch.no_grad():
        head[banned] = 20 * torch.randn(len(banned), head.shape[1], generator=torch.Generator().manual_seed(0))
    scene.version += 1
    for prompt, row in zip(scene.prompts, scene.generate(), strict=True):
        assert not {token for completion in row for token in completion.token_ids}.intersection(banned)
        assert float((scene.trainer_logprobs(prompt, row, 1.0) - sampled(row)).abs().max()) <= 1e-4
        with torch.no_grad():
            unmasked, _ = padded_logprobs(
                scene.hugging_face_model(), prompt, [c.token_ids for c in row], temperature=1.0, banned_token_ids=()
            )
        assert float(unmasked.exp().median()) < 1e-6  # of the sampled tokens, without the ban
    with torch.no_grad():
        head.copy_(kept)
    scene.version += 1


def test_progress_counts_every_completion_once_and_a_group_is_given_as_soon_as_it_is_finished(scene):
    groups, counts = [], []

    def on_group(index, row):
        groups.append((index, row))
        if len(groups) == 1:
            assert sum(counts) < len(scene.prompts) * SAMPLING.n  # others are still being sampled

    completions = scene.generate(on_progress=counts.append, on_group=on_group)
    assert len(groups) == len(scene.prompts)
    assert dict(groups) == dict(enumerate(completions))
    assert sum(counts) == len(scene.prompts) * SAMPLING.n
    assert min(counts) >= 0  # 0: the engine works on
    assert scene.generate() == completions  # the callbacks do not change the result


def test_weights_of_the_loaded_version_are_not_read_again(scene):
    with scene.awake():
        pass

    with scene.engine.awake(unreadable_weights(), version=scene.version):
        scene.engine.generate(scene.prompts[:1], SAMPLING)
        with scene.engine.awake(unreadable_weights(), version=scene.version):
            pass
        scene.engine.generate(scene.prompts[:1], SAMPLING)  # still awake


def test_the_engine_sleeps_after_an_error(scene):
    with pytest.raises(ZeroDivisionError), scene.awake():
        _ = 1 / 0
    with pytest.raises(EngineError, match="sleeps"):
        scene.engine.generate(scene.prompts, SAMPLING)
    assert scene.max_difference() <= 1e-4
    other = scene.engine.awake(WeightsHandle(), version=scene.version + 1)
    with pytest.raises(EngineError, match="cannot load WeightsHandle"), other:
        pass


def test_a_prompt_that_leaves_no_room_for_a_completion_raises_with_its_id(scene):
    with pytest.raises(EngineError, match=r"train:1: .* worker.rollout.max_model_len is 512"):
        scene.generate(replace(SAMPLING, max_tokens=MAX_MODEL_LEN - len(scene.prompts[0].token_ids)))


@pytest.mark.parametrize("callback", ["on_progress", "on_group"])
def test_an_interrupted_call_does_not_affect_the_next_one(scene, callback):
    def interrupt(*_):
        raise KeyboardInterrupt

    expected = scene.generate()
    with scene.awake():
        with pytest.raises(KeyboardInterrupt):
            scene.engine.generate(scene.prompts, SAMPLING, **{callback: interrupt})
        assert scene.engine.generate(scene.prompts, SAMPLING) == expected


# -- engines that stop before all completions have ended --

STOPPING = pytest.mark.parametrize(
    "scene", [each for each in SCENES if each.id in ("vllm-qwen2_5_vl-untied", "vllm-qwen3_vl-tied")], indirect=True
)


def sample_until(scene, prompts, sampling, until):
    with scene.awake():
        return scene.engine.generate(prompts, sampling, until=until)


@pytest.mark.vllm
@STOPPING
def test_a_greedy_completion_that_was_stopped_continues_to_the_same_tokens(scene):
    greedy = replace(SAMPLING, n=2, temperature=0.0, max_tokens=40)
    whole = scene.generate(greedy)
    lengths = [len(row[0].token_ids) for row in whole]
    shortest = min(lengths)
    assert max(lengths) > shortest, "all end at once"
    rows = sample_until(scene, scene.prompts, greedy, Until(1))
    finished = [index for index, row in enumerate(rows) if not row[0].is_unfinished]
    assert finished == [index for index, length in enumerate(lengths) if length == shortest]
    assert all(len(each.token_ids) == shortest for row in rows for each in row)
    left = [index for index in range(len(rows)) if index not in finished]
    begun = tuple(tuple(rows[index]) for index in left)
    again = sample_until(scene, [scene.prompts[index] for index in left], greedy, Until(len(left), begun=begun))
    assert again == [whole[index] for index in left]


@pytest.mark.vllm
@STOPPING
def test_what_continues_under_other_weights_has_the_trainers_log_probabilities(scene):
    short = replace(FULL_LENGTH, max_tokens=10)
    begun = tuple(
        tuple(replace(each, finish_reason="unfinished", text="") for each in row) for row in scene.generate(short)
    )
    old_version = scene.version
    scene.change_weights()
    rows = sample_until(scene, scene.prompts, FULL_LENGTH, Until(len(begun), begun=begun))
    for prompt, row, first in zip(scene.prompts, rows, begun, strict=True):
        trained = scene.trainer_logprobs(prompt, row, 1.0).split([len(each.token_ids) for each in row])
        for completion, before, logprobs in zip(row, first, trained, strict=True):
            assert completion.version_runs == ((old_version, 10), (scene.version, 14))
            assert completion.token_ids[:10] == before.token_ids
            assert completion.sampling_logprobs[:10] == before.sampling_logprobs
            difference = (torch.tensor(completion.sampling_logprobs) - logprobs).abs()
            assert float(difference[10:].max()) <= 1e-4
            assert float(difference[:10].max()) > 1e-3
            text = scene.processors.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert completion.text == text
    assert len({each.token_ids for row in rows for each in row}) == len(rows) * FULL_LENGTH.n


@pytest.mark.vllm
@STOPPING
def test_a_call_that_is_interrupted_keeps_what_it_has_and_changes_no_later_one(scene):
    expected = scene.generate(FULL_LENGTH)

    def interrupt(kind, *, after, begun=()):
        interruption, passes = Interruption(), []

        def on_progress(_):
            passes.append(1)
            if len(passes) == after:
                interruption.ask(kind)

        until = Until(len(scene.prompts), begun=begun, interruption=interruption)
        with scene.awake():
            return scene.engine.generate(scene.prompts, FULL_LENGTH, until=until, on_progress=on_progress)

    drained = [each for row in interrupt("drain", after=1) for each in row]
    assert {(each.is_unfinished, len(each.token_ids)) for each in drained} <= {(False, 24), (True, 0)}
    assert not all(each.is_unfinished for each in drained)
    stopped = interrupt("stop", after=3)
    assert all(each.is_unfinished and len(each.token_ids) <= 3 for row in stopped for each in row)
    assert any(each.token_ids for row in stopped for each in row)
    again = interrupt("stop", after=5, begun=tuple(map(tuple, stopped)))
    for row, before in zip(again, stopped, strict=True):
        for each, begun in zip(row, before, strict=True):
            assert each.token_ids[: len(begun.token_ids)] == begun.token_ids
            assert len(each.sampling_logprobs) == len(each.token_ids) <= len(begun.token_ids) + 5
    assert scene.generate(FULL_LENGTH) == expected


@pytest.mark.vllm
@STOPPING
def test_a_call_after_one_that_stopped_gives_what_it_would_without_it(scene):
    sampling = replace(SAMPLING, n=1, max_tokens=64)  # most of them end, each after another number of tokens
    expected = scene.generate(sampling)
    first = sample_until(scene, scene.prompts, sampling, Until(1))
    assert any(each.is_unfinished for row in first for each in row)
    assert scene.generate(sampling) == expected
    assert sample_until(scene, scene.prompts, sampling, Until(1)) == first


@pytest.mark.extended
@pytest.mark.parametrize("num_passes", [1, 5, 30])
@pytest.mark.parametrize(
    "scene", [each for each in SCENES if each.id == "transformers-qwen2_5_vl-untied"], indirect=True
)
def test_the_transformers_engine_keeps_what_it_has_when_it_is_interrupted(scene, num_passes):
    greedy = replace(SAMPLING, n=2, temperature=0.0, max_tokens=24)
    whole = scene.generate(greedy)
    interruption, passes = Interruption(), []

    def on_progress(_):
        passes.append(1)
        if len(passes) == num_passes:
            interruption.ask("stop")

    until = Until(len(whole), interruption=interruption)
    with scene.awake():
        begun = scene.engine.generate(scene.prompts, greedy, until=until, on_progress=on_progress)
    assert sum(len(row[0].token_ids) for row in begun) == num_passes
    left = [index for index, row in enumerate(begun) if row[0].is_unfinished]
    assert left == list(range(min(left), len(whole)))
    carried = Until(len(left), begun=tuple(tuple(begun[index]) for index in left))
    rows = sample_until(scene, [scene.prompts[index] for index in left], greedy, carried)
    assert [*begun[: min(left)], *rows] == whole
