"""The seed of a sample is a function of (run seed, step, prompt, sample) alone."""

from trigon.rollout.episode_state import sample_seed


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
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Arguments that concatenate to the same text.
    assert sample_seed(1, draw=11, prompt_id="a", sample=1) != sample_seed(11, draw=1, prompt_id="a", sample=1)
