"""ProcessedMedia: which ranks have the pixels of a prompt."""

from dataclasses import replace

from trigon.distributed.worker_group import ProcessedMedia
from trigon.types import Completion, EncodedMedia, Prompt, Rollout, RolloutGroup, Score

TEXT = Prompt("p", (1, 2, 3), None, "", None, {}, ())


def with_files(*hashes: str) -> Prompt:
    return replace(TEXT, vision=EncodedMedia(tuple(name.encode() for name in hashes), hashes))


def group_of(prompt: Prompt, *completions: Completion) -> RolloutGroup:
    return RolloutGroup(prompt, tuple(Rollout(each, Score(0.0, {}, "ok", "")) for each in completions))


def test_ranks_are_added_and_forgotten():
    processed = ProcessedMedia()
    one, two = with_files("a"), with_files("a", "b")
    processed.add([one, two, TEXT], [2, 3])
    processed.add([two], [0])
    assert set(processed.ranks_of(group_of(one))) == {2, 3}
    assert set(processed.ranks_of(group_of(replace(two, prompt_id="another with the same files")))) == {0, 2, 3}
    assert not processed.ranks_of(group_of(with_files("b")))
    processed.forget()
    assert not processed.ranks_of(group_of(one))


def test_a_group_is_where_the_images_of_its_prompt_and_of_all_its_completions_are():
    processed = ProcessedMedia()
    prompt = with_files("a")
    completions = [
        Completion((1, 2), (0.0, 0.0), "stop", "", 0, vision=EncodedMedia((name.encode(),), (name,)))
        for name in ("b", "c")
    ]
    processed.add([prompt, *completions], [0, 1])
    processed.add(completions, [2])
    processed.add([completions[0]], [3])
    assert set(processed.ranks_of(group_of(prompt, *completions))) == {0, 1}
    assert set(processed.ranks_of(group_of(TEXT, *completions))) == {0, 1, 2}
    assert set(processed.ranks_of(group_of(TEXT, completions[0]))) == {0, 1, 2, 3}
