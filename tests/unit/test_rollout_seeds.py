"""The seed of a sample is a function of (run seed, step, prompt, sample) alone."""

from trigon.rollout.seeds import sample_seed


def test_a_seed_does_not_change_between_versions_of_trigon():
    assert sample_seed(1, draw=2, prompt_id="train:17", sample=3) == 7240194199493609275


def test_each_argument_changes_the_seed():
    seeds = {
        sample_seed(run_seed, draw=step, prompt_id=f"train:{row}", sample=sample)
        for run_seed in range(3)
        for step in range(10)
        for row in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 10 * 20 * 8


def test_arguments_that_concatenate_to_the_same_text_have_different_seeds():
    assert sample_seed(1, draw=11, prompt_id="a", sample=1) != sample_seed(11, draw=1, prompt_id="a", sample=1)
    assert sample_seed(1, draw=2, prompt_id="3/a", sample=4) != sample_seed(1, draw=2, prompt_id="a", sample=3)


def test_a_seed_fits_a_signed_64_bit_integer():
    assert all(0 <= sample_seed(0, draw=0, prompt_id=str(i), sample=0) < 2**63 for i in range(1000))
