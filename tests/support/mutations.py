"""Small edits that each break one guard, with the tests that notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One edit of a source file.

    guard: what it breaks. file: below trigon/. old: text that occurs once in it. new: replaces it.
    test: a file below tests/. names: the expression of `pytest -k` that selects its tests.
    """

    guard: str
    file: str
    old: str
    new: str
    test: str
    names: str


MUTATIONS = (
    Mutation(
        "a changed byte in a checkpoint",
        "checkpoint/manifest.py",
        'if actual["sha256"] != saved["sha256"]:',
        "if False:",
        "unit/test_checkpoint_store.py",
        "a_damaged_newest",
    ),
    Mutation(
        "a damaged list of files of a checkpoint",
        "checkpoint/manifest.py",
        "is_valid = PROGRESS in files and all(map(_is_entry, files, files.values()))",
        "is_valid = True",
        "unit/test_checkpoint_store.py",
        "a_damaged_newest",
    ),
    Mutation(
        "the best checkpoint is never removed",
        "checkpoint/store.py",
        "kept = {newest, *(step for _, step in self._ranked_by_score()[:1])}",
        "kept = {newest}",
        "unit/test_checkpoint_store.py",
        "never_the_newest_or_the_best",
    ),
    Mutation(
        "a checkpoint appears when it is complete",
        "checkpoint/store.py",
        "            write_manifest(temporary, hashing, self._on_progress)\n            os.rename(temporary, final)",
        "            os.rename(temporary, final)\n            write_manifest(final, hashing, self._on_progress)",
        "invariants/test_checkpoint_killed.py",
        "no_best-foreground",
    ),
    Mutation(
        "a step is not saved twice",
        "checkpoint/store.py",
        "        if final.exists():",
        "        if False:",
        "unit/test_checkpoint_store.py",
        "saving_a_step_twice",
    ),
    Mutation(
        "one run at a time writes to a run folder",
        "report/run_folder.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "unit/test_report_run_folder.py",
        "two_runs_cannot",
    ),
    Mutation(
        "an incomplete last line is removed",
        "report/run_folder.py",
        "            os.truncate(path, num_bytes)",
        "            pass",
        "unit/test_report_run_folder.py",
        "incomplete_last_line",
    ),
    Mutation(
        "an image is inside the image folder",
        "data/media_files.py",
        "if not path.is_relative_to(folder):",
        "if False:",
        "unit/test_data_images.py",
        "outside_the_image_folder",
    ),
    Mutation(
        "an image has few enough pixels",
        "data/images.py",
        "if width * height > max_pixels:",
        "if False:",
        "unit/test_data_images.py",
        "huge_images",
    ),
    Mutation(
        "role tokens in a row are text",
        "data/special_tokens.py",
        "return self._owner.any_token.sub(lambda match: self.characters[match.group()], text)",
        "return text",
        "unit/test_data_special_tokens.py",
        "role_tokens_of_a_row",
    ),
    Mutation(
        "a template ends",
        "data/templates.py",
        "if time.monotonic() > deadline:",
        "if False:",
        "unit/test_data_prompts.py",
        "template",
    ),
    Mutation(
        "a reward is a number",
        "rewards/contract.py",
        "if not isinstance(plain, int | float):",
        "if False:",
        "unit/test_rewards_contract.py",
        "other_return_values",
    ),
    Mutation(
        "a reward function that hangs is killed",
        "rewards/pool.py",
        "if worker.is_busy and worker.deadline <= now]:",
        "if False]:",
        "integration/test_reward_pool_faults.py",
        "affects_only_its_completion",
    ),
    Mutation(
        "an invalid message of a reward process",
        "rewards/pool.py",
        "except (ValueError, KeyError, IndexError, TypeError):",
        "except ValueError:",
        "integration/test_reward_pool_faults.py",
        "forged or nonsense",
    ),
    Mutation(
        "log-probabilities of engine and trainer agree",
        "parity.py",
        "if not float(each.mean()) <= self.tolerance]",
        "if False]",
        "unit/test_parity.py",
        "raises",
    ),
    Mutation(
        "the engine's weights are the trainer's",
        "rollout/vllm/weight_check.py",
        "elif not any(held.equals(expected) for expected in _possible(sources, first.tensors, len(ranks))):",
        "elif False:",
        "unit/test_rollout_checksums.py",
        "stale_shard",
    ),
    Mutation(
        "an update with a gradient that is not finite",
        "training/local.py",
        "is_applied = is_finite and plan.denominators.tokens > 0",
        "is_applied = plan.denominators.tokens > 0",
        "unit/test_training_update.py",
        "finite or nan",
    ),
    Mutation(
        "other hosts do not see the viewer",
        "view/server.py",
        'if not self._any_host and not is_loopback(name.strip("[]")):',
        "if False:",
        "unit/test_view_server.py",
        "another_host",
    ),
    Mutation(
        "the viewer's token",
        "view/server.py",
        "return hmac.compare_digest(text.encode(), self._token.encode())",
        "return True",
        "unit/test_view_server.py",
        "with_a_token_only",
    ),
    Mutation(
        "images of a run only",
        "view/images.py",
        'if not _NAME.fullmatch(name) or (run / "images").is_symlink():',
        "if False:",
        "unit/test_view_server.py",
        "images",
    ),
    Mutation(
        "text of models is printed as text",
        "terminal.py",
        'shown = _CONTROLS.sub(_as_text, text[:max_characters].replace("\\r\\n", "\\n"))',
        "shown = text[:max_characters]",
        "unit/test_report_console.py",
        "control or escape or hostile",
    ),
    Mutation(
        "the size of a configuration",
        "config/yaml_nodes.py",
        "if self._depth > MAX_DEPTH:",
        "if False:",
        "unit/test_config_hostile.py",
        "odd_file",
    ),
    Mutation(
        "completions differ by seed, step and sample",
        "rollout/seeds.py",
        "{run_seed}/{step}/{sample}/{prompt_id}",
        "{run_seed}/{step}/{prompt_id}",
        "unit/test_rollout_seeds.py",
        "seed",
    ),
    Mutation(
        "rollouts of a later version are refused",
        "records/rollouts.py",
        "if version > SCHEMA_VERSION:",
        "if False:",
        "unit/test_records.py",
        "version",
    ),
    Mutation(
        "a resumed run notices other code and files",
        "build/origin.py",
        "return set(before[part]).isdisjoint(now[part]) and not _is_unknown(before[part], now[part])",
        "return False",
        "unit/test_build_origin.py",
        "other_validation_data",
    ),
    Mutation(
        "a resumed run notices other options",
        "build/origin.py",
        "if name in saved and saved[name] != value\n        }",
        "if name in saved and False\n        }",
        "unit/test_build_origin.py",
        "before_a_hub_is_asked",
    ),
    Mutation(
        "a resumed run notices other images in the same files",
        "data/content.py",
        "self.fingerprint == other.fingerprint and same_files",
        "self.fingerprint == other.fingerprint",
        "unit/test_data_stream.py",
        "image_file_with_other_content",
    ),
    Mutation(
        "the store of the ranks listens on one address",
        "distributed/rendezvous.py",
        "listener.bind((address, 0))",
        'listener.bind(("", 0))',
        "unit/test_distributed_network.py",
        "the_store_is_reached",
    ),
    Mutation(
        "gloo and NCCL listen on the loopback interface",
        "distributed/cluster.py",
        "os.environ.update(loopback_variables())",
        "pass",
        "unit/test_distributed_network.py",
        "whatever_is_set",
    ),
    Mutation(
        "Ray listens on the loopback address",
        "distributed/local_ray.py",
        "ray_constants.ENABLE_RAY_CLUSTER = False",
        "ray_constants.ENABLE_RAY_CLUSTER = True",
        "integration/test_worker_group.py",
        "no_server_of_ray",
    ),
    Mutation(
        "the temporary folder of a living run stays",
        "system/temporary.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "unit/test_temporary.py",
        "killed_process_and_not",
    ),
    Mutation(
        "the temporary folder of a killed run is removed",
        "system/temporary.py",
        "    remove_dead_folders(base)\n    folder, lock",
        "    folder, lock",
        "unit/test_temporary.py",
        "killed_process_and_not",
    ),
)
