"""Demonstrations of episodes have the tokens of a run, of which the learned turns have a loss."""

import shutil
from contextlib import nullcontext

import pytest
from PIL import Image

from support.builders import make_builder
from trigon.data.media_processing import MediaProcessor
from trigon.data.turns import TurnTemplate
from trigon.errors import DataError
from trigon.tools.quickstart.warm_start import Demonstration, as_target, learn_demonstrations, play


class Counter:
    """Shows how often it was stepped, beside a picture, and ends after three steps."""

    def reset(self, row):
        self.num_steps, self.actions = 0, []
        return {"text": row["problem"], "image": Image.new("RGB", (56, 56))}

    def step(self, action):
        self.num_steps += 1
        self.actions.append(action)
        return {"text": f"step {self.num_steps}", "image": Image.new("RGB", (84, 56))}, 0.0, self.num_steps == 3


def play_counter(processors, *, max_turns=8, opens=True):
    counter = Counter()
    demonstration = Demonstration({"problem": "How many?"}, counter, lambda turn: (f"I see {turn}.", turn != 1))
    template = TurnTemplate(processors, max_image_pixels=1_000_000)
    target = play(demonstration, processors, template, opens=opens, max_turns=max_turns)
    return counter, target


def test_the_tokens_are_those_of_the_conversation(processors):
    counter, target = play_counter(processors)
    assert counter.actions == ["I see 0.", "I see 1.", "I see 2."]
    image, text = {"type": "image"}, "text"
    messages = [{"role": "user", "content": "How many?"}]
    for number, shown in enumerate(("How many?", "step 1", "step 2")):
        messages.append({"role": "user", "content": [image, {"type": text, text: shown}]})
        messages.append({"role": "assistant", "content": f"I see {number}."})
    rendered = processors.tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    for count in (4, 6, 6):  # 56 x 56 pixels, and 84 x 56, in tokens of 28 x 28
        rendered = rendered.replace("<|image_pad|>", "<pads>" * count, 1)
    prompt = make_builder(processors, generation_prompt=False).build({"problem": "How many?", "answer": ""}, "a")
    ids = [*prompt.token_ids, *target.token_ids]
    assert processors.tokenizer.decode(ids).replace("<|image_pad|>", "<pads>") == rendered
    assert len(target.vision.encoded) == len(target.vision.hashes) == 3
    texts = [processors.tokenizer.decode(target.token_ids[start:end]) for start, end in target.sampled]
    assert texts == [f"I see {number}.<|im_end|>" for number in range(3)]
    lengths = [end - start for start, end in target.sampled]
    assert target.loss_mask.tolist() == [1.0] * lengths[0] + [0.0] * lengths[1] + [1.0] * lengths[2]


def test_an_episode_ends_after_the_last_turn_without_another_observation(processors):
    counter, target = play_counter(processors, max_turns=2)
    assert counter.num_steps == 2
    assert len(target.sampled) == 2
    assert target.sampled[-1][1] == len(target.token_ids)
    assert len(target.vision.encoded) == 2
    _, unopened = play_counter(processors, opens=False)
    assert unopened.sampled[0][0] == 0
    whole = as_target((5, 6, 7))  # without turns
    assert (whole.sampled, whole.vision, whole.loss_mask.tolist()) == (((0, 3),), None, [1.0] * 3)


@pytest.mark.parametrize("fails", [False, True])
def test_the_environment_is_closed_at_the_end_also_if_it_raises(processors, fails):
    closed = []

    class Closing(Counter):
        def step(self, action):
            assert not fails
            return super().step(action)

        def close(self):
            closed.append(self)

    environment = Closing()
    demonstration = Demonstration({"problem": "How many?"}, environment, lambda turn: ("I see.", True))
    template = TurnTemplate(processors, max_image_pixels=1_000_000)
    with pytest.raises(AssertionError) if fails else nullcontext():
        play(demonstration, processors, template, opens=True, max_turns=8)
    assert closed == [environment]


def test_a_batch_without_a_learned_turn_is_refused_and_the_processor_of_media_closed(tiny_vlm, tmp_path, monkeypatch):
    closed = []
    close = MediaProcessor.close
    monkeypatch.setattr(MediaProcessor, "close", lambda self: (close(self), closed.append(self)))
    folder = shutil.copytree(tiny_vlm, tmp_path / "model")
    row = {"problem": "How many?", "answer": ""}
    with pytest.raises(DataError, match="no turn of the 2 examples of update 1 is learned"):
        learn_demonstrations(
            folder,
            lambda index: Demonstration(row, Counter(), lambda turn: ("I see.", False)),
            num_updates=1,
            target_accuracy=1.0,
            batch_size=2,
            learning_rate=1e-3,
            seed=0,
        )
    assert len(closed) == 1
