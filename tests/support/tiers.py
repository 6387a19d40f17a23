"""Which tests `make test` and `make test-all` leave to others, and which are skipped without vLLM.

`make test` has lint, types, unit tests, invariants, and one run of each kind: one worker, two
workers, resume, export, a learning test. The files of KEPT have more cases of the same kinds; their
tests are extended, except those whose ids match the pattern. `make test-all` runs them too, except
those of LONG, which take long.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
RELIABILITY = TESTS.parent / "docs" / "reliability.md"

KEPT = {
    "learn/test_every_algorithm.py": None,
    "learn/test_gridworld.py": None,
    "learn/test_learns_to_look_closer.py": None,
    "learn/test_reward_rises.py": r"^(?!.*blank_images)",
    "learn/test_smollm2.py": None,
    "invariants/test_ranks_change_nothing.py": r"\[(vision on 2|bfloat16 weights)\]|not_finite",
    "invariants/test_critic_invariants.py": r"^(?!.*two_ranks.*lora)",
    "invariants/test_sequence_parallel.py": r"\[qwen3_vl, two rows of 2\]",
    "invariants/test_sharded_offload.py": None,
    "invariants/test_sharded_memory.py": r"\[all\]",
    "invariants/test_checkpoint_killed.py": None,
    "integration/test_diverging_runs.py": r"test_gradients_that_are_nan",
    "invariants/test_crash_points.py": None,
    "integration/test_disk_faults.py": None,
    "integration/test_doctor.py": r"test_a_few_checks|test_ending_the_command",
    "unit/test_check_page.py": r"thresholds",
    "unit/test_checks.py": r"^(?!test_exactly_the_planted|test_the_shipped_recipes|test_the_advice|test_prompts_are|"
    r"test_a_function_that_reads)"
    r"|\[(a misspelt option|a marker too few|a row twice|a reward function that hangs on nothing|large images)\]"
    r"|\[qwen2_5_vl_3b_geo3k_grpo\]",
    "integration/test_sampler_pool.py": r"by_the_other_one\[die\]",
    "integration/test_separate_pools.py": None,
    "integration/test_starter.py": None,
    "unit/test_model_judge.py": r"^(?!test_no_count_is_lost_when_processes)",
    "unit/test_rollout_vllm_arguments.py": r"^(?!test_importing_the_package)",
    "unit/test_tiny_model.py": r"^(?!test_the_same_arguments_give_the_same_bytes_in_another_process)",
    "unit/test_watchdog.py": r"\[hang_in_python\]|test_progress_from_another_thread|test_the_stacks_of",
    "unit/test_models_activations.py": r"counted\[frozen vision\]|measured_peak\[qwen2_5_vl-|"
    r"autocast-checkpointing-lora|variable_lengths",
    "integration/test_environment_pool.py": r"^(?!.*\[strict\b)",
    "integration/test_episodes_benchmark.py": r"sampled_tokens_are_compared",
    "integration/test_episodes_combined.py": None,
    "integration/test_episodes_runs.py": r"turns_are_sampled",
    "integration/test_evaluation.py": None,
    "integration/test_examples.py": None,
    "integration/test_memory_of_a_larger_model.py": None,
    "integration/test_environment.py": None,
    "integration/test_export.py": r"^(?!test_an_export_has_the_same_logprobs)",
    "integration/test_python_api.py": None,
    "integration/test_python_examples.py": r"test_the_page_has|saved_with_its_outputs",
    "integration/test_fused_parts.py": r"^(?!.*test_compiled_modules_compute_the_same)",
    "integration/test_gpu_placement.py": None,
    "integration/test_hangs.py": None,
    "integration/test_judge_served.py": None,
    "integration/test_many_workers.py": r"test_two_workers_(have_the_numbers_of_one|process_each_image)",
    "integration/test_model_families.py": r"\[(qwen2_5_vl|qwen3_vl)\b",
    "integration/test_oversampling_runs.py": None,
    "integration/test_network.py": None,
    "integration/test_plan_equals_run.py": None,
    "integration/test_page_sessions.py": r" options\]",
    "integration/test_push.py": r"^(?!test_a_lora_run|test_failures_are)",
    "integration/test_reward_confinement.py": r"without_what_prevents_them\[(\]|namespaces, landlock\])|a_container|"
    r"is_killed\[all\]|supervisor_that_is|but_its_channel|\[(hang-timeout-)?all\]|asked_for|network|private|an_option",
    "integration/test_rollout_engines.py": r"^(?!.*\[transformers-qwen3_vl)",
    "integration/test_rollout_episode_engines.py": r"\[vllm-qwen2_5_vl|anew_with_the_same_bits\[vllm-qwen2\]|"
    r"tensor_parallelism",
    "integration/test_rollout_videos.py": None,
    "integration/test_rollout_vllm_cuda_config.py": None,
    "integration/test_rollout_vllm_faults.py": r"^(?!test_a_new_engine_that_fails_too)",
    "integration/test_rollout_vllm_random_weights.py": None,
    "integration/test_secrets_of_a_run.py": None,
    "integration/test_train_auto_micro_batch.py": None,
    "integration/test_train_critic.py": r"test_the_policy_rests",
    "integration/test_train_lora.py": None,
    "integration/test_train_media.py": None,
    "integration/test_stop_signals.py": None,
    "integration/test_train_resume.py": r"test_ctrl_c_and_sigterm",
    "integration/test_watchers.py": None,
    "integration/test_working_folder.py": None,
}
"""File below tests/ -> pattern of the test ids that `make test` runs; None: none of them."""

LONG = {
    "integration/test_disk_faults.py": r"test_a_worker_that_cannot",
    "integration/test_diverging_runs.py": r"two_workers|an_update_made_nan.*\[nan weight\]|learning_rate_of_ten",
    "integration/test_episodes_combined.py": r"",
    "integration/test_examples.py": r"test_a_recipe_trains\[(?!qwen2_5_vl_7b_(visual_search_crop|multi_image)|"
    r"qwen3_vl_4b_geo3k_grpo\]|qwen3_14b_dapo17k|baselines/qwen2_5_vl_3b_clevr|grpo_trainer)",
    "integration/test_hangs.py": r"of_two_workers|hang_in_c",
    "integration/test_judge_served.py": r"",
    "integration/test_many_workers.py": r"test_a_killed_worker|test_ctrl_c_reaches|share_no_memory|"
    r"test_four_workers_with_tensor_parallelism|test_a_cluster_of_two_nodes_has",
    "integration/test_memory_of_a_larger_model.py": r"",
    "integration/test_mutations.py": r"test_a_broken_guard",
    "integration/test_network.py": r"test_files_of_a_killed_run",
    "integration/test_page_sessions.py": r" (ten-minutes|sharing|evaluation)\]",
    "integration/test_random_kills.py": r"",
    "integration/test_rollout_engines.py": r"\[transformers-qwen3_vl",
    "integration/test_separate_pools.py": r"whoever_is_killed|test_a_sampler_that_is_killed|two_nodes",
    "integration/test_stop_signals.py": r"test_a_run_that_is_stopped_at_any_moment|test_two_workers_that_all_get|"
    r"\[(one worker|two workers)\]",
    "integration/test_train_auto_micro_batch.py": r"",
    "integration/test_train_critic.py": r"that_is_killed|on_one_trunk",
    "integration/test_train_media.py": r"test_a_run_on_videos\[2\]",
    "integration/test_train_resume.py": r"killed_three_times|the_output_of_a_run|run_without_steps",
    "integration/test_watchers.py": r"constant_reward|control_group|learning_rate_that|failing_rewards_warn",
    "integration/test_working_folder.py": r"",
    "invariants/test_crash_points.py": r"\[(save|background|each call of a rank|merge|export)\]",
    "invariants/test_ranks_change_nothing.py": r"\[(vision on 4|full kl on 4|tied on|rows on 2 of 4, (gspo|frozen)|"
    r"rows on 2, (moe|tiles|full kl)|lora, (hybrid|frozen tower, gathered|tied)|layers kept|tiles on|checkpointing)|"
    r"tower, deepstack|budgets_give|read by 2 and 1\]|and hybrid\]|\[hybrid, read",
    "invariants/test_sequence_parallel.py": r"two rows of 2, lora",
    "invariants/test_sharded_offload.py": r"\[vision\]",
    "learn/test_learns_to_look_closer.py": r"",
}
"""File below tests/ -> pattern of ids of extended tests that `make test-all` leaves out, since they
take long. `make test-long` runs them, and `make test-faults` those of faults."""

NEEDS_VLLM = {
    "integration/test_diverging_runs.py": r"test_two_workers_survive",
    "integration/test_environment.py": r"\[vllm\]",
    "integration/test_episodes_benchmark.py": r"episodes_are_measured",
    "integration/test_export.py": r"test_an_export_has_the_same_logprobs_in_vllm_and_transformers",
    "integration/test_images_cost_once.py": r"-vllm\]",
    "integration/test_judge_served.py": r"",
    "integration/test_many_workers.py": r"tensor_parallelism|test_a_cluster_of_two_nodes_has",
    "integration/test_model_families.py": r"-vllm\]",
    "integration/test_network.py": r"",
    "integration/test_page_sessions.py": r" (ten-minutes|debugging)\]",
    "integration/test_rollout_deepstack.py": r"",
    "integration/test_separate_pools.py": r"",
    "integration/test_rollout_engines.py": r"\[vllm-",
    "integration/test_rollout_episode_engines.py": r"\[vllm-|tensor_parallelism",
    "integration/test_rollout_videos.py": r"\[vllm-",
    "integration/test_rollout_vllm.py": r"",
    "integration/test_rollout_vllm_cuda_config.py": r"",
    "integration/test_rollout_vllm_faults.py": r"",
    "integration/test_rollout_vllm_random_weights.py": r"",
    "integration/test_tile_models.py": r"test_another_supported_language_model_gives_the_same_log",
}
"""File below tests/ -> pattern of the test ids that need vLLM; all others also run without it."""


def needs_vllm(file: str, test_id: str) -> bool:
    """Return whether a test needs vLLM. file, test_id: as for is_extended."""
    return file in NEEDS_VLLM and re.search(NEEDS_VLLM[file], test_id) is not None


def is_extended(file: str, test_id: str) -> bool:
    """Return whether `make test` leaves a test to others.

    file: its path below tests/. test_id: its name, with the brackets of a parametrized test.
    """
    if is_long(file, test_id):
        return True
    if file not in KEPT:
        return False
    pattern = KEPT[file]
    return pattern is None or re.search(pattern, test_id) is None


def has_selected_tests(file: str, expression: str) -> bool:
    """Return whether a file may have tests that pytest's option -m selects.

    file: its path below tests/. expression: a conjunction of "alone", "extended", "long", each with
    or without "not"; with any other word every file may have some.
    """
    words = expression.split(" and ")
    if not set(words) <= {"alone", "not alone", "extended", "not extended", "long", "not long"}:
        return True
    if "long" in words and file not in LONG:
        return False
    if "extended" in words and file not in KEPT and file not in LONG:
        return False
    if "not extended" in words and KEPT.get(file, "") is None:
        return False
    return "alone" not in words or "mark.alone" in (TESTS / file).read_text(encoding="utf-8")


def is_long(file: str, test_id: str) -> bool:
    """Return whether `make test-all` leaves a test to others. file, test_id: as for is_extended."""
    return file in LONG and re.search(LONG[file], test_id) is not None


@cache
def _faults() -> frozenset[tuple[str, str]]:
    """Return the (file, function) of the tests that the page on reliability names; "": all."""
    named = re.findall(r"`tests/([\w/]+\.py)(?:::(\w+))?`", RELIABILITY.read_text(encoding="utf-8"))
    return frozenset(named)


def is_fault(file: str, test_id: str) -> bool:
    """Return whether `make test-faults` runs a test because the page on reliability names it.

    file, test_id: as for is_extended. It also runs those marked as faults.
    """
    return (file, "") in _faults() or (file, test_id.partition("[")[0]) in _faults()


def named_faults() -> list[tuple[str, str]]:
    """Return the (file, function) that the page on reliability names; "": all of the file."""
    return sorted(_faults())
