"""Each sample has a seed of its own, which depends on nothing else."""

from trigon.rollout.seeds import sample_seed


def test_a_seed_is_the_same_in_every_version_of_the_program():
    assert sample_seed(1, step=2, prompt_id="train:17", sample=3) == 7240194199493609275


def test_each_of_the_four_changes_the_seed():
    seeds = {
        sample_seed(run_seed, step=step, prompt_id=f"train:{row}", sample=sample)
        for run_seed in range(3)
        for step in range(10)
        for row in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 10 * 20 * 8


def test_numbers_that_read_alike_side_by_side_are_kept_apart():
    assert sample_seed(1, step=11, prompt_id="a", sample=1) != sample_seed(11, step=1, prompt_id="a", sample=1)
    assert sample_seed(1, step=2, prompt_id="3/a", sample=4) != sample_seed(1, step=2, prompt_id="a", sample=3)


def test_a_seed_fits_a_signed_64_bit_integer():
    assert all(0 <= sample_seed(0, step=0, prompt_id=str(i), sample=0) < 2**63 for i in range(1000))
